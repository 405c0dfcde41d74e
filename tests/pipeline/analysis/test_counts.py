"""Counts of training graphs: by hand on small ones, against the paper's on BERT-large, after lowering, and as text.

Dimension legend: B batch, S query position, T key position, H head, P head size, E embedding, U feed-forward size.
"""

from __future__ import annotations

import time
from functools import lru_cache

import dace
import pytest
import sympy
from dace.sdfg import SDFG

from stepdown.models.definition import EncoderLayer
from stepdown.models.dtypes import resolve_dtype
from stepdown.models.operators import Add, Contraction, Dropout, LayerNorm, OperatorClass, Scale
from stepdown.models.operators.gradient import connect_operator
from stepdown.models.operators.operator import make_memlet
from stepdown.pipeline.analysis.counts import Counts, count_graph, count_kernels
from stepdown.pipeline.stages import Compilation, differentiate_stage, parse
from stepdown.pipeline.target import find_target
from stepdown.transformations.differentiate import differentiate
from stepdown.transformations.fusion.fuse_row_operators import FuseRowOperators
from stepdown.transformations.lowering.cpu import register
from stepdown.transformations.lowering.lower_operators import lower_operators
from stepdown.transformations.training_graph import TrainingGraph

PAPER = EncoderLayer(embed=1024, heads=16, ffn=4096, activation="relu", activation_dropout=0.1)
"""The layer that the paper measures: BERT-large's sizes, ReLU, dropout after the activation."""

BATCH, SEQ = 8, 512


@lru_cache(maxsize=4)
def layer_graph(definition: EncoderLayer, batch: int | None, seq: int | None, dtype: str) -> TrainingGraph:
    """A layer's training graph before fusion; not to be changed."""
    compilation = Compilation(definition, batch, seq, resolve_dtype(dtype), find_target("cpu"), "counted")
    parse(compilation)
    differentiate_stage(compilation)
    assert compilation.graph is not None
    return compilation.graph


@pytest.fixture(scope="module")
def paper(strict_dace_session: None) -> TrainingGraph:
    """The paper's layer in bfloat16 with symbolic sizes."""
    return layer_graph(PAPER, None, None, "bfloat16")


@pytest.fixture(scope="module")
def forward_operators(paper: TrainingGraph) -> dict[str, dict[str, int]]:
    """Counts of the forward operators by name, at the paper's sizes."""
    found = count_graph(paper).by_operator
    return {o.name: o.counts.at(BATCH, SEQ) for o in found if o.direction == "forward"}


# ---- against the paper's table of the forward pass (B=8, S=512; Gflop, million words) -------------------------------


@pytest.mark.parametrize(
    ("name", "gflop", "words_in", "words_out"),
    [
        ("scores", "4.295", "8.39", "33.55"),
        ("context", "4.295", "37.75", "4.19"),
        ("attention_product", "8.590", "5.24", "4.19"),
        ("intermediate_product", "34.360", "8.39", "16.78"),
        ("output_product", "34.360", "20.97", "4.19"),
    ],
)
def test_contractions_are_the_papers_to_the_digit(
    forward_operators: dict[str, dict[str, int]], name: str, gflop: str, words_in: str, words_out: str
) -> None:
    counts = forward_operators[name]
    assert f"{counts['flop'] / 1e9:.3f}" == gflop
    assert f"{counts['words_in'] / 1e6:.2f}" == words_in
    assert f"{counts['words_out'] / 1e6:.2f}" == words_out


def test_projections_are_the_papers_but_for_the_reads_of_x(forward_operators: dict[str, dict[str, int]]) -> None:
    """The paper stacks Q, K and V: one read of x. Three contractions read it three times."""
    three = [forward_operators[f"{name}_product"] for name in ("query", "key", "value")]
    assert f"{sum(c['flop'] for c in three) / 1e9:.2f}" == "25.77"
    assert f"{sum(c['words_out'] for c in three) / 1e6:.2f}" == "12.58"
    assert f"{sum(c['words_in'] for c in three) / 1e6:.2f}" == "15.73"
    x = BATCH * SEQ * PAPER.embed
    assert f"{(sum(c['words_in'] for c in three) - 2 * x) / 1e6:.2f}" == "7.34"


