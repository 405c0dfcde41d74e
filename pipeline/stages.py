"""The stages of the compiler, in order; each leaves a training graph that can be looked at.

``parse`` and ``differentiate`` leave graphs in canonical form, which is validated after them. ``lower`` and
``schedule`` leave graphs of maps and library calls, which DaCe validates. ``generate`` and ``bind`` change no graph:
they are the compiler proper (:mod:`stepdown.pipeline.generate`) and the interface of the libraries.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import dace
from dace.sdfg import SDFG, nodes

from stepdown.models.definition import EncoderLayer
from stepdown.models.dtypes import DataType
from stepdown.models.encoder import INPUT, OUTPUT, encoder_program
from stepdown.models.errors import OptionError
from stepdown.pipeline.analysis.counts import GraphCounts, count_graph
from stepdown.pipeline.target import Target
from stepdown.transformations.algebraic.accumulate_into_contractions import AccumulateIntoContractions
from stepdown.transformations.algebraic.fold_scales import FoldScales
from stepdown.transformations.algebraic.recompute import Recompute
from stepdown.transformations.algebraic.remove_dead_work import RemoveDeadWork
from stepdown.transformations.algebraic.stack_projections import StackProjections
from stepdown.transformations.canonical_form import the_state, validate
from stepdown.transformations.differentiate import differentiate
from stepdown.transformations.fusion.fuse_attention import FuseAttention
from stepdown.transformations.fusion.fuse_row_operators import FuseRowOperators
from stepdown.transformations.layout.assign_layouts import AssignLayouts
from stepdown.transformations.layout.configuration import LayoutConfiguration
from stepdown.transformations.lowering.lower_operators import lower_operators
from stepdown.transformations.schedule.plan_workspace import Lifetime, plan_workspace
from stepdown.transformations.training_graph import TrainingGraph


@dataclass(frozen=True)
class PassRecord:
    """What one pass did: its name with options, its time in seconds, and a line about what changed.

    :ivar counts: the graph after it; None where it is no longer in canonical form, or no graph changed.
    """

    name: str
    seconds: float
    what: str
    counts: GraphCounts | None = None

    def to_manifest(self) -> dict[str, Any]:
        """The pass's entry in a build's manifest."""
        counted = {} if self.counts is None else self.counts.to_manifest()
        return {"name": self.name, "seconds": self.seconds, "what": self.what, **counted}


@dataclass
class StageRecord:
    """A stage's result: the graph after it, whether it is in canonical form, and the passes that ran."""

    name: str
    graph: TrainingGraph
    canonical: bool
    passes: list[PassRecord] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Time of all passes."""
        return sum(record.seconds for record in self.passes)

    @property
    def what(self) -> str:
        """One line about what the stage changed."""
        return "; ".join(record.what for record in self.passes if record.what)


@dataclass
class Compilation:
    """What the stages work on and leave behind.

    :ivar memory_budget: most bytes that forward may keep for backward; None for no limit.
    :ivar stack: at most so many projections of one input become one; None for all.
    :ivar layouts: the layouts that ``layout`` assigns.
    :ivar lifetimes: by direction, how long each temporary lives (from ``schedule`` on).
    """

    definition: EncoderLayer
    batch: int | None
    seq: int | None
    dtype: DataType
    target: Target
    name: str
    disable: tuple[str, ...] = ()
    layouts: LayoutConfiguration = field(default_factory=LayoutConfiguration)
    memory_budget: int | None = None
    stack: int | None = None
    graph: TrainingGraph | None = None
    lifetimes: dict[str, dict[str, Lifetime]] = field(default_factory=dict)


def parse(compilation: Compilation) -> str:
    """DaCe program -> forward graph of operators."""
    program = encoder_program(compilation.definition, compilation.batch, compilation.seq, compilation.dtype)
    sdfg = program.to_sdfg(simplify=True)
    sdfg.name = f"{compilation.name}_forward"
    sdfg.replace("__return", OUTPUT)
    merge_reads(sdfg)
    remove_unused_arguments(sdfg)
    compilation.graph = TrainingGraph(sdfg)
    return f"{len(list(operator_nodes(sdfg)))} operators"


def differentiate_stage(compilation: Compilation) -> str:
    """Forward graph -> training graph."""
    forward = _graph(compilation).forward
    containers = [parameter.container for parameter in compilation.definition.parameters().values()]
    graph = differentiate(forward, OUTPUT, [INPUT, *containers])
    assert graph.backward is not None
    graph.backward.name = f"{compilation.name}_backward"
    compilation.graph = graph
    return (
        f"{len(list(operator_nodes(graph.backward)))} operators in the backward pass, {len(graph.kept)} containers kept"
    )


class GraphPass(Protocol):
    """A pass over a training graph, with its options."""

    def apply(self, graph: TrainingGraph) -> tuple[TrainingGraph, str]:
        """The graph after it, and a line about what changed."""


def _run(make: Callable[[Compilation], GraphPass]) -> Callable[[Compilation], str]:
    """What runs the pass that ``make`` makes with a compilation's options."""

    def run(compilation: Compilation) -> str:
        compilation.graph, what = make(compilation).apply(_graph(compilation))
        return what

    return run


def lower(compilation: Compilation) -> str:
    """Operators -> maps and library calls of the target."""
    graph = _graph(compilation)
    implementation = compilation.target.implementation
    backward = None if graph.backward is None else lower_operators(graph.backward, implementation)
    compilation.graph = replace(graph, forward=lower_operators(graph.forward, implementation), backward=backward)
    return f'every operator expanded by implementation "{implementation}"'


