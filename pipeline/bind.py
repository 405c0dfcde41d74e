"""``bind``: the interface of the compiled libraries, as the manifest describes it to the runtime."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dace import data
from dace.sdfg import SDFG

from stepdown.models.definition import EncoderLayer, Parameter
from stepdown.models.encoder import INPUT, MASK, OUTPUT, PROBABILITY_FIELDS, RNG
from stepdown.models.errors import CanonicalFormError
from stepdown.models.operators.gradient import GRADIENT
from stepdown.pipeline.generate import init_arguments, program_names, scalar_name
from stepdown.transformations.schedule.plan_workspace import Lifetime
from stepdown.transformations.training_graph import TrainingGraph

FIXED_ROLES = {INPUT: "input", MASK: "mask", RNG: "rng", OUTPUT: "output"}


def interface(
    graph: TrainingGraph, definition: EncoderLayer, lifetimes: Mapping[str, Mapping[str, Lifetime]]
) -> dict[str, Any]:
    """Every argument of both libraries with its role, shape and lifetime, in C order."""
    result: dict[str, Any] = {}
    for direction, sdfg in graph.graphs():
        result[direction] = {
            "library": f"lib/{direction}.so",
            **program_names(sdfg),
            "arguments": [
                _argument(name, descriptor, sdfg, definition, graph, lifetimes[direction])
                for name, descriptor in sdfg.arglist().items()
            ],
            "init_arguments": init_arguments(sdfg),
        }
    return result


def _argument(
    name: str,
    descriptor: data.Data,
    sdfg: SDFG,
    definition: EncoderLayer,
    graph: TrainingGraph,
    lifetimes: Mapping[str, Lifetime],
) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": name, "dtype": scalar_name(descriptor.dtype), "shape": [], "strides": []}
    if isinstance(descriptor, data.Array):
        entry["shape"] = [str(extent) for extent in descriptor.shape]
        entry["strides"] = [str(stride) for stride in descriptor.strides]
        entry["bytes"] = str(descriptor.total_size * descriptor.dtype.bytes)
    parameters: dict[str, Parameter] = {p.container: p for p in definition.parameters().values()}
    base = name.removeprefix(GRADIENT)
    if name in sdfg.symbols:
        entry["role"] = "symbol"
    elif name in lifetimes:
        entry |= {"role": "workspace", "live": [lifetimes[name].first, lifetimes[name].last]}
    elif name in graph.kept:
        entry["role"] = "kept"
    elif name in FIXED_ROLES:
        entry["role"] = FIXED_ROLES[name]
    elif name in PROBABILITY_FIELDS:
        entry |= {"role": "probability", "field": PROBABILITY_FIELDS[name]}
    elif name in parameters:
        entry |= {"role": "parameter", "parameter": parameters[name].name}
    elif base in graph.stacks:
        members = [parameters[member].name for member in graph.stacks[base]]
        entry |= {"role": "parameter" if base == name else "gradient_parameter", "parameters": members}
    elif base == OUTPUT:
        entry["role"] = "gradient_output"
    elif base == INPUT:
        entry["role"] = "gradient_input"
    elif base in parameters:
        entry |= {"role": "gradient_parameter", "parameter": parameters[base].name}
    else:
        raise CanonicalFormError(f'argument "{name}" of graph "{sdfg.name}" has no role')
    return entry
