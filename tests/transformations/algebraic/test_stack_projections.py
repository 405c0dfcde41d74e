"""StackProjections: what becomes one contraction, what does not, and what it saves.

Dimension legend: B batch, S query position, T key position, H head, P head size, E embedding, U feed-forward size,
N projection in a stack.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import dace
import pytest
import torch
from dace.sdfg import SDFG

from stepdown.models.definition import EncoderLayer
from stepdown.models.errors import OptionError
from stepdown.models.operators import Add, Bias, Contraction, Gelu, Operator, SumRows, TiledGroup
from stepdown.models.operators.gradient import connect_operator
from stepdown.pipeline.analysis.counts import count_graph
from stepdown.transformations.algebraic.accumulate_into_contractions import AccumulateIntoContractions
from stepdown.transformations.algebraic.fold_scales import FoldScales
from stepdown.transformations.algebraic.recompute import Recompute
from stepdown.transformations.algebraic.remove_dead_work import RemoveDeadWork
from stepdown.transformations.algebraic.stack_projections import StackProjections, common_name
from stepdown.transformations.canonical_form import operators, the_state, validate
from stepdown.transformations.differentiate import differentiate
from stepdown.transformations.fusion.fuse_attention import FuseAttention
from stepdown.transformations.fusion.fuse_row_operators import FuseRowOperators
from stepdown.transformations.lowering.cpu.contraction_plan import plan_contraction
from stepdown.transformations.training_graph import TrainingGraph
from tests.transformations.conftest import MakeGraph

from .cases import LAYERS, results, same_training, same_values

SIZES = {"B": 2, "S": 3, "E": 4, "U": 5}


def stacked(graph: TrainingGraph, most: int | None = None) -> tuple[TrainingGraph, str]:
    after, what = StackProjections(most).apply(graph.copy())
    validate(after)
    return after, what


def backward_of(graph: TrainingGraph) -> SDFG:
    assert graph.backward is not None
    return graph.backward


def of_kind(sdfg: SDFG, kind: type[Operator], part: str) -> list[Any]:
    """Operators of a kind whose name holds ``part``."""
    return [node for node in operators(sdfg) if isinstance(node, kind) and part in node.name]


def connected(sdfg: SDFG, node: Operator) -> dict[str, str]:
    """What every connector of an operator reads or writes, with its subset."""
    state = the_state(sdfg)
    return {edge.dst_conn if edge.dst is node else edge.src_conn: str(edge.data) for edge in state.all_edges(node)}


# ---- layers --------------------------------------------------------------------------------------------------------


def test_forward_has_one_projection_and_one_bias(make_graph: MakeGraph) -> None:
    graph, what = stacked(make_graph(LAYERS["bert"]))
    assert what == "3 projections in 1 stacks, 12 operators less"
    assert graph.stacks == {
        "query_key_value_weight": ("query_weight", "key_weight", "value_weight"),
        "query_key_value_bias": ("query_bias", "key_bias", "value_bias"),
    }
    (product,) = of_kind(graph.forward, Contraction, "query")
    assert (product.name, product.einsum) == ("query_key_value_product", "BSE,NHPE->BSNHP")
    (bias,) = of_kind(graph.forward, Bias, "query")
    assert (bias.name, bias.dims, bias.bias_dims) == ("query_key_value", "BSNHP", "NHP")
    assert graph.forward.arrays["query_key_value_weight"].shape == (3, 3, 4, 12)
    (scores,) = of_kind(graph.forward, Contraction, "scores")
    assert connected(graph.forward, scores)["a"] == "query_key_value[0:B, 0:S, 0, 0:3, 0:4]"
    assert connected(graph.forward, scores)["b"] == "query_key_value[0:B, 0:S, 1, 0:3, 0:4]"
    assert "query_key_value" in graph.kept and not {"query", "key", "value"} & set(graph.kept)
    assert not any(name in graph.forward.arrays for name in ("query_weight", "key_bias", "query_product", "value"))


def test_backward_has_one_operator_for_each_gradient_and_no_sums_of_parts(make_graph: MakeGraph) -> None:
    before = make_graph(LAYERS["bert"])
    graph, _ = stacked(before)
    backward = backward_of(graph)
    einsums = {
        node.name: node.einsum for node in of_kind(backward, Contraction, "product_gradient") if "key" in node.name
    }
    assert einsums == {
        "query_key_value_product_gradient_a": "BSNHP,NHPE->BSE",
        "query_key_value_product_gradient_b": "BSNHP,BSE->NHPE",
    }
    (sums,) = of_kind(backward, SumRows, "key")
    assert (sums.dims, sums.sum_dims) == ("BSNHP", "NHP")
    assert [node.name for node in of_kind(backward, Add, "gradient_x")] == ["gradient_x_accumulation_3"]
    state = the_state(backward)
    (access,) = (node for node in state.data_nodes() if node.data == "gradient_query_key_value")
    parts = [str(edge.data) for edge in state.in_edges(access)]
    assert sorted(parts) == [f"gradient_query_key_value[0:B, 0:S, {index}, 0:3, 0:4]" for index in range(3)]
    assert results(graph) == results(before)
    assert "gradient_query_weight" not in backward.arrays


@pytest.mark.parametrize("most", [2, 3, None])
@pytest.mark.parametrize("layer", LAYERS)
def test_layers_keep_every_output_and_gradient(layer: str, most: int | None, make_graph: MakeGraph) -> None:
    before = make_graph(LAYERS[layer])
    after, _ = stacked(before, most)
    same_training(before, after, LAYERS[layer])


@pytest.mark.parametrize("attention", [False, True], ids=["unfused", "fused"])
@pytest.mark.parametrize("layer", LAYERS)
def test_other_passes_accept_parts(layer: str, attention: bool, make_graph: MakeGraph) -> None:
    before = make_graph(LAYERS[layer])
    graph, _ = stacked(before)
    passes: list[Any] = [RemoveDeadWork(), FoldScales(), AccumulateIntoContractions()]
    passes += [FuseAttention()] if attention else []
    for one in [*passes, Recompute(), FuseRowOperators()]:
        graph, _ = one.apply(graph)
        validate(graph)
    same_training(before, graph, LAYERS[layer])
    tiled = [node for _, sdfg in graph.graphs() for node in operators(sdfg) if isinstance(node, TiledGroup)]
    assert len(tiled) == (2 if attention else 0)
    if attention:
        stem = "query_key_value" if LAYERS[layer].bias else "query_key_value_product"
        assert {f"{stem}_{index}" for index in range(3)} <= set(tiled[0].in_connectors)
        assert any("_2" in name for name in tiled[1].out_connectors)


def test_two_at_most_leave_the_third_alone(make_graph: MakeGraph) -> None:
    graph, what = stacked(make_graph(LAYERS["bert"]), 2)
    assert graph.stacks["query_key_weight"] == ("query_weight", "key_weight")
    assert [node.name for node in of_kind(graph.forward, Contraction, "value")] == ["value_product"]
    assert what.startswith("2 projections in 1 stacks")
    assert StackProjections(2).apply(graph)[1] == "no projections of one input"


@pytest.mark.parametrize(
    ("direction", "name"),
    [("forward", "query_key_value_product"), ("backward", "query_key_value_product_gradient_a"),
     ("backward", "query_key_value_product_gradient_b")],
)  # fmt: skip
def test_a_stack_is_one_matrix_product(direction: str, name: str, make_graph: MakeGraph) -> None:
    graph, _ = stacked(make_graph(LAYERS["bert"]))
    sdfg = dict(graph.graphs())[direction]
    (node,) = of_kind(sdfg, Contraction, name)
    dims = node.operand_dims()
    strides = {
        edge.dst_conn or edge.src_conn: sdfg.arrays[edge.data.data].strides for edge in the_state(sdfg).all_edges(node)
    }
    sizes = node.sizes(sdfg, the_state(sdfg))
    plan = plan_contraction((dims["a"], dims["b"], dims["d"]), sizes, strides)
    assert not plan.loops and not plan.sum_loops and not plan.packed


def test_words_and_kernels_without_stacks_with_q_and_k_and_with_all(make_graph: MakeGraph) -> None:
    """Table 2 of the paper compares the times of these three; here, what they move: BERT-large, B=8, S=512.

    Forward reads x (8 * 512 * 1024 words) once less for every projection that joins. Backward does so for the gradient
    of the weights; and every gradient of x that is not written, read and added (its sum written and read again) saves
    four times as much.
    """
    before = make_graph(EncoderLayer(embed=1024, heads=16, ffn=4096))
    moved, kernels = [], []
    for most in (None, 2, 1):
        graph = before if most == 1 else stacked(before, most)[0]
        counts = count_graph(graph).total.at(8, 512)
        moved.append(counts["words_in"] + counts["words_out"])
        kernels.append(counts["kernels"])
    assert moved == [1_266_765_842, 1_291_931_666, 1_317_097_490]
    assert kernels == [48, 54, 60]
    assert moved[2] - moved[1] == moved[1] - moved[0] == 6 * 8 * 512 * 1024


# ---- graphs built by hand ------------------------------------------------------------------------------------------


class Projections:
    """Products of x [B, S, E] with parameters [U, E], added up after a GELU each."""

    def __init__(self, names: str = "abc") -> None:
        self.names = names
        self.sdfg = SDFG("projections")
        self.sdfg.add_state("operators")
        self.shapes: dict[str, str] = {"x": "BSE"} | {f"{name}_weight": "UE" for name in names}
        self.einsum = dict.fromkeys(names, "BSE,UE->BSU")
        self.inputs = dict.fromkeys(names, "x")
        self.alpha = dict.fromkeys(names, 1.0)
        self.biases: dict[str, str] = {}

    def build(self) -> TrainingGraph:
        total = ""
        for name in self.names:
            node = Contraction(f"{name}_product", self.einsum[name], self.alpha[name])
            last = self._add(node, {"a": self.inputs[name], "b": f"{name}_weight"}, f"{name}_product", "d")
            if name in self.biases:
                last = self._add(
                    Bias(f"{name}_biased", "BSU", "U"), {"x": last, "bias": self.biases[name]}, f"{name}_biased"
                )
            last = self._add(Gelu(f"{name}_gelu", "BSU"), {"x": last}, f"{name}_gelu")
            total = self._add(Add(f"{name}_sum", "BSU"), {"a": total, "b": last}, f"{name}_sum") if total else last
        self._add(Gelu("last", "BSU"), {"x": total}, "y")
        self.sdfg.arrays["y"].transient = False
        leaves = [name for name in self.shapes if name in self.sdfg.arrays]
        graph = differentiate(self.sdfg, "y", leaves)
        validate(graph)
        return graph

    def _add(self, node: Operator, inputs: dict[str, str], output: str, connector: str = "y") -> str:
        dims = node.operand_dims()
        for operand, name in inputs.items():
            if name not in self.sdfg.arrays:
                self.shapes.setdefault(name, dims[operand])
                self.sdfg.add_array(name, [SIZES[letter] for letter in self.shapes[name]], dace.float64)
        self.sdfg.add_transient(output, [SIZES[letter] for letter in dims[connector]], dace.float64)
        connect_operator(self.sdfg, the_state(self.sdfg), node, inputs, {connector: output})
        return output

    def values(self) -> dict[str, torch.Tensor]:
        found = {
            name: torch.randn([SIZES[letter] for letter in dims], dtype=torch.float64)
            for name, dims in self.shapes.items()
        }
        return found | {"given": torch.zeros(SIZES["B"], SIZES["S"], SIZES["U"])}


def test_any_contractions_that_share_an_input_match() -> None:
    built = Projections("abcd")
    built.biases = {name: f"{name}_bias" for name in "abcd"}
    before = built.build()
    after, what = stacked(before)
    assert what.startswith("4 projections in 1 stacks")
    assert set(after.stacks) == {"a_b_c_d_weight", "a_b_c_d_bias"}
    same_values(before, after, built.values(), "y")
    two, what = stacked(before, 2)
    assert what.startswith("4 projections in 2 stacks")
    same_values(before, two, built.values(), "y")


def test_a_bias_of_two_is_not_stacked_but_the_projections_are() -> None:
    built = Projections("ab")
    built.biases = {"a": "bias", "b": "bias"}
    before = built.build()
    after, _ = stacked(before)
    assert set(after.stacks) == {"a_b_weight"}
    same_values(before, after, built.values(), "y")


def test_a_product_is_not_kept_because_another_is() -> None:
    """What follows a bias reads the biased product; without one, backward reads the product itself."""
    built = Projections("abc")
    built.biases = {"a": "a_bias"}
    before = built.build()
    assert "b_product" in before.kept and "a_product" not in before.kept
    after, _ = stacked(before)
    assert set(after.stacks) == {"b_c_weight"}
    same_values(before, after, built.values(), "y")


def test_gradients_that_are_one_container_stay_apart() -> None:
    """Without anything between product and sum both products have the same gradient."""
    sdfg = SDFG("sum")
    state = sdfg.add_state("operators")
    for name, dims in (("x", "BSE"), ("a", "UE"), ("b", "UE"), ("p", "BSU"), ("q", "BSU"), ("y", "BSU")):
        sdfg.add_array(name, [SIZES[d] for d in dims], dace.float64, transient=name in "pq")
    connect_operator(sdfg, state, Contraction("p", "BSE,UE->BSU"), {"a": "x", "b": "a"}, {"d": "p"})
    connect_operator(sdfg, state, Contraction("q", "BSE,UE->BSU"), {"a": "x", "b": "b"}, {"d": "q"})
    connect_operator(sdfg, state, Add("y", "BSU"), {"a": "p", "b": "q"}, {"y": "y"})
    before = differentiate(sdfg, "y", ["x", "a", "b"])
    after, _ = stacked(before)
    assert after.stacks == {"a_b": ("a", "b")}
    assert {"gradient_a", "gradient_b"} <= set(backward_of(after).arrays)
    values = {name: torch.randn([SIZES[d] for d in dims], dtype=torch.float64) for name, dims in
              (("x", "BSE"), ("a", "UE"), ("b", "UE"), ("given", "BSU"))}  # fmt: skip
    same_values(before, after, values, "y")


def test_some_gradients_alone_are_accepted() -> None:
    built = Projections("abc")
    built.build()
    weights = ["a_weight", "b_weight", "c_weight"]
    for wanted in (weights[:2], ["x"], ["x", "a_weight"], weights):
        before = differentiate(built.sdfg, "y", wanted)
        after, _ = stacked(before)
        # The product of a parameter without gradient is not kept, so that it is none of the others' kind.
        assert set(after.stacks) == {"a_b_weight" if wanted == weights[:2] else "a_b_c_weight"}
        same_values(before, after, built.values(), "y")


def change(field: str, value: Any) -> Projections:
    built = Projections("ab")
    getattr(built, field)["b"] = value
    return built


@pytest.mark.parametrize(
    "built",
    [change("alpha", 0.5), change("inputs", "z"), change("einsum", "BSE,EU->BSU")],
    ids=["another factor", "another input", "another order"],
)
def test_projections_that_differ_are_refused(built: Projections) -> None:
    built.shapes["b_weight"] = built.einsum["b"].split(",")[1].split("->")[0]
    graph, what = stacked(built.build())
    assert what == "no projections of one input" and not graph.stacks


def test_data_are_no_parameters() -> None:
    sdfg = SDFG("data")
    state = sdfg.add_state("operators")
    for name, dims in (("x", "BSE"), ("a", "BUE"), ("b", "BUE"), ("y", "BSU"), ("z", "BSU")):
        sdfg.add_array(name, [SIZES[d] for d in dims], dace.float64)
    for name, result in (("a", "y"), ("b", "z")):
        connect_operator(sdfg, state, Contraction(name, "BSE,BUE->BSU"), {"a": "x", "b": name}, {"d": result})
    assert StackProjections().apply(TrainingGraph(sdfg))[1] == "no projections of one input"


def test_a_forward_graph_alone_is_stacked(make_graph: MakeGraph) -> None:
    graph = dataclasses.replace(make_graph(LAYERS["bert"]).copy(), backward=None, kept=())
    after, _ = StackProjections().apply(graph)
    assert "query_key_value_weight" in after.forward.arrays


@pytest.mark.parametrize("most", [1, 0, True, "2"])
def test_a_stack_of_less_than_two_is_refused(most: Any) -> None:
    with pytest.raises(OptionError, match="accepted are None and numbers from 2"):
        StackProjections(most)


@pytest.mark.parametrize(
    ("names", "one"),
    [
        (["query_weight", "key_weight"], "query_key_weight"),
        (["gradient_query", "gradient_key"], "gradient_query_key"),
        (["gradient_x_of_query_product", "gradient_x_of_key_product"], "gradient_x_of_query_key_product"),
        (["a", "b"], "a_b"),
        (["w", "w_0"], "w_w_0"),
        (["w_1", "w_2"], "w_1_2"),
    ],
)
def test_names_have_what_is_common_once(names: list[str], one: str) -> None:
    assert common_name(names) == one
