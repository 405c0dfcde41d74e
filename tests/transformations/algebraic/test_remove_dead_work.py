"""RemoveDeadWork: what it removes, what it leaves, and what becomes of kept containers and arguments."""

from __future__ import annotations

import dace
import torch
from dace.sdfg import SDFG

from stepdown.models.operators import Add, Contraction, Dropout, Gelu, GeluGradient, LayerNorm, Scale, SumRows
from stepdown.models.operators.gradient import connect_operator
from stepdown.models.operators.operator import make_memlet
from stepdown.transformations.algebraic.remove_dead_work import RemoveDeadWork
from stepdown.transformations.canonical_form import the_state, validate
from stepdown.transformations.reference_executor import execute
from stepdown.transformations.training_graph import TrainingGraph

from .cases import Builder, hand_built, names


def cleaned(builder: Builder) -> SDFG:
    """The graph without dead work, with the same values."""
    graph = TrainingGraph(builder.sdfg).copy()
    graph, _ = RemoveDeadWork().apply(graph)
    validate(graph)
    values = builder.values()
    expected, found = execute(builder.sdfg, values), execute(graph.forward, values)
    for name, descriptor in graph.forward.arrays.items():
        if not descriptor.transient:
            assert torch.equal(found[name], expected[name])
    return graph.forward


def test_operators_without_use_go_with_what_only_they_read() -> None:
    builder = Builder()
    builder.add(Gelu("used", "BSE"), {"x": "x"}, "y", argument=True)
    builder.add(Gelu("dead", "BSE"), {"x": "x"}, "one")
    builder.add(Contraction("deader", "BSE,UE->BSU"), {"a": "one", "b": "w"}, "two")
    found = cleaned(builder)
    assert names(found) == ["used"]
    assert set(found.arrays) == {"x", "y"}, "the weight is no argument any more"


def test_statistics_that_nobody_reads_go() -> None:
    builder = Builder()
    builder.add(LayerNorm("norm", "BSE", 1e-5), {"x": "x", "weight": "w", "bias": "b"}, "y", argument=True)
    builder.container("mean", "BS", transient=True)
    state = builder.state
    node = next(n for n in state.nodes() if isinstance(n, LayerNorm))
    builder.sdfg.add_transient("rstd", [2, 3], builder.sdfg.arrays["x"].dtype)
    connect_operator(
        builder.sdfg, state, Scale("reader", "BS", 2.0), {"x": "rstd"}, {"y": builder.container("z", "BS")}
    )
    for name in ("mean", "rstd"):
        target = next((n for n in state.data_nodes() if n.data == name), None) or state.add_access(name)
        node.add_out_connector(name)
        state.add_edge(node, name, target, None, make_memlet(builder.sdfg, name))
    found = cleaned(builder)
    (kept,) = (n for n in the_state(found).nodes() if isinstance(n, LayerNorm))
    assert set(kept.out_connectors) == {"y", "rstd"}
    assert "mean" not in found.arrays


def test_a_copy_of_a_temporary_into_a_result_is_not_made() -> None:
    builder = Builder()
    builder.add(Gelu("gelu", "BSE"), {"x": "x"}, "active")
    builder.add(Scale("copy", "BSE", 1.0), {"x": "active"}, "y", argument=True)
    builder.add(Gelu("again", "BSE"), {"x": "active"}, "z", argument=True)
    found = cleaned(builder)
    assert names(found) == ["gelu", "again"]
    assert set(found.arrays) == {"x", "y", "z"}


def test_a_copy_that_others_read_is_bypassed() -> None:
    builder = Builder()
    builder.add(Scale("copy", "BSE", 1.0), {"x": "x"}, "same")
    builder.add(SumRows("sum over nothing", "BSE", "BSE"), {"x": "same"}, "same again")
    builder.add(Gelu("gelu", "BSE"), {"x": "same again"}, "y", argument=True)
    assert names(cleaned(builder)) == ["gelu"]


def test_a_copy_between_arguments_stays() -> None:
    builder = Builder()
    builder.add(Scale("copy", "BSE", 1.0), {"x": "x"}, "y", argument=True)
    builder.add(Gelu("gelu", "BSE"), {"x": "x"}, "z", argument=True)
    builder.add(Scale("copy of a result", "BSE", 1.0), {"x": "z"}, "v", argument=True)
    assert names(cleaned(builder)) == ["copy", "gelu", "copy of a result"]


