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
from dataclasses import dataclass, replace

from dace.sdfg import SDFG, SDFGState, nodes
from dace.sdfg.graph import MultiConnectorEdge

from stepdown.models.errors import CanonicalFormError
from stepdown.models.operators import Contraction, Member, Operator, RowGroup, TiledGroup
from stepdown.models.operators.gradient import connect_operator
from stepdown.models.operators.tiled_group import TILED_KINDS
from stepdown.transformations.canonical_form import kept_containers, operand_edges, the_state, topological_nodes
from stepdown.transformations.lowering.passes_of_rows import plan_rows
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
                _write(sdfg, members)
                groups, members_fused = groups + 1, members_fused + len(members)
        what = f"{members_fused} operators over two positions in {groups} tiled kernels"
        if trial.backward is None:
            return trial, what
        kept = kept_containers(trial.forward, trial.backward)
        for name in {*graph.kept, *kept} & set(trial.forward.arrays):
            trial.forward.arrays[name].transient = name not in kept
        return replace(trial, kept=kept), what


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
    sets: list[tuple[set[str], list[Operator]]] = []
    for node in topological_nodes(state):
        if not isinstance(node, Operator):
            continue
        own = {name for _, name, _ in operand_edges(state, node)} & values
        if not own:
            continue
        joined = [entry for entry in sets if entry[0] & own]
        sets = [entry for entry in sets if not entry[0] & own]
        names = own.union(*(entry[0] for entry in joined))
        sets.append((names, [member for entry in joined for member in entry[1]] + [node]))
    position = {node: place for place, node in enumerate(topological_nodes(state))}
    return [sorted(members, key=position.__getitem__) for _, members in sets]


def _kept_values(graph: TrainingGraph) -> list[str]:
    """Kept containers with two position dimensions."""
    if graph.backward is None:
        return []
    return [name for name in graph.kept if name in tiled_values(graph.forward)]


def _recompute(graph: TrainingGraph, names: list[str]) -> None:
    """Clone what computes the named containers into the backward graph, from values that have fewer positions."""
    forward, backward = graph.forward, graph.backward
    if backward is None:
        return
    source, target = the_state(forward), the_state(backward)
    values = tiled_values(forward)
    wanted, needed = list(names), set()
    while wanted:
        name = wanted.pop()
        producer = _producer(source, name)
        if producer in needed:
            continue
        needed.add(producer)
        wanted += [value for _, value, written in operand_edges(source, producer) if not written and value in values]
    for node in [node for node in topological_nodes(source) if node in needed]:
        inputs: dict[str, str] = {}
        outputs: dict[str, str] = {}
        for connector, name, written in operand_edges(source, node):
            (outputs if written else inputs)[connector] = name
            _declare(forward, backward, name, transient=name in values)
        readers = {name: [access for access in target.data_nodes() if access.data == name] for name in outputs.values()}
        clone = copy.deepcopy(node)
        connect_operator(backward, target, clone, inputs, outputs)
        taken = {edge.dst_conn: edge.data for edge in source.in_edges(node)}
        for edge in target.in_edges(clone):
            edge.data = copy.deepcopy(taken[edge.dst_conn])
        for name, old in readers.items():
            new = next(access for access in target.data_nodes() if access.data == name and access not in old)
            for access in old:
                for edge in target.out_edges(access):
                    target.add_edge(new, edge.src_conn, edge.dst, edge.dst_conn, copy.deepcopy(edge.data))
                target.remove_node(access)
    for name in names:
        forward.arrays[name].transient = True


def _declare(source: SDFG, target: SDFG, name: str, *, transient: bool) -> None:
    """Give the other graph a container that it lacks; what is computed there is no argument any more."""
    if name not in target.arrays:
        target.add_datadesc(name, copy.deepcopy(source.arrays[name]))
        for symbol in source.arrays[name].free_symbols:
            if str(symbol) not in target.symbols:
                target.add_symbol(str(symbol), source.symbols[str(symbol)])
    target.arrays[name].transient = transient