def test_softmax_and_dropout_beside_the_paper(forward_operators: dict[str, dict[str, int]]) -> None:
    """33.55 -> 100.66 in one kernel there, which stores a mask; here two kernels, 67.11 out, masks are drawn again."""
    weights, dropped = forward_operators["attention_weights"], forward_operators["attention_dropped"]
    assert f"{weights['words_in'] / 1e6:.2f}" == "33.55"
    assert f"{(weights['words_out'] + dropped['words_out']) / 1e6:.2f}" == "67.11"
    assert dropped["words_in"] == BATCH * 16 * SEQ * SEQ + 2 + 1, "the generator's pair and the probability"


def test_contractions_are_almost_all_flop(paper: TrainingGraph) -> None:
    """99.8, 0.17 and 0.03 per cent in the paper, whose rule for selects and dropout is another."""
    by_class = {kind: counts.at(BATCH, SEQ) for kind, counts in count_graph(paper).by_class().items()}
    total = sum(counts["flop"] for counts in by_class.values())
    shares = {kind: 100 * counts["flop"] / total for kind, counts in by_class.items()}
    assert shares[OperatorClass.CONTRACTION] == pytest.approx(99.71, abs=0.01)
    assert shares[OperatorClass.STATISTICAL_NORMALIZATION] == pytest.approx(0.16, abs=0.01)
    assert shares[OperatorClass.ELEMENT_WISE] == pytest.approx(0.13, abs=0.01)
    assert by_class[OperatorClass.CONTRACTION]["flop"] == 3 * 111_669_149_696, "backward is twice forward"


def test_totals_of_the_papers_layer(paper: TrainingGraph) -> None:
    total = count_graph(paper).total.at(BATCH, SEQ)
    assert total["kernels"] == 62
    assert round((total["words_in"] + total["words_out"]) / 1e6) == 1384


def test_the_forward_pass_beside_the_paper(paper: TrainingGraph) -> None:
    """524.3 million words there, in kernels fused by hand that store masks."""

    def million_words(graph: TrainingGraph) -> str:
        forward = count_graph(graph).forward.at(BATCH, SEQ)
        return f"{(forward['words_in'] + forward['words_out']) / 1e6:.1f}"

    assert million_words(paper) == "574.7"
    fused, _ = FuseRowOperators().apply(paper.copy())
    assert million_words(fused) == "381.7"


# ---- by hand --------------------------------------------------------------------------------------------------------


def norm_graph(dtype: dace.typeclass = dace.bfloat16) -> TrainingGraph:
    """y = LayerNorm(x + x), differentiated: every number can be written down."""
    sdfg = SDFG("norm")
    state = sdfg.add_state()
    B, S = (dace.symbol(name, dace.int64, positive=True) for name in "BS")
    for name, shape in (("x", (B, S, 4)), ("w", (4,)), ("b", (4,)), ("y", (B, S, 4))):
        sdfg.add_array(name, shape, dtype)
    sdfg.add_transient("sum", (B, S, 4), dtype)
    connect_operator(sdfg, state, Add("sum", "BSE"), {"a": "x", "b": "x"}, {"y": "sum"})
    inputs = {"x": "sum", "weight": "w", "bias": "b"}
    connect_operator(sdfg, state, LayerNorm("norm", "BSE"), inputs, {"y": "y"})
    return differentiate(sdfg, "y", ["x", "w", "b"])


