"""One group in place of its members, and what groups call the values between them."""

from __future__ import annotations

from collections.abc import Sequence

from dace.sdfg import SDFG
from dace.sdfg.graph import MultiConnectorEdge

from stepdown.models.operators import Operator
from stepdown.transformations.canonical_form import the_state


def value_of(sdfg: SDFG, edge: MultiConnectorEdge) -> str:
    """What a group calls the value that an edge carries: its container, with the index of a part."""
    shape, subset = sdfg.arrays[edge.data.data].shape, edge.data.subset
    index = [
        str(low)
        for (low, _, _), size, extent in zip(subset.ranges, subset.size(), shape, strict=True)
        if size == 1 and extent != 1
    ]
    return "_".join([edge.data.data, *index])


def replace_members(sdfg: SDFG, members: Sequence[Operator], group: Operator) -> None:
    """Put a group, whose connectors are called after values, in the place of its members; values inside it go."""
    state = the_state(sdfg)
    read = {value_of(sdfg, edge): edge for member in members for edge in state.in_edges(member)}
    written = {value_of(sdfg, edge): edge for member in members for edge in state.out_edges(member)}
    state.remove_nodes_from(members)
    state.add_node(group)
    for value in group.in_connectors:
        state.add_edge(read[value].src, None, group, value, read[value].data)
    for value, edge in sorted(written.items()):
        if value in group.out_connectors:
            state.add_edge(group, value, edge.dst, None, edge.data)
        else:
            state.remove_node(edge.dst)
            sdfg.remove_data(edge.data.data)
