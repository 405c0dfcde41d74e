"""Counts of a training graph: kernels, flop, words and bytes moved, bytes kept.

The counting rule is that of ``docs/counting.md``: each operator is a kernel that reads each distinct input once and
writes each output once.

Dimension legend: B batch, S query position, T key position, H head, P head size, E embedding, U feed-forward size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any

import sympy
from dace import data
from dace.sdfg import SDFG, SDFGState, nodes

from stepdown.models.operators import Operator, OperatorClass
from stepdown.models.operators.row_group import RowGroup
from stepdown.models.operators.tiled_group import TiledGroup
from stepdown.pipeline.analysis.expressions import as_number
from stepdown.transformations.canonical_form import operators, the_state
from stepdown.transformations.training_graph import TrainingGraph

Count = Any
"""A SymPy expression or an integer (SymPy has no types)."""


@dataclass(frozen=True)
class Counts:
    """Counts of one direction, or of both together; expressions in the symbols B and S where those are not fixed.

    :ivar kernels: number of kernels.
    :ivar containers: number of containers.
    :ivar flop: floating-point operations.
    :ivar words_in: words read.
    :ivar words_out: words written.
    :ivar bytes_moved: bytes read and written.
    :ivar kept_bytes: bytes that forward keeps for backward.
    """

    kernels: int = 0
    containers: int = 0
    flop: Count = 0
    words_in: Count = 0
    words_out: Count = 0
    bytes_moved: Count = 0
    kept_bytes: Count = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def at(self, batch: int, seq: int) -> dict[str, int]:
        """Every count as a number at one batch size and sequence length."""
        values = {sympy.Symbol("B"): batch, sympy.Symbol("S"): seq}
        return {f.name: int(sympy.sympify(getattr(self, f.name)).subs(values)) for f in fields(self)}

    def to_manifest(self) -> dict[str, Any]:
        """Numbers where they are numbers, and expressions as text."""
        return {f.name: as_number(getattr(self, f.name)) for f in fields(self)}


@dataclass(frozen=True)
class MemberCounts:
    """An operator of a group; it moves nothing itself."""

    name: str
    kind: str
    operator_class: OperatorClass
    flop: Count


@dataclass(frozen=True)
class OperatorCounts:
    """Counts of one operator.

    :ivar operator_class: of a group, the first of contraction, statistical normalization and element-wise that one of
        its members has.
    :ivar dims: what it iterates over, in legend letters.
    :ivar reads, writes: containers.
    :ivar bytes_by_dtype: bytes moved by the containers' scalar type.
    :ivar members: the operators of a group, in order.
    """

    name: str
    kind: str
    operator_class: OperatorClass
    direction: str
    counts: Counts
    dims: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    bytes_by_dtype: dict[str, Count]
    members: tuple[MemberCounts, ...] = ()

    def flop_by_class(self) -> dict[OperatorClass, Count]:
        """Flop by the class of what does them: members of a group may be of several."""
        found: dict[OperatorClass, Count] = {}
        for member in self.members:
            found[member.operator_class] = found.get(member.operator_class, 0) + member.flop
        return found or {self.operator_class: self.counts.flop}


@dataclass(frozen=True)
class GraphCounts:
    """Counts of a training graph in canonical form, by direction and by operator.

    :ivar compulsory: by direction, the bytes of all arguments and kept containers, each moved once: what even one
        kernel for the whole direction moves.
    """

    forward: Counts
    backward: Counts | None
    by_operator: tuple[OperatorCounts, ...] = field(default=())
    compulsory: dict[str, Count] = field(default_factory=dict)

    @property
    def total(self) -> Counts:
        """Both directions together; what is kept is counted once."""
        if self.backward is None:
            return self.forward
        both = self.forward + self.backward
        return Counts(**{f.name: getattr(both, f.name) for f in fields(both)} | {"kept_bytes": self.forward.kept_bytes})

    def by_class(self) -> dict[OperatorClass, Counts]:
        """Counts of each of the paper's three classes: flop by what does them, the rest by the class of the kernel."""
        totals = dict.fromkeys(OperatorClass, Counts())
        for operator in self.by_operator:
            totals[operator.operator_class] += replace(operator.counts, flop=0)
            for kind, flop in operator.flop_by_class().items():
                totals[kind] += Counts(flop=flop)
        return totals

    def to_manifest(self) -> dict[str, Any]:
        """The counts as a stage's entry in a build's manifest has them."""
        backward = None if self.backward is None else self.backward.to_manifest()
        return {**self.total.to_manifest(), "forward": self.forward.to_manifest(), "backward": backward}


