"""Vector lanes: which maps get a pragma, with which reductions, and in front of which loop.

Dimension legend: S query position, E embedding.
"""

from __future__ import annotations

import re
from typing import Any

import dace
import pytest
from dace.sdfg import SDFG, SDFGState, nodes

from stepdown.models.quiet import quiet_dace
from stepdown.transformations.lowering.cpu.simd import simd_pragma

SUM, MAX = "lambda a, b: a + b", "lambda a, b: max(a, b)"
PLAIN = "#pragma omp simd"


def rows(
    outputs: dict[str, tuple[str, str | None]],
    ranges: dict[str, str] | None = None,
    schedule: dace.ScheduleType = dace.ScheduleType.Sequential,
) -> tuple[SDFG, SDFGState, nodes.MapEntry]:
    """A map that reads ``x[i, j]`` and writes each output at the given place, or accumulates into it."""
    sdfg = SDFG("rows")
    state = sdfg.add_state()
    for name in ("x", "y"):
        sdfg.add_array(name, [5, 7], dace.float32)
    sdfg.add_array("column", [7], dace.float32)
    sdfg.add_array("single", [1], dace.float32)
    for name in ("total", "other", "peak"):
        sdfg.add_scalar(name, dace.float32, transient=True)
    memlets = {f"out_{name}": dace.Memlet(f"{name}[{place}]", wcr=wcr) for name, (place, wcr) in outputs.items()}
    code = "\n".join(f"{connector} = value" for connector in memlets)
    _, entry, _ = state.add_mapped_tasklet(
        "rows",
        ranges or {"i": "0:5", "j": "0:7"},
        {"value": dace.Memlet("x[i, j]")},
        code,
        memlets,
        schedule=schedule,
        external_edges=True,
    )
    return sdfg, state, entry


@pytest.mark.parametrize(
    ("outputs", "pragma"),
    [
        ({"y": ("i, j", None)}, PLAIN),
        ({"total": ("0", SUM)}, f"{PLAIN} reduction(+:total)"),
        ({"peak": ("0", MAX)}, f"{PLAIN} reduction(max:peak)"),
        (
            {"total": ("0", SUM), "peak": ("0", MAX), "other": ("0", SUM), "y": ("i, j", None)},
            f"{PLAIN} reduction(+:other, total) reduction(max:peak)",
        ),
        ({"column": ("j", SUM)}, PLAIN),
        ({"column": ("j", "lambda a, b: a * b")}, PLAIN),
        ({"column": ("6 - j", SUM)}, PLAIN),
        ({"y": ("j % 2, j", SUM)}, PLAIN),
    ],
    ids=["element", "sum", "maximum", "several", "columns", "product of columns", "backwards", "one index of two"],
)
def test_lanes_and_their_reductions(outputs: dict[str, tuple[str, str | None]], pragma: str) -> None:
    found = simd_pragma(*rows(outputs))
    assert found is not None
    clauses = [sorted(re.findall(r"\w+", clause)) for clause in sorted(found.removeprefix(PLAIN).split(" reduction"))]
    expected = [sorted(re.findall(r"\w+", clause)) for clause in sorted(pragma.removeprefix(PLAIN).split(" reduction"))]
    assert found.startswith(PLAIN)
    assert clauses == expected


@pytest.mark.parametrize(
    "outputs",
    [
        {"total": ("0", "lambda a, b: a * b")},
        {"total": ("0", "lambda a, b: min(a, b)")},
        {"total": ("0", "lambda a, b: a + 2 * b")},
        {"single": ("0", SUM)},
        {"column": ("i", SUM)},
        {"column": ("j // 2", SUM)},
        {"column": ("j % 3", SUM)},
        {"column": ("0 * j", SUM)},
        {"column": ("j * (6 - j)", SUM)},
        {"column": ("j:j + 2", SUM)},
        {"y": ("i, 0:7", SUM)},
    ],
    ids=["product", "minimum", "custom", "array", "outer", "pairs", "modulo", "constant", "square", "overlap", "range"],
)
def test_lanes_that_would_meet_in_memory_are_refused(outputs: dict[str, tuple[str, str | None]]) -> None:
    assert simd_pragma(*rows(outputs)) is None


def test_only_innermost_sequential_maps_with_unit_steps_run_in_lanes() -> None:
    element: dict[str, Any] = {"y": ("i, j", None)}
    assert simd_pragma(*rows(element, {"i": "0:5:2", "j": "0:7"})) == PLAIN
    assert simd_pragma(*rows(element, {"i": "0:5", "j": "0:7:2"})) is None
    assert simd_pragma(*rows(element, schedule=dace.ScheduleType.CPU_Multicore)) is None
    sdfg, state, entry = rows(element)
    entry.map.unroll = True
    assert simd_pragma(sdfg, state, entry) is None


def test_maps_with_scopes_or_side_effects_inside_are_refused() -> None:
    sdfg = SDFG("outer")
    state = sdfg.add_state()
    sdfg.add_array("y", [5, 7], dace.float32)
    sequential = dace.ScheduleType.Sequential
    outer, outer_exit = state.add_map("outer", {"i": "0:5"}, sequential)
    inner, inner_exit = state.add_map("inner", {"j": "0:7"}, sequential)
    tasklet = state.add_tasklet("one", {}, {"out"}, "out = 1")
    state.add_nedge(outer, inner, dace.Memlet())
    state.add_nedge(inner, tasklet, dace.Memlet())
    write = state.add_write("y")
    state.add_memlet_path(tasklet, inner_exit, outer_exit, write, src_conn="out", memlet=dace.Memlet("y[i, j]"))
    assert simd_pragma(sdfg, state, outer) is None
    assert simd_pragma(sdfg, state, inner) == PLAIN
    tasklet.side_effects = True
    assert simd_pragma(sdfg, state, inner) is None


@pytest.mark.parametrize("other", [SUM, MAX])
def test_a_scalar_in_two_reductions_is_refused(other: str) -> None:
    sdfg, state, entry = rows({"total": ("0", SUM)})
    exit_ = state.exit_node(entry)
    (edge,) = state.in_edges(exit_)
    exit_.add_in_connector("IN_again")
    edge.src.add_out_connector("again")
    state.add_edge(edge.src, "again", exit_, "IN_again", dace.Memlet("total[0]", wcr=other))
    assert simd_pragma(sdfg, state, entry) is None


def loops(sdfg: SDFG) -> list[str]:
    """The loops of the generated code by their variable, and the pragmas right in front of them."""
    with quiet_dace():
        code = sdfg.generate_code()[0].code
    found = re.findall(r"(#pragma omp simd[\w(:,+) ]*?)?\s*(?:////\S*\s+)*for \(\w+ (\w+) =", code)
    return [f"{pragma.strip()} {variable}".strip() for pragma, variable in found]


def test_the_pragma_stands_before_the_innermost_loop() -> None:
    assert loops(rows({"y": ("i, j", None)})[0]) == ["i", f"{PLAIN} j"]
    assert loops(rows({"total": ("0", SUM)})[0]) == ["i", f"{PLAIN} reduction(+:total) j"]


def test_other_loops_are_as_dace_writes_them() -> None:
    assert loops(rows({"column": ("i", SUM)})[0]) == ["i", "j"]
