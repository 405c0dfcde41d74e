"""``Recompute``: what forward keeps for backward, and what backward computes again instead, chosen by bytes.

Dimension legend: B batch, S query position, T key position, H head, P head size, E embedding, U feed-forward size.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import combinations

from dace.sdfg.nodes import LibraryNode

from stepdown.models.errors import OptionError
from stepdown.models.operators import MEMBER_KINDS, Operator
from stepdown.transformations.canonical_form import name_is_output
from stepdown.transformations.dataflow import Dataflow, derive_kept
from stepdown.transformations.fusion.plan_row_groups import (
    NOMINAL,
    Container,
    RowGroupPlanner,
    Use,
    containers_of,
    uses_of,
)
from stepdown.transformations.training_graph import TrainingGraph

CLONE = "_again"
"""Ends the name of an operator that computes in backward what the operator of the same name computes in forward."""

Chosen = frozenset[int]
"""Operators of forward, by their places in the order of execution, whose kept results backward computes again."""


@dataclass(frozen=True)
class Recompute:
    """The pass; ``recompute`` on the command line.

    A kept container that a row or element-wise operator writes need not be kept: a clone of the operator in the
    backward graph computes it from the operator's operands, which are arguments of the layer, its output, kept
    themselves, or computed again in turn. Contractions are never cloned: their results are kept where a clone reads
    them. Dropout draws the same mask again from (seed, offset).

    Bytes moved are those of both graphs once their row and element-wise operators are grouped as
    ``fuse-row-operators`` does: a clone that shares a kernel with a reader of its result costs no memory traffic, and
    what is kept no longer may never be written at all. Without a budget an operator is cloned where fewer bytes are
    kept or moved and more of neither. With one, clones are added in the order of bytes saved for each extra byte
    moved until the kept bytes are within it; within it, fewer bytes moved are preferred.

    :ivar memory_budget: most bytes to keep, at the nominal sizes of
        :mod:`stepdown.transformations.fusion.plan_row_groups` where batch or sequence length is symbolic.
    """

    memory_budget: int | None = None

    def apply(self, graph: TrainingGraph) -> tuple[TrainingGraph, str]:
        """Change both graphs in place; returns the graph and a line about what changed.

        :raises OptionError: when no choice keeps as few bytes as the budget says.
        """
        if graph.backward is None:
            return graph, "nothing is kept"
        search = _Search(graph)
        before = search.outcome(frozenset())
        after = search.run(self.memory_budget)
        if not after.clones:
            return graph, f"{before.kept_bytes} bytes kept, nothing computed again"
        _write(graph, search, after)
        return (
            derive_kept(graph),
            f"{after.kept_bytes} bytes kept instead of {before.kept_bytes}, {after.moved_bytes} moved instead of "
            f"{before.moved_bytes}, {len(after.clones)} operators computed again",
        )


@dataclass(frozen=True)
class _Outcome:
    """What a choice leads to.

    :ivar clones: operators of forward to be cloned, in order.
    """

    clones: tuple[int, ...]
    kept: frozenset[str]
    kept_bytes: int
    moved_bytes: int

    @property
    def rank(self) -> tuple[int, int]:
        """What is smaller is better."""
        return self.moved_bytes, self.kept_bytes


class _Search:
    """Chooses what to compute again; the graphs are not touched."""

    def __init__(self, graph: TrainingGraph) -> None:
        assert graph.backward is not None
        self.forward_containers = containers_of(graph.forward)
        self.backward_containers = containers_of(graph.backward)
        self.forward = uses_of(graph.forward, self.forward_containers)
        self.backward = uses_of(graph.backward, self.backward_containers)
        self.kept = frozenset(graph.kept)
        self.symbols = {
            str(symbol) for name in graph.kept for symbol in graph.forward.arrays[name].free_symbols
        } & NOMINAL.keys()
        self.writer = {name: place for place, use in enumerate(self.forward) for name in use.writes}
        self.outputs = {name for name in self.writer if name_is_output(graph.forward, name)}
        self.backward_writer = {name: place for place, use in enumerate(self.backward) for name in use.writes}
        self.there = {name for name in self.backward_writer if self._same_value(name)}
        self.taken = self.backward_writer.keys() - self.there
        self.candidates = [
            place for place, use in enumerate(self.forward) if self._can_be_cloned(use) and use.writes & self.kept
        ]
        self._outcomes: dict[Chosen, _Outcome] = {}
        self._clones: dict[tuple[int, frozenset[str]], Use] = {}
        self._known: dict[tuple[object, ...], bool] = {}
        self._forward_moved: dict[frozenset[str], int] = {}

    # ---- the search ------------------------------------------------------------------------------------------------

    def run(self, budget: int | None) -> _Outcome:
        """The best choice found.

        :raises OptionError: when nothing found is within the budget.
        """
        chosen = self._improve(frozenset(), None)
        if budget is not None:
            chosen = self._improve(self._reach(chosen, budget), budget)
        return self.outcome(chosen)

    def _improve(self, chosen: Chosen, budget: int | None) -> Chosen:
        """Add and take back single operators while that is better: no more kept, unless there is room, nor moved."""
        while True:
            now = self.outcome(chosen)
            better: list[tuple[tuple[int, int], int]] = []
            for place in self.candidates:
                other = self.outcome(chosen ^ {place})
                no_worse = other.kept_bytes <= now.kept_bytes and other.moved_bytes <= now.moved_bytes
                room = budget is not None and other.kept_bytes <= budget and other.moved_bytes < now.moved_bytes
                if (no_worse and other.rank != now.rank) or room:
                    better.append((other.rank, place))
            if not better:
                return chosen
            chosen ^= {min(better)[1]}

    def _reach(self, chosen: Chosen, budget: int) -> Chosen:
        """Add operators, those first that save the most for each byte moved more, until the budget is kept."""
        everything = frozenset(self.candidates)
        while self.outcome(chosen).kept_bytes > budget:
            additions = self._reductions(chosen, 1) or self._reductions(chosen, 2)
            if additions:
                chosen |= max(additions)[1]
            elif chosen != everything and self.outcome(everything).kept_bytes < self.outcome(chosen).kept_bytes:
                chosen = everything
            else:
                least = self.outcome(chosen).kept_bytes
                nominal = " and ".join(f"{letter}={NOMINAL[letter]}" for letter in sorted(self.symbols))
                sizes = f" at {nominal}" if nominal else ""
                raise OptionError(
                    f'"memory_budget" is {budget} bytes; accepted are at least {least}, what forward keeps{sizes} '
                    "when backward computes again all that it can."
                )
        return chosen

    def _reductions(self, chosen: Chosen, number: int) -> list[tuple[tuple[float, int], Chosen]]:
        """Ways of adding ``number`` operators that keep fewer bytes, each with how good it is."""
        now = self.outcome(chosen)
        found: list[tuple[tuple[float, int], Chosen]] = []
        for added in combinations([place for place in self.candidates if place not in chosen], number):
            other = self.outcome(chosen | set(added))
            saved, extra = now.kept_bytes - other.kept_bytes, other.moved_bytes - now.moved_bytes
            if saved > 0:
                found.append(((saved / extra if extra > 0 else float("inf"), saved), frozenset(added)))
        return found

    # ---- what a choice leads to ------------------------------------------------------------------------------------

    def outcome(self, chosen: Chosen) -> _Outcome:
        """What is cloned, kept and moved."""
        if chosen not in self._outcomes:
            self._outcomes[chosen] = self._evaluate(chosen)
        return self._outcomes[chosen]

    def _evaluate(self, chosen: Chosen) -> _Outcome:
        clones = self._closure(chosen)
        uses = [*self.clones(clones), *self.backward]
        computed = {name for use in uses for name in use.writes}
        kept = frozenset({name for use in uses for name in use.reads} & set(self.writer) - computed - self.outputs)
        forward = dict(self.forward_containers)
        for name in self.kept ^ kept:
            forward[name] = replace(forward[name], transient=name not in kept)
        backward = dict(self.backward_containers)
        for use in uses[: len(clones)]:
            backward |= {name: replace(forward[name], transient=False) for name in use.reads - backward.keys()}
            backward |= {name: replace(forward[name], transient=True) for name in use.writes}
        if kept not in self._forward_moved:
            self._forward_moved[kept] = self._moved(self.forward, forward)
        moved = self._forward_moved[kept] + self._moved(uses, backward)
        return _Outcome(clones, kept, sum(forward[name].bytes for name in kept), moved)

    def _moved(self, uses: list[Use], containers: Mapping[str, Container]) -> int:
        return RowGroupPlanner(uses, containers, known=self._known).moved_bytes()

    def _closure(self, chosen: Iterable[int]) -> tuple[int, ...]:
        """The chosen operators and those that compute what they read and backward has not got."""
        clones: set[int] = set()
        pending = list(chosen)
        dropped = {name for place in chosen for name in self.forward[place].writes}
        while pending:
            place = pending.pop()
            if place in clones:
                continue
            clones.add(place)
            for name in self.forward[place].reads:
                if name not in self.writer or name in self.outputs or name in self.there:
                    continue  # an argument, the layer's output, or computed again before
                source = self.writer[name]
                if (name not in self.kept or name in dropped) and self._can_be_cloned(self.forward[source]):
                    pending.append(source)
        return tuple(sorted(clones))

    def _can_be_cloned(self, use: Use) -> bool:
        """A row or element-wise operator whose containers' names do not stand for other values in backward."""
        free = not (use.writes & self.backward_writer.keys()) and not (use.reads & self.taken)
        return free and use.whole and type(use.operator).__name__ in MEMBER_KINDS

    def _same_value(self, name: str) -> bool:
        """Whether a container has the same value in both graphs: an operator's clone wrote it in backward."""
        if name not in self.backward_writer:
            return True
        if name not in self.writer:
            return False
        one, other = self.forward[self.writer[name]], self.backward[self.backward_writer[name]]
        return (
            _formula(one) == _formula(other)
            and all(one.values.get(connector) == value for connector, value in other.values.items())
            and all(self._same_value(operand) for operand in other.reads)
        )

    def clones(self, places: Iterable[int]) -> list[Use]:
        """The clones of operators of forward, without statistics that backward does not read."""
        uses = [self.forward[place] for place in places]
        read = {name for use in (*uses, *self.backward) for name in use.reads}
        found: list[Use] = []
        for place, use in zip(places, uses, strict=True):
            extra = set(use.operator.extra_outputs)
            values = {c: name for c, name in use.values.items() if c not in extra or name in read}
            key = (place, frozenset(values))
            if key not in self._clones:
                self._clones[key] = Use(_clone(use.operator, values), values, use.moved)
            found.append(self._clones[key])
        return found


