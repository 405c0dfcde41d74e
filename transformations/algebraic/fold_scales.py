"""``FoldScales``: factors go where they cost nothing, into contractions, or into one another."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dace.sdfg import SDFG

from stepdown.models.operators import Contraction, Scale
from stepdown.transformations.canonical_form import operators
from stepdown.transformations.dataflow import Dataflow, derive_kept, replace_kept
from stepdown.transformations.training_graph import TrainingGraph


@dataclass(frozen=True)
class FoldScales:
    """The pass; ``fold-scales`` on the command line.

    ``s (alpha a.b) = (s alpha) a.b`` where the scale is the only reader of the product, which has no addend;
    ``alpha (s a).b = (s alpha) a.b`` where everything that reads ``s a``, in the backward pass, too, is a contraction
    that has it as a factor (not as the addend); ``t (s x) = (t s) x`` where nothing else reads ``s x``. Each saves a
    kernel that reads and writes its whole operand. A product of factors that overflows or vanishes is not formed.
    """

    def apply(self, graph: TrainingGraph) -> tuple[TrainingGraph, str]:
        """Fold in place; returns the graph and a line about what changed."""
        folded = 0
        changed = True
        while changed:
            changed = False
            for _, sdfg in graph.graphs():
                for node in operators(sdfg):
                    if isinstance(node, Scale) and (_into_writer(sdfg, node) or _into_readers(graph, sdfg, node)):
                        folded, changed = folded + 1, True
                        graph = derive_kept(graph)
        return graph, f"{folded} scales folded"


def _product(one: float, other: float) -> float | None:
    """The product of two factors, None where it is not as good as both."""
    product = one * other
    if not math.isfinite(product) or (product == 0.0 and one != 0.0 and other != 0.0):
        return None
    return product


def _into_writer(sdfg: SDFG, node: Scale) -> bool:
    """Scale what is written: the operand's writer is a contraction or a scale, and nobody else reads the operand."""
    flow = Dataflow(sdfg)
    operands = flow.operands(node)
    writer = flow.writer(operands["x"])
    if not sdfg.arrays[operands["x"]].transient or len(flow.readers(operands["x"])) > 1 or not flow.reads_whole(node):
        return False
    if isinstance(writer, Scale) and flow.reads_whole(writer):
        factor = _product(writer.factor, node.factor)
        if factor is None:
            return False
        writer.factor = factor
        connector = "y"
    elif isinstance(writer, Contraction) and not writer.accumulate and flow.reads_whole(writer):
        alpha = _product(writer.alpha, node.factor)
        if alpha is None:
            return False
        writer.alpha = alpha
        connector = "d"
    else:
        return False
    flow.write_instead(writer, connector, operands["y"])
    flow.remove_operator(node)
    return True


def _into_readers(graph: TrainingGraph, sdfg: SDFG, node: Scale) -> bool:
    """Scale what is made of it: every reader of the result is a contraction that has it as a factor."""
    flow = Dataflow(sdfg)
    operands = flow.operands(node)
    source, result = operands["x"], operands["y"]
    kept = sdfg is graph.forward and result in graph.kept
    if not (sdfg.arrays[result].transient or kept) or not flow.reads_whole(node) or not flow.alike(source, result):
        return False
    edges = flow.readers(result)
    if kept and graph.backward is not None:
        edges = edges + Dataflow(graph.backward).readers(result)
    alphas: dict[Contraction, float] = {}
    for edge in edges:
        reader = edge.dst
        if not isinstance(reader, Contraction) or edge.dst_conn not in ("a", "b"):
            return False
        alpha = _product(alphas.get(reader, reader.alpha), node.factor)
        if alpha is None:
            return False
        alphas[reader] = alpha
    if not alphas:
        return False
    for reader, alpha in alphas.items():
        reader.alpha = alpha
    if kept:
        replace_kept(graph, result, source)
        sdfg.arrays[result].transient = True
    else:
        flow.redirect(result, source)
    flow.remove_operator(node)
    return True
