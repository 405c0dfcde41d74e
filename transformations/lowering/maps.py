"""Building blocks that lowerings share: maps around C++ tasklets and nested SDFGs, with plain memlets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import dace
from dace.sdfg import SDFG, SDFGState
from dace.sdfg.nodes import NestedSDFG
from dace.symbolic import int_floor, pystr_to_symbolic


def cpp_tasklet(
    state: SDFGState, label: str, inputs: Iterable[str], outputs: Iterable[str], code: str
) -> dace.nodes.Tasklet:
    """A tasklet in C++."""
    return state.add_tasklet(label, dict.fromkeys(inputs), dict.fromkeys(outputs), code, language=dace.Language.CPP)


def read_of(state: SDFGState, name: str) -> dace.nodes.AccessNode:
    """The access node that a state reads ``name`` from."""
    for node in state.data_nodes():
        if node.data == name and state.in_degree(node) == 0:
            return node
    return state.add_read(name)


def add_map(
    state: SDFGState,
    label: str,
    ranges: Mapping[str, str],
    inputs: Mapping[str, dace.Memlet],
    code: str,
    outputs: Mapping[str, dace.Memlet],
) -> None:
    """A sequential map around one C++ tasklet, connected to the containers of its memlets."""
    entry, exit_ = state.add_map(label, dict(ranges), dace.ScheduleType.Sequential)
    tasklet = cpp_tasklet(state, label, inputs, outputs, code)
    connect_through(state, [entry], tasklet, inputs)
    connect_out(state, tasklet, [exit_], outputs)


def connect_through(
    state: SDFGState,
    entries: list[dace.nodes.MapEntry],
    node: dace.nodes.Node,
    inputs: Mapping[str, dace.Memlet],
    sources: Mapping[str, dace.nodes.AccessNode] | None = None,
) -> None:
    """Edges from access nodes through map entries, outermost first; outside the innermost they carry whole containers.

    (DaCe would find tighter subsets by symbolic analysis; nothing reads them, and it takes most of a build's time.)

    :param sources: access nodes of connectors that are not to read from the container's first one.
    """
    for connector, memlet in inputs.items():
        source: dace.nodes.Node = (sources or {}).get(connector) or read_of(state, memlet.data)
        output: str | None = None
        for entry in entries:
            place = entry.next_connector(memlet.data)
            entry.add_in_connector(f"IN_{place}")
            entry.add_out_connector(f"OUT_{place}")
            whole = dace.Memlet.from_array(memlet.data, state.sdfg.arrays[memlet.data])
            state.add_edge(source, output, entry, f"IN_{place}", whole)
            source, output = entry, f"OUT_{place}"
        state.add_edge(source, output, node, connector, memlet)
    if entries and not inputs:
        for outer, inner in zip(entries, [*entries[1:], node], strict=True):
            state.add_edge(outer, None, inner, None, dace.Memlet())


def connect_out(
    state: SDFGState,
    node: dace.nodes.Node,
    exits: list[dace.nodes.MapExit],
    outputs: Mapping[str, dace.Memlet],
    targets: Mapping[str, dace.nodes.AccessNode] | None = None,
) -> None:
    """Edges to access nodes through map exits, innermost first; accumulation is marked on all of them.

    :param targets: access nodes of connectors that are not to write to a new one.
    """
    for connector, memlet in outputs.items():
        source, output, carried = node, connector, memlet
        for exit_ in exits:
            place = exit_.next_connector(memlet.data)
            exit_.add_in_connector(f"IN_{place}")
            exit_.add_out_connector(f"OUT_{place}")
            state.add_edge(source, output, exit_, f"IN_{place}", carried)
            source, output = exit_, f"OUT_{place}"
            carried = dace.Memlet.from_array(memlet.data, state.sdfg.arrays[memlet.data])
            carried.wcr, carried.wcr_nonatomic = memlet.wcr, memlet.wcr_nonatomic
        target = (targets or {}).get(connector) or state.add_write(memlet.data)
        state.add_edge(source, output, target, None, carried)


def add_nested_maps(
    state: SDFGState,
    label: str,
    outer: Mapping[str, str],
    inner: Mapping[str, str],
    inputs: Mapping[str, dace.Memlet],
    code: str,
    outputs: Mapping[str, dace.Memlet],
) -> None:
    """Two sequential maps around one C++ tasklet."""
    outer_entry, outer_exit = state.add_map(f"{label}_outer", dict(outer), dace.ScheduleType.Sequential)
    inner_entry, inner_exit = state.add_map(label, dict(inner), dace.ScheduleType.Sequential)
    tasklet = cpp_tasklet(state, label, inputs, outputs, code)
    for connector, memlet in inputs.items():
        source = read_of(state, memlet.data)
        state.add_memlet_path(source, outer_entry, inner_entry, tasklet, dst_conn=connector, memlet=memlet)
    for connector, memlet in outputs.items():
        state.add_memlet_path(
            tasklet, inner_exit, outer_exit, state.add_write(memlet.data), src_conn=connector, memlet=memlet
        )


def nest(
    state: SDFGState,
    body: SDFG,
    entries: list[dace.nodes.MapEntry],
    exits: list[dace.nodes.MapExit],
    symbols: Mapping[str, Any],
) -> NestedSDFG:
    """Put ``body`` into maps, outermost first, or into none; it sees the parent's containers of the same names, and
    ``symbols`` under new values.
    """
    reads, writes = used_containers(body)
    used = {str(symbol) for symbol in body.free_symbols}
    for name in [name for name in body.symbols if name not in used]:
        body.remove_symbol(name)
    mapping = {name: symbols.get(name, pystr_to_symbolic(name)) for name in sorted(used)}
    nested = state.add_nested_sdfg(
        body, dict.fromkeys(sorted(reads)), dict.fromkeys(sorted(writes)), symbol_mapping=mapping
    )
    arrays = state.sdfg.arrays
    connect_through(
        state, entries, nested, {name: dace.Memlet.from_array(name, arrays[name]) for name in sorted(reads)}
    )
    connect_out(
        state, nested, exits[::-1], {name: dace.Memlet.from_array(name, arrays[name]) for name in sorted(writes)}
    )
    return nested


def inner_sdfg(outer: SDFG, label: str, names: Iterable[str], symbols: Iterable[str], dtype: dace.typeclass) -> SDFG:
    """An SDFG to be nested in ``outer``: it sees the named containers, all its symbols, and further ones."""
    sdfg = SDFG(label)
    for name in names:
        descriptor = outer.arrays[name].clone()
        descriptor.transient = False
        sdfg.add_datadesc(name, descriptor)
    for symbol, known in outer.symbols.items():
        if symbol not in sdfg.symbols:
            sdfg.add_symbol(symbol, known)
    for symbol in sorted(set(symbols) - set(sdfg.symbols)):
        sdfg.add_symbol(symbol, dtype)
    return sdfg


def index_of(position: Any, dims: str, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """The index in each dimension of the element at a row-major position."""
    index: dict[str, Any] = {}
    for place, letter in reversed(list(enumerate(dims))):
        index[letter] = position if place == 0 else position % sizes[letter]
        position = int_floor(position, sizes[letter])
    return index


def used_containers(body: SDFG) -> tuple[set[str], set[str]]:
    """What a nested SDFG reads before it writes it, and what it writes; containers that it does not use are removed."""
    reads: set[str] = set()
    writes: set[str] = set()
    for state in body.states():
        for node in state.data_nodes():
            if body.arrays[node.data].transient:
                continue
            if state.out_degree(node) > 0:
                reads.add(node.data)
            if state.in_degree(node) > 0:
                writes.add(node.data)
    for name in [n for n, d in body.arrays.items() if not d.transient and n not in reads | writes]:
        body.remove_data(name)
    return reads, writes
