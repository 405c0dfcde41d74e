"""AssignLayouts: what it lays where, what it refuses, and that no value changes.

Dimension legend: B batch, S query position, T key position, H head, P head size, E embedding, U feed-forward size.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import dace
import numpy as np
import pytest
import torch
from dace.sdfg import SDFG
from hypothesis import given, settings
from hypothesis import strategies as st

from stepdown.models.definition import EncoderLayer
from stepdown.models.errors import CanonicalFormError, OptionError
from stepdown.models.operators import Bias, Contraction, Gelu, Relayout
from stepdown.models.operators.gradient import connect_operator
from stepdown.models.operators.operator import make_memlet
from stepdown.pipeline.analysis.counts import count_graph
from stepdown.pipeline.analysis.layouts import report_layouts
from stepdown.pipeline.verification.layouts import draw_layouts
from stepdown.transformations.canonical_form import operators, the_state, validate, validate_sdfg
from stepdown.transformations.fusion.fuse_row_operators import FuseRowOperators
from stepdown.transformations.layout.assign_layouts import AssignLayouts, conversions
from stepdown.transformations.layout.configuration import read_layouts
from stepdown.transformations.reference_executor import execute, execute_training
from stepdown.transformations.training_graph import TrainingGraph

MakeGraph = Callable[[EncoderLayer], TrainingGraph]
LAYER = EncoderLayer(embed=6, heads=2, ffn=5)
PRE_NORM = EncoderLayer(embed=6, heads=2, ffn=5, norm="pre", causal=True, bias=False, activation="relu")


def small_graph() -> SDFG:
    """``y = gelu(x w + b)``: one temporary between every two operators."""
    sdfg = SDFG("small")
    state = sdfg.add_state("operators")
    shapes = {"x": (2, 3, 4), "w": (5, 4), "b": (5,), "product": (2, 3, 5), "biased": (2, 3, 5), "y": (2, 3, 5)}
    for name, shape in shapes.items():
        sdfg.add_array(name, shape, dace.float64, transient=name in ("product", "biased"))
    connect_operator(sdfg, state, Contraction("project", "BSE,UE->BSU"), {"a": "x", "b": "w"}, {"d": "product"})
    connect_operator(sdfg, state, Bias("bias", "BSU", "U"), {"x": "product", "bias": "b"}, {"y": "biased"})
    connect_operator(sdfg, state, Gelu("gelu", "BSU"), {"x": "biased"}, {"y": "y"})
    return sdfg


def assigned(graph: TrainingGraph | SDFG, layouts: dict[str, Any]) -> tuple[TrainingGraph, str]:
    """A copy with the layouts, validated."""
    copied = TrainingGraph(copy.deepcopy(graph)) if isinstance(graph, SDFG) else graph.copy()
    result, what = AssignLayouts(read_layouts(layouts)).apply(copied)
    validate(result)
    return result, what


def text(graph: TrainingGraph) -> list[dict[str, Any]]:
    """Everything that a graph says, but for the numbers that DaCe gives to its elements."""

    def cleaned(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: cleaned(entry) for key, entry in value.items() if key not in ("guid", "hash", "debuginfo")}
        return [cleaned(entry) for entry in value] if isinstance(value, list) else value

    return [cleaned(sdfg.to_json()) for _, sdfg in graph.graphs()]


# ---- what it does --------------------------------------------------------------------------------------------------


def test_a_temporary_is_laid_out_and_no_operator_changes() -> None:
    graph, what = assigned(small_graph(), {"containers": {"product": "USB", "biased": {"order": "SUB", "pad": 16}}})
    arrays = graph.forward.arrays
    assert arrays["product"].strides == (1, 2, 6)
    assert arrays["biased"].strides == (1, 80, 16)
    assert (arrays["product"].total_size, arrays["biased"].total_size) == (30, 240)
    assert [node.name for node in operators(graph.forward)] == ["project", "bias", "gelu"]
    assert what == "2 containers in chosen layouts"


def test_a_container_of_pytorch_is_copied_into_the_layout() -> None:
    graph, what = assigned(small_graph(), {"containers": {"w": "EU"}})
    sdfg, state = graph.forward, the_state(graph.forward)
    assert sdfg.arrays["w"].strides == (4, 1)
    assert sdfg.arrays["w_converted"].strides == (1, 5)
    assert sdfg.arrays["w_converted"].transient
    (found,) = conversions(sdfg)
    assert (found.node.name, found.source, found.target) == ("w_relayout", "w", "w_converted")
    assert (found.node.dims, found.bytes_moved) == ("EU", 2 * 20 * 8)
    (project,) = [node for node in operators(sdfg) if node.name == "project"]
    assert {edge.data.data for edge in state.in_edges(project)} == {"x", "w_converted"}
    assert what == "1 containers in chosen layouts, 1 conversions that move 320 bytes"


def test_a_result_is_computed_in_the_layout_and_copied_out() -> None:
    graph, _ = assigned(small_graph(), {"containers": {"y": {"order": "UBS", "pad": {"U": 8}}}})
    sdfg = graph.forward
    assert sdfg.arrays["y"].strides == (15, 5, 1)
    assert sdfg.arrays["y_converted"].strides == (3, 1, 8)
    assert [node.name for node in operators(sdfg)] == ["project", "bias", "gelu", "y_relayout"]
    (found,) = conversions(sdfg)
    assert (found.source, found.target, found.node.dims) == ("y_converted", "y", "BSU")


def test_readers_of_a_result_read_it_in_the_layout() -> None:
    sdfg = small_graph()
    sdfg.add_array("z", (2, 3, 5), dace.float64)
    connect_operator(sdfg, the_state(sdfg), Gelu("again", "BSU"), {"x": "y"}, {"y": "z"})
    graph, _ = assigned(sdfg, {"containers": {"y": "SBU"}})
    state = the_state(graph.forward)
    (again,) = [node for node in operators(graph.forward) if node.name == "again"]
    assert [edge.data.data for edge in state.in_edges(again)] == ["y_converted"]


def test_the_layout_that_pytorch_has_needs_no_copy() -> None:
    graph, what = assigned(small_graph(), {"containers": {"w": "UE", "y": "BSU", "b": "U"}})
    assert text(graph) == text(TrainingGraph(small_graph()))
    assert what == "3 containers in chosen layouts"


def test_without_a_configuration_nothing_changes(make_graph: MakeGraph) -> None:
    graph, what = assigned(make_graph(LAYER), {})
    assert text(graph) == text(make_graph(LAYER))
    assert what == "every container in its default layout"


def test_both_graphs_agree_on_what_is_kept(make_graph: MakeGraph) -> None:
    graph, _ = assigned(make_graph(LAYER), {"containers": {"weights": "THSB", "key": {"order": "HPTB", "pad": 4}}})
    assert graph.backward is not None
    for name in ("weights", "key"):
        assert graph.forward.arrays[name].strides == graph.backward.arrays[name].strides
    assert str(graph.forward.arrays["key"].strides[1]) == "4*int_ceil(B, 4)"


def test_each_graph_makes_its_own_copy_and_none_is_kept(make_graph: MakeGraph) -> None:
    before = make_graph(LAYER)
    graph, _ = assigned(before, {"containers": {"output_weight": "UE"}})
    assert graph.backward is not None
    assert graph.kept == before.kept
    for sdfg in (graph.forward, graph.backward):
        assert [found.target for found in conversions(sdfg)] == ["output_weight_converted"]


def test_one_graph_alone_may_have_a_layout(make_graph: MakeGraph) -> None:
    graph, _ = assigned(
        make_graph(LAYER),
        {"containers": {"output_weight": "EU"}, "backward": {"output_weight": "UE", "gradient_scores": "TSHB"}},
    )
    assert graph.backward is not None
    assert not list(conversions(graph.forward))
    assert [found.target for found in conversions(graph.backward)] == ["output_weight_converted"]


def test_positions_go_by_either_name_where_there_is_one(make_graph: MakeGraph) -> None:
    names = [{"containers": {"key": order, "attention_mask": mask}} for order, mask in (("THBP", "SB"), ("SHBP", "TB"))]
    first, second = (text(assigned(make_graph(LAYER), layouts)[0]) for layouts in names)
    assert first == second


def test_parts_of_a_container_lie_in_its_layout() -> None:
    sdfg = SDFG("stacked")
    state = sdfg.add_state("operators")
    sdfg.add_array("stacked", (3, 2, 4), dace.float64)
    for number in (0, 2):
        sdfg.add_array(f"y{number}", (2, 4), dace.float64)
        node = Gelu(f"gelu{number}", "BE")
        state.add_node(node)
        state.add_edge(state.add_read("stacked"), None, node, "x", dace.Memlet(f"stacked[{number}, 0:2, 0:4]"))
        state.add_edge(node, "y", state.add_write(f"y{number}"), None, make_memlet(sdfg, f"y{number}"))
    validate_sdfg(sdfg)
    graph, _ = assigned(sdfg, {"containers": {"stacked": "ENB"}})
    assert graph.forward.arrays["stacked_converted"].strides == (2, 1, 6)
    values = {"stacked": torch.randn(3, 2, 4, dtype=torch.float64)}
    before, after = execute(sdfg, values), execute(graph.forward, values)
    assert all(torch.equal(after[name], before[name]) for name in ("y0", "y2"))
    once = text(graph)
    assert text(assigned(graph.forward, {"containers": {"stacked": "ENB"}})[0]) == once


# ---- what it refuses -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layouts", "message"),
    [
        (
            {"containers": {"scroes": "BHST"}},
            'container "scroes" was given; the layer accepts layouts of',
        ),
        ({"containers": {"rng": "B"}}, 'container "rng" was given; the layer accepts layouts of'),
        ({"containers": {"dropout_p": "B"}}, 'container "dropout_p" was given; the layer accepts layouts of'),
        ({"forward": {"gradient_y": "ESB"}}, 'container "gradient_y" was given; the forward graph accepts layouts of'),
        ({"backward": {"scores": "BHST"}}, 'container "scores" was given; the backward graph accepts layouts of'),
        ({"backward": {"weights": "THSB"}}, 'container "weights" in the backward graph alone was given; it is kept'),
        (
            {"containers": {"scores": "BHS"}},
            'order "BHS" of container "scores" was given; accepted is any order of "BHST"',
        ),
        ({"containers": {"scores": "BHSE"}}, 'order "BHSE" of container "scores"'),
        ({"containers": {"x": "BSTE"}}, 'order "BSTE" of container "x" was given; accepted is any order of "BSE"'),
    ],
)
def test_layouts_that_do_not_fit_are_refused_and_change_nothing(
    make_graph: MakeGraph, layouts: dict[str, Any], message: str
) -> None:
    graph = make_graph(LAYER).copy()
    layouts = {**layouts, "containers": {**layouts.get("containers", {}), "query": "PHSB"}}
    with pytest.raises(OptionError, match=message) as refusal:
        AssignLayouts(read_layouts(layouts)).apply(graph)
    assert str(refusal.value).endswith(".")
    assert text(graph) == text(make_graph(LAYER))


def test_copies_have_no_layout_of_their_own() -> None:
    graph, _ = assigned(small_graph(), {"containers": {"w": "EU"}})
    with pytest.raises(OptionError, match='container "w_converted" was given; the layer accepts layouts of'):
        AssignLayouts(read_layouts({"containers": {"w_converted": "EU"}})).apply(graph)


# ---- what it preserves ---------------------------------------------------------------------------------------------


def values_of(sdfg: SDFG, batch: int, seq: int) -> dict[str, torch.Tensor]:
    """Values of every argument that no operator writes."""
    written = {node.data for node in the_state(sdfg).data_nodes() if the_state(sdfg).in_degree(node) > 0}
    extents = {"B": batch, "S": seq}
    values: dict[str, torch.Tensor] = {}
    for name, descriptor in sdfg.arrays.items():
        if name in written:
            continue
        if isinstance(descriptor, dace.data.Scalar):
            values[name] = torch.tensor(0.25, dtype=torch.float64)
            continue
        shape = [int(dace.symbolic.evaluate(extent, extents)) for extent in descriptor.shape]
        values[name] = torch.randn(shape, dtype=torch.float64)
    values["attention_mask"] = torch.rand(batch, seq) > 0.3
    values["rng"] = torch.tensor([5, 6])
    return values


@pytest.fixture(scope="session")
def graphs(make_graph: MakeGraph) -> list[TrainingGraph]:
    """Training graphs of two layers, and the same with row groups."""
    plain = [make_graph(definition) for definition in (LAYER, PRE_NORM)]
    return [*plain, *(FuseRowOperators().apply(graph.copy())[0] for graph in plain)]


@settings(max_examples=24, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), which=st.integers(0, 3))
def test_values_stay_and_a_second_run_changes_nothing(graphs: list[TrainingGraph], seed: int, which: int) -> None:
    before = graphs[which]
    generator = np.random.default_rng(seed)
    layouts = draw_layouts(before, generator, share=generator.random())
    after, what = assigned(before, layouts)
    torch.manual_seed(seed % 1000)
    values = values_of(before.forward, 2, 3)
    given = {"gradient_y": torch.randn_like(values["x"])}
    expected, found = (execute_training(graph, values, given) for graph in (before, after))
    for one, other in zip(expected, found, strict=True):
        assert all(torch.equal(other[name], value) for name, value in one.items())

    once = text(after)
    again, what_again = AssignLayouts(read_layouts(layouts)).apply(after)
    assert what_again == what
    assert text(again) == once


def test_conversions_are_counted(make_graph: MakeGraph) -> None:
    before = make_graph(LAYER)
    layouts = {"containers": {"x": "ESB", "y": "SBE", "gradient_query_weight": "EHP", "attention_mask": "SB"}}
    after, _ = assigned(before, layouts)
    old, new = count_graph(before).total, count_graph(after).total
    # Read and written: x and the mask in both graphs, y and the weight's gradient in one. The rest is as it was.
    batch, seq = 2, 3
    words = 2 * batch * seq * 6 + batch * seq * 6 + 2 * batch * seq + 6 * 6
    moved_bytes = 2 * (8 * (3 * batch * seq * 6 + 6 * 6) + 2 * batch * seq)
    assert new.at(batch, seq)["words_in"] - old.at(batch, seq)["words_in"] == words
    assert new.at(batch, seq)["words_out"] - old.at(batch, seq)["words_out"] == words
    assert new.at(batch, seq)["bytes_moved"] - old.at(batch, seq)["bytes_moved"] == moved_bytes
    assert new.at(batch, seq)["flop"] == old.at(batch, seq)["flop"]
    assert new.kernels - old.kernels == 6
    report = report_layouts(after, {"B": batch, "S": seq})
    assert report.conversion_bytes == moved_bytes
    assert [found.bytes_moved for found in report.conversions].count(2 * batch * seq) == 2


def test_a_relayout_visits_the_dimensions_of_its_containers() -> None:
    with pytest.raises(CanonicalFormError, match='operator "copy" visits "BSU", which are not the dimensions "BSE"'):
        Relayout("copy", "BSU", "BSE")