def count_graph(graph: TrainingGraph) -> GraphCounts:
    """Count a training graph in canonical form."""
    by_operator: list[OperatorCounts] = []
    directions: dict[str, Counts] = {}
    compulsory: dict[str, Count] = {}
    kept = sum((_bytes(graph.forward, name) for name in graph.kept), start=sympy.Integer(0))
    for direction, sdfg in graph.graphs():
        own = _count_operators(direction, sdfg)
        by_operator += own
        summed = sum((operator.counts for operator in own), start=Counts())
        extra = Counts(containers=len(sdfg.arrays), kept_bytes=kept)
        directions[direction] = summed + extra
        compulsory[direction] = sum(
            (_bytes(sdfg, name) for name, descriptor in sdfg.arrays.items() if not descriptor.transient),
            start=sympy.Integer(0),
        )
    return GraphCounts(directions["forward"], directions.get("backward"), tuple(by_operator), compulsory)


def kernel_nodes(sdfg: SDFG) -> Iterator[tuple[SDFG, SDFGState, nodes.Node]]:
    """Kernels of a lowered graph: its outermost maps, and tasklets and library calls outside any map."""
    for state in sdfg.states():
        scopes = state.scope_dict()
        for node in state.nodes():
            if scopes[node] is not None:
                continue
            if isinstance(node, nodes.NestedSDFG):
                yield from kernel_nodes(node.sdfg)
            elif isinstance(node, nodes.MapEntry | nodes.Tasklet | nodes.LibraryNode):
                yield sdfg, state, node


def count_kernels(sdfg: SDFG) -> int:
    """The number of kernels of a lowered graph."""
    return sum(1 for _ in kernel_nodes(sdfg))


def _count_operators(direction: str, sdfg: SDFG) -> list[OperatorCounts]:
    state = the_state(sdfg)
    return [_count_operator(direction, sdfg, state, node) for node in operators(sdfg)]


def _count_operator(direction: str, sdfg: SDFG, state: SDFGState, node: Operator) -> OperatorCounts:
    sizes = {letter: _free(extent) for letter, extent in node.sizes(sdfg, state).items()}
    by_dtype: dict[str, Count] = {}
    words: dict[bool, Count] = {True: 0, False: 0}
    names: dict[bool, list[str]] = {True: [], False: []}
    seen: set[tuple[Any, ...]] = set()
    dims = node.operand_dims()
    for edge in state.all_edges(node):
        written = edge.src is node
        connector = edge.src_conn if written else edge.dst_conn
        name = edge.data.data
        operand = (name, *edge.data.subset.ranges)
        if operand in seen:
            continue
        seen.add(operand)
        if name not in names[written]:
            names[written].append(name)
        count = sympy.Integer(1)
        for letter in dims[connector]:
            count *= 2 if letter == "2" else sizes[letter]
        words[written] += count
        descriptor = sdfg.arrays[name]
        dtype = descriptor.dtype.to_string()
        by_dtype[dtype] = by_dtype.get(dtype, 0) + count * descriptor.dtype.bytes
    members = _count_members(node, sizes)
    flop = sympy.Add(*(member.flop for member in members)) if members else node.flop(sizes)
    present = {member.operator_class for member in members} or {node.operator_class}
    return OperatorCounts(
        node.name,
        type(node).__name__,
        next(kind for kind in OperatorClass if kind in present),
        direction,
        Counts(1, 0, flop, words[False], words[True], sympy.Add(*by_dtype.values())),
        node.dims,
        tuple(sorted(names[False])),
        tuple(sorted(names[True])),
        by_dtype,
        members,
    )


def _count_members(node: Operator, sizes: dict[str, Any]) -> tuple[MemberCounts, ...]:
    if not isinstance(node, RowGroup | TiledGroup):
        return ()
    listed = (member.operator for member in node.members)
    return tuple(MemberCounts(o.name, type(o).__name__, o.operator_class, o.flop(sizes)) for o in listed)


def _bytes(sdfg: SDFG, name: str) -> sympy.Expr:
    """What a container takes in memory, the padding of its layout included."""
    descriptor = sdfg.arrays[name]
    size = 1 if isinstance(descriptor, data.Scalar) else descriptor.total_size
    return _free(size) * descriptor.dtype.bytes


@lru_cache(maxsize=1024)
def _free(extent: Any) -> sympy.Expr:
    """An extent in plain symbols: DaCe's carry assumptions that make equal names differ."""
    expression = sympy.sympify(extent)
    return expression.subs({symbol: sympy.Symbol(symbol.name) for symbol in expression.free_symbols})
