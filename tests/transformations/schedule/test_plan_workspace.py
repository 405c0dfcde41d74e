"""Temporaries as arguments: how long each lives, that sharing bytes by lifetime is safe, and that nothing is left over.

Dimension legend: B batch, S query position, E embedding.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable

import dace
import pytest
from dace.sdfg import SDFG, InterstateEdge, SDFGState
from dace.sdfg.nodes import NestedSDFG
from dace.sdfg.state import LoopRegion
from hypothesis import given, settings
from hypothesis import strategies as st

from stepdown.models.errors import CanonicalFormError
from stepdown.models.operators import Dropout, Operator, Softmax, SumRows
from stepdown.models.operators.gradient import connect_operator
from stepdown.models.quiet import quiet_dace
from stepdown.pipeline.runtime.workspace import Request, aligned, first_fit
from stepdown.transformations.lowering import cpu
from stepdown.transformations.lowering.lower_operators import lower_operators
from stepdown.transformations.schedule.plan_workspace import Lifetime, plan_workspace, state_chain

Uses = list[tuple[int, list[int]]]
"""Of every temporary: its size in bytes and the states that use it, in the order in which they were drawn."""


def chain(length: int, name: str = "chain") -> SDFG:
    """Empty states in a row, made in another order than they run."""
    sdfg = SDFG(name)
    states = {place: sdfg.add_state(f"kernel_{place}") for place in reversed(range(length))}
    for place in range(1, length):
        sdfg.add_edge(states[place - 1], states[place], InterstateEdge())
    return sdfg


def nested(state: SDFGState, name: str, **storage: dace.StorageType) -> NestedSDFG:
    """An expansion with a temporary of 8 floats for each name."""
    body = SDFG(name)
    inside = body.add_state("inside")
    for temporary, kind in storage.items():
        body.add_array(temporary, [8], dace.float32, kind, transient=True)
        tasklet = inside.add_tasklet(f"fill_{temporary}", {}, {"out"}, "out = 1")
        inside.add_edge(tasklet, "out", inside.add_write(temporary), None, dace.Memlet(f"{temporary}[0]"))
    return state.add_nested_sdfg(body, {}, {})


def refused(sdfg: SDFG, message: str) -> None:
    with pytest.raises(CanonicalFormError, match=f"^{re.escape(message)}$"):
        plan_workspace(sdfg)


# ---- lifetimes ----


@st.composite
def uses(draw: st.DrawFn) -> Uses:
    size = st.integers(1, 1000)
    return draw(st.lists(st.tuples(size, st.lists(st.integers(0, 9), min_size=1, max_size=4)), max_size=8))


@settings(deadline=None, max_examples=50)
@given(uses())
def test_a_temporary_lives_from_its_first_use_to_its_last(drawn: Uses) -> None:
    sdfg = chain(10)
    sdfg.add_array("argument", [4], dace.float32)
    for state in sdfg.states():
        state.add_access("argument")
    for number, (size, places) in enumerate(drawn):
        sdfg.add_array(f"t{number}", [size], dace.uint8, transient=True)
        for place in places:
            next(s for s in sdfg.states() if s.label == f"kernel_{place}").add_access(f"t{number}")
    lifetimes = plan_workspace(sdfg)
    assert lifetimes == {f"t{n}": Lifetime(min(places), max(places)) for n, (_, places) in enumerate(drawn)}
    assert not any(descriptor.transient for descriptor in sdfg.arrays.values())

    # Run the states over shared memory: whoever wrote a byte last must be the one who reads it.
    names = list(lifetimes)
    sizes = {name: int(sdfg.arrays[name].total_size) for name in names}
    layout = first_fit([Request(sizes[name], lifetimes[name].first, lifetimes[name].last) for name in names])
    offsets = dict(zip(names, layout.offsets, strict=True))
    memory = [""] * layout.size
    for state in state_chain(sdfg):
        here = {node.data for node in state.data_nodes()} - {"argument"}
        for name in here:
            part = slice(offsets[name], offsets[name] + sizes[name])
            fresh = state.label == f"kernel_{lifetimes[name].first}"
            assert fresh or memory[part] == [name] * sizes[name]
            memory[part] = [name] * sizes[name]
        assert all(memory[offsets[name] : offsets[name] + sizes[name]] == [name] * sizes[name] for name in here), (
            "containers of one kernel share bytes"
        )
    alive = [
        sum(aligned(sizes[name]) for name in names if lifetimes[name].first <= place <= lifetimes[name].last)
        for place in range(10)
    ]
    assert max(alive) <= layout.size <= sum(aligned(size) for size in sizes.values())


def test_a_plan_of_a_planned_graph_is_empty() -> None:
    sdfg = chain(2)
    sdfg.add_array("t", [4], dace.float32, transient=True)
    sdfg.start_state.add_access("t")
    assert set(plan_workspace(sdfg)) == {"t"}
    assert plan_workspace(sdfg) == {}


# ---- temporaries of expansions ----


@pytest.mark.parametrize(
    "storage", [dace.StorageType.Default, dace.StorageType.CPU_Heap, dace.StorageType.Register], ids=str
)
def test_temporaries_of_an_expansion_live_while_it_runs(storage: dace.StorageType) -> None:
    """A register, too: DaCe calls everything so that has no storage, whatever its size."""
    sdfg = chain(3)
    for state in state_chain(sdfg)[1:]:
        nested(state, "softmax", buffer=storage)
    lifetimes = plan_workspace(sdfg)
    assert sorted((life.first, life.last) for life in lifetimes.values()) == [(1, 1), (2, 2)]
    for name in lifetimes:
        assert (sdfg.arrays[name].shape, sdfg.arrays[name].dtype) == ((8,), dace.float32)
        assert sdfg.arrays[name].storage is dace.StorageType.Default
    for _, name, descriptor in sdfg.arrays_recursive():
        assert not descriptor.transient, name
    sdfg.validate()


def test_scalars_stay_registers() -> None:
    sdfg = chain(1)
    node = nested(sdfg.start_state, "softmax")
    node.sdfg.add_scalar("total", dace.float32, dace.StorageType.Register, transient=True)
    assert plan_workspace(sdfg) == {}
    assert node.sdfg.arrays["total"].transient


OPERATORS = [
    (Softmax("softmax", "BSE"), "x", "y"),
    (Dropout("dropout", "BSE", 1), "x rng p", "y"),
    (SumRows("columns", "BSE", "E"), "x", "y"),
]


@pytest.mark.parametrize(("node", "inputs", "outputs"), OPERATORS, ids=lambda value: getattr(value, "name", ""))
def test_code_of_a_row_operator_has_no_memory_of_its_own(node: Operator, inputs: str, outputs: str) -> None:
    """Generated code never allocates: buffers, partial sums and random words of rows are arguments."""
    cpu.register()
    node = copy.deepcopy(node)
    batch, seq = (dace.symbol(name, dace.int32) for name in "BS")
    sizes = {"B": batch, "S": seq, "E": 2000, "2": 2}
    sdfg = SDFG(f"rows_{node.name}")
    for connector, dims in node.operand_dims().items():
        if connector in inputs.split() + outputs.split():
            dtype = {"rng": dace.int64, "p": dace.float64}.get(connector, dace.float32)
            if dims:
                sdfg.add_array(connector, [sizes[letter] for letter in dims], dtype)
            else:
                sdfg.add_scalar(connector, dtype)
    state = sdfg.add_state()
    connect_operator(sdfg, state, node, {c: c for c in inputs.split()}, {c: c for c in outputs.split()})
    lowered = lower_operators(sdfg, "cpu")
    assert plan_workspace(lowered)
    left = {name for _, name, d in lowered.arrays_recursive() if d.transient and isinstance(d, dace.data.Array)}
    assert not left
    with quiet_dace():
        code = lowered.generate_code()[0].code
    assert not re.search(r"\bnew (float|dace::uint)\b|aligned_new_array|DACE_ALIGN", code)


# ---- refusals ----


@pytest.mark.parametrize(
    ("extent", "storage"),
    [
        (8, dace.StorageType.Default),
        (8, dace.StorageType.CPU_Heap),
        (dace.symbol("S", dace.int32), dace.StorageType.Register),
        (10**6, dace.StorageType.Register),
    ],
    ids=["default", "heap", "symbolic", "large"],
)
def test_memory_inside_a_loop_is_refused(extent: object, storage: dace.StorageType) -> None:
    sdfg = chain(1)
    outer = nested(sdfg.start_state, "rows")
    inner = SDFG("row")
    inner.add_array("buffer", [extent], dace.float32, storage, transient=True)
    inner.add_state().add_access("buffer")
    body = outer.sdfg.start_state
    entry, exit_ = body.add_map("rows", {"i": "0:4"})
    node = body.add_nested_sdfg(inner, {}, {}, symbol_mapping={str(s): s for s in inner.free_symbols})
    body.add_nedge(entry, node, dace.Memlet())
    body.add_nedge(node, exit_, dace.Memlet())
    with pytest.raises(CanonicalFormError) as raised:
        plan_workspace(sdfg)
    text = r'temporary "buffer" of "row" has \S+ bytes inside a loop, where registers of at most \d+ bytes are accepted'
    assert re.fullmatch(text, str(raised.value))


def test_a_small_register_inside_a_loop_stays() -> None:
    sdfg = chain(1)
    outer = nested(sdfg.start_state, "rows")
    inner = SDFG("row")
    inner.add_array("lanes", [8], dace.float32, dace.StorageType.Register, transient=True)
    inner.add_state().add_access("lanes")
    outer.sdfg.start_state.add_nested_sdfg(inner, {}, {})
    assert plan_workspace(sdfg) == {}
    assert inner.arrays["lanes"].transient


def test_a_temporary_that_nobody_uses_or_that_is_no_array_is_refused() -> None:
    sdfg = chain(1)
    sdfg.add_array("t", [4], dace.float32, transient=True)
    refused(sdfg, 'temporary "t" of graph "chain" cannot be given as an argument')
    sdfg = chain(1)
    sdfg.add_scalar("s", dace.float32, transient=True)
    sdfg.start_state.add_access("s")
    refused(sdfg, 'temporary "s" of graph "chain" cannot be given as an argument')


def test_an_expansion_that_renames_a_symbol_is_refused() -> None:
    sdfg = chain(1)
    sdfg.add_symbol("S", dace.int32)
    body = SDFG("rows")
    body.add_symbol("N", dace.int32)
    body.add_array("t", [dace.symbol("N", dace.int32)], dace.float32, transient=True)
    body.add_state().add_access("t")
    sdfg.start_state.add_nested_sdfg(body, {}, {}, symbol_mapping={"N": dace.symbol("S", dace.int32)})
    refused(sdfg, 'expansion "rows" renames symbol "N"')


def branch(sdfg: SDFG, first: SDFGState, last: SDFGState) -> None:
    sdfg.add_edge(first, sdfg.add_state("other"), InterstateEdge("1 > 2"))


def loop(sdfg: SDFG, first: SDFGState, last: SDFGState) -> None:
    sdfg.add_edge(last, first, InterstateEdge())


def loop_at_the_end(sdfg: SDFG, first: SDFGState, last: SDFGState) -> None:
    sdfg.add_edge(last, last, InterstateEdge())


def condition(sdfg: SDFG, first: SDFGState, last: SDFGState) -> None:
    sdfg.edges()[0].data.condition = dace.properties.CodeBlock("1 > 2")


def second_start(sdfg: SDFG, first: SDFGState, last: SDFGState) -> None:
    sdfg.add_edge(sdfg.add_state("never runs"), last, InterstateEdge())


def alone(sdfg: SDFG, first: SDFGState, last: SDFGState) -> None:
    sdfg.add_state("alone")


def region(sdfg: SDFG, first: SDFGState, last: SDFGState) -> None:
    body = LoopRegion("again", "i < 3", "i", "i = 0", "i = i + 1")
    sdfg.add_node(body)
    body.add_state("body", is_start_block=True)
    sdfg.add_edge(last, body, InterstateEdge())


@pytest.mark.parametrize("change", [branch, loop, loop_at_the_end, condition, second_start, alone, region])
def test_only_a_chain_of_states_has_an_order(change: Callable[[SDFG, SDFGState, SDFGState], None]) -> None:
    sdfg = chain(2)
    first, last = state_chain(sdfg)
    assert [first.label, last.label] == ["kernel_0", "kernel_1"]
    change(sdfg, first, last)
    refused(sdfg, 'graph "chain" is not a chain of states')
