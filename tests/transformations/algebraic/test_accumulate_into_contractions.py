"""AccumulateIntoContractions: additions that cost a kernel are folded, those that a row kernel has for free are not."""

from __future__ import annotations

import torch
from dace.sdfg import SDFG

from stepdown.models.definition import EncoderLayer
from stepdown.models.operators import Add, Contraction, Gelu, LayerNorm
from stepdown.pipeline.analysis.counts import count_graph
from stepdown.transformations.algebraic.accumulate_into_contractions import AccumulateIntoContractions
from stepdown.transformations.canonical_form import operators, validate
from stepdown.transformations.fusion.fuse_row_operators import FuseRowOperators
from stepdown.transformations.reference_executor import execute
from stepdown.transformations.training_graph import TrainingGraph
from tests.transformations.conftest import MakeGraph

from .cases import Builder, names


def folded(builder: Builder) -> SDFG:
    """The graph after the pass, with the same values."""
    graph, _ = AccumulateIntoContractions().apply(TrainingGraph(builder.sdfg).copy())
    validate(graph)
    values = builder.values()
    expected, found = execute(builder.sdfg, values), execute(graph.forward, values)
    for name, descriptor in graph.forward.arrays.items():
        if not descriptor.transient:
            torch.testing.assert_close(found[name], expected[name], rtol=1e-13, atol=1e-13)
    return graph.forward


def back(builder: Builder, name: str, source: str, *, argument: bool = False) -> str:
    """``name[BSE] = source[BSU] m[EU]``."""
    node = Contraction(name, "BSU,EU->BSE", 0.5)
    return builder.add(node, {"a": source, "b": f"m_{name}"}, name, argument=argument)


def accumulating(sdfg: SDFG) -> dict[str, str]:
    """Addend of every contraction that has one."""
    state = sdfg.nodes()[0]
    return {
        node.name: next(edge.data.data for edge in state.in_edges(node) if edge.dst_conn == "c")
        for node in operators(sdfg)
        if isinstance(node, Contraction) and node.accumulate
    }


def test_a_residual_connection_becomes_an_addend() -> None:
    builder = Builder()
    back(builder, "p", "h")
    builder.add(Add("residual", "BSE"), {"a": "p", "b": "x"}, "y", argument=True)
    found = folded(builder)
    assert names(found) == ["p"] and accumulating(found) == {"p": "x"}
    (node,) = operators(found)
    assert isinstance(node, Contraction) and node.alpha == 0.5, "the factor is the product's alone"


def test_a_sum_of_gradients_is_a_chain_of_addends() -> None:
    builder = Builder()
    for name in ("p", "q", "r"):
        back(builder, name, f"h_{name}")
    builder.add(Add("one", "BSE"), {"a": "x", "b": "p"}, "s")
    builder.add(Add("two", "BSE"), {"a": "s", "b": "q"}, "t")
    builder.add(Add("three", "BSE"), {"a": "t", "b": "r"}, "y", argument=True)
    found = folded(builder)
    assert accumulating(found) == {"p": "x", "q": "s", "r": "t"}
    assert set(names(found)) == {"p", "q", "r"}


def test_one_of_two_products_takes_the_other_as_its_addend() -> None:
    builder = Builder()
    back(builder, "p", "h")
    back(builder, "q", "k")
    builder.add(Add("sum", "BSE"), {"a": "q", "b": "p"}, "y", argument=True)
    assert accumulating(folded(builder)) in ({"q": "p"}, {"p": "q"})


def test_an_addition_that_a_row_kernel_takes_in_stays() -> None:
    builder = Builder()
    back(builder, "p", "h")
    builder.add(Add("residual", "BSE"), {"a": "p", "b": "x"}, "s")
    builder.add(LayerNorm("norm", "BSE", 1e-5), {"x": "s", "weight": "w", "bias": "b"}, "y", argument=True)
    assert names(folded(builder)) == ["p", "residual", "norm"]


def test_an_addition_whose_sum_others_need_as_well_is_folded() -> None:
    builder = Builder()
    back(builder, "p", "h")
    builder.add(Add("residual", "BSE"), {"a": "p", "b": "x"}, "s", argument=True)
    builder.add(LayerNorm("norm", "BSE", 1e-5), {"x": "s", "weight": "w", "bias": "b"}, "y", argument=True)
    found = folded(builder)
    assert names(found) == ["p", "norm"] and accumulating(found) == {"p": "x"}


def test_a_product_with_other_readers_stays() -> None:
    builder = Builder()
    back(builder, "p", "h")
    builder.add(Add("sum", "BSE"), {"a": "p", "b": "x"}, "y", argument=True)
    builder.add(Contraction("other", "BSE,UE->BSU"), {"a": "p", "b": "w"}, "z", argument=True)
    assert set(names(folded(builder))) == {"p", "sum", "other"}


def test_a_product_that_is_a_result_stays() -> None:
    builder = Builder()
    back(builder, "p", "h", argument=True)
    builder.add(Add("sum", "BSE"), {"a": "p", "b": "x"}, "y", argument=True)
    assert names(folded(builder)) == ["p", "sum"]


def test_twice_the_product_stays() -> None:
    builder = Builder()
    back(builder, "p", "h")
    builder.add(Add("twice", "BSE"), {"a": "p", "b": "p"}, "y", argument=True)
    assert names(folded(builder)) == ["p", "twice"]


def test_a_contraction_that_has_an_addend_takes_no_other() -> None:
    builder = Builder()
    node = Contraction("p", "BSU,EU->BSE", accumulate=True)
    builder.add(node, {"a": "h", "b": "m", "c": "v"}, "p")
    builder.add(Add("sum", "BSE"), {"a": "p", "b": "x"}, "y", argument=True)
    assert names(folded(builder)) == ["p", "sum"]


def test_either_of_two_products_leaves_no_cycle() -> None:
    """An addend may depend on whatever comes before the sum, but not on the product: nobody else reads that."""
    builder = Builder()
    builder.add(Gelu("late", "BSE"), {"x": "x"}, "v")
    builder.add(Contraction("late product", "BSE,UE->BSU"), {"a": "v", "b": "w"}, "u", argument=True)
    back(builder, "p", "u")
    back(builder, "q", "h")
    builder.add(Add("sum", "BSE"), {"a": "q", "b": "p"}, "y", argument=True)
    found = folded(builder)
    assert len(accumulating(found)) == 1 and "sum" not in names(found)


def test_the_gradient_of_berts_input_is_summed_in_contractions(make_graph: MakeGraph) -> None:
    """Three additions and their kernel go: 2 B S E words less, and no addition that LayerNorm's kernels hold."""
    before = make_graph(EncoderLayer(embed=16, heads=2, ffn=24))
    after, what = AccumulateIntoContractions().apply(before.copy())
    assert what == "3 additions folded into contractions"
    counted = [count_graph(FuseRowOperators().apply(graph.copy())[0]).total.at(8, 512) for graph in (before, after)]
    words = [counts["words_in"] + counts["words_out"] for counts in counted]
    assert words[0] - words[1] == 2 * 8 * 512 * 16
    assert counted[0]["kernels"] - counted[1]["kernels"] == 1
    assert after.backward is not None
    assert "gradient_hidden_accumulation_1" in names(after.backward)
