"""How the containers of a graph in canonical form lie in memory, who uses them, and what conversions move.

Dimension legend: B batch, S query position, T key position, H head, P head size, E embedding, U feed-forward size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import sympy
from dace import data
from dace.sdfg import SDFG

from stepdown.models.operators.operator import data_type
from stepdown.pipeline.analysis.expressions import Number, as_number
from stepdown.transformations.canonical_form import operand_edges, operators, the_state
from stepdown.transformations.layout.assign_layouts import conversions
from stepdown.transformations.layout.layouts import logical_dims, padding, physical_order
from stepdown.transformations.training_graph import TrainingGraph


@dataclass(frozen=True)
class ContainerLayout:
    """One container of one graph, or one that both graphs are given.

    :ivar graphs: ``forward``, ``backward`` or both.
    :ivar kind: ``argument`` (PyTorch's), ``kept`` (for the backward pass) or ``temporary``.
    :ivar dims: logical dimensions. ``order``: the same from the slowest to the fastest.
    :ivar strides: by logical dimension, in elements; text where they depend on B and S.
    :ivar padding: by dimension, the elements that its stride is longer than what lies inside it.
    :ivar bytes: what the container spans, padding included.
    :ivar written_by, read_by: operators.
    """

    name: str
    graphs: tuple[str, ...]
    kind: str
    dtype: str
    dims: str
    order: str
    strides: tuple[Number, ...]
    padding: dict[str, Number]
    bytes: Number
    written_by: tuple[str, ...]
    read_by: tuple[str, ...]


@dataclass(frozen=True)
class ConversionRecord:
    """One copy into another layout: ``order`` and ``target_order`` are those of the two containers."""

    name: str
    graph: str
    source: str
    target: str
    order: str
    target_order: str
    bytes_moved: Number


@dataclass(frozen=True)
class LayoutReport:
    """The layouts of a training graph, and what all its conversions move."""

    containers: tuple[ContainerLayout, ...]
    conversions: tuple[ConversionRecord, ...]
    conversion_bytes: Number

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON holds it."""
        return asdict(self)


def report_layouts(graph: TrainingGraph, sizes: Mapping[str, int | None] | None = None) -> LayoutReport:
    """The layout of every container that has dimensions.

    :param sizes: evaluates strides and bytes; what it leaves open stays text in B and S.
    """
    found: dict[tuple[Any, ...], ContainerLayout] = {}
    copies: list[ConversionRecord] = []
    for direction, sdfg in graph.graphs():
        for container in _containers(direction, sdfg, graph.kept, sizes or {}):
            own = direction if container.kind == "temporary" else ""  # other memory in the other graph
            key = (container.name, own, container.order, container.strides, container.bytes)
            other = found.get(key)
            found[key] = container if other is None else _joined(other, container)
        copies += _conversions(direction, sdfg, sizes or {})
    moved = sum((c.bytes_moved for _, sdfg in graph.graphs() for c in conversions(sdfg)), start=sympy.Integer(0))
    return LayoutReport(tuple(found.values()), tuple(copies), as_number(moved, sizes or {}))


def _containers(
    direction: str, sdfg: SDFG, kept: tuple[str, ...], sizes: Mapping[str, int | None]
) -> list[ContainerLayout]:
    users: dict[bool, dict[str, list[str]]] = {True: {}, False: {}}
    for node in operators(sdfg):
        for _, name, written in operand_edges(the_state(sdfg), node):
            listed = users[written].setdefault(name, [])
            if node.name not in listed:
                listed.append(node.name)
    found = []
    for name, dims in logical_dims(sdfg).items():
        descriptor = sdfg.arrays[name]
        if not dims or not isinstance(descriptor, data.Array):
            continue
        kind = "temporary" if descriptor.transient else "kept" if name in kept else "argument"
        extra = padding(dims, descriptor.shape, descriptor.strides)
        found.append(
            ContainerLayout(
                name,
                (direction,),
                kind,
                data_type(descriptor).name,
                dims,
                physical_order(dims, descriptor.strides),
                tuple(as_number(stride, sizes) for stride in descriptor.strides),
                {letter: as_number(elements, sizes) for letter, elements in extra.items()},
                as_number(descriptor.total_size * descriptor.dtype.bytes, sizes),
                tuple(users[True].get(name, ())),
                tuple(users[False].get(name, ())),
            )
        )
    return found


def _joined(one: ContainerLayout, other: ContainerLayout) -> ContainerLayout:
    """A container that both graphs use."""
    values = {name: getattr(one, name) for name in one.__dataclass_fields__}
    for name in ("graphs", "written_by", "read_by"):
        values[name] = tuple(dict.fromkeys((*getattr(one, name), *getattr(other, name))))
    return ContainerLayout(**values)


def _conversions(direction: str, sdfg: SDFG, sizes: Mapping[str, int | None]) -> list[ConversionRecord]:
    dims = logical_dims(sdfg)
    return [
        ConversionRecord(
            found.node.name,
            direction,
            found.source,
            found.target,
            physical_order(dims[found.source], sdfg.arrays[found.source].strides),
            physical_order(dims[found.target], sdfg.arrays[found.target].strides),
            as_number(found.bytes_moved, sizes),
        )
        for found in conversions(sdfg)
    ]
