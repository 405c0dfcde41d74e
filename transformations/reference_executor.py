"""Runs a graph in canonical form by its operators' reference semantics in PyTorch: no code generation, no compiler."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from dace.sdfg import SDFG
from dace.sdfg.graph import MultiConnectorEdge

from stepdown.models.errors import InputError
from stepdown.models.operators import Operator
from stepdown.models.operators.gradient import GRADIENT
from stepdown.models.operators.operator import fixed_axes
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
            index = _index(sdfg, node, edge.dst_conn, edge)
            operands[edge.dst_conn] = results[name][index] if index else results[name]
        outputs = node.reference(operands)
        for edge in state.out_edges(node):
            name, value = edge.data.data, outputs[edge.src_conn]
            index = _index(sdfg, node, edge.src_conn, edge)
            if not index:
                results[name] = value
                continue
            if name not in results:
                shape = list(value.shape)
                for axis in [axis for axis, place in enumerate(index) if isinstance(place, int)]:
                    shape.insert(axis, int(sdfg.arrays[name].shape[axis]))
                results[name] = value.new_full(shape, float("nan"))
            results[name][index] = value
    return results


def _index(sdfg: SDFG, node: Operator, connector: str, edge: MultiConnectorEdge) -> tuple[int | slice, ...]:
    """What an edge that takes a part of a container indexes it with; nothing for the whole container."""
    shape, subset = tuple(sdfg.arrays[edge.data.data].shape), edge.data.subset
    fixed = fixed_axes(subset.size(), shape, len(node.operand_dims()[connector])) if shape != (1,) else ()
    if not fixed:
        return ()
    return tuple(int(low) if axis in fixed else slice(None) for axis, (low, _, _) in enumerate(subset.ranges))


def execute_training(
    graph: TrainingGraph, values: Mapping[str, torch.Tensor], given: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Forward, then backward with the kept containers and the ``given`` gradients: the values of both graphs.

    Stacked parameters may be given as their members; the gradients of stacks are there as those of their members, too.
    """
    stacked = {
        stack: torch.stack([values[member] for member in members])
        for stack, members in graph.stacks.items()
        if stack not in values and set(members) <= set(values)
    }
    forward = execute(graph.forward, {**values, **stacked})
    if graph.backward is None:
        raise InputError(f'graph "{graph.forward.name}" has no backward pass')
    arguments = {name: forward[name] for name in graph.backward.arrays if name in forward}
    backward = execute(graph.backward, arguments | dict(given))
    for stack, members in graph.stacks.items():
        if GRADIENT + stack in backward:
            backward |= {GRADIENT + name: backward[GRADIENT + stack][place] for place, name in enumerate(members)}
    return forward, backward
