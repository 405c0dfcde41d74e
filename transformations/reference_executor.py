"""Runs a graph in canonical form by its operators' reference semantics in PyTorch: no code generation, no compiler."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from dace.sdfg import SDFG

from stepdown.models.errors import InputError
from stepdown.transformations.canonical_form import operators, the_state
from stepdown.transformations.training_graph import TrainingGraph


def execute(sdfg: SDFG, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Every container's value, given those of the graph's arguments.

    Values keep the precision they are given in (float64 for an oracle), whatever the containers' types.

    :param values: argument name to tensor in the container's logical shape; scalars as 0-d tensors.
    :raises InputError: when an argument that an operator reads is missing.
    """
    state = the_state(sdfg)
    results = dict(values)
    for node in operators(sdfg):
        operands: dict[str, torch.Tensor] = {}
        for edge in state.in_edges(node):
            name = edge.data.data
            if name not in results:
                raise InputError(f'argument "{name}" of graph "{sdfg.name}" was not given')
            value = results[name]
            rank = len(node.operand_dims()[edge.dst_conn])
            for low, _, _ in edge.data.subset.ranges[: value.dim() - rank]:
                value = value[int(low)]
            operands[edge.dst_conn] = value
        outputs = node.reference(operands)
        for edge in state.out_edges(node):
            results[edge.data.data] = outputs[edge.src_conn]
    return results


def execute_training(
    graph: TrainingGraph, values: Mapping[str, torch.Tensor], given: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Forward, then backward with the kept containers and the ``given`` gradients: the values of both graphs."""
    forward = execute(graph.forward, values)
    if graph.backward is None:
        raise InputError(f'graph "{graph.forward.name}" has no backward pass')
    arguments = {name: forward[name] for name in graph.backward.arrays if name in forward}
    return forward, execute(graph.backward, arguments | dict(given))