def _formula(use: Use) -> tuple[object, ...]:
    """What an operator computes of its operands: everything but its name."""
    skipped = {prop.attr_name for prop in LibraryNode.__properties__.values()}
    options = {prop.attr_name: value for prop, value in use.operator.properties() if prop.attr_name not in skipped}
    return type(use.operator), use.whole, options


def _clone(operator: Operator, connectors: Iterable[str]) -> Operator:
    clone = copy.deepcopy(operator)
    clone.name = clone.label = f"{operator.name}{CLONE}"
    for connector in set(clone.out_connectors) - set(connectors):
        clone.remove_out_connector(connector)
    return clone


def _write(graph: TrainingGraph, search: _Search, outcome: _Outcome) -> None:
    """Put the clones into the backward graph; what they write is no argument of it any more."""
    assert graph.backward is not None
    flow = Dataflow(graph.backward)
    for use in search.clones(outcome.clones):
        for name in sorted(use.reads):
            flow.declare(graph.forward, name)
        for name in sorted(use.writes):
            flow.declare(graph.forward, name)
            graph.backward.arrays[name].transient = True
        inputs = {c: use.values[c] for c in use.values if use.values[c] in use.reads}
        outputs = {c: use.values[c] for c in use.values if use.values[c] in use.writes}
        flow.add(use.operator, inputs, outputs)
