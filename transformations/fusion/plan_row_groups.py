"""Which row and element-wise operators of a graph run as one kernel, decided without touching the graph.

:class:`~stepdown.transformations.fusion.fuse_row_operators.FuseRowOperators` writes the groups into a graph; passes
that choose between graphs by the bytes that those will move ask :meth:`RowGroupPlanner.moved_bytes`.

Dimension legend: B batch, S query position, T key position, H head, P head size, E embedding, U feed-forward size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import sympy
from dace import data
from dace.sdfg import SDFG

from stepdown.models.errors import CanonicalFormError
from stepdown.models.operators import MEMBER_KINDS, Member, Operator, RowGroup
from stepdown.transformations.canonical_form import operators, the_state
from stepdown.transformations.lowering.passes_of_rows import plan_operator

NOMINAL = {"B": 8, "S": 512}
"""Sizes at which bytes are compared where batch or sequence length is symbolic."""


@dataclass(frozen=True)
class Container:
    """What planning needs to know of a container.

    :ivar bytes: its size, at the nominal sizes where it is symbolic.
    :ivar rank: number of logical dimensions; zero for a scalar.
    :ivar transient: whether it is of no use outside the graph.
    """

    bytes: int
    rank: int
    transient: bool


@dataclass(frozen=True, eq=False)
class Use:
    """An operator between containers.

    :ivar values: container of each connector.
    :ivar moved: bytes of each container that the operator reads or writes.
    :ivar whole: whether it reads and writes whole containers only.
    """

    operator: Operator
    values: Mapping[str, str]
    moved: Mapping[str, int]
    whole: bool = True

    @cached_property
    def writes(self) -> frozenset[str]:
        """Containers that the operator writes."""
        return frozenset(name for connector, name in self.values.items() if connector in self.operator.out_connectors)

    @cached_property
    def reads(self) -> frozenset[str]:
        """Containers that the operator reads."""
        return frozenset(name for connector, name in self.values.items() if connector in self.operator.in_connectors)


@dataclass(frozen=True)
class Group:
    """Operators that run as one kernel, by their places in the order of execution."""

    number: int
    members: tuple[int, ...]
    dims: str
    reads: frozenset[str]
    writes: frozenset[str]


def nominal_bytes(descriptor: data.Data) -> int:
    """Bytes of a container; symbolic batch and sequence length count at their nominal sizes."""
    count = sympy.sympify(descriptor.total_size)
    values = {symbol: NOMINAL[symbol.name] for symbol in count.free_symbols if symbol.name in NOMINAL}
    return int(count.subs(values)) * descriptor.dtype.bytes


def containers_of(sdfg: SDFG) -> dict[str, Container]:
    """Every container of a graph."""
    return {
        name: Container(
            nominal_bytes(descriptor),
            0 if isinstance(descriptor, data.Scalar) else len(descriptor.shape),
            descriptor.transient,
        )
        for name, descriptor in sdfg.arrays.items()
    }


def uses_of(sdfg: SDFG, containers: Mapping[str, Container]) -> list[Use]:
    """The operators of a graph in canonical form, in topological order, and their containers."""
    state = the_state(sdfg)
    found: list[Use] = []
    for node in operators(sdfg):
        values: dict[str, str] = {}
        parts: dict[str, dict[str, int]] = {}
        whole = True
        for edge in state.all_edges(node):
            connector, name = edge.dst_conn if edge.dst is node else edge.src_conn, edge.data.data
            values[connector] = name
            descriptor = sdfg.arrays[name]
            size = containers[name].bytes
            if edge.data.subset.size() != list(descriptor.shape):
                whole = False
                for axis, extent in enumerate(edge.data.subset.size()):
                    size = size // int(descriptor.shape[axis]) if extent == 1 and descriptor.shape[axis] != 1 else size
            parts.setdefault(name, {})[str(edge.data.subset)] = size
        moved = {name: min(sum(sizes.values()), containers[name].bytes) for name, sizes in parts.items()}
        found.append(Use(node, values, moved, whole))
    return found


class RowGroupPlanner:
    """Grows groups, the pair that saves the most bytes first.

    Legality follows from the dataflow: members iterate over the same dimensions, nothing outside a group lies on a path
    between two members, and the group's statements can be ordered into passes over rows
    (:func:`stepdown.transformations.lowering.passes_of_rows.plan_rows`).

    :param uses: operators in an order of execution.
    :param siblings: also group operators that only read the same data.
    :param known: which groups can be ordered, shared between planners that see the same operators again.
    """

    def __init__(
        self,
        uses: Sequence[Use],
        containers: Mapping[str, Container],
        siblings: bool = True,
        known: dict[tuple[Any, ...], bool] | None = None,
    ) -> None:
        self.uses = uses
        self.containers = containers
        self.siblings = siblings
        self.known: dict[tuple[Any, ...], bool] = {} if known is None else known
        self.readers: dict[str, set[int]] = {}
        for place, use in enumerate(uses):
            for name in use.reads:
                self.readers.setdefault(name, set()).add(place)
        self.after = self._reachability()
        self.single: list[Group] = [
            Group(place, (place,), common_dims(use.operator.dims), use.reads, use.writes)
            for place, use in enumerate(uses)
        ]
        self._rejected: set[tuple[int, int]] = set()
        self._savings: dict[tuple[int, int], int] = {}

    @cached_property
    def groups(self) -> list[Group]:
        """The groups, those of a single operator included."""
        groups = [group for group in self.single if self._fusible(self.uses[group.members[0]])]
        number = len(self.uses)
        while True:
            best: tuple[int, int, int] | None = None
            for first in range(len(groups)):
                for second in range(first + 1, len(groups)):
                    saved = self._saved(groups[first], groups[second])
                    if saved > 0 and (best is None or saved > best[0]) and self._legal(groups, first, second):
                        best = (saved, first, second)
            if best is None:
                return groups
            _, first, second = best
            merged = replace(self._merged(groups[first], groups[second]), number=number)
            number += 1
            groups = [group for place, group in enumerate(groups) if place not in (first, second)] + [merged]

    def moved_bytes(self) -> int:
        """Bytes that all kernels move: each reads each distinct input once and writes each output once."""
        grouped = {place for group in self.groups for place in group.members}
        total = sum(sum(use.moved.values()) for place, use in enumerate(self.uses) if place not in grouped)
        for group in self.groups:
            total += sum(self.containers[name].bytes for name in (*group.reads, *self.outputs(group)))
        return total

    def outputs(self, group: Group) -> list[str]:
        """Containers of a group that somebody outside it needs, or that nobody at all reads."""
        return sorted(
            name for name in group.writes if not self._internal(name, group.members) or name not in self.readers
        )

    # ---- what a merge saves ----------------------------------------------------------------------------------------

    def _saved(self, first: Group, second: Group) -> int:
        """Bytes that one kernel moves less than two."""
        key = (first.number, second.number)
        if key not in self._savings:
            self._savings[key] = self._count_saved(first, second) if first.dims == second.dims else 0
        return self._savings[key]

    def _count_saved(self, first: Group, second: Group) -> int:
        saved = 0
        members = (*first.members, *second.members)
        for producer, consumer in ((first, second), (second, first)):
            for name in producer.writes & consumer.reads:
                size = self.containers[name].bytes
                saved += 2 * size if self._internal(name, members) else size
        if self.siblings:
            for name in (first.reads & second.reads) - first.writes - second.writes:
                if self.containers[name].rank == len(first.dims):
                    saved += self.containers[name].bytes
        return saved

    def _internal(self, name: str, members: tuple[int, ...]) -> bool:
        """Whether nobody but the members uses a container."""
        return self.containers[name].transient and self.readers.get(name, set()) <= set(members)

    # ---- whether it is allowed -------------------------------------------------------------------------------------

    def _fusible(self, use: Use) -> bool:
        return use.whole and type(use.operator).__name__ in MEMBER_KINDS

    def _legal(self, groups: Sequence[Group], first: int, second: int) -> bool:
        one, two = groups[first], groups[second]
        key = (one.number, two.number)
        if key in self._rejected:
            return False
        merged = self._merged(one, two)
        legal = self._convex(groups, merged) and self._orderable(merged)
        if not legal:
            self._rejected.add(key)
        return legal

    def _convex(self, groups: Sequence[Group], merged: Group) -> bool:
        """Whether no path leaves the members and comes back: other kernels run before or after all of them."""
        # Other groups count as one node each: they, too, run as a whole.
        members = set(merged.members)
        blocks = [set(group.members) for group in groups if not members & set(group.members)]
        grouped = {place for group in groups for place in group.members}
        blocks += [{place} for place in range(len(self.uses)) if place not in grouped]
        below = set().union(*(self.after[member] for member in members))
        pending = [block for block in blocks if block & below]
        waiting = [block for block in blocks if not block & below]
        while pending:
            reached = set().union(*(self.after[place] for place in pending.pop()))
            if reached & members:
                return False
            pending += [block for block in waiting if block & reached]
            waiting = [block for block in waiting if not block & reached]
        return True

    def _orderable(self, group: Group) -> bool:
        key = (group.dims, *((id(self.uses[p].operator), *sorted(self.uses[p].values.items())) for p in group.members))
        if key not in self.known:
            try:
                plan_operator(RowGroup("trial", self.members(group)))
            except CanonicalFormError:
                self.known[key] = False
            else:
                self.known[key] = True
        return self.known[key]

    def members(self, group: Group) -> list[Member]:
        """The operators of a group as a :class:`RowGroup` takes them."""
        uses = [self.uses[place] for place in group.members]
        return [Member(_over(use.operator, group.dims), dict(use.values)) for use in uses]

    def _merged(self, first: Group, second: Group) -> Group:
        writes = first.writes | second.writes
        members = tuple(sorted((*first.members, *second.members)))
        return Group(-1, members, first.dims, (first.reads | second.reads) - writes, writes)

    def _reachability(self) -> list[set[int]]:
        after: list[set[int]] = [set() for _ in self.uses]
        for place in reversed(range(len(self.uses))):
            for name in self.uses[place].writes:
                for reader in self.readers.get(name, ()):
                    after[place] |= {reader} | after[reader]
        return after


def moved_bytes(sdfg: SDFG) -> int:
    """Bytes that the kernels of a graph in canonical form move once its row and element-wise operators are grouped."""
    containers = containers_of(sdfg)
    return RowGroupPlanner(uses_of(sdfg, containers), containers).moved_bytes()


def common_dims(dims: str) -> str:
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
            options[prop.attr_name] = common_dims(value) if prop.attr_name.endswith("dims") else value
    return type(node)(name=node.name, **options)
