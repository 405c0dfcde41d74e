"""The operators of a stage with what they cost: class, flop, words, bytes, intensity, kernels, members, MUE.

A stage in canonical form is counted by :mod:`stepdown.pipeline.analysis.counts`. In a lowered graph every operator is a
nested graph of its own name: flop, class, words and lower bound are those of the canonical graph before it, bytes moved
and kernels those of the maps and calls inside it.

Dimension legend: B batch, S query position, T key position, H head, P head size, E embedding, U feed-forward size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import sympy
from dace import data
from dace.sdfg import SDFG, SDFGState, nodes

from stepdown.models.operators import OperatorClass
from stepdown.pipeline.analysis.counts import Counts, GraphCounts, OperatorCounts, count_graph, kernel_nodes
from stepdown.pipeline.analysis.expressions import Number, as_number
from stepdown.pipeline.analysis.machine import Machine, MeasuredTimes
from stepdown.transformations.training_graph import TrainingGraph

BOTH = "both"
_SYMBOLS = {letter: sympy.Symbol(letter) for letter in "BS"}
Sizes = Mapping[str, int | None]


@dataclass(frozen=True)
class MemberRecord:
    """An operator of a group."""

    name: str
    kind: str
    operator_class: str
    flop: Number


@dataclass(frozen=True)
class KernelRecord:
    """A map, tasklet or library call of a lowered operator, with the bytes of what it reads and writes."""

    name: str
    kind: str
    bytes_moved: Number


@dataclass(frozen=True)
class OperatorRecord:
    """One operator. Numbers that the sizes leave open are text in B and S.

    :ivar operator_class: contraction, statistical normalization or element-wise (the paper's Table 1); of a group, the
        first of these that a member has.
    :ivar words_in, words_out: elements read and written.
    :ivar bytes_moved: what its kernels read and write, each distinct container once for each kernel.
    :ivar bytes_by_dtype: the same of the operator as one kernel, by scalar type.
    :ivar lower_bound: bytes of its distinct inputs and outputs: what any kernel for it moves (Q).
    :ivar intensity: flop for each byte moved.
    :ivar members: the operators of a group, in order.
    :ivar kernels: what it was lowered to; empty before.
    :ivar seconds: measured, or None.
    :ivar mue: memory usage efficiency in percent, ``Q/D * B/B_peak * 100`` with D the bytes moved and B = D / seconds;
        None without a time.
    """

    direction: str
    name: str
    kind: str
    operator_class: str
    dims: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    flop: Number
    words_in: Number
    words_out: Number
    bytes_moved: Number
    bytes_by_dtype: dict[str, Number]
    lower_bound: Number
    intensity: float | None
    members: tuple[MemberRecord, ...]
    kernels: tuple[KernelRecord, ...]
    seconds: float | None
    mue: float | None


@dataclass(frozen=True)
class Total:
    """Sums over operators: of a direction, or of a class in it.

    Shares are in percent of the direction, None where the sizes leave them open or there is nothing to share.

    :ivar lower_bound: sum of the operators' lower bounds.
    :ivar flop: of a class, what its operators do, members of groups of other classes included.
    """

    operators: int
    flop: Number
    words_in: Number
    words_out: Number
    bytes_moved: Number
    lower_bound: Number
    intensity: float | None
    seconds: float | None
    mue: float | None
    flop_share: float | None = None
    bytes_share: float | None = None
    seconds_share: float | None = None


@dataclass(frozen=True)
class Analysis:
    """A stage: its operators in order, totals by direction, and by direction and class.

    :ivar compulsory: by direction, bytes of arguments and kept containers, each moved once.
    :ivar machine: whose peak bandwidth MUE is relative to; None without times.
    """

    operators: tuple[OperatorRecord, ...]
    totals: dict[str, Total]
    classes: dict[str, dict[str, Total]]
    compulsory: dict[str, Number]
    machine: Machine | None = None

    @property
    def groups(self) -> tuple[OperatorRecord, ...]:
        """The operators that have members."""
        return tuple(record for record in self.operators if record.members)

    def to_dict(self) -> dict[str, Any]:
        """The analysis as JSON holds it."""
        return asdict(self)


def analyze(
    graph: TrainingGraph,
    sizes: Sizes | None = None,
    *,
    canonical: TrainingGraph | None = None,
    times: MeasuredTimes | None = None,
) -> Analysis:
    """Analyze a stage.

    :param graph: as the stage left it.
    :param sizes: evaluates counts at sizes B and S.
    :param canonical: for a lowered ``graph``, the canonical one before it; None where ``graph`` is canonical.
    :param times: measured seconds by operator.
    """
    known = sizes or {}
    counts = count_graph(canonical or graph)
    kernels: dict[tuple[str, str], list[KernelRecord]] = {}
    if canonical is not None:
        for direction, sdfg in graph.graphs():
            for name, record in _kernels(sdfg, known):
                kernels.setdefault((direction, name), []).append(record)
    records = []
    for operator in counts.by_operator:
        found = kernels.get((operator.direction, operator.name), [])
        records.append(_record(operator, tuple(found), known, times))
    directions = [BOTH] if counts.backward is not None else []
    directions += [direction for direction, _ in graph.graphs()]
    totals, classes = {}, {}
    for direction in directions:
        own = [record for record in records if direction in (BOTH, record.direction)]
        total = _total(own, times)
        totals[direction] = total
        classes[direction] = _class_totals(counts, own, total, direction, known, times)
    compulsory = {direction: as_number(value, known) for direction, value in counts.compulsory.items()}
    return Analysis(
        tuple(records), totals, classes, compulsory, None if times is None or not times.seconds else times.machine
    )


def sum_of(values: Iterable[Number | None]) -> Number:
    """The sum, as text where a term is."""
    numbers = [value for value in values if value is not None]
    if not any(isinstance(value, str) for value in numbers):
        return sum(value for value in numbers if not isinstance(value, str))
    return as_number(sympy.Add(*(sympy.sympify(value, locals=_SYMBOLS) for value in numbers)))


def ratio(value: Number | None, of: Number | None) -> float | None:
    """``value / of`` where both are known and there is something to divide by."""
    if value is None or of is None or isinstance(value, str) or isinstance(of, str) or not of:
        return None
    return value / of


def by_bytes(records: Iterable[OperatorRecord]) -> list[OperatorRecord]:
    """The operators that move most first; as they come where the sizes leave that open."""
    listed = list(records)
    if any(isinstance(record.bytes_moved, str) for record in listed):
        return listed
    return sorted(listed, key=lambda record: -float(record.bytes_moved))


def _record(
    operator: OperatorCounts, kernels: tuple[KernelRecord, ...], sizes: Sizes, times: MeasuredTimes | None
) -> OperatorRecord:
    counts = operator.counts
    bound = as_number(counts.bytes_moved, sizes)
    moved = sum_of(kernel.bytes_moved for kernel in kernels) if kernels else bound
    flop = as_number(counts.flop, sizes)
    seconds = None if times is None else times.of(operator.direction, operator.name)
    return OperatorRecord(
        direction=operator.direction,
        name=operator.name,
        kind=operator.kind,
        operator_class=operator.operator_class.value,
        dims=operator.dims,
        reads=operator.reads,
        writes=operator.writes,
        flop=flop,
        words_in=as_number(counts.words_in, sizes),
        words_out=as_number(counts.words_out, sizes),
        bytes_moved=moved,
        bytes_by_dtype={dtype: as_number(value, sizes) for dtype, value in operator.bytes_by_dtype.items()},
        lower_bound=bound,
        intensity=ratio(flop, moved),
        members=tuple(
            MemberRecord(member.name, member.kind, member.operator_class.value, as_number(member.flop, sizes))
            for member in operator.members
        ),
        kernels=kernels,
        seconds=seconds,
        mue=_mue(bound, seconds, times),
    )


def _mue(bound: Number, seconds: float | None, times: MeasuredTimes | None) -> float | None:
    """``Q/D * B/B_peak * 100``; the bytes moved cancel, because B is D in the measured time."""
    rate = ratio(bound, seconds)
    return None if rate is None or times is None else 100 * rate / times.machine.bandwidth


def _total(records: list[OperatorRecord], times: MeasuredTimes | None) -> Total:
    """Seconds and MUE are None unless every operator has a time."""
    measured = bool(records) and all(record.seconds is not None for record in records)
    seconds = sum(record.seconds or 0.0 for record in records) if measured else None
    names = ("flop", "words_in", "words_out", "bytes_moved", "lower_bound")
    sums: dict[str, Any] = {name: sum_of(getattr(record, name) for record in records) for name in names}
    return Total(
        operators=len(records),
        **sums,
        intensity=ratio(sums["flop"], sums["bytes_moved"]),
        seconds=seconds,
        mue=_mue(sums["lower_bound"], seconds, times),
    )


def _class_totals(
    counts: GraphCounts,
    records: list[OperatorRecord],
    total: Total,
    direction: str,
    sizes: Sizes,
    times: MeasuredTimes | None,
) -> dict[str, Total]:
    found: dict[str, Total] = {}
    flop = {kind: Counts() for kind in OperatorClass}
    for operator in counts.by_operator:
        if direction in (BOTH, operator.direction):
            for kind, own in operator.flop_by_class().items():
                flop[kind] += Counts(flop=own)
    for kind in OperatorClass:
        summed = _total([record for record in records if record.operator_class == kind.value], times)
        values = asdict(summed) | {"flop": as_number(flop[kind].flop, sizes)}
        shares = {
            f"{name}_share": _percent(ratio(values[whole], getattr(total, whole)))
            for name, whole in (("flop", "flop"), ("bytes", "bytes_moved"), ("seconds", "seconds"))
        }
        found[kind.value] = Total(**{**values, "intensity": ratio(values["flop"], summed.bytes_moved), **shares})
    return found


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _kernels(sdfg: SDFG, sizes: Sizes) -> Iterable[tuple[str, KernelRecord]]:
    """The kernels of a lowered graph, each with the name of the operator that it is a part of."""
    for state in sdfg.states():
        for node in state.nodes():
            if isinstance(node, nodes.NestedSDFG):
                for inner, own, kernel in kernel_nodes(node.sdfg):
                    yield node.label, _kernel(inner, own, kernel, sizes)


def _kernel(sdfg: SDFG, state: SDFGState, node: nodes.Node, sizes: Sizes) -> KernelRecord:
    last = state.exit_node(node) if isinstance(node, nodes.EntryNode) else node
    moved: sympy.Expr = sympy.Integer(0)
    for edges in (state.in_edges(node), state.out_edges(last)):
        seen: set[tuple[str, str]] = set()
        for edge in edges:
            operand = (str(edge.data.data), str(edge.data.subset))
            if edge.data.is_empty() or operand in seen or not isinstance(sdfg.arrays[edge.data.data], data.Array):
                continue
            seen.add(operand)
            elements = sympy.sympify(edge.data.subset.num_elements())
            moved += elements * sdfg.arrays[edge.data.data].dtype.bytes
    kind = "Map" if isinstance(node, nodes.MapEntry) else type(node).__name__
    return KernelRecord(str(node.label), kind, as_number(moved, sizes))
