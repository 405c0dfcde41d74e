"""``AccumulateIntoContractions``: a sum with a contraction's result becomes the contraction's addend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stepdown.models.operators import Add, Contraction
from stepdown.transformations.dataflow import Dataflow, connected
from stepdown.transformations.fusion.plan_row_groups import (
    Container,
    RowGroupPlanner,
    Use,
    containers_of,
    uses_of,
)
from stepdown.transformations.training_graph import TrainingGraph


@dataclass(frozen=True)
class AccumulateIntoContractions:
    """The pass; ``accumulate-into-contractions`` on the command line.

    ``p = alpha a.b; y = p + c`` becomes ``y = alpha a.b + c`` (operand ``c``, beta = 1) where the sum is the only
    reader of ``p``. An addition alone then moves ``c`` and ``y`` instead of ``p`` twice, ``c`` and ``y``. One that a
    row kernel takes in for free saves nothing: the kernel reads ``y`` instead of ``p`` and ``c``, and the contraction
    reads ``c``. So the rule is to count: additions are folded, one by one or several in a row, where the kernels of the
    graph, with their row and element-wise operators grouped as ``fuse-row-operators`` does, then move fewer bytes. The
    lowering lets ``y`` share the memory of ``c`` where ``c`` is dead afterwards.
    """

    def apply(self, graph: TrainingGraph) -> tuple[TrainingGraph, str]:
        """Fold in place; returns the graph and a line about what changed."""
        folded = 0
        for _, sdfg in graph.graphs():
            containers = containers_of(sdfg)
            uses = uses_of(sdfg, containers)
            for node, connector in _choose(uses, containers):
                _fold(Dataflow(sdfg), node, connector)
                folded += 1
        return graph, f"{folded} additions folded into contractions"


@dataclass(frozen=True)
class _Candidate:
    """An addition, the operand that is the contraction's result, and the places of both in the order of execution."""

    addition: int
    contraction: int
    connector: str


def _candidates(uses: Sequence[Use], containers: Mapping[str, Container]) -> list[_Candidate]:
    """Additions that can be folded; of two contractions, the one that runs later takes the addition."""
    writer = {name: place for place, use in enumerate(uses) for name in use.writes}
    readers: dict[str, int] = {}
    for use in uses:
        for connector, name in use.values.items():
            readers[name] = readers.get(name, 0) + (connector in use.operator.in_connectors)
    taken: set[int] = set()
    found: list[_Candidate] = []
    for place, use in enumerate(uses):
        if not isinstance(use.operator, Add):
            continue
        options = [
            _Candidate(place, writer[name], connector)
            for connector, name in use.values.items()
            if connector in use.operator.in_connectors
            and name in writer
            and writer[name] not in taken
            and containers[name].transient
            and readers[name] == 1
            and _can_take_an_addend(use, uses[writer[name]])
        ]
        if options:
            best = max(options, key=lambda option: option.contraction)
            taken.add(best.contraction)
            found.append(best)
    return found


def _can_take_an_addend(addition: Use, writer: Use) -> bool:
    contraction = writer.operator
    return addition.whole and writer.whole and isinstance(contraction, Contraction) and not contraction.accumulate


def _chains(uses: Sequence[Use], candidates: Sequence[_Candidate]) -> list[list[_Candidate]]:
    """Candidates connected through their results, each set in the order of execution."""
    return connected((candidate, set(uses[candidate.addition].values.values())) for candidate in candidates)


def _choose(uses: Sequence[Use], containers: Mapping[str, Container]) -> list[tuple[Add, str]]:
    """The additions whose folding saves bytes: of every chain, the run that saves the most, until none saves any."""
    candidates = _candidates(uses, containers)
    known: dict[tuple[object, ...], bool] = {}
    folded_forms: dict[_Candidate, Use] = {}

    def moved(chosen: Sequence[_Candidate]) -> int:
        return RowGroupPlanner(_folded(uses, containers, chosen, folded_forms), containers, known=known).moved_bytes()

    chosen: list[_Candidate] = []
    least = moved(chosen) if candidates else 0
    for chain in _chains(uses, candidates):
        rest = list(chain)
        while rest:
            runs = [rest[first:last] for first in range(len(rest)) for last in range(first + 1, len(rest) + 1)]
            moves = [(moved([*chosen, *run]), len(run), place) for place, run in enumerate(runs)]
            best, _, place = min(moves)
            if best >= least:
                break
            least, run = best, runs[place]
            chosen += run
            rest = [candidate for candidate in rest if candidate not in run]
    nodes: list[tuple[Add, str]] = []
    for candidate in chosen:
        node = uses[candidate.addition].operator
        assert isinstance(node, Add)
        nodes.append((node, candidate.connector))
    return nodes


def _folded(
    uses: Sequence[Use],
    containers: Mapping[str, Container],
    chosen: Sequence[_Candidate],
    forms: dict[_Candidate, Use],
) -> list[Use]:
    """The operators as they are once the chosen additions are folded."""
    result = list(uses)
    for candidate in chosen:
        if candidate not in forms:
            addition, writer = uses[candidate.addition], uses[candidate.contraction]
            old = writer.operator
            assert isinstance(old, Contraction)
            node = Contraction(old.name, old.einsum, old.alpha, accumulate=True)
            node.add_in_connector("a")
            node.add_out_connector("d")
            values = {**writer.values, "d": addition.values["y"], "c": addition.values[_other(candidate.connector)]}
            moved = {name: writer.moved.get(name, containers[name].bytes) for name in values.values()}
            forms[candidate] = Use(node, values, moved)
        result[candidate.addition] = forms[candidate]
    gone = {candidate.contraction for candidate in chosen}
    return [use for place, use in enumerate(result) if place not in gone]


def _other(connector: str) -> str:
    return "b" if connector == "a" else "a"


def _fold(flow: Dataflow, node: Add, connector: str) -> None:
    """Replace an addition by the addend of the contraction whose result is its operand ``connector``."""
    operands = flow.operands(node)
    product, addend, result = operands[connector], operands[_other(connector)], operands["y"]
    contraction = flow.writer(product)
    assert isinstance(contraction, Contraction)
    contraction.accumulate = True
    flow.connect_input(contraction, "c", addend)
    flow.write_instead(contraction, "d", result)
    flow.remove_operator(node)
