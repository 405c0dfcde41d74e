"""Counts of a training graph in canonical form: kernels, flop, words and bytes moved, bytes kept.

The counting rule is that of ``docs/counting.md``: each operator is a kernel that reads each distinct input once and
writes each output once.

Dimension legend: B batch, S query position, T key position, H head, P head size, E embedding, U feed-forward size.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any

import sympy
from dace import data
from dace.sdfg import SDFG, nodes

from stepdown.models.operators import OperatorClass
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
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}


@dataclass(frozen=True)
class OperatorCounts:
    """Counts of one operator: its name, kind and class."""

    name: str
    kind: str
    operator_class: OperatorClass
    direction: str
    counts: Counts


@dataclass(frozen=True)
class GraphCounts:
    """Counts of a training graph by direction and by operator."""

    forward: Counts
    backward: Counts | None
    by_operator: tuple[OperatorCounts, ...] = field(default=())

    @property
    def total(self) -> Counts:
        """Both directions together; what is kept is counted once."""
        if self.backward is None:
            return self.forward
        both = self.forward + self.backward
        return Counts(**{f.name: getattr(both, f.name) for f in fields(both)} | {"kept_bytes": self.forward.kept_bytes})

    def by_class(self) -> dict[OperatorClass, Counts]:
        """Counts of each of the paper's three classes."""
        totals = dict.fromkeys(OperatorClass, Counts())
        for operator in self.by_operator:
            totals[operator.operator_class] += operator.counts
        return totals

    def to_manifest(self) -> dict[str, Any]:
        """The counts as a stage's entry in a build's manifest has them."""
        backward = None if self.backward is None else self.backward.to_manifest()
        return {**self.total.to_manifest(), "forward": self.forward.to_manifest(), "backward": backward}


def count_graph(graph: TrainingGraph) -> GraphCounts:
    """Count a training graph in canonical form."""
    by_operator: list[OperatorCounts] = []
    directions: dict[str, Counts] = {}
    kept = sum((_bytes(graph.forward, name) for name in graph.kept), start=sympy.Integer(0))
    for direction, sdfg in graph.graphs():
        own = _count_operators(direction, sdfg)
        by_operator += own
        summed = sum((operator.counts for operator in own), start=Counts())
        extra = Counts(containers=len(sdfg.arrays), kept_bytes=kept)
        directions[direction] = summed + extra
    return GraphCounts(directions["forward"], directions.get("backward"), tuple(by_operator))


def count_kernels(sdfg: SDFG) -> int:
    """Kernels of a lowered graph: its outermost maps, and tasklets outside any map."""
    kernels = 0
    for state in sdfg.states():
        scopes = state.scope_dict()
        for node in state.nodes():
            if scopes[node] is not None:
                continue
            if isinstance(node, nodes.NestedSDFG):
                kernels += count_kernels(node.sdfg)
            elif isinstance(node, (nodes.MapEntry, nodes.Tasklet, nodes.LibraryNode)):
                kernels += 1
    return kernels


def _count_operators(direction: str, sdfg: SDFG) -> list[OperatorCounts]:
    state = the_state(sdfg)
    found: list[OperatorCounts] = []
    for node in operators(sdfg):
        sizes = {letter: _free(extent) for letter, extent in node.sizes(sdfg, state).items()}
        moved: Count = 0
        words: dict[bool, Count] = {True: 0, False: 0}
        seen: set[tuple[Any, ...]] = set()
        dims = node.operand_dims()
        for edge in state.all_edges(node):
            written = edge.src is node
            connector = edge.src_conn if written else edge.dst_conn
            operand = (edge.data.data, *edge.data.subset.ranges)
            if operand in seen:
                continue
            seen.add(operand)
            count = sympy.Integer(1)
            for letter in dims[connector]:
                count *= 2 if letter == "2" else sizes[letter]
            words[written] += count
            moved += count * sdfg.arrays[edge.data.data].dtype.bytes
        counts = Counts(1, 0, node.flop(sizes), words[False], words[True], moved)
        found.append(OperatorCounts(node.name, type(node).__name__, node.operator_class, direction, counts))
    return found


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


def _plain(count: Count) -> int | str:
    expression = sympy.expand(count)
    return int(expression) if expression.is_Integer else str(expression)