def test_by_hand() -> None:
    counts = count_graph(norm_graph())
    rows, elements = 2 * 3, 2 * 3 * 4
    forward = counts.forward.at(2, 3)
    assert forward["kernels"] == 2
    assert forward["containers"] == 7, "x, w, b, y, sum, mean, rstd"
    assert forward["flop"] == elements + 9 * elements + 5 * rows
    assert forward["words_in"] == elements + (elements + 8), "x once although it is both operands"
    assert forward["words_out"] == elements + (elements + 2 * rows)
    words_of_two_bytes = forward["words_in"] + forward["words_out"] - 2 * rows
    assert forward["bytes_moved"] == 2 * words_of_two_bytes + 4 * 2 * rows, "statistics are float32"
    assert forward["kept_bytes"] == 2 * elements + 2 * 4 * rows, "sum, mean, rstd"
    assert counts.backward is not None
    backward = counts.backward.at(2, 3)
    assert backward["kernels"] == 3
    assert backward["flop"] == (14 * elements + 2 * rows) + 5 * elements + elements
    assert backward["words_in"] == (2 * elements + 2 * rows + 4) + (2 * elements + 2 * rows) + elements
    assert backward["words_out"] == elements + 8 + elements
    assert backward["kept_bytes"] == forward["kept_bytes"]


def test_totals_add_the_directions_and_count_what_is_kept_once() -> None:
    counts = count_graph(norm_graph())
    assert counts.backward is not None
    total, forward, backward = (c.at(2, 3) for c in (counts.total, counts.forward, counts.backward))
    for name in total:
        assert total[name] == forward[name] + (0 if name == "kept_bytes" else backward[name]), name


def test_inference_keeps_nothing() -> None:
    counts = count_graph(TrainingGraph(norm_graph().forward))
    assert counts.backward is None
    assert counts.total == counts.forward
    assert counts.total.kept_bytes == 0
    assert counts.to_manifest()["backward"] is None


@pytest.mark.parametrize(("dtype", "width"), [(dace.float64, 8), (dace.float32, 4), (dace.bfloat16, 2)])
def test_words_do_not_depend_on_the_type_and_bytes_do(dtype: dace.typeclass, width: int) -> None:
    counts = count_graph(norm_graph(dtype)).by_operator[0].counts.at(2, 3)
    assert (counts["words_in"], counts["words_out"], counts["bytes_moved"]) == (24, 24, 48 * width)


def test_two_parts_of_a_stack_are_two_inputs_and_one_part_twice_is_one() -> None:
    def words(*indices: int) -> int:
        sdfg = SDFG("packed")
        state = sdfg.add_state()
        sdfg.add_array("stack", (3, 2, 4), dace.float32)
        sdfg.add_array("y", (2, 2), dace.float32)
        node = Contraction("scores", "SE,TE->ST")
        state.add_node(node)
        for connector, index in zip("ab", indices, strict=True):
            memlet = dace.Memlet(f"stack[{index}, 0:2, 0:4]")
            state.add_edge(state.add_read("stack"), None, node, connector, memlet)
        state.add_edge(node, "d", state.add_write("y"), None, make_memlet(sdfg, "y"))
        return count_graph(TrainingGraph(sdfg)).total.at(1, 1)["words_in"]

    assert words(0, 1) == 16
    assert words(1, 1) == 8


def test_a_dropout_reads_its_pair_and_its_probability() -> None:
    sdfg = SDFG("dropout")
    state = sdfg.add_state()
    sdfg.add_array("x", (2, 3, 4), dace.bfloat16)
    sdfg.add_array("y", (2, 3, 4), dace.bfloat16)
    sdfg.add_array("rng", (2,), dace.int64)
    sdfg.add_scalar("p", dace.float64)
    connect_operator(sdfg, state, Dropout("dropout", "BSE"), {"x": "x", "rng": "rng", "p": "p"}, {"y": "y"})
    counts = count_graph(TrainingGraph(sdfg)).total.at(1, 1)
    assert (counts["words_in"], counts["words_out"]) == (24 + 2 + 1, 24)
    assert counts["bytes_moved"] == 2 * 48 + 2 * 8 + 8
    assert counts["flop"] == 2 * 24 + 2


def test_gradients_that_pass_through_are_copied_where_they_are_asked_for() -> None:
    """y = a + b: both gradients are the given one, and each copy is a kernel."""
    sdfg = SDFG("sum")
    state = sdfg.add_state()
    for name in ("a", "b", "y"):
        sdfg.add_array(name, (3,), dace.float32)
    connect_operator(sdfg, state, Add("sum", "E"), {"a": "a", "b": "b"}, {"y": "y"})
    counts = count_graph(differentiate(sdfg, "y", ["a", "b"]))
    backward = [operator for operator in counts.by_operator if operator.direction == "backward"]
    assert [operator.kind for operator in backward] == [Scale.__name__] * 2