def _producer(state: SDFGState, name: str) -> Operator:
    for access in state.data_nodes():
        for edge in state.in_edges(access) if access.data == name else ():
            assert isinstance(edge.src, Operator)
            return edge.src
    raise CanonicalFormError(f'nothing computes "{name}"')


def _check(sdfg: SDFG, members: list[Operator]) -> None:
    """Refuse a set that cannot run tile by tile.

    :raises CanonicalFormError: with what stands in the way.
    """
    state = the_state(sdfg)
    for node in members:
        if not isinstance(node, TILED_KINDS):
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
            written = run.written_values()
            operands = {name: dims for name, dims in run.operand_dims().items() if name not in written}
            program = plan_rows(run.statements(), run.dims, operands)
            if program.outer != group.dims[:-1] or any(row_pass.column_reductions for row_pass in program.passes):
                raise CanonicalFormError(f'group "{run.name}" adds up over more than its last dimension')
    _check_convex(state, inside)


def _check_convex(state: SDFGState, members: set[Operator]) -> None:
    """Refuse a set that something outside must run in the middle of."""
    after: set[nodes.Node] = set()
    pending = [access for member in members for access in state.successors(member)]
    pending = [node for access in pending for node in state.successors(access) if node not in members]
    while pending:
        node = pending.pop()
        if node in members:
            raise CanonicalFormError(f'another kernel must run before "{node.label}"')
        if node not in after:
            after.add(node)
            pending += state.successors(node)


def _in_runs(state: SDFGState, members: list[Operator]) -> list[Operator]:
    """The members in an order in which row operators follow each other: they then share passes over a tile.

    Among those that can run, contractions that give a tile come first and those that take one last.
    """
    sdfg = state.sdfg
    reads = {node: {_value(sdfg, edge) for edge in state.in_edges(node)} for node in members}
    writes = {node: {_value(sdfg, edge) for edge in state.out_edges(node)} for node in members}
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
        Member(node, {_connector(edge, node): _value(sdfg, edge) for edge in state.all_edges(node)}) for node in members
    ]
    inside = set(members)
    outputs = {
        _value(sdfg, written)
        for node in members
        for written in state.out_edges(node)
        if not sdfg.arrays[written.data.data].transient
        or any(edge.dst not in inside for edge in state.out_edges(written.dst))
    }
    return TiledGroup(f"{members[0].name}__{members[-1].name}", listed, sorted(outputs), dims)


def _write(sdfg: SDFG, members: list[Operator]) -> None:
    """Replace the members by one node."""
    state = the_state(sdfg)
    node = _group(sdfg, members)
    read = {_value(sdfg, edge): edge for member in members for edge in state.in_edges(member)}
    written = {_value(sdfg, edge): edge for member in members for edge in state.out_edges(member)}
    state.remove_nodes_from(members)
    state.add_node(node)
    for value in node.in_connectors:
        state.add_edge(read[value].src, None, node, value, read[value].data)
    for value, edge in written.items():
        if value in node.out_connectors:
            state.add_edge(node, value, edge.dst, None, edge.data)
        else:
            state.remove_node(edge.dst)
            sdfg.remove_data(edge.data.data)


def _connector(edge: MultiConnectorEdge, node: Operator) -> str:
    return edge.dst_conn if edge.dst is node else edge.src_conn


def _value(sdfg: SDFG, edge: MultiConnectorEdge) -> str:
    """What a group calls the value that an edge carries: its container, with the index of a part."""
    shape, subset = sdfg.arrays[edge.data.data].shape, edge.data.subset
    index = [
        str(low)
        for (low, _, _), size, extent in zip(subset.ranges, subset.size(), shape, strict=True)
        if size == 1 and extent != 1
    ]
    return "_".join([edge.data.data, *index])
