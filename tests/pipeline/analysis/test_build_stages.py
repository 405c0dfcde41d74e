"""Stages of a build: loaded, analyzed, compared; and what the manifest says after every pass."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepdown.models.errors import OptionError
from stepdown.pipeline.analysis.build_stages import (
    COMPARED,
    analyze_stage,
    canonical_stages,
    compare_stages,
    load_stage,
    saved_stages,
)
from stepdown.pipeline.analysis.expressions import evaluate
from stepdown.pipeline.analysis.operators import sum_of
from stepdown.pipeline.build_folder import BuildFolder, read_build
from stepdown.pipeline.report import counted_passes, stage_records
from stepdown.pipeline.stages import STAGES

SIZES = {"B": 3, "S": 5}


def test_stages_are_known_by_their_form(stages_build: BuildFolder) -> None:
    assert saved_stages(stages_build) == tuple(stage.name for stage in STAGES)
    assert canonical_stages(stages_build) == tuple(stage.name for stage in STAGES if stage.canonical)


@pytest.mark.parametrize("name", [stage.name for stage in STAGES])
def test_every_stage_is_analyzed_and_agrees_with_the_manifest(stages_build: BuildFolder, name: str) -> None:
    shown, analysis = analyze_stage(stages_build, name, SIZES)
    assert shown == name
    stage = stages_build.stage(name)
    for direction, total in analysis.totals.items():
        part = stage if direction == "both" else stage[direction]
        assert total.flop == evaluate(part["flop"], SIZES)
        assert total.lower_bound == evaluate(part["bytes_moved"], SIZES)
        assert total.words_in == evaluate(part["words_in"], SIZES)
        if stage["canonical"]:
            assert total.bytes_moved == total.lower_bound
            assert total.operators == part["kernels"]
    if not stage["canonical"]:
        assert sum(len(record.kernels) for record in analysis.operators) == stage["kernels"]


def test_the_last_canonical_stage_is_the_default(stages_build: BuildFolder) -> None:
    name, analysis = analyze_stage(stages_build, None, SIZES)
    assert name == canonical_stages(stages_build)[-1]
    assert analysis.groups


def test_kept_containers_come_from_the_manifest(stages_build: BuildFolder) -> None:
    name = canonical_stages(stages_build)[-1]
    assert load_stage(stages_build, name).kept == tuple(stages_build.stage(name)["kept"])
    assert load_stage(stages_build, "parse").backward is None


def test_every_pass_is_counted(stages_build: BuildFolder) -> None:
    records = stage_records(stages_build.manifest, 3, 5)
    passes = counted_passes(records)
    expected = [name for stage in STAGES if stage.canonical for name, _ in stage.passes]
    assert [one["name"] for _, one, _ in passes] == expected
    assert passes[0][2] is None
    for (_, _, before), (_, earlier, _) in zip(passes[1:], passes, strict=False):
        assert before is earlier
    for record in records:
        last = record["passes"][-1]
        if record["canonical"]:
            assert all(
                last[name] == record[name] for name in ("kernels", "flop", "bytes_moved", "kept_bytes", "words_in")
            )
        else:
            assert "bytes_moved" not in last
    assert all(isinstance(one["bytes_moved"], int) for _, one, _ in passes)


def test_two_stages_are_compared(stages_build: BuildFolder) -> None:
    difference = compare_stages(stages_build, "differentiate", "fuse", SIZES)
    gone = {change.name: change for change in difference.gone}
    new = {change.name: change for change in difference.new}
    softmax = gone["attention_weights"]
    (group,) = softmax.groups
    assert softmax.before is not None
    assert softmax.after is None
    assert "attention_weights" in new[group].groups
    old, fused = (analyze_stage(stages_build, name, SIZES)[1] for name in ("differentiate", "fuse"))
    kept = {(r.direction, r.name) for r in old.operators} & {(r.direction, r.name) for r in fused.operators}
    assert len(difference.gone) == len(old.operators) - len(kept)
    assert len(difference.new) == len(fused.operators) - len(kept)
    assert {(c.direction, c.name) for c in difference.changed} <= kept
    for name in COMPARED:
        before, after = difference.totals["both"][name]
        assert before is not None
        assert after is not None
        assert float(after) < float(before) or name == "flop", name
    words = difference.totals["both"]["words"][0]
    assert words == sum_of((old.totals["both"].words_in, old.totals["both"].words_out))


def test_a_stage_does_not_differ_from_itself(stages_build: BuildFolder) -> None:
    difference = compare_stages(stages_build, "fuse", "fuse", SIZES)
    assert not (difference.gone or difference.new or difference.changed)
    assert all(before == after for values in difference.totals.values() for before, after in values.values())


def test_a_direction_that_one_stage_lacks_has_no_number_there(stages_build: BuildFolder) -> None:
    difference = compare_stages(stages_build, "parse", "differentiate", SIZES)
    assert difference.totals["backward"]["flop"][0] is None
    assert difference.totals["both"]["flop"][0] is None
    assert difference.totals["forward"]["flop"][0] == difference.totals["forward"]["flop"][1]


def test_stages_without_a_graph_are_refused(hand_made_build: Path) -> None:
    build = read_build(hand_made_build)
    with pytest.raises(OptionError, match='Stage "fuse" left no graph'):
        analyze_stage(build, "fuse", SIZES)
    with pytest.raises(OptionError, match='stage "x" is unknown'):
        compare_stages(build, "parse", "x", SIZES)
    (hand_made_build / "stages").unlink()
    with pytest.raises(OptionError, match="holds no graph in canonical form"):
        analyze_stage(build, None, SIZES)
