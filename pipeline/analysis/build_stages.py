"""The saved stages of a build, analyzed, and two of them compared.

Dimension legend: B batch, S query position, T key position, H head, P head size, E embedding, U feed-forward size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from stepdown.models.errors import OptionError
from stepdown.pipeline.analysis.expressions import Number, evaluate
from stepdown.pipeline.analysis.listing import load_graph
from stepdown.pipeline.analysis.machine import MeasuredTimes
from stepdown.pipeline.analysis.operators import Analysis, OperatorRecord, analyze, sum_of
from stepdown.pipeline.build_folder import BuildFolder
from stepdown.transformations.training_graph import TrainingGraph

Sizes = Mapping[str, int | None]
COMPARED = ("operators", "kernels", "flop", "words", "bytes_moved", "kept_bytes")
"""What is compared of two stages."""


def load_stage(build: BuildFolder, name: str) -> TrainingGraph:
    """The graphs that stage ``name`` left.

    :raises OptionError: when the stage is unknown or left no graph.
    :raises CanonicalFormError: when a graph cannot be read.
    """
    forward, backward = build.graph_file(name, "forward"), build.graph_file(name, "backward")
    if forward is None:
        raise OptionError(f'Stage "{name}" left no graph in "{build.path}/stages"; accepted is a stage with one.')
    entry = build.stage(name)
    kept = tuple(entry.get("kept", ()))
    stacks = {stack: tuple(members) for stack, members in entry.get("stacks", {}).items()}
    return TrainingGraph(load_graph(forward), None if backward is None else load_graph(backward), kept, stacks)


def saved_stages(build: BuildFolder) -> tuple[str, ...]:
    """The stages that left a graph, in order."""
    return tuple(name for name in build.stage_names if build.graph_file(name, "forward") is not None)


def canonical_stages(build: BuildFolder) -> tuple[str, ...]:
    """The stages among them whose graphs are in canonical form."""
    return tuple(name for name in saved_stages(build) if build.stage(name).get("canonical", True))


def analyze_stage(
    build: BuildFolder,
    name: str | None,
    sizes: Sizes,
    times: MeasuredTimes | None = None,
    load: Callable[[str], TrainingGraph] | None = None,
) -> tuple[str, Analysis]:
    """The analysis of stage ``name``, by default of the last one in canonical form, and the stage's name.

    :param load: gives the graphs of a stage; one that remembers them saves time where several stages are analyzed.
    :raises OptionError: when the stage is unknown or left no graph, or none is in canonical form.
    """
    before = canonical_stages(build)
    if not before:
        raise OptionError(f'"{build.path}" holds no graph in canonical form; accepted is a build with one.')
    chosen = name or before[-1]
    read = load or partial(load_stage, build)
    graph = read(chosen)
    if chosen in before:
        return chosen, analyze(graph, sizes, times=times)
    names = build.stage_names
    (*_, last) = (stage for stage in before if names.index(stage) < names.index(chosen))
    return chosen, analyze(graph, sizes, canonical=read(last), times=times)


@dataclass(frozen=True)
class OperatorChange:
    """An operator before and after; None on the side where it is not.

    :ivar groups: of one that is gone, the groups that it became a member of; of a group that is new or has changed, the
        members that were operators of their own before.
    """

    direction: str
    name: str
    before: OperatorRecord | None
    after: OperatorRecord | None
    groups: tuple[str, ...] = ()


@dataclass(frozen=True)
class StageDifference:
    """What became of one stage's operators in another one.

    :ivar totals: by direction (``both`` included), every one of :data:`COMPARED` before and after; None where one of
        the stages has no such direction.
    """

    before: str
    after: str
    totals: dict[str, dict[str, tuple[Number | None, Number | None]]]
    gone: tuple[OperatorChange, ...]
    new: tuple[OperatorChange, ...]
    changed: tuple[OperatorChange, ...]

    def to_dict(self) -> dict[str, Any]:
        """The difference as JSON holds it."""
        return asdict(self)


def compare_stages(build: BuildFolder, before: str, after: str, sizes: Sizes) -> StageDifference:
    """Compare two stages of a build.

    :raises OptionError: when a stage is unknown or left no graph.
    """
    (_, old), (_, new) = (analyze_stage(build, name, sizes) for name in (before, after))
    olds = {(record.direction, record.name): record for record in old.operators}
    news = {(record.direction, record.name): record for record in new.operators}
    holders: dict[tuple[str, str], list[str]] = {}
    for record in new.operators:
        for member in record.members:
            holders.setdefault((record.direction, member.name), []).append(record.name)
    gone = [
        OperatorChange(*key, record, None, tuple(holders.get(key, ())))
        for key, record in olds.items()
        if key not in news
    ]
    added = [
        OperatorChange(*key, None, record, _taken(record, olds)) for key, record in news.items() if key not in olds
    ]
    changed = [
        OperatorChange(*key, olds[key], record, _taken(record, olds))
        for key, record in news.items()
        if key in olds and _differs(olds[key], record)
    ]
    directions = dict.fromkeys((*new.totals, *old.totals))
    return StageDifference(
        before,
        after,
        {
            direction: _both_sides(
                _totals(build.stage(before), old, direction, sizes), _totals(build.stage(after), new, direction, sizes)
            )
            for direction in directions
        },
        tuple(gone),
        tuple(added),
        tuple(changed),
    )


def _taken(record: OperatorRecord, olds: Mapping[tuple[str, str], OperatorRecord]) -> tuple[str, ...]:
    names = (member.name for member in record.members)
    return tuple(name for name in names if name != record.name and (record.direction, name) in olds)


def _differs(old: OperatorRecord, new: OperatorRecord) -> bool:
    compared = ("kind", "flop", "words_in", "words_out", "bytes_moved", "reads", "writes", "members")
    return any(getattr(old, name) != getattr(new, name) for name in compared)


def _totals(stage: Mapping[str, Any], analysis: Analysis, direction: str, sizes: Sizes) -> dict[str, Number | None]:
    total = analysis.totals.get(direction)
    if total is None:
        return dict.fromkeys(COMPARED)
    part = stage if direction == "both" else stage.get(direction) or stage
    return {
        "operators": total.operators,
        "kernels": part.get("kernels"),
        "flop": total.flop,
        "words": sum_of((total.words_in, total.words_out)),
        "bytes_moved": total.bytes_moved,
        "kept_bytes": None if part.get("kept_bytes") is None else evaluate(part["kept_bytes"], sizes),
    }


def _both_sides(
    before: Mapping[str, Number | None], after: Mapping[str, Number | None]
) -> dict[str, tuple[Number | None, Number | None]]:
    return {name: (before[name], after[name]) for name in COMPARED}
