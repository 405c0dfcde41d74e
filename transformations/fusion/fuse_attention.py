"""``FuseAttention``: what lies between two contractions over positions becomes one operator that runs tile by tile.

A value with two position dimensions (``S`` and ``T``: scores and weights of attention, and their gradients) is larger
than anything around it. Contractions and row operators that touch such values and nothing else between them become a
:class:`~stepdown.models.operators.tiled_group.TiledGroup` for each connected set of them, so that no such value is
written to memory. Where the backward pass reads one that the forward pass kept, the operators that compute it are
cloned into the backward graph (with the same random numbers) and it is kept no longer.

Dimension legend: B batch, S query position, T key position, H head, P head size, E embedding, U feed-forward size.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

from dace.sdfg import SDFG, SDFGState
from dace.sdfg.graph import MultiConnectorEdge

from stepdown.models.errors import CanonicalFormError
from stepdown.models.operators import Contraction, Member, Operator, RowGroup, TiledGroup
from stepdown.transformations.canonical_form import operand_edges, operators, the_state
from stepdown.transformations.dataflow import Dataflow, connected, derive_kept
from stepdown.transformations.fusion.replace_members import replace_members, value_of
from stepdown.transformations.lowering.passes_of_rows import plan_operator
from stepdown.transformations.training_graph import TrainingGraph

POSITIONS = frozenset("ST")


@dataclass(frozen=True)
class FuseAttention:
    """The pass; ``fuse-attention`` on the command line.

    Sets that cannot be fused stay as they are, and the line that the pass returns says why.
    """

    def apply(self, graph: TrainingGraph) -> tuple[TrainingGraph, str]:
        """Fuse in place; returns the graph and a line about what changed."""
        found = [members for _, sdfg in graph.graphs() for members in tiled_sets(sdfg)]
        if not found:
            return graph, "no values over two positions"
        trial = graph.copy()
        try:
            _recompute(trial, _kept_values(trial))
            for _, sdfg in trial.graphs():
                for members in tiled_sets(sdfg):
                    _check(sdfg, members)
        except CanonicalFormError as error:
            return graph, f"attention is not fused: {error}"
        groups = members_fused = 0
        for _, sdfg in trial.graphs():
            for members in tiled_sets(sdfg):
                replace_members(sdfg, members, _group(sdfg, members))
                groups, members_fused = groups + 1, members_fused + len(members)
        what = f"{members_fused} operators over two positions in {groups} tiled kernels"
        return derive_kept(trial), what


def tiled_values(sdfg: SDFG) -> set[str]:
    """Containers with two position dimensions that operators of the vocabulary, not groups of them, read or write."""
    state = the_state(sdfg)
    found: set[str] = set()
    for node in state.nodes():
        if isinstance(node, Operator) and not isinstance(node, TiledGroup):
            dims = node.operand_dims()
            found |= {name for connector, name, _ in operand_edges(state, node) if set(dims[connector]) >= POSITIONS}
    return found


def tiled_sets(sdfg: SDFG) -> list[list[Operator]]:
    """Operators connected by values over two positions, each set in topological order."""
    state = the_state(sdfg)
    values = tiled_values(sdfg)
    found = [(node, {name for _, name, _ in operand_edges(state, node)} & values) for node in operators(sdfg)]
    return connected((node, names) for node, names in found if names)


def _kept_values(graph: TrainingGraph) -> list[str]:
    """Kept containers with two position dimensions."""
    if graph.backward is None:
        return []
    return [name for name in graph.kept if name in tiled_values(graph.forward)]


def _recompute(graph: TrainingGraph, names: list[str]) -> None:
    """Clone what computes the named containers into the backward graph, from values that have fewer positions."""
    if graph.backward is None:
        return
    source, target = Dataflow(graph.forward), Dataflow(graph.backward)
    values = tiled_values(graph.forward)
    wanted, needed = list(names), set()
    while wanted:
        producer = source.writer(wanted.pop())
        if producer is not None and producer not in needed:
            needed.add(producer)
            wanted += [name for name in source.operands(producer).values() if name in values]
    for node in [node for node in operators(graph.forward) if node in needed]:
        for name in source.operands(node).values():
            target.declare(graph.forward, name)
            target.sdfg.arrays[name].transient = name in values  # what is computed there is no argument any more
        clone = copy.deepcopy(node)
        taken = {edge.dst_conn: edge.data for edge in source.state.in_edges(node)}
        inputs = {connector: memlet.data for connector, memlet in taken.items()}
        outputs = {edge.src_conn: edge.data.data for edge in source.state.out_edges(node)}
        target.add(clone, inputs, outputs)
        for edge in target.state.in_edges(clone):
            edge.data = copy.deepcopy(taken[edge.dst_conn])
    for name in names:
        graph.forward.arrays[name].transient = True


def _check(sdfg: SDFG, members: list[Operator]) -> None:
    """Refuse a set that cannot run tile by tile.

    :raises CanonicalFormError: with what stands in the way.
    """
    state = the_state(sdfg)
    for node in members:
        if not isinstance(node, TiledGroup.kinds):
            raise CanonicalFormError(f'operator "{node.name}" is a {type(node).__name__}, which does not run in tiles')
    values = tiled_values(sdfg)
    inside = set(members)
    for access in state.data_nodes():
        if access.data not in values:
            continue
        users = {edge.dst for edge in state.out_edges(access)} | {edge.src for edge in state.in_edges(access)}
        if users & inside and not sdfg.arrays[access.data].transient:
            raise CanonicalFormError(f'"{access.data}" is an argument and must be in memory')
    group = _group(sdfg, members)
    for run in group.runs():
        if isinstance(run, RowGroup):
            program = plan_operator(run)
            if program.outer != group.dims[:-1] or any(row_pass.column_reductions for row_pass in program.passes):
                raise CanonicalFormError(f'group "{run.name}" adds up over more than its last dimension')
    _check_convex(sdfg, members)


def _check_convex(sdfg: SDFG, members: list[Operator]) -> None:
    """Refuse a set that something outside must run in the middle of."""
    flow = Dataflow(sdfg)
    users = {
        user for member in members for access in flow.state.successors(member) for user in flow.state.successors(access)
    }
    outside = users - set(members)
    after = flow.below(outside)
    for member in members:
        if member in after:
            raise CanonicalFormError(f'another kernel must run before "{member.label}"')


def _in_runs(state: SDFGState, members: list[Operator]) -> list[Operator]:
    """The members in an order in which row operators follow each other: they then share passes over a tile.

    Among those that can run, contractions that give a tile come first and those that take one last.
    """
    sdfg = state.sdfg
    reads = {node: {value_of(sdfg, edge) for edge in state.in_edges(node)} for node in members}
    writes = {node: {value_of(sdfg, edge) for edge in state.out_edges(node)} for node in members}
    written = set().union(*writes.values())

    def priority(node: Operator) -> int:
        if not isinstance(node, Contraction):
            return 1
        return 0 if set(node.operand_dims()["d"]) >= POSITIONS else 2

    order: list[Operator] = []
    done: set[str] = set()
    waiting = list(members)
    while waiting:
        node = min((node for node in waiting if reads[node] & written <= done), key=priority)
        waiting.remove(node)
        order.append(node)
        done |= writes[node]
    return order


def _group(sdfg: SDFG, members: list[Operator]) -> TiledGroup:
    state = the_state(sdfg)
    members = _in_runs(state, members)
    dims = next(
        (node.dims for node in members if not isinstance(node, Contraction)),
        next(d for node in members for d in node.operand_dims().values() if set(d) >= POSITIONS),
    )
    listed = [
        Member(node, {_connector(edge, node): value_of(sdfg, edge) for edge in state.all_edges(node)})
        for node in members
    ]
    inside = set(members)
    outputs = {
        value_of(sdfg, written)
        for node in members
        for written in state.out_edges(node)
        if not sdfg.arrays[written.data.data].transient
        or any(edge.dst not in inside for edge in state.out_edges(written.dst))
    }
    return TiledGroup(f"{members[0].name}__{members[-1].name}", listed, sorted(outputs), dims)


def _connector(edge: MultiConnectorEdge, node: Operator) -> str:
    return edge.dst_conn if edge.dst is node else edge.src_conn
