"""``AssignLayouts``: containers of both graphs get the physical layout that a configuration names.

A layout is the container's strides (``docs/canonical_form.md``, rule 2): operators address elements by logical index,
and the lowering reads strides, so that no operator changes. How PyTorch's own tensors lie (inputs, outputs, parameters
and their gradients: row-major) is not ours to choose: one of those is copied by a ``Relayout`` operator into, or from,
a temporary in the wanted layout, which the other operators then use instead. Each graph makes its own copy, because a
copy kept for the backward pass would take memory in every layer.

Containers that the configuration does not name keep their layout: row-major in their logical dimensions, unless an
earlier pass decided otherwise.

Dimension legend: B batch, S query position, T key position, H head, P head size, E embedding, U feed-forward size.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import sympy
from dace import data
from dace.sdfg import SDFG

from stepdown.models.errors import OptionError
from stepdown.models.operators import Relayout
from stepdown.models.operators.operator import make_memlet
from stepdown.transformations.canonical_form import operators, the_state
from stepdown.transformations.layout.configuration import LayoutConfiguration
from stepdown.transformations.layout.layouts import Layout, is_dense, logical_dims, physical_order
from stepdown.transformations.training_graph import TrainingGraph


@dataclass(frozen=True)
class AssignLayouts:
    """The pass; ``assign-layouts`` on the command line.

    :ivar configuration: the wanted layouts by container.
    """

    configuration: LayoutConfiguration = field(default_factory=LayoutConfiguration)

    def apply(self, graph: TrainingGraph) -> tuple[TrainingGraph, str]:
        """Assign layouts in place; returns the graph and a line about what was assigned.

        :raises OptionError: for a container that the graphs do not have, letters that are not its dimensions, or a
            layout for one graph of a container that both share.
        """
        assignments = {
            direction: _Assignment(sdfg, frozenset(graph.kept), self.configuration.of(direction))
            for direction, sdfg in graph.graphs()
        }
        self._check_names(graph, assignments)
        for assignment in assignments.values():
            assignment.check()
        for assignment in assignments.values():
            assignment.run()
        if not self.configuration:
            return graph, "every container in its default layout"
        laid = len(set().union(*(assignment.chosen() for assignment in assignments.values())))
        found = [conversion for _, sdfg in graph.graphs() for conversion in conversions(sdfg)]
        line = f"{laid} containers in chosen layouts"
        if found:
            moved = sympy.expand(sum(conversion.bytes_moved for conversion in found))
            line += f", {len(found)} conversions that move {moved} bytes"
        return graph, line

    def _check_names(self, graph: TrainingGraph, assignments: dict[str, _Assignment]) -> None:
        known = {direction: assignment.accepted() for direction, assignment in assignments.items()}
        both = set().union(*known.values())
        for name in self.configuration.containers:
            if name not in both:
                raise OptionError(_unknown(name, "the layer", both))
        for direction in ("forward", "backward"):
            for name in getattr(self.configuration, direction):
                if name not in known.get(direction, set()):
                    raise OptionError(_unknown(name, f"the {direction} graph", known.get(direction, set())))
                if name in graph.kept:
                    raise OptionError(
                        f'a layout of container "{name}" in the {direction} graph alone was given; it is kept for the '
                        f'backward pass, for which a layout under "containers" is accepted.'
                    )


@dataclass(frozen=True)
class Conversion:
    """A ``Relayout`` operator of a graph: the containers it copies from and to."""

    node: Relayout
    source: str
    target: str
    bytes_moved: Any


def conversions(sdfg: SDFG) -> Iterator[Conversion]:
    """The conversions of a graph in canonical form, in order of execution."""
    state = the_state(sdfg)
    for node in operators(sdfg):
        if isinstance(node, Relayout):
            source, target = state.in_edges(node)[0].data.data, state.out_edges(node)[0].data.data
            shape, size = sdfg.arrays[source].shape, sdfg.arrays[source].dtype.bytes
            yield Conversion(node, source, target, 2 * size * sympy.prod(shape))


class _Assignment:
    """The wanted layouts of one graph."""

    def __init__(self, sdfg: SDFG, kept: frozenset[str], wanted: dict[str, Layout]) -> None:
        self.sdfg = sdfg
        self.state = the_state(sdfg)
        self.kept = kept
        self.dims = logical_dims(sdfg)
        self.wanted = {name: layout for name, layout in wanted.items() if name in self.accepted()}

    def accepted(self) -> set[str]:
        """Containers that may be given a layout: those with dimensions, but for the copies that conversions make."""
        made = {c.target if self.fixed(c.source) else c.source for c in conversions(self.sdfg)}
        return {name for name, dims in self.dims.items() if dims and name not in made}

    def fixed(self, name: str) -> bool:
        """Whether the container belongs to PyTorch."""
        return not self.sdfg.arrays[name].transient and name not in self.kept

    def chosen(self) -> set[str]:
        """Containers of the graph that have an entry in the configuration."""
        return set(self.wanted)

    def check(self) -> None:
        """Refuse layouts that do not fit their containers, before anything is changed."""
        for name in self.wanted:
            self._layout(name)

    def run(self) -> None:
        """Give every named container its layout."""
        for name in sorted(self.wanted):
            layout, dims, descriptor = self._layout(name), self.dims[name], self.sdfg.arrays[name]
            strides, total = layout.strides(dims, descriptor.shape)
            if not self.fixed(name):
                _lay(descriptor, strides, total)
                continue
            copied = self._copy_of(name)
            if copied is None and is_dense(dims, descriptor.shape, strides, dims):
                continue
            if copied is None:
                copied = self._convert(name, physical_order(dims, strides))
            _lay(self.sdfg.arrays[copied], strides, total)

    def _layout(self, name: str) -> Layout:
        """The wanted layout under the letters that this graph's operators use."""
        layout, dims = self.wanted[name], self.dims[name]
        letters: dict[str, str] = {}
        if "S" not in dims or "T" not in dims:  # one of the two names: operators may disagree about which
            letters = {"S": "T"} if "T" in dims else {"T": "S"}
        if sorted(letters.get(letter, letter) for letter in layout.order) != sorted(dims):
            raise OptionError(
                f'order "{layout.order}" of container "{name}" was given; accepted is any order of "{dims}".'
            )
        return layout.renamed(letters)

    def _copy_of(self, name: str) -> str | None:
        """The container that a conversion of ``name`` already reads or writes."""
        for conversion in conversions(self.sdfg):
            if name in (conversion.source, conversion.target):
                return conversion.target if conversion.source == name else conversion.source
        return None

    def _convert(self, name: str, order: str) -> str:
        """Put a copy between PyTorch's container and the operators that use it."""
        state, sdfg = self.state, self.sdfg
        descriptor = copy.deepcopy(sdfg.arrays[name])
        descriptor.transient = True
        copied = sdfg.add_datadesc(f"{name}_converted", descriptor, find_new_name=True)
        accesses = [node for node in state.data_nodes() if node.data == name]
        written = [node for node in accesses if state.in_degree(node) > 0]
        dims = self.dims[name]
        inside = state.add_access(copied)
        for access in accesses:
            for edge in [*state.in_edges(access), *state.out_edges(access)]:
                memlet = copy.deepcopy(edge.data)
                memlet.data = copied
                state.remove_edge(edge)
                if edge.dst is access:
                    state.add_edge(edge.src, edge.src_conn, inside, None, memlet)
                else:
                    state.add_edge(inside, None, edge.dst, edge.dst_conn, memlet)
        kept, *others = written or accesses
        state.remove_nodes_from(others)
        # The order in which the result is written: elements of the target are neighbours.
        order = order if not written else physical_order(dims, sdfg.arrays[name].strides)
        node = Relayout(f"{name}_relayout", order, dims)
        state.add_node(node)
        source, target = (inside, kept) if written else (kept, inside)
        state.add_edge(source, None, node, "x", make_memlet(sdfg, source.data))
        state.add_edge(node, "y", target, None, make_memlet(sdfg, target.data))
        return copied


def _lay(descriptor: data.Array, strides: tuple[Any, ...], total: Any) -> None:
    descriptor.strides = strides
    descriptor.total_size = total


def _unknown(name: str, where: str, accepted: set[str]) -> str:
    names = ", ".join(f'"{other}"' for other in sorted(accepted)) or "none"
    return f'a layout of container "{name}" was given; {where} accepts layouts of {names}.'
