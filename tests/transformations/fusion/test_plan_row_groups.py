"""What a plan of row groups says a graph will move is what the fused graph moves."""

from __future__ import annotations

import dace
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepdown.models.operators import Contraction, Gelu, Scale
from stepdown.models.operators.operator import make_memlet
from stepdown.pipeline.analysis.counts import count_graph
from stepdown.transformations.canonical_form import operators, validate_sdfg
from stepdown.transformations.fusion.fuse_row_operators import FuseRowOperators
from stepdown.transformations.fusion.plan_row_groups import containers_of, moved_bytes, nominal_bytes, uses_of
from stepdown.transformations.training_graph import TrainingGraph
from tests.transformations.algebraic.cases import LAYERS, draw_graph
from tests.transformations.conftest import MakeGraph


def check(graph: TrainingGraph) -> None:
    planned = [moved_bytes(sdfg) for _, sdfg in graph.graphs()]
    fused, _ = FuseRowOperators().apply(graph.copy())
    counted = count_graph(fused)
    assert counted.backward is not None
    assert planned == [counted.forward.at(8, 512)["bytes_moved"], counted.backward.at(8, 512)["bytes_moved"]]


@pytest.mark.parametrize("layer", LAYERS)
def test_layers(layer: str, make_graph: MakeGraph) -> None:
    check(make_graph(LAYERS[layer]))


@given(drawn=st.data())
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_random_graphs(drawn: st.DataObject) -> None:
    check(draw_graph(drawn)[0])


def test_symbolic_sizes_count_at_nominal_ones() -> None:
    B, S = (dace.symbol(name, dace.int64) for name in "BS")
    assert nominal_bytes(dace.data.Array(dace.float32, (B, S, 3))) == 8 * 512 * 3 * 4
    assert nominal_bytes(dace.data.Scalar(dace.float64)) == 8


def test_parts_of_a_container_are_counted_and_their_operators_left_alone() -> None:
    """Two of a stack of three, one through a row operator, which a group (of whole containers) may not hold."""
    sdfg = dace.SDFG("stack")
    state = sdfg.add_state()
    sdfg.add_array("stack", (3, 2, 4), dace.float64)
    for name, shape in (("part", (2, 4)), ("scaled", (2, 4)), ("y", (2, 2))):
        sdfg.add_array(name, shape, dace.float64, transient=name != "y")
    stack = state.add_read("stack")
    gelu, scale, product = Gelu("gelu", "SE"), Scale("scale", "SE", 2.0), Contraction("product", "SE,TE->ST")
    state.add_nodes_from([gelu, scale, product])
    part, scaled = state.add_access("part"), state.add_access("scaled")
    state.add_edge(stack, None, gelu, "x", dace.Memlet("stack[1, 0:2, 0:4]"))
    state.add_edge(gelu, "y", part, None, make_memlet(sdfg, "part"))
    state.add_edge(part, None, scale, "x", make_memlet(sdfg, "part"))
    state.add_edge(scale, "y", scaled, None, make_memlet(sdfg, "scaled"))
    state.add_edge(stack, None, product, "a", dace.Memlet("stack[2, 0:2, 0:4]"))
    state.add_edge(scaled, None, product, "b", make_memlet(sdfg, "scaled"))
    state.add_edge(product, "d", state.add_write("y"), None, make_memlet(sdfg, "y"))
    validate_sdfg(sdfg)
    uses = {use.operator.name: use for use in uses_of(sdfg, containers_of(sdfg))}
    assert uses["gelu"].moved["stack"] == uses["product"].moved["stack"] == 8 * 2 * 4
    assert not uses["gelu"].whole and uses["scale"].whole
    graph, _ = FuseRowOperators().apply(TrainingGraph(sdfg))
    assert {node.name for node in operators(graph.forward)} == {"gelu", "scale", "product"}