def test_scales_sums_and_layouts_that_do_something_stay() -> None:
    builder = Builder()
    builder.add(Scale("scale", "BSE", -1.0), {"x": "x"}, "a")
    builder.add(SumRows("sum", "BSE", "SE"), {"x": "a"}, "b", argument=True)
    builder.add(SumRows("transpose", "SE", "ES"), {"x": "b"}, "c", argument=True)
    builder.add(Scale("conversion", "SE", 1.0), {"x": "b"}, "d")
    builder.sdfg.arrays["d"].strides = (1, 3)  # another layout
    builder.add(Gelu("gelu", "SE"), {"x": "d"}, "e", argument=True)
    assert names(cleaned(builder)) == ["scale", "sum", "transpose", "conversion", "gelu"]


def training(factor: float, *, dead_reader: bool) -> TrainingGraph:
    """Keeps a container that is a copy (of ``factor`` 1) and is read by an operator of backward, dead or not."""
    forward, backward = Builder(), Builder()
    forward.add(Gelu("first", "BSE"), {"x": "x"}, "active")
    forward.add(Scale("copy", "BSE", factor), {"x": "active"}, "copied")
    forward.add(Gelu("last", "BSE"), {"x": "copied"}, "y", argument=True)
    backward.add(Gelu("gradient", "BSE"), {"x": "gradient_y"}, "gradient_copied")
    inputs = {"dy": "gradient_copied", "x": "copied"}
    backward.add(
        GeluGradient("reader", "BSE"), inputs, "dead" if dead_reader else "gradient_w", argument=not dead_reader
    )
    backward.add(Scale("result", "BSE", 2.0), {"x": "gradient_copied"}, "gradient_x", argument=True)
    return hand_built(forward, backward)


def test_what_backward_no_longer_reads_is_a_temporary_again() -> None:
    graph = training(2.0, dead_reader=True)
    assert graph.kept == ("copied",)
    graph, what = RemoveDeadWork().apply(graph)
    validate(graph)
    assert graph.backward is not None
    assert graph.kept == () and graph.forward.arrays["copied"].transient
    assert names(graph.backward) == ["gradient", "result"] and "copied" not in graph.backward.arrays
    assert what == "1 operators and 2 containers removed"


def test_a_kept_copy_gives_way_to_the_original() -> None:
    graph = training(1.0, dead_reader=False)
    graph, _ = RemoveDeadWork().apply(graph)
    validate(graph)
    assert graph.kept == ("active",)
    assert names(graph.forward) == ["first", "last"]


def test_a_kept_original_gives_way_to_an_output() -> None:
    forward, backward = Builder(), Builder()
    forward.add(Gelu("first", "BSE"), {"x": "x"}, "active")
    forward.add(Scale("copy", "BSE", 1.0), {"x": "active"}, "y", argument=True)
    backward.add(GeluGradient("reader", "BSE"), {"dy": "gradient_y", "x": "active"}, "gradient_x", argument=True)
    graph, _ = RemoveDeadWork().apply(hand_built(forward, backward))
    validate(graph)
    assert graph.kept == () and names(graph.forward) == ["first"], "the output is there anyway"
    assert graph.backward is not None and "y" in graph.backward.arrays


def test_an_argument_of_both_graphs_stays_while_one_reads_it() -> None:
    forward, backward = Builder(), Builder()
    forward.add(Gelu("first", "BSE"), {"x": "x"}, "y", argument=True)
    forward.add(Add("dead", "BSE"), {"a": "x", "b": "other"}, "unread")
    backward.add(GeluGradient("reader", "BSE"), {"dy": "gradient_y", "x": "other"}, "gradient_x", argument=True)
    graph, _ = RemoveDeadWork().apply(hand_built(forward, backward))
    validate(graph)
    assert "other" in graph.forward.arrays and names(graph.forward) == ["first"]


def test_random_numbers_that_nobody_uses_are_not_drawn() -> None:
    builder = Builder()
    builder.add(Gelu("gelu", "BSE"), {"x": "x"}, "y", argument=True)
    builder.sdfg.add_array("rng", [2], dace.int64)
    builder.sdfg.add_scalar("p", builder.sdfg.arrays["x"].dtype)
    builder.add(Dropout("dropped", "BSE"), {"x": "y", "rng": "rng", "p": "p"}, "unread")
    graph, _ = RemoveDeadWork().apply(TrainingGraph(builder.sdfg))
    assert set(graph.forward.arrays) == {"x", "y"}
