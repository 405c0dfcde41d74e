"""``memory_budget``: in the build, in its key, on the command line, and refused in one sentence."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from stepdown.models.definition import EncoderLayer
from stepdown.models.errors import OptionError
from stepdown.pipeline import CompiledLayer, compile_layer
from stepdown.pipeline.cli import app

SMALL = EncoderLayer(embed=8, heads=2, ffn=12)


def kept(build: CompiledLayer) -> int:
    """Bytes that the finished graph keeps."""
    return int(build.manifest["stages"][-1]["kept_bytes"])


def graphs(budget: Any = None, **options: Any) -> CompiledLayer:
    """A build without libraries."""
    return compile_layer(SMALL, build=False, memory_budget=budget, batch=2, seq=5, **options)


def test_a_budget_is_kept_and_is_another_build() -> None:
    free = graphs()
    budget = kept(free) * 3 // 4
    less = graphs(budget)
    assert kept(less) <= budget < kept(free)
    assert less.manifest["options"]["memory_budget"] == budget and free.manifest["options"]["memory_budget"] is None
    assert less.path != free.path and graphs(budget).cached
    (what,) = (p["what"] for s in less.manifest["stages"] for p in s["passes"] if p["name"] == "recompute")
    assert what.startswith(f"{kept(less)} bytes kept instead of ")


def test_the_smallest_budget_is_named() -> None:
    with pytest.raises(OptionError) as error:
        graphs(1)
    assert re.fullmatch(
        r'"memory_budget" is 1 bytes; accepted are at least \d+, what forward keeps .*\.', str(error.value)
    )
    least = int(re.findall(r"at least (\d+)", str(error.value))[0])
    assert kept(graphs(least)) == least


@pytest.mark.parametrize("value", [-1, 1.5, True, "50MB"])
def test_other_things_than_bytes_are_refused(value: Any) -> None:
    with pytest.raises(
        OptionError, match=r'^"memory_budget" is .*; accepted are a number of bytes, or None for no limit\.$'
    ):
        graphs(value)


def test_a_budget_needs_the_pass() -> None:
    with pytest.raises(OptionError, match=r'^a memory budget was given and the pass "recompute" was switched off'):
        graphs(10**9, disable=["recompute"])


def test_the_command_line_takes_bytes(tmp_path: Path) -> None:
    budget = kept(graphs()) * 3 // 4
    layer = tmp_path / "layer.json"
    layer.write_text(json.dumps(SMALL.to_dict()))
    command = ["compile", str(layer), "--batch", "2", "--seq", "5", "--no-build", "--json", "--memory-budget"]
    result = CliRunner().invoke(app, [*command, str(budget)])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["stages"][-1]["kept_bytes"] <= budget
    result = CliRunner().invoke(app, [*command, "1"])
    assert result.exit_code == 2 and "accepted are at least" in result.stderr
