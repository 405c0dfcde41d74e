"""The analysis of stages: classes, bytes by type, groups, lowered kernels, times and MUE, and files of times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import dace
import pytest
from dace.sdfg import SDFG

from stepdown.models.errors import OptionError
from stepdown.models.operators import Add, Bias, Contraction, LayerNorm, RowGroup
from stepdown.models.operators.gradient import connect_operator
from stepdown.models.operators.row_group import Member
from stepdown.pipeline.analysis.machine import MACHINES, Machine, MeasuredTimes, find_machine, read_times
from stepdown.pipeline.analysis.operators import Analysis, analyze, ratio, sum_of
from stepdown.transformations.differentiate import differentiate
from stepdown.transformations.lowering.cpu import register
from stepdown.transformations.lowering.lower_operators import lower_operators
from stepdown.transformations.training_graph import TrainingGraph

SIZES = {"B": 2, "S": 3}
E, U = 4, 8
ROWS = 2 * 3


def small_graph(dtype: dace.typeclass = dace.bfloat16) -> SDFG:
    """z = LayerNorm(x w + b): a contraction, a bias and a normalization."""
    sdfg = SDFG("analyzed")
    state = sdfg.add_state()
    B, S = (dace.symbol(name, dace.int32) for name in "BS")
    shapes = {"x": (B, S, E), "w": (U, E), "b": (U,), "weight": (U,), "offset": (U,), "z": (B, S, U)}
    for name, shape in shapes.items():
        sdfg.add_array(name, shape, dtype)
    for name in ("product", "sum"):
        sdfg.add_transient(name, (B, S, U), dtype)
    connect_operator(sdfg, state, Contraction("product", "BSE,UE->BSU"), {"a": "x", "b": "w"}, {"d": "product"})
    connect_operator(sdfg, state, Bias("bias", "BSU", "U"), {"x": "product", "bias": "b"}, {"y": "sum"})
    inputs = {"x": "sum", "weight": "weight", "bias": "offset"}
    connect_operator(sdfg, state, LayerNorm("norm", "BSU"), inputs, {"y": "z"})
    return sdfg


def grouped_graph() -> TrainingGraph:
    """y = (x + b) + r in one group."""
    sdfg = SDFG("grouped")
    state = sdfg.add_state()
    for name, shape in (("x", [2, 3, 4]), ("b", [4]), ("r", [2, 3, 4]), ("y", [2, 3, 4])):
        sdfg.add_array(name, shape, dace.float32)
    members = [
        Member(Bias("bias", "BSE", "E"), {"x": "x", "bias": "b", "y": "v"}),
        Member(Add("add", "BSE"), {"a": "v", "b": "r", "y": "y"}),
    ]
    group = RowGroup("bias__add", members, ["y"])
    connect_operator(sdfg, state, group, {name: name for name in ("x", "b", "r")}, {"y": "y"})
    return TrainingGraph(sdfg)


def number(value: int | float | str) -> float:
    assert not isinstance(value, str)
    return float(value)


def by_name(analysis: Analysis) -> dict[str, Any]:
    return {record.name: record for record in analysis.operators}


def test_operators_by_hand() -> None:
    found = by_name(analyze(TrainingGraph(small_graph()), SIZES))
    product, bias, norm = found["product"], found["bias"], found["norm"]
    classes = [record.operator_class for record in (product, bias, norm)]
    assert classes == ["contraction", "element-wise", "statistical normalization"]
    assert (product.words_in, product.words_out) == (ROWS * E + U * E, ROWS * U)
    assert product.flop == 2 * ROWS * E * U
    assert product.bytes_moved == product.lower_bound == 2 * (ROWS * E + U * E + ROWS * U)
    assert product.intensity == product.flop / product.bytes_moved
    assert (product.reads, product.writes) == (("w", "x"), ("product",))
    assert bias.bytes_by_dtype == {"bfloat16": 2 * (2 * ROWS * U + U)}
    assert (product.seconds, product.mue, product.members, product.kernels) == (None, None, (), ())


def test_bytes_by_type_of_statistics() -> None:
    graph = differentiate(small_graph(), "z", ["x", "w", "b", "weight", "offset"])
    norm = by_name(analyze(graph, SIZES))["norm"]
    assert norm.bytes_by_dtype == {"bfloat16": 2 * (2 * ROWS * U + 2 * U), "float32": 4 * 2 * ROWS}
    assert norm.bytes_moved == sum(norm.bytes_by_dtype.values())


def test_directions_and_classes_add_up() -> None:
    analysis = analyze(differentiate(small_graph(), "z", ["x", "w", "b", "weight", "offset"]), SIZES)
    assert list(analysis.totals) == ["both", "forward", "backward"]
    for name in ("operators", "flop", "words_in", "words_out", "bytes_moved", "lower_bound"):
        forward, backward = (getattr(analysis.totals[d], name) for d in ("forward", "backward"))
        assert getattr(analysis.totals["both"], name) == forward + backward, name
        for direction, classes in analysis.classes.items():
            assert sum(getattr(total, name) for total in classes.values()) == getattr(analysis.totals[direction], name)
    for share in ("flop_share", "bytes_share"):
        assert sum(getattr(t, share) for t in analysis.classes["both"].values()) == pytest.approx(100)
    arguments = ROWS * E + U * E + 3 * U + ROWS * U
    kept = 2 * ROWS * U + 2 * 4 * ROWS
    assert analysis.compulsory["forward"] == 2 * arguments + kept


def test_inference_has_one_direction() -> None:
    assert list(analyze(TrainingGraph(small_graph()), SIZES).totals) == ["forward"]


def test_symbolic_sizes_stay_text_and_have_no_shares() -> None:
    analysis = analyze(TrainingGraph(small_graph()))
    product = by_name(analysis)["product"]
    assert product.flop == "64*B*S"
    assert product.intensity is None
    assert analysis.totals["forward"].words_out == "24*B*S"
    assert analysis.classes["forward"]["contraction"].flop_share is None


def test_a_group_says_its_members_and_splits_its_flop() -> None:
    analysis = analyze(grouped_graph())
    (group,) = analysis.groups
    assert [(member.name, member.kind, member.flop) for member in group.members] == [
        ("bias", "Bias", 24),
        ("add", "Add", 24),
    ]
    assert group.operator_class == "element-wise", "no member is a normalization"
    assert group.flop == 48
    assert not analyze(TrainingGraph(small_graph())).groups


def test_a_groups_class_is_its_members_and_its_flop_theirs() -> None:
    sdfg = SDFG("normalized")
    state = sdfg.add_state()
    for name, shape in (("x", [2, 3, 4]), ("b", [4]), ("w", [4]), ("o", [4]), ("y", [2, 3, 4])):
        sdfg.add_array(name, shape, dace.float32)
    members = [
        Member(Bias("bias", "BSE", "E"), {"x": "x", "bias": "b", "y": "v"}),
        Member(LayerNorm("norm", "BSE"), {"x": "v", "weight": "w", "bias": "o", "y": "y"}),
    ]
    group = RowGroup("bias__norm", members, ["y"])
    connect_operator(sdfg, state, group, {name: name for name in ("x", "b", "w", "o")}, {"y": "y"})
    analysis = analyze(TrainingGraph(sdfg))
    assert analysis.operators[0].operator_class == "statistical normalization"
    classes = analysis.classes["forward"]
    assert classes["element-wise"].flop == 24
    assert classes["statistical normalization"].flop == 9 * 24 + 5 * 6
    assert classes["element-wise"].bytes_moved == 0
    assert classes["statistical normalization"].bytes_share == 100


def test_a_lowered_stage_counts_kernels_against_the_lower_bound() -> None:
    register()
    graph = differentiate(small_graph(dace.float32), "z", ["x", "w", "b", "weight", "offset"])
    assert graph.backward is not None
    lowered = TrainingGraph(lower_operators(graph.forward, "cpu"), lower_operators(graph.backward, "cpu"), graph.kept)
    analysis = analyze(lowered, SIZES, canonical=graph)
    plain = analyze(graph, SIZES)
    assert [record.name for record in analysis.operators] == [record.name for record in plain.operators]
    for record, before in zip(analysis.operators, plain.operators, strict=True):
        assert record.kernels
        assert record.lower_bound == before.bytes_moved
        assert record.bytes_moved == sum_of(kernel.bytes_moved for kernel in record.kernels)
        assert number(record.bytes_moved) >= number(record.lower_bound), record.name
    sums = by_name(analysis)["bias_gradient"]
    assert len(sums.kernels) == 2, "partial sums, and the sum of those"
    assert sums.bytes_moved > sums.lower_bound


MACHINE = Machine("machine", bandwidth=1000.0, flop_rate=4000.0)


def test_mue_is_what_the_paper_says() -> None:
    seconds = {"product": 0.5, "bias": 0.25, "norm": 0.25}
    analysis = analyze(TrainingGraph(small_graph()), SIZES, times=MeasuredTimes(MACHINE, {"forward": seconds}))
    for record in analysis.operators:
        moved = number(record.bytes_moved)
        bandwidth = moved / seconds[record.name]
        assert record.mue == pytest.approx(100 * number(record.lower_bound) / moved * bandwidth / MACHINE.bandwidth)
    total = analysis.totals["forward"]
    assert total.seconds == 1.0
    assert total.mue == pytest.approx(100 * number(total.lower_bound) / 1000.0)
    assert analysis.classes["forward"]["contraction"].seconds_share == pytest.approx(50)
    assert analysis.machine == MACHINE


def test_a_total_has_a_time_only_when_all_operators_have_one() -> None:
    times = MeasuredTimes(MACHINE, {"forward": {"product": 0.5}})
    analysis = analyze(TrainingGraph(small_graph()), SIZES, times=times)
    assert by_name(analysis)["product"].mue is not None
    assert by_name(analysis)["bias"].mue is None
    assert analysis.totals["forward"].seconds is None
    assert analysis.totals["forward"].mue is None


def test_sums_and_ratios() -> None:
    assert sum_of([1, "2*B", "B*S", 3]) == "B*S + 2*B + 4"
    assert sum_of([]) == 0
    assert ratio(3, 2) == 1.5
    assert ratio("B", 2) is None
    assert ratio(3, 0) is None
    assert MACHINE.balance == 4
    assert MACHINE.least_seconds(8000, 1000) == 2.0
    assert MACHINE.least_seconds(0, 5000) == 5.0


def test_times_are_read(tmp_path: Path) -> None:
    file = tmp_path / "times.json"
    file.write_text(json.dumps({"machine": "v100", "forward": {"scores": 1e-3}}))
    times = read_times(file)
    assert times.machine is MACHINES["v100"]
    assert (times.of("forward", "scores"), times.of("forward", "x"), times.of("backward", "scores")) == (
        1e-3,
        None,
        None,
    )
    own = {"name": "mine", "bandwidth": 1e9, "flop_rate": 2e9}
    file.write_text(json.dumps({"machine": own}))
    assert read_times(file).machine == Machine("mine", 1e9, 2e9)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "holds no times"),
        ("{}", "holds no times"),
        ('{"machine": "h200", "sideways": {}}', "holds no times"),
        ('{"machine": "abacus"}', 'machine "abacus" is unknown; accepted are "v100", "h200"'),
        ('{"machine": {"name": "m"}}', "accepted are a name, or an object"),
        ('{"machine": {"name": "m", "bandwidth": 0, "flop_rate": 1}}', '"bandwidth" in .* accepted is a positive'),
        ('{"machine": "h200", "forward": [1]}', "in place of an object"),
        ('{"machine": "h200", "forward": {"a": true}}', '"a" in .* is True; accepted is a positive number'),
        ('{"machine": "h200", "forward": {"a": -1}}', "accepted is a positive number"),
    ],
)
def test_other_times_are_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "times.json").write_text(content)
    with pytest.raises(OptionError, match=message):
        read_times(tmp_path / "times.json")


def test_a_missing_file_and_an_unknown_machine_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="cannot be read"):
        read_times(tmp_path / "none.json")
    with pytest.raises(OptionError, match='machine "x" is unknown'):
        find_machine("x")
