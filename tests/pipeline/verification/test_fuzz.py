"""The fuzz command, on stand-ins: what it prints and writes, exit codes, resuming."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from typer.testing import CliRunner

from stepdown.models import EncoderLayer
from stepdown.models.dtypes import DataType
from stepdown.pipeline.verification import campaign, fuzz
from stepdown.pipeline.verification.campaign import Settings, Task

MakeStandIn = Callable[..., Any]
ARGUMENTS = (
    "--layers",
    "2",
    "--cases-per-layer",
    "1",
    "--dtypes-per-layer",
    "1",
    "--dtype",
    "fp32",
    "--dtype",
    "bf16",
    "--jobs",
    "1",
)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every drawn layer is replaced by a small one with few draws."""
    drawn = campaign.plan

    def plan(settings: Settings) -> list[Task]:
        tasks = drawn(settings)
        for task in tasks:
            for case in task.cases:
                object.__setattr__(case, "draws", 2)
                object.__setattr__(case, "seq", 5)
        layer = EncoderLayer(embed=24, heads=2, ffn=19)
        return [Task(task.layer, layer, task.dtype, task.cases, task.numbers) for task in tasks]

    monkeypatch.setattr(campaign, "plan", plan)


def run(monkeypatch: pytest.MonkeyPatch, make: MakeStandIn, kind: str, *arguments: str) -> tuple[int, str, list[str]]:
    built: list[str] = []

    def build(definition: EncoderLayer, dtype: DataType) -> nn.Module:
        built.append(dtype.name)
        return make(definition, dtype.name, kind)

    monkeypatch.setattr(fuzz, "build", build)
    result = CliRunner().invoke(fuzz.app, [*ARGUMENTS, *arguments], env={"COLUMNS": "160"})
    return result.exit_code, result.output, built


@pytest.mark.usefixtures("small")
def test_command(monkeypatch: pytest.MonkeyPatch, make_stand_in: MakeStandIn, tmp_path: Path) -> None:
    path = tmp_path / "fuzz.json"
    out = ("--out", str(path))
    code, printed, built = run(monkeypatch, make_stand_in, "ScaleMissingInBackward", *out)
    assert code == 1 and built == ["float32", "bfloat16"]
    failed = [row["dtype"] for row in json.loads(path.read_text())["rows"] if not row["passed"]]
    assert "failed: layer 0, case 0" in printed
    code, printed, built = run(monkeypatch, make_stand_in, "StandIn", *out, "--resume")
    assert code == 0 and built == failed
    assert "Drawn layers and inputs against float64" in printed
    code, printed, built = run(monkeypatch, make_stand_in, "StandIn", *out, "--resume")
    assert code == 0 and built == []
    summary = path.with_suffix(".csv").read_text().splitlines()
    assert summary[0].startswith("dtype,layers,cases,passed,failed")
    assert summary[1].startswith("all,2,2,2,0")
    stored = json.loads(path.read_text())
    assert stored["summary"]["all"]["passed"] == 2
    assert len(stored["runs"]) == 2 and [row["run"] for row in stored["rows"]].count(1) == len(failed)
    first = stored["runs"][0]
    assert first["command"].startswith("python -m stepdown.pipeline.verification.fuzz")
    assert {"torch", "dace", "numpy", "python", "stepdown"} <= first["versions"].keys()
    assert first["machine"]["processor"] and first["date"]


def test_bad_options(monkeypatch: pytest.MonkeyPatch, make_stand_in: MakeStandIn, tmp_path: Path) -> None:
    path = tmp_path / "fuzz.json"
    path.write_text("{}")
    code, printed, built = run(monkeypatch, make_stand_in, "StandIn", "--out", str(path), "--resume")
    assert code == 2 and "accepted is the result of a campaign" in printed.replace("\n", " ") and not built
    code, printed, _ = run(monkeypatch, make_stand_in, "StandIn", "--dtype", "int8")
    assert code == 2 and 'dtype "int8" is unknown' in printed