def schedule(compilation: Compilation) -> str:
    """Temporaries become parts of one workspace a call."""
    total = 0
    for direction, sdfg in _graph(compilation).graphs():
        compilation.lifetimes[direction] = plan_workspace(sdfg)
        total += len(compilation.lifetimes[direction])
    return f"{total} temporaries placed in the workspace"


@dataclass(frozen=True)
class Stage:
    """A stage: name, passes, whether it leaves graphs in canonical form, and whether its passes are optional."""

    name: str
    passes: tuple[tuple[str, Callable[[Compilation], str]], ...]
    canonical: bool
    optional: bool = False


STAGES: tuple[Stage, ...] = (
    Stage("parse", (("parse", parse),), True),
    Stage("differentiate", (("differentiate", differentiate_stage),), True),
    Stage(
        "algebraic",
        (
            ("stack-projections", _run(lambda c: StackProjections(c.stack))),
            ("remove-dead-work", _run(lambda c: RemoveDeadWork())),
            ("fold-scales", _run(lambda c: FoldScales())),
            ("accumulate-into-contractions", _run(lambda c: AccumulateIntoContractions())),
        ),
        True,
        optional=True,
    ),
    Stage(
        "fuse",
        (
            ("fuse-attention", _run(lambda c: FuseAttention())),
            ("recompute", _run(lambda c: Recompute(c.memory_budget))),
            ("fuse-row-operators", _run(lambda c: FuseRowOperators())),
        ),
        True,
        optional=True,
    ),
    Stage("layout", (("assign-layouts", _run(lambda c: AssignLayouts(c.layouts))),), True, optional=True),
    Stage("lower", (("lower-operators", lower),), False),
    Stage("schedule", (("plan-workspace", schedule),), False),
)
"""Every stage that changes the graph, in order."""

OPTIONAL_PASSES: tuple[str, ...] = tuple(name for stage in STAGES if stage.optional for name, _ in stage.passes)
"""Passes that can be switched off by name."""


def run_stages(
    compilation: Compilation,
    progress: Callable[[str], None] = lambda name: None,
    finished: Callable[[StageRecord], None] = lambda record: None,
    stages: Sequence[Stage] | None = None,
) -> None:
    """Run every stage, validate after every pass, and record what happened.

    :param progress: called with the name of each stage that begins.
    :param finished: called with the record of each stage that ended; later stages may change its graph.
    :param stages: the first of :data:`STAGES` to run instead of all.
    :raises OptionError: before anything runs, when a pass that is to be left out is not an optional one.
    :raises CanonicalFormError: when a pass breaks the canonical form.
    """
    refuse_other_passes(compilation.disable)
    for stage in STAGES if stages is None else stages:
        progress(stage.name)
        passes: list[PassRecord] = []
        for name, run in stage.passes:
            if name in compilation.disable:
                passes.append(PassRecord(name, 0.0, f"{name} switched off", _count(compilation, stage)))
                continue
            start = time.perf_counter()
            what = run(compilation)
            check(compilation, stage)
            seconds = time.perf_counter() - start
            passes.append(PassRecord(name, seconds, what, _count(compilation, stage)))
        finished(StageRecord(stage.name, _graph(compilation), stage.canonical, passes))


def _count(compilation: Compilation, stage: Stage) -> GraphCounts | None:
    return count_graph(_graph(compilation)) if stage.canonical else None


def refuse_other_passes(names: Iterable[object]) -> None:
    """Check names of passes that are to be left out.

    :raises OptionError: when one is not the name of an optional pass.
    """
    for name in names:
        if name not in OPTIONAL_PASSES:
            accepted = ", ".join(f'"{known}"' for known in OPTIONAL_PASSES)
            raise OptionError(f'pass "{name}" cannot be switched off; optional passes are: {accepted}.')


def check(compilation: Compilation, stage: Stage) -> None:
    """Validate the graph as the stage leaves it."""
    graph = _graph(compilation)
    if stage.canonical:
        validate(graph)
    elif stage is STAGES[-1]:  # DaCe's validation of a lowered graph takes seconds; nothing reads it before this stage
        for _, sdfg in graph.graphs():
            sdfg.validate()


def merge_reads(sdfg: SDFG) -> None:
    """Give every container that is only read one access node (the frontend makes one for each use)."""
    state = the_state(sdfg)
    first: dict[str, nodes.AccessNode] = {}
    for node in list(state.data_nodes()):
        if state.in_degree(node) > 0:
            continue
        kept = first.setdefault(node.data, node)
        if kept is node:
            continue
        for edge in state.out_edges(node):
            state.add_edge(kept, edge.src_conn, edge.dst, edge.dst_conn, copy.deepcopy(edge.data))
        state.remove_node(node)


def remove_unused_arguments(sdfg: SDFG) -> None:
    """Drop arguments that nothing reads, such as the biases of a layer without them."""
    used = {node.data for node in the_state(sdfg).data_nodes()}
    for name in [name for name in sdfg.arrays if name not in used]:
        sdfg.remove_data(name, validate=False)


def operator_nodes(sdfg: SDFG) -> list[Any]:
    """The library nodes of a graph in canonical form."""
    return [node for node in the_state(sdfg).nodes() if isinstance(node, dace.nodes.LibraryNode)]


def _graph(compilation: Compilation) -> TrainingGraph:
    if compilation.graph is None:
        raise AssertionError('stage "parse" has not run')
    return compilation.graph
