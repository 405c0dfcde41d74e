"""``PlanWorkspace``: every temporary becomes an argument with a lifetime, so that generated code never allocates.

The runtime takes one workspace a call from PyTorch's allocator and places the temporaries in it, sharing bytes between
those that do not live at the same time.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import dace
from dace import dtypes, symbolic
from dace.config import Config
from dace.sdfg import SDFG, SDFGState, nodes

from stepdown.models.errors import CanonicalFormError
from stepdown.transformations.lowering.lower_operators import is_memory


@dataclass(frozen=True)
class Lifetime:
    """First and last state, by position, that uses a temporary; both inclusive."""

    first: int
    last: int


def plan_workspace(sdfg: SDFG) -> dict[str, Lifetime]:
    """Make all temporaries of a lowered graph arguments, in place.

    :param sdfg: a chain of states, as ``lower_operators`` leaves it.
    :returns: the lifetime of every former temporary.
    :raises CanonicalFormError: when the graph is not a chain of states, or the generated code would allocate memory
        because a temporary cannot become an argument.
    """
    states = state_chain(sdfg)
    for state in states:
        for node in [n for n in state.nodes() if isinstance(n, nodes.NestedSDFG)]:
            if state.entry_node(node) is None:
                _lift(sdfg, state, node)
    _refuse_allocations(sdfg)
    lifetimes: dict[str, Lifetime] = {}
    for position, state in enumerate(states):
        for access in state.data_nodes():
            descriptor = sdfg.arrays[access.data]
            if descriptor.transient and is_memory(descriptor):
                known = lifetimes.get(access.data)
                lifetimes[access.data] = Lifetime(position if known is None else known.first, position)
    for name in [n for n, d in sdfg.arrays.items() if d.transient and n not in lifetimes]:
        raise CanonicalFormError(f'temporary "{name}" of graph "{sdfg.name}" cannot be given as an argument')
    for name in lifetimes:
        sdfg.arrays[name].transient = False
    return lifetimes


def state_chain(sdfg: SDFG) -> list[SDFGState]:
    """The states in order of execution.

    :raises CanonicalFormError: when they branch or loop, or not all of them run.
    """
    order: list[SDFGState] = []
    following = [block for block in sdfg.nodes() if sdfg.in_degree(block) == 0]
    while len(following) == 1 and isinstance(following[0], SDFGState):
        order.append(following[0])
        edges = sdfg.out_edges(following[0])
        following = [edge.dst for edge in edges if edge.data.is_unconditional() and sdfg.in_degree(edge.dst) == 1]
        if len(following) < len(edges):
            break
    if len(order) != sdfg.number_of_nodes():
        raise CanonicalFormError(f'graph "{sdfg.name}" is not a chain of states')
    return order


def _lift(sdfg: SDFG, state: SDFGState, node: nodes.NestedSDFG) -> None:
    """Move the temporaries of an expansion into the graph around it.

    Whatever their storage: when DaCe expands a node it calls everything without a storage of its own a register, and
    allocates those that are large or of symbolic size in every call.
    """
    inner = node.sdfg
    extents: Mapping[str, object] = node.symbol_mapping
    for name, descriptor in list(inner.arrays.items()):
        if not descriptor.transient or not is_memory(descriptor):
            continue
        outer = copy.deepcopy(descriptor)
        outer.storage = descriptor.storage = dtypes.StorageType.Default
        for symbol, value in extents.items():
            if symbol != str(value):
                raise CanonicalFormError(f'expansion "{node.label}" renames symbol "{symbol}"')
        new_name = sdfg.add_datadesc(f"{node.label}_{name}", outer, find_new_name=True)
        descriptor.transient = False
        node.add_out_connector(name, force=True)
        memlet = dace.Memlet.from_array(new_name, sdfg.arrays[new_name])
        state.add_edge(node, name, state.add_write(new_name), None, memlet)


def _refuse_allocations(sdfg: SDFG) -> None:
    """Inside loops only a few registers may be left: arrays of a constant size that the generator puts on the stack."""
    largest = Config.get("compiler", "max_stack_array_size")
    for inner, name, descriptor in sdfg.arrays_recursive():
        if inner is sdfg or not descriptor.transient or not is_memory(descriptor):
            continue
        extent = descriptor.total_size * descriptor.dtype.bytes
        on_stack = descriptor.storage is dtypes.StorageType.Register and not symbolic.issymbolic(extent)
        if not on_stack or int(extent) > largest:
            raise CanonicalFormError(
                f'temporary "{name}" of "{inner.name}" has {extent} bytes inside a loop, where registers of at most '
                f"{largest} bytes are accepted"
            )
