"""Drawn cases and campaigns: what is drawn, that it is repeatable and resumable, and what is written."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from stepdown.models import EncoderLayer
from stepdown.models.dtypes import DataType, resolve_dtype
from stepdown.models.errors import BuildError, OptionError
from stepdown.pipeline.verification.campaign import (
    ResultFile,
    Row,
    Settings,
    Task,
    plan,
    run_campaign,
    summarize,
    verify_case,
)
from stepdown.pipeline.verification.cases import MASK_KINDS, Case, draw_layer, make_mask, sufficient_draws

MakeStandIn = Callable[..., Any]


def test_default_campaign_is_wide() -> None:
    tasks = plan(Settings())
    cases = [(task, case) for task in tasks for case in task.cases]
    layers = {task.layer: task.definition for task in tasks}
    assert len(layers) >= 20 and len(cases) >= 200
    assert len(set(layers.values())) == len(layers)
    assert {task.dtype.name for task in tasks} == {"float32", "bfloat16", "float16", "float64"}
    for option in ("activation", "norm", "bias", "causal", "eps"):
        assert len({getattr(layer, option) for layer in layers.values()}) > 1, option
    assert {layer.activation for layer in layers.values()} == {"gelu", "gelu_tanh", "relu"}
    assert any(layer.head_size % 8 for layer in layers.values()) and any(layer.ffn % 2 for layer in layers.values())
    assert {case.mask for _, case in cases} == set(MASK_KINDS)
    assert any(case.seq == 1 for _, case in cases) and any(case.batch == 1 for _, case in cases)
    assert any(case.seq % 2 and case.seq > 1 for _, case in cases)
    assert sum(case.dropout and any(task.definition.dropout_sites) for task, case in cases) > 0.7 * len(cases)
    numbers = sorted((task.layer, number) for task in tasks for number in task.numbers)
    assert numbers == [(layer, case) for layer in range(24) for case in range(10)]


@pytest.mark.parametrize("seed", range(30))
def test_drawn_layers_are_within_the_promised_sizes(seed: int) -> None:
    layer = draw_layer(np.random.default_rng(seed))
    assert 1 <= layer.heads <= 16 and 24 <= layer.head_size <= 128 and layer.embed <= 640 and 17 <= layer.ffn <= 1024
    assert min(layer.embed, layer.ffn) * sufficient_draws(layer) >= 17 * 256
    assert sufficient_draws(layer) >= 16


@pytest.mark.parametrize("kind", MASK_KINDS)
@pytest.mark.parametrize(("batch", "seq"), [(1, 1), (1, 7), (4, 9)])
def test_masks(kind: str, batch: int, seq: int) -> None:
    mask = make_mask(kind, batch, seq, 5)
    if kind == "none":
        assert mask is None
        return
    assert mask is not None and mask.dtype == torch.bool and mask.shape == (batch, seq)
    again = make_mask(kind, batch, seq, 5)
    assert again is not None and torch.equal(mask, again)
    if kind == "right":
        assert mask[:, 0].all() and torch.equal(mask, mask.cummin(1).values)
    if kind == "left":
        assert mask[:, -1].all() and torch.equal(mask, mask.cummax(1).values)
    if kind == "rows":
        assert not mask.any(1).all()
        assert mask.any() or batch == 1


def test_unknown_mask_is_refused() -> None:
    with pytest.raises(OptionError, match='mask "diagonal" is unknown; accepted are "none", "right", "left"'):
        make_mask("diagonal", 1, 1, 0)


def test_settings_are_checked() -> None:
    assert Settings(dtypes=("bf16",)) == Settings(dtypes=("bfloat16",))
    with pytest.raises(OptionError, match="layers=0 was given"):
        Settings(layers=0)
    with pytest.raises(OptionError, match="seed=-1 was given"):
        Settings(seed=-1)
    with pytest.raises(OptionError, match='dtype "int8" is unknown'):
        Settings(dtypes=("int8",))
    with pytest.raises(OptionError, match="no dtype was given"):
        Settings(dtypes=())


@pytest.fixture
def small_plan(monkeypatch: pytest.MonkeyPatch) -> Settings:
    """A campaign of two layers with small sizes and few draws."""
    settings = Settings(layers=2, cases_per_layer=3, dtypes=("float32", "bfloat16"))
    small = [
        Task(task.layer, EncoderLayer(embed=24, heads=2, ffn=19), task.dtype, task.cases, task.numbers)
        for task in plan(settings)
    ]
    for task in small:
        for case in task.cases:
            object.__setattr__(case, "draws", 2)
    monkeypatch.setattr("stepdown.pipeline.verification.campaign.plan", lambda settings: small)
    return settings


def test_campaign_builds_once_a_layer_and_dtype_and_resumes(
    make_stand_in: MakeStandIn, small_plan: Settings, tmp_path: Path
) -> None:
    builds: list[tuple[int, str]] = []

    def build(definition: EncoderLayer, dtype: DataType) -> nn.Module:
        builds.append((definition.embed, dtype.name))
        return make_stand_in(definition, dtype.name)

    path = tmp_path / "results" / "fuzz.json"
    file = ResultFile.start(path, small_plan, {"date": "today"}, resume=True)
    for row in run_campaign(small_plan, build):
        file.add(row)
        if len(file.rows) == 4:
            break
    assert builds == [(24, "float32"), (24, "bfloat16"), (24, "float32")]
    builds.clear()
    again = ResultFile.start(path, small_plan, {"date": "tomorrow"}, resume=True)
    for row in run_campaign(small_plan, build, again.rows, run=1):
        again.add(row)
    assert builds == [(24, "float32"), (24, "bfloat16")]
    stored = json.loads(path.read_text())
    assert [(row["layer"], row["case"]) for row in stored["rows"]] == [(i, j) for i in range(2) for j in range(3)]
    assert [row["run"] for row in stored["rows"]].count(1) == 2
    assert [run["date"] for run in stored["runs"]] == ["today", "tomorrow"]
    assert stored["summary"]["all"]["cases"] == 6 and stored["summary"]["float32"]["cases"] > 0
    assert stored["summary"]["all"]["failed"] == sum(not row["passed"] for row in stored["rows"])
    assert stored["summary"]["all"]["mask_bits_different"] == 0 < stored["summary"]["all"]["mask_bits_observable"]
    assert set(stored["rows"][0]["results"]) >= {"y", "x.grad", "output.LayerNorm.bias.grad"}


def test_wrong_layers_and_failed_builds_are_recorded(make_stand_in: MakeStandIn, small_plan: Settings) -> None:
    def build(definition: EncoderLayer, dtype: DataType) -> nn.Module:
        if dtype.name == "bfloat16":
            raise BuildError("no compiler was found.")
        return make_stand_in(definition, dtype.name, "ScaleMissingInBackward")

    rows: list[Row] = list(run_campaign(small_plan, build))
    counts = summarize(rows)
    assert counts["all"]["failed"] >= counts["bfloat16"]["failed"] == counts["bfloat16"]["cases"] > 0
    assert {row["error"] for row in rows if row["dtype"] == "bfloat16"} == {"BuildError: no compiler was found."}
    assert any(row["worst"]["name"].startswith("attention.self") for row in rows if row["dtype"] == "float32")


def test_more_draws_decide_only_where_the_rule_fails(make_stand_in: MakeStandIn) -> None:
    layer, dtype = EncoderLayer(embed=24, heads=2, ffn=19), resolve_dtype("float32")
    case = Case(batch=1, seq=2, mask="none", dropout=True, draws=20, seed=0)
    assert verify_case(make_stand_in(layer, "float32"), layer, dtype, case).draws == 16
    failed = verify_case(make_stand_in(layer, "float32", "ScaleMissingInBackward"), layer, dtype, case)
    assert failed.draws == 20 and not failed.passed


def test_another_campaigns_file_is_not_resumed(small_plan: Settings, tmp_path: Path) -> None:
    path = tmp_path / "fuzz.json"
    ResultFile.start(path, small_plan, {}, resume=False).write()
    with pytest.raises(OptionError, match="accepted is a result of the same settings"):
        ResultFile.start(path, Settings(seed=1), {}, resume=True)
    path.write_text("[]")
    with pytest.raises(OptionError, match="accepted is the result of a campaign"):
        ResultFile.start(path, small_plan, {}, resume=True)
