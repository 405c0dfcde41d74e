"""``RemoveDeadWork``: what computes nothing that is used, and what computes what is there already, goes."""

from __future__ import annotations

from dataclasses import dataclass

from dace.sdfg import SDFG

from stepdown.models.operators import Operator, Scale, SumRows
from stepdown.models.operators.gradient import GRADIENT
from stepdown.transformations.canonical_form import operators
from stepdown.transformations.dataflow import Dataflow, derive_kept, replace_kept
from stepdown.transformations.training_graph import TrainingGraph


@dataclass(frozen=True)
class RemoveDeadWork:
    """The pass; ``remove-dead-work`` on the command line.

    Removed are

    * operators whose results are temporaries that nobody reads, and statistics (extra outputs) that nobody reads;
    * identities, a scale by one and a sum over no dimension: whoever reads the copy reads the original, or the original
      is written where the copy was wanted. A copy from one argument of the graph into another stays;
    * kept containers that backward no longer reads (they become temporaries of forward), and arguments that nobody
      reads any more.

    It relies on single assignment (canonical form, rule 3).
    """

    def apply(self, graph: TrainingGraph) -> tuple[TrainingGraph, str]:
        """Clean up in place; returns the graph and a line about what changed."""
        before = _size(graph)
        arguments = {direction: _read_arguments(sdfg) for direction, sdfg in graph.graphs()}
        changed = True
        while changed:
            changed = False
            for _, sdfg in graph.graphs():
                for node in operators(sdfg):
                    if _is_identity(node) and _bypass(graph, sdfg, node):
                        changed = True
                        graph = derive_kept(graph)
                changed |= _remove_unread(Dataflow(sdfg))
            if graph.backward is not None:
                Dataflow(graph.backward).drop_arguments(arguments["backward"])
            kept = graph.kept
            graph = derive_kept(graph)
            changed |= graph.kept != kept
        if graph.backward is not None:
            arguments["forward"] -= set(graph.backward.arrays)
        Dataflow(graph.forward).drop_arguments(arguments["forward"])
        after = _size(graph)
        return graph, f"{before[0] - after[0]} operators and {before[1] - after[1]} containers removed"


def _size(graph: TrainingGraph) -> tuple[int, int]:
    graphs = [sdfg for _, sdfg in graph.graphs()]
    return sum(len(operators(sdfg)) for sdfg in graphs), sum(len(sdfg.arrays) for sdfg in graphs)


def _read_arguments(sdfg: SDFG) -> set[str]:
    """Arguments that operators read, but for gradients, which the caller gives whatever happens to them."""
    flow = Dataflow(sdfg)
    return {
        name
        for name, descriptor in sdfg.arrays.items()
        if not descriptor.transient and flow.readers(name) and not name.startswith(GRADIENT)
    }


def _remove_unread(flow: Dataflow) -> bool:
    """Remove operators and extra outputs that nobody needs, last ones first."""
    changed = False
    for node in reversed(operators(flow.sdfg)):
        results = {edge.src_conn: edge.data.data for edge in flow.state.out_edges(node)}
        unread = {
            connector
            for connector, name in results.items()
            if flow.sdfg.arrays[name].transient and not flow.readers(name)
        }
        if unread == set(results):
            flow.remove_operator(node)
            changed = True
            continue
        for connector in sorted(unread & set(node.extra_outputs)):
            flow.remove_output(node, connector)
            changed = True
    return changed


def _is_identity(node: Operator) -> bool:
    return (isinstance(node, Scale) and node.factor == 1.0) or (
        isinstance(node, SumRows) and node.sum_dims == node.dims
    )


def _bypass(graph: TrainingGraph, sdfg: SDFG, node: Operator) -> bool:
    """Let one container stand for operand and result of an identity, where their other users allow it."""
    flow = Dataflow(sdfg)
    operands = flow.operands(node)
    source, result = operands["x"], operands["y"]
    if not flow.reads_whole(node) or not flow.alike(source, result):
        return False
    forward = sdfg is graph.forward
    if sdfg.arrays[result].transient:
        flow.redirect(result, source)
    elif forward and result in graph.kept:
        replace_kept(graph, result, source)
        sdfg.arrays[result].transient = True
    else:
        return _write_result(graph, flow, node, source, result)
    flow.remove_operator(node)
    return True


def _write_result(graph: TrainingGraph, flow: Dataflow, node: Operator, source: str, result: str) -> bool:
    """Let the writer of ``source`` write ``result``, which others need under that name."""
    forward = flow.sdfg is graph.forward
    kept = forward and source in graph.kept
    writer = flow.writer(source)
    if writer is None or not (flow.sdfg.arrays[source].transient or kept):
        return False
    edge = next(edge for edge in flow.state.out_edges(writer) if edge.data.data == source)
    if not flow.reads_whole(writer):
        return False
    flow.remove_operator(node)
    if kept:
        replace_kept(graph, source, result)
        flow.sdfg.arrays[source].transient = True
    flow.redirect(source, result)
    flow.write_instead(writer, edge.src_conn, result)
    return True