# ---- sizes, text, lowering ------------------------------------------------------------------------------------------


def test_symbolic_counts_become_those_of_fixed_sizes() -> None:
    definition = EncoderLayer(embed=6, heads=2, ffn=5)
    symbolic = count_graph(layer_graph(definition, None, None, "float32"))
    fixed = count_graph(layer_graph(definition, 3, 7, "float32"))
    assert symbolic.total.at(3, 7) == fixed.total.at(99, 99)
    parts = (fixed.to_manifest(), fixed.to_manifest()["forward"], fixed.to_manifest()["backward"])
    assert all(isinstance(value, int) for part in parts for value in part.values() if not isinstance(value, dict))


def test_manifest_has_numbers_and_text_in_b_and_s(paper: TrainingGraph) -> None:
    counts = count_graph(paper)
    manifest = counts.to_manifest()
    keys = ["kernels", "containers", "flop", "words_in", "words_out", "bytes_moved", "kept_bytes"]
    assert list(manifest) == [*keys, "forward", "backward"]
    assert list(manifest["forward"]) == list(manifest["backward"]) == keys
    assert manifest["kernels"] == manifest["forward"]["kernels"] + manifest["backward"]["kernels"] == 62
    symbols = {letter: sympy.Symbol(letter) for letter in "BS"}
    for part, expected in ((manifest, counts.total), (manifest["forward"], counts.forward)):
        for name, value in expected.at(BATCH, SEQ).items():
            read = sympy.sympify(part[name], locals=symbols)
            assert read.free_symbols <= set(symbols.values())
            assert read.subs({symbols["B"]: BATCH, symbols["S"]: SEQ}) == value, name


def test_classes_and_operators_add_up(paper: TrainingGraph) -> None:
    counts = count_graph(paper)
    by_class = sum(counts.by_class().values(), start=Counts()).at(BATCH, SEQ)
    total = counts.total.at(BATCH, SEQ)
    for name in ("kernels", "flop", "words_in", "words_out", "bytes_moved"):
        assert by_class[name] == total[name]
    assert len(counts.by_operator) == total["kernels"]
    names = [(o.direction, o.name) for o in counts.by_operator]
    assert len(set(names)) == len(names)


def test_counting_is_fast(paper: TrainingGraph) -> None:
    """Every stage of every compilation is counted: processor time, because other processes may run."""
    took = []
    for _ in range(5):
        start = time.process_time()
        count_graph(paper).to_manifest()
        took.append(time.process_time() - start)
    assert min(took) < 0.1


def test_kernels_after_lowering_are_outermost_maps_and_calls() -> None:
    sdfg = SDFG("lowered")
    state = sdfg.add_state()
    for name in "xy":
        sdfg.add_array(name, (4, 4), dace.float32)
    state.add_mapped_tasklet(
        "double",
        {"i": "0:4", "j": "0:4"},
        {"a": dace.Memlet("x[i, j]")},
        "b = 2 * a",
        {"b": dace.Memlet("y[i, j]")},
        external_edges=True,
    )
    assert count_kernels(sdfg) == 1, "a map with a tasklet inside"
    state.add_tasklet("call", {}, {}, "")
    assert count_kernels(sdfg) == 2, "a call outside any map"
    inner = SDFG("inner")
    inner.add_state().add_tasklet("call", {}, {}, "")
    state.add_nested_sdfg(inner, {}, {})
    assert count_kernels(sdfg) == 3, "what a nested graph outside any map holds"


def test_a_lowered_layer_has_at_least_a_kernel_for_each_operator() -> None:
    register()
    graph = norm_graph(dace.float32)
    assert graph.backward is not None
    assert count_kernels(graph.forward) == 2, "an operator that is not lowered yet is one"
    assert count_kernels(lower_operators(graph.forward, "cpu")) >= 2
    assert count_kernels(lower_operators(graph.backward, "cpu")) >= 3
