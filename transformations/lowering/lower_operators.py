"""``lower``: every operator becomes maps and library calls for the target, one state each, in a fixed order."""

from __future__ import annotations

import copy

from dace import data
from dace.sdfg import SDFG, InterstateEdge, SDFGState, nodes

from stepdown.models.errors import CanonicalFormError
from stepdown.models.operators import Operator
from stepdown.models.quiet import quiet_dace
from stepdown.transformations.canonical_form import operators, the_state
from stepdown.transformations.lowering.share_addends import share_addends


def lower_operators(sdfg: SDFG, implementation: str) -> SDFG:
    """A graph in which every operator is expanded by ``implementation``.

    Each operator gets a state of its own in topological order, so that the order of execution, and with it how long
    every container lives, is written in the graph and not left to the code generator. Contractions then add to their
    addends in place where those are dead afterwards (:mod:`~stepdown.transformations.lowering.share_addends`).

    :raises CanonicalFormError: when an operator has no such implementation.
    """
    lowered = SDFG(sdfg.name)
    for symbol, dtype in sdfg.symbols.items():
        if symbol not in lowered.symbols:
            lowered.add_symbol(symbol, dtype)
    for name, descriptor in sdfg.arrays.items():
        lowered.add_datadesc(name, copy.deepcopy(descriptor))
    states: list[SDFGState] = []
    for number, node in enumerate(operators(sdfg)):
        if implementation not in node.implementations:
            raise CanonicalFormError(f'operator "{node.name}" has no implementation "{implementation}"')
        state = lowered.add_state(f"kernel_{number:02d}_{node.name}")
        if states:
            lowered.add_edge(states[-1], state, InterstateEdge())
        states.append(state)
        _copy_operator(the_state(sdfg), node, state, implementation)
    share_addends(lowered, states)
    with quiet_dace():
        lowered.expand_library_nodes()
    return lowered


def _copy_operator(source: SDFGState, node: Operator, target: SDFGState, implementation: str) -> None:
    """Put a copy of ``node`` with its operands into a state of its own."""
    clone = copy.deepcopy(node)
    clone.implementation = implementation
    target.add_node(clone)
    reads: dict[str, nodes.AccessNode] = {}
    for edge in source.in_edges(node):
        name = edge.data.data
        if name not in reads:
            reads[name] = target.add_read(name)
        target.add_edge(reads[name], None, clone, edge.dst_conn, copy.deepcopy(edge.data))
    for edge in source.out_edges(node):
        target.add_edge(clone, edge.src_conn, target.add_write(edge.data.data), None, copy.deepcopy(edge.data))


def is_memory(descriptor: data.Data) -> bool:
    """Whether a container is memory that a call must be given, not a register or a scalar."""
    return isinstance(descriptor, data.Array) and not isinstance(descriptor, data.View)
