"""FoldScales: factors before and after contractions and scales, in both graphs; where they must stay."""

from __future__ import annotations

import pytest
import torch
from dace.sdfg import SDFG

from stepdown.models.operators import Bias, Contraction, Gelu, Operator, Scale
from stepdown.transformations.algebraic.fold_scales import FoldScales
from stepdown.transformations.canonical_form import operators, validate
from stepdown.transformations.reference_executor import execute, execute_training
from stepdown.transformations.training_graph import TrainingGraph

from .cases import Builder, hand_built, names


def folded(builder: Builder) -> SDFG:
    """The graph after the pass, with the same values."""
    graph, _ = FoldScales().apply(TrainingGraph(builder.sdfg).copy())
    validate(graph)
    values = builder.values()
    expected, found = execute(builder.sdfg, values), execute(graph.forward, values)
    for name, descriptor in graph.forward.arrays.items():
        if not descriptor.transient:
            torch.testing.assert_close(found[name], expected[name], rtol=1e-13, atol=1e-13)
    return graph.forward


def only(sdfg: SDFG) -> Operator:
    """The one operator of a graph."""
    (node,) = operators(sdfg)
    return node


def product(builder: Builder, a: str, b: str, output: str, *, argument: bool = False, alpha: float = 1.0) -> str:
    """``output[BSU] = a[BSE] b[UE]``."""
    return builder.add(Contraction(output, "BSE,UE->BSU", alpha), {"a": a, "b": b}, output, argument=argument)


def test_a_scaled_result_becomes_the_factor() -> None:
    builder = Builder()
    product(builder, "x", "w", "p", alpha=0.5)
    builder.add(Scale("scale", "BSU", -3.0), {"x": "p"}, "y", argument=True)
    node = only(folded(builder))
    assert isinstance(node, Contraction) and node.alpha == -1.5


@pytest.mark.parametrize(("dims", "operand"), [("BSE", "a"), ("UE", "b")])
def test_a_scaled_factor_becomes_the_factor(dims: str, operand: str) -> None:
    builder = Builder()
    builder.add(Scale("scale", dims, 0.25), {"x": "v"}, "scaled")
    inputs = {"a": "x", "b": "w"} | {operand: "scaled"}
    builder.add(Contraction("product", "BSE,UE->BSU", 2.0), inputs, "y", argument=True)
    node = only(folded(builder))
    assert isinstance(node, Contraction) and node.alpha == 0.5


def test_both_operands_and_every_reader_take_their_share() -> None:
    builder = Builder()
    builder.add(Scale("scale", "SE", 3.0), {"x": "v"}, "scaled")
    builder.add(Contraction("square", "SE,SE->S"), {"a": "scaled", "b": "scaled"}, "y", argument=True)
    builder.add(Contraction("other", "SE,UE->SU"), {"a": "scaled", "b": "w"}, "z", argument=True)
    found = operators(folded(builder))
    assert {node.name: node.alpha for node in found if isinstance(node, Contraction)} == {"square": 9.0, "other": 3.0}
    assert len(found) == 2


def test_scales_in_a_row_are_one() -> None:
    builder = Builder()
    builder.add(Gelu("gelu", "BSE"), {"x": "x"}, "a")
    builder.add(Scale("one", "BSE", 2.0), {"x": "a"}, "b")
    builder.add(Scale("two", "BSE", 5.0), {"x": "b"}, "c")
    builder.add(Scale("three", "BSE", -1.0), {"x": "c"}, "y", argument=True)
    found = operators(folded(builder))
    assert [type(node) for node in found] == [Gelu, Scale]
    assert isinstance(found[1], Scale) and found[1].factor == -10.0


def test_an_addend_is_not_scaled() -> None:
    builder = Builder()
    builder.add(Scale("scale", "BSU", 3.0), {"x": "v"}, "scaled")
    builder.add(Contraction("sum", "BSE,UE->BSU", accumulate=True), {"a": "x", "b": "w", "c": "scaled"}, "p")
    builder.add(Scale("after", "BSU", 2.0), {"x": "p"}, "y", argument=True)
    assert names(folded(builder)) == ["scale", "sum", "after"]


def test_what_others_read_stays() -> None:
    builder = Builder()
    product(builder, "x", "w", "p")
    builder.add(Scale("scale", "BSU", 3.0), {"x": "p"}, "y", argument=True)
    builder.add(Gelu("gelu", "BSU"), {"x": "p"}, "z", argument=True)
    builder.add(Scale("before", "BSE", 3.0), {"x": "v"}, "scaled")
    product(builder, "scaled", "w", "q", argument=True)
    builder.add(Bias("bias", "BSE", "E"), {"x": "scaled", "bias": "b"}, "u", argument=True)
    assert set(names(folded(builder))) == {"p", "scale", "gelu", "before", "q", "bias"}


def test_results_stay() -> None:
    builder = Builder()
    product(builder, "x", "w", "p", argument=True)
    builder.add(Scale("scale", "BSU", 3.0), {"x": "p"}, "y", argument=True)
    builder.add(Scale("result", "BSE", 3.0), {"x": "v"}, "scaled", argument=True)
    product(builder, "scaled", "w", "q", argument=True)
    assert set(names(folded(builder))) == {"p", "scale", "result", "q"}


@pytest.mark.parametrize(("one", "other"), [(1e200, 1e200), (1e-200, 1e-200)])
def test_factors_whose_product_is_no_number_stay(one: float, other: float) -> None:
    builder = Builder()
    builder.add(Scale("one", "BSE", one), {"x": "x"}, "a")
    builder.add(Scale("two", "BSE", other), {"x": "a"}, "y", argument=True)
    assert names(folded(builder)) == ["one", "two"]


def scaled_queries(backward_reader: Operator, inputs: dict[str, str], output: str) -> TrainingGraph:
    """Forward scales before a contraction; backward reads what it scaled."""
    forward, backward = Builder(), Builder()
    forward.add(Gelu("gelu", "BSE"), {"x": "x"}, "active")
    forward.add(Scale("scale", "BSE", 4.0), {"x": "active"}, "scaled")
    product(forward, "scaled", "w", "y", argument=True)
    backward.container("gradient_y", "BSU")
    backward.add(backward_reader, inputs, output, argument=True)
    return hand_built(forward, backward)


def test_a_kept_factor_is_folded_in_both_graphs() -> None:
    inputs = {"a": "gradient_y", "b": "scaled"}
    graph = scaled_queries(Contraction("gradient", "BSU,BSE->UE"), inputs, "gradient_w")
    before = graph.copy()
    graph, what = FoldScales().apply(graph)
    validate(graph)
    assert what == "1 scales folded" and graph.kept == ("active",)
    assert names(graph.forward) == ["gelu", "y"]
    values = {"x": torch.randn(2, 3, 4).double(), "w": torch.randn(5, 4).double()}
    upstream = {"gradient_y": torch.randn(2, 3, 5).double()}
    for found, expected in zip(
        execute_training(graph, values, upstream), execute_training(before, values, upstream), strict=True
    ):
        for name in {"y", "gradient_w"} & set(expected):
            torch.testing.assert_close(found[name], expected[name], rtol=1e-13, atol=1e-13)


def test_a_kept_factor_that_a_row_operator_reads_stays() -> None:
    graph = scaled_queries(Gelu("reader", "BSE"), {"x": "scaled"}, "gradient_x")
    graph, what = FoldScales().apply(graph)
    assert what == "0 scales folded" and graph.kept == ("scaled",)
