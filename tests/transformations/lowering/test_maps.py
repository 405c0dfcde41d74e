"""Maps around tasklets and nested graphs, compiled: values, and what edges carry."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import dace
import numpy as np
import pytest
from dace.sdfg import SDFG, nodes

from stepdown.pipeline.generate import generate, program_names
from stepdown.transformations.lowering import cpu
from stepdown.transformations.lowering.maps import (
    add_map,
    add_nested_maps,
    connect_out,
    connect_through,
    cpp_tasklet,
    nest,
    read_of,
    used_containers,
)
from stepdown.transformations.training_graph import TrainingGraph

ROWS, COLUMNS = 5, 7
Values = dict[str, np.ndarray]
Memlet = dace.Memlet
SEQUENTIAL = dace.ScheduleType.Sequential


def accumulated(place: str, wcr: str) -> dace.Memlet:
    memlet = dace.Memlet(place, wcr=wcr)
    memlet.wcr_nonatomic = True
    return memlet


def build() -> SDFG:
    """doubled = 2 x + x[0, :]; row_sum, row_peak, column_sum; index: which row a nested graph was in, and its value."""
    sdfg = SDFG("maps_compiled")
    for name, shape in (
        ("x", [ROWS, COLUMNS]),
        ("doubled", [ROWS, COLUMNS]),
        ("row_sum", [ROWS]),
        ("row_peak", [ROWS]),
        ("column_sum", [COLUMNS]),
        ("index", [ROWS]),
        ("constant", [COLUMNS]),
    ):
        sdfg.add_array(name, shape, dace.float64)
    all_ = {"i": f"0:{ROWS}", "j": f"0:{COLUMNS}"}
    state = sdfg.add_state("elements")
    inputs = {"in_a": Memlet("x[i, j]"), "in_b": Memlet("x[0, j]")}
    add_map(state, "double", all_, inputs, "out = 2 * in_a + in_b;", {"out": Memlet("doubled[i, j]")})
    add_map(state, "fill", {"j": f"0:{COLUMNS}"}, {}, "out = 3.5;", {"out": Memlet("constant[j]")})
    state = sdfg.add_state_after(state, "columns")
    add_nested_maps(
        state,
        "columns",
        {"i": f"0:{ROWS}"},
        {"j": f"0:{COLUMNS}"},
        {"value": Memlet("x[i, j]")},
        "out = value;",
        {"out": accumulated("column_sum[j]", "lambda a, b: a + b")},
    )
    state = sdfg.add_state_after(state, "rows")
    entry, exit_ = state.add_map("rows", {"row": f"0:{ROWS}"}, SEQUENTIAL)
    nest(state, row_graph(sdfg), [entry], [exit_], {"i": dace.symbol("row", dace.int64)})
    return sdfg


def row_graph(parent: SDFG) -> SDFG:
    """One row: its sum and maximum through registers, and its number; "doubled" plays no part."""
    body = SDFG("row")
    for name in ("x", "row_sum", "row_peak", "index", "doubled"):
        body.add_datadesc(name, parent.arrays[name].clone())
    body.add_symbol("i", dace.int64)
    for name in ("total", "peak"):
        body.add_scalar(name, dace.float64, transient=True, storage=dace.StorageType.Register)
    state = body.add_state("clear")
    for name, value in (("total", "0"), ("peak", "-INFINITY")):
        tasklet = cpp_tasklet(state, f"clear_{name}", (), ("out",), f"out = {value};")
        state.add_edge(tasklet, "out", state.add_write(name), None, Memlet(f"{name}[0]"))
    state = body.add_state_after(state, "reduce")
    outputs = {
        "out_total": accumulated("total[0]", "lambda a, b: a + b"),
        "out_peak": accumulated("peak[0]", "lambda a, b: max(a, b)"),
    }
    code = "out_total = value; out_peak = value;"
    add_map(state, "reduce", {"j": f"0:{COLUMNS}"}, {"value": Memlet("x[i, j]")}, code, outputs)
    state = body.add_state_after(state, "store")
    tasklet = cpp_tasklet(state, "store", ("a", "b"), ("s", "p", "n"), "s = a; p = b; n = i;")
    for connector, name in (("a", "total"), ("b", "peak")):
        state.add_edge(read_of(state, name), None, tasklet, connector, Memlet(f"{name}[0]"))
    for connector, name in (("s", "row_sum"), ("p", "row_peak"), ("n", "index")):
        state.add_edge(tasklet, connector, state.add_write(name), None, Memlet(f"{name}[i]"))
    return body


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory, strict_dace_session: None) -> Callable[[np.ndarray], Values]:
    """Calls the compiled graph on a matrix; results start as zeros."""
    cpu.register()
    sdfg = build()
    sdfg.validate()
    arguments = list(sdfg.arglist())
    library = ctypes.CDLL(str(generate(TrainingGraph(sdfg), tmp_path_factory.mktemp("maps"), "light")["forward"]))
    names = program_names(sdfg)
    init = getattr(library, names["init"])
    init.restype = ctypes.c_void_p

    def call(x: np.ndarray) -> Values:
        values = {name: np.zeros([int(extent) for extent in sdfg.arrays[name].shape]) for name in arguments}
        values["x"] = np.ascontiguousarray(x, dtype=np.float64)
        pointers = [ctypes.c_void_p(values[name].ctypes.data) for name in arguments]
        getattr(library, names["program"])(ctypes.c_void_p(init()), *pointers)
        return values

    return call


@pytest.mark.parametrize("seed", range(3))
def test_values(run: Callable[[np.ndarray], Values], seed: int) -> None:
    x = np.random.default_rng(seed).standard_normal((ROWS, COLUMNS))
    found = run(x)
    np.testing.assert_array_equal(found["doubled"], 2 * x + x[0])
    np.testing.assert_array_equal(found["constant"], np.full(COLUMNS, 3.5))
    np.testing.assert_allclose(found["column_sum"], x.sum(0), rtol=1e-14, atol=1e-14)
    np.testing.assert_allclose(found["row_sum"], x.sum(1), rtol=1e-14, atol=1e-14)
    np.testing.assert_array_equal(found["row_peak"], x.max(1))
    np.testing.assert_array_equal(found["index"], np.arange(ROWS))


def test_a_maximum_without_finite_values_is_minus_infinity(run: Callable[[np.ndarray], Values]) -> None:
    x = np.zeros((ROWS, COLUMNS))
    x[2] = -np.inf
    assert run(x)["row_peak"].tolist() == [0, 0, -np.inf, 0, 0]


# ---- what edges carry ----


def test_one_access_node_feeds_all_reads_of_a_state() -> None:
    sdfg = build()
    state = sdfg.start_state
    assert read_of(state, "x") is read_of(state, "x")
    assert len([node for node in state.data_nodes() if node.data == "x"]) == 1
    assert state.in_degree(read_of(state, "doubled")) == 0, "what the state writes is read from another node"


def test_a_nested_graph_sees_what_it_uses_and_symbols_under_new_values() -> None:
    sdfg = build()
    (state,) = (state for state in sdfg.states() if state.label == "rows")
    (node,) = (node for node in state.nodes() if isinstance(node, nodes.NestedSDFG))
    assert set(node.in_connectors) == {"x"}
    assert "doubled" not in node.sdfg.arrays
    assert set(node.out_connectors) == {"row_sum", "row_peak", "index"}
    assert {name: str(value) for name, value in node.symbol_mapping.items()} == {"i": "row"}
    for edge in [*state.in_edges(node), *state.out_edges(node)]:
        assert edge.data.subset.size() == list(sdfg.arrays[edge.data.data].shape), "whole containers"


def test_what_is_read_after_it_is_written_comes_in_and_goes_out() -> None:
    body = SDFG("body")
    for name in ("a", "b", "c"):
        body.add_array(name, [4], dace.float64)
    body.add_array("t", [4], dace.float64, transient=True)
    state = body.add_state()
    add_map(state, "one", {"k": "0:4"}, {"v": Memlet("a[k]")}, "o = v;", {"o": Memlet("t[k]")})
    state = body.add_state_after(state)
    add_map(state, "two", {"k": "0:4"}, {"v": Memlet("t[k]")}, "o = v;", {"o": Memlet("b[k]")})
    state = body.add_state_after(state)
    add_map(state, "three", {"k": "0:4"}, {"v": Memlet("b[k]")}, "o = v;", {"o": Memlet("b[k]")})
    assert used_containers(body) == ({"a", "b"}, {"b"})
    assert set(body.arrays) == {"a", "b", "t"}, "what nobody uses is gone"


def test_accumulation_is_marked_on_every_edge_and_the_innermost_one_is_exact() -> None:
    sdfg = SDFG("edges")
    sdfg.add_array("x", [ROWS, COLUMNS], dace.float64)
    sdfg.add_array("y", [COLUMNS], dace.float64)
    state = sdfg.add_state()
    outer, outer_exit = state.add_map("outer", {"i": f"0:{ROWS}"}, SEQUENTIAL)
    inner, inner_exit = state.add_map("inner", {"j": f"0:{COLUMNS}"}, SEQUENTIAL)
    tasklet = cpp_tasklet(state, "add", ("a", "b"), ("out",), "out = a + b;")
    connect_through(state, [outer, inner], tasklet, {"a": Memlet("x[i, j]"), "b": Memlet("x[0, j]")})
    connect_out(state, tasklet, [inner_exit, outer_exit], {"out": accumulated("y[j]", "lambda a, b: a + b")})
    sdfg.validate()
    path = state.memlet_path(state.out_edges(tasklet)[0])
    assert [str(edge.data.subset) for edge in path] == ["j", f"0:{COLUMNS}", f"0:{COLUMNS}"]
    assert all(edge.data.wcr is not None and edge.data.wcr_nonatomic for edge in path)
    inputs = [state.memlet_path(edge) for edge in state.in_edges(tasklet)]
    whole = f"0:{ROWS}, 0:{COLUMNS}"
    assert [[str(edge.data.subset) for edge in path] for path in inputs] == [
        [whole, whole, "i, j"],
        [whole, whole, "0, j"],
    ]
    assert {path[0].src for path in inputs} == {read_of(state, "x")}
