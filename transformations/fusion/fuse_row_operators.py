"""``FuseRowOperators``: row and element-wise operators that share data become row groups, one kernel each.

Legality follows from the dataflow: members iterate over the same dimensions, nothing outside a group lies on a path
between two members, and the group's statements can be ordered into passes over rows
(:func:`stepdown.transformations.lowering.passes_of_rows.plan_rows`). Groups grow along chains and between siblings that
read the same data, the pair that saves the most bytes first.

Dimension legend: B batch, S query position, T key position, H head, P head size, E embedding, U feed-forward size.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import sympy
from dace import data
from dace.sdfg import SDFG, nodes

from stepdown.models.errors import CanonicalFormError
from stepdown.models.operators import MEMBER_KINDS, Member, Operator, RowGroup
from stepdown.models.operators.operator import make_memlet
from stepdown.transformations.canonical_form import operand_edges, the_state, topological_nodes
from stepdown.transformations.lowering.passes_of_rows import plan_rows
from stepdown.transformations.training_graph import TrainingGraph

NOMINAL = {"B": 8, "S": 512}
"""Sizes at which bytes saved are compared where batch or sequence length is symbolic."""


@dataclass(frozen=True)
class FuseRowOperators:
    """The pass; ``fuse-row-operators`` on the command line.

    :ivar siblings: also fuse operators that only read the same data.
    """

    siblings: bool = True

    def apply(self, graph: TrainingGraph) -> tuple[TrainingGraph, str]:
        """Fuse in place; returns the graph and a line about what changed."""
        before = after = 0
        for _, sdfg in graph.graphs():
            fusion = _Fusion(sdfg, self.siblings)
            before += len(fusion.candidates)
            fusion.run()
            after += len(fusion.groups)
        return graph, f"{before} row and element-wise operators in {after} kernels"


@dataclass
class _Group:
    """Members in topological order, and what the group reads and writes."""

    members: list[Operator]
    dims: str
    reads: set[str] = field(default_factory=set)
    writes: set[str] = field(default_factory=set)


class _Fusion:
    """Grows groups in one graph."""

    def __init__(self, sdfg: SDFG, siblings: bool) -> None:
        self.sdfg = sdfg
        self.siblings = siblings
        self.state = the_state(sdfg)
        order = topological_nodes(self.state)
        self.position = {node: place for place, node in enumerate(order)}
        self.candidates = [node for node in order if type(node).__name__ in MEMBER_KINDS]
        self.groups = [self._single(node) for node in self.candidates]
        self.after = self._reachability(order)
        self.rejected: set[tuple[int, int]] = set()

    def run(self) -> None:
        """Merge the most profitable legal pair until none is left, then write the groups into the graph."""
        while True:
            best: tuple[int, int, int] | None = None
            for first in range(len(self.groups)):
                for second in range(first + 1, len(self.groups)):
                    saved = self._saved(self.groups[first], self.groups[second])
                    if saved > 0 and (best is None or saved > best[0]) and self._legal(first, second):
                        best = (saved, first, second)
            if best is None:
                break
            _, first, second = best
            merged = self._merged(self.groups[first], self.groups[second])
            self.groups = [g for place, g in enumerate(self.groups) if place not in (first, second)] + [merged]
        for group in self.groups:
            if len(group.members) > 1:
                self._write(group)

    # ---- what a merge saves and whether it is allowed --------------------------------------------------------------

    def _saved(self, first: _Group, second: _Group) -> int:
        """Bytes that one kernel moves less than two."""
        if first.dims != second.dims:
            return 0
        saved = 0
        for producer, consumer in ((first, second), (second, first)):
            for name in producer.writes & consumer.reads:
                saved += self._bytes(name)
                if self._internal(name, producer, consumer):
                    saved += self._bytes(name)
        if self.siblings:
            for name in (first.reads & second.reads) - first.writes - second.writes:
                if self._full(name, first.dims):
                    saved += self._bytes(name)
        return saved

    def _internal(self, name: str, first: _Group, second: _Group) -> bool:
        """Whether nobody but the two groups uses a container."""
        if not self.sdfg.arrays[name].transient:
            return False
        members = {*first.members, *second.members}
        return all(
            edge.dst in members
            for access in self.state.data_nodes()
            if access.data == name
            for edge in self.state.out_edges(access)
        )

    def _full(self, name: str, dims: str) -> bool:
        """Whether a container has an element for each element that the group iterates over."""
        return len(self.sdfg.arrays[name].shape) == len(dims) and not isinstance(self.sdfg.arrays[name], data.Scalar)

    def _bytes(self, name: str) -> int:
        descriptor = self.sdfg.arrays[name]
        count = sympy.sympify(descriptor.total_size)
        values = {symbol: NOMINAL[symbol.name] for symbol in count.free_symbols if symbol.name in NOMINAL}
        return int(count.subs(values)) * descriptor.dtype.bytes

    def _legal(self, first: int, second: int) -> bool:
        one, two = self.groups[first], self.groups[second]
        key = (id(one), id(two))
        if key in self.rejected:
            return False
        members = {*one.members, *two.members}
        legal = self._convex(members) and self._orderable(self._merged(one, two))
        if not legal:
            self.rejected.add(key)
        return legal

    def _convex(self, members: set[Operator]) -> bool:
        """Whether no path leaves the members and comes back: other kernels run before or after all of them."""
        # Other groups count as one node each: they, too, run as a whole.
        blocks = [set(group.members) for group in self.groups if not members & set(group.members)]
        blocks += [{node} for node in self.position if isinstance(node, Operator) and not self._grouped(node)]
        pending = [block for block in blocks if any(node in self.after[member] for member in members for node in block)]
        waiting = [block for block in blocks if block not in pending]
        while pending:
            block = pending.pop()
            if any(member in self.after[node] for node in block for member in members):
                return False
            below = [
                other for other in waiting if any(node in self.after[source] for source in block for node in other)
            ]
            waiting = [other for other in waiting if other not in below]
            pending += below
        return True

    def _grouped(self, node: nodes.Node) -> bool:
        return any(node in group.members for group in self.groups)

    def _orderable(self, group: _Group) -> bool:
        node = self._node(group, "trial")
        operands = {name: dims for name, dims in node.operand_dims().items() if name not in node.written_values()}
        try:
            plan_rows(node.statements(), node.dims, operands)
        except CanonicalFormError:
            return False
        return True

    # ---- groups and nodes ------------------------------------------------------------------------------------------

    def _single(self, node: Operator) -> _Group:
        group = _Group([node], _common_dims(node.dims))
        for _, name, written in operand_edges(self.state, node):
            (group.writes if written else group.reads).add(name)
        return group

    def _merged(self, first: _Group, second: _Group) -> _Group:
        members = sorted([*first.members, *second.members], key=self.position.__getitem__)
        writes = first.writes | second.writes
        return _Group(members, first.dims, (first.reads | second.reads) - writes, writes)

    def _reachability(self, order: Iterable[nodes.Node]) -> dict[nodes.Node, set[nodes.Node]]:
        after: dict[nodes.Node, set[nodes.Node]] = {}
        for node in reversed(list(order)):
            after[node] = set()
            for edge in self.state.out_edges(node):
                after[node] |= {edge.dst} | after[edge.dst]
        return after

    def _outputs(self, group: _Group) -> list[str]:
        """Containers that somebody outside the group needs."""
        return sorted(name for name in group.writes if not self._internal(name, group, group) or not self._read(name))

    def _read(self, name: str) -> bool:
        return any(self.state.out_degree(access) > 0 for access in self.state.data_nodes() if access.data == name)

    def _node(self, group: _Group, name: str) -> RowGroup:
        members = [
            Member(
                _over(node, group.dims), {connector: value for connector, value, _ in operand_edges(self.state, node)}
            )
            for node in group.members
        ]
        return RowGroup(name, members, self._outputs(group))

    def _write(self, group: _Group) -> None:
        """Replace the members by one node."""
        state = self.state
        name = f"{group.members[0].name}__{group.members[-1].name}"
        node = self._node(group, name)
        access = {n.data: n for n in state.data_nodes() if n.data in group.reads | group.writes}
        outputs = set(node.out_connectors)
        state.remove_nodes_from(group.members)
        state.add_node(node)
        for value in node.in_connectors:
            state.add_edge(access[value], None, node, value, make_memlet(self.sdfg, value))
        for value in group.writes:
            if value in outputs:
                state.add_edge(node, value, access[value], None, make_memlet(self.sdfg, value))
            else:
                state.remove_node(access[value])
                self.sdfg.remove_data(value)


def _common_dims(dims: str) -> str:
    """Dimensions with key positions counted as query positions where only one of the two occurs."""
    return dims if "S" in dims else dims.replace("T", "S")


def _over(node: Operator, dims: str) -> Operator:
    """``node`` with its dimensions named as the group names them."""
    if node.dims == dims:
        return node
    options: dict[str, Any] = {}
    base = {prop.attr_name for prop in Operator.__properties__.values()} - {"dims"}
    for prop, value in node.properties():
        if prop.attr_name not in base:
            options[prop.attr_name] = _common_dims(value) if prop.attr_name.endswith("dims") else value
    return type(node)(name=node.name, **options)
