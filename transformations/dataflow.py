"""A graph in canonical form as operators and containers: who writes, who reads, and small changes to both.

Single assignment (canonical form, rule 3) makes a container the name of a value: what reads it may read another
container of the same value instead.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import replace
from operator import itemgetter
from typing import TypeVar

from dace.sdfg import SDFG
from dace.sdfg.graph import MultiConnectorEdge
from dace.sdfg.nodes import AccessNode, Node

from stepdown.models.operators import Operator
from stepdown.models.operators.operator import make_memlet, part_memlet
from stepdown.transformations.canonical_form import kept_containers, name_is_output, the_state
from stepdown.transformations.training_graph import TrainingGraph

Entry = TypeVar("Entry")


class Dataflow:
    """One graph; every change is made to it at once."""

    def __init__(self, sdfg: SDFG) -> None:
        self.sdfg = sdfg
        self.state = the_state(sdfg)

    # ---- questions -------------------------------------------------------------------------------------------------

    def accesses(self, name: str) -> list[AccessNode]:
        """Access nodes of a container."""
        return [node for node in self.state.data_nodes() if node.data == name]

    def writer(self, name: str) -> Operator | None:
        """The operator that writes a container; None for an argument."""
        edges = [edge for access in self.accesses(name) for edge in self.state.in_edges(access)]
        return edges[0].src if edges else None

    def readers(self, name: str) -> list[MultiConnectorEdge]:
        """The edges through which operators read a container."""
        return [edge for access in self.accesses(name) for edge in self.state.out_edges(access)]

    def operands(self, node: Operator) -> dict[str, str]:
        """Container of every connector."""
        found = {edge.dst_conn: edge.data.data for edge in self.state.in_edges(node)}
        return found | {edge.src_conn: edge.data.data for edge in self.state.out_edges(node)}

    def reads_whole(self, node: Operator) -> bool:
        """Whether the operator reads and writes whole containers only."""
        return all(
            edge.data.subset.size() == list(self.sdfg.arrays[edge.data.data].shape)
            for edge in self.state.all_edges(node)
        )

    def below(self, start: Iterable[Node]) -> set[Node]:
        """Everything that depends on the nodes."""
        found: set[Node] = set()
        pending = [successor for node in start for successor in self.state.successors(node)]
        while pending:
            node = pending.pop()
            if node not in found:
                found.add(node)
                pending += self.state.successors(node)
        return found

    def alike(self, one: str, other: str) -> bool:
        """Whether two containers have the same type, shape and layout."""
        return form(self.sdfg, one) == form(self.sdfg, other)

    # ---- changes ---------------------------------------------------------------------------------------------------

    def declare(self, source: SDFG, name: str, *, transient: bool = False) -> None:
        """Give this graph a container that ``source`` has, unless it has it already."""
        if name in self.sdfg.arrays:
            return
        descriptor = copy.deepcopy(source.arrays[name])
        descriptor.transient = transient
        self.sdfg.add_datadesc(name, descriptor)
        for symbol in descriptor.free_symbols:
            if str(symbol) not in self.sdfg.symbols:
                self.sdfg.add_symbol(str(symbol), source.symbols[str(symbol)])

    def redirect(self, old: str, new: str) -> None:
        """Let everything that reads ``old`` read ``new``, which has the same shape."""
        edges = self.readers(old)
        if not edges:
            return
        source = self._source(new)
        for edge in edges:
            self._reconnect(edge, source, edge.dst)
        self._drop_unused(old)

    def read_part(self, old: str, new: str, axis: int, index: int) -> None:
        """Let everything that reads ``old`` read ``new`` at one index of a dimension, which has the same shape."""
        edges = self.readers(old)
        source = self._source(new) if edges else None
        for edge in edges:
            self.state.remove_edge(edge)
            self.state.add_edge(source, None, edge.dst, edge.dst_conn, part_memlet(self.sdfg, new, axis, index))
        self.drop(old)

    def write_part(self, old: str, new: str, axis: int, index: int) -> None:
        """Let the writer of ``old`` write ``new`` at one index of a dimension, which has the same shape."""
        edges = [edge for access in self.accesses(old) for edge in self.state.in_edges(access)]
        for edge in edges:
            self.state.remove_edge(edge)
            memlet = part_memlet(self.sdfg, new, axis, index)
            self.state.add_edge(edge.src, edge.src_conn, self._source(new), None, memlet)

    def write_instead(self, node: Operator, connector: str, name: str) -> None:
        """Let an operator write ``name``, which nobody writes, instead of what it writes."""
        edge = next(edge for edge in self.state.out_edges(node) if edge.src_conn == connector)
        old = edge.data.data
        self._reconnect(edge, node, self._source(name))
        self._drop_unused(old)

    def remove_operator(self, node: Operator) -> None:
        """Remove an operator, the access nodes that it leaves alone, and the temporaries that it wrote in vain."""
        names = set(self.operands(node).values())
        self.state.remove_node(node)
        for name in sorted(names):
            self._drop_unused(name)

    def remove_output(self, node: Operator, connector: str) -> None:
        """Remove an output that nobody reads."""
        edge = next(edge for edge in self.state.out_edges(node) if edge.src_conn == connector)
        self.state.remove_edge(edge)
        node.remove_out_connector(connector)
        self._drop_unused(edge.data.data)

    def drop(self, name: str) -> None:
        """Remove a container that no operator touches, argument or not, if there is one of this name."""
        if name not in self.sdfg.arrays:
            return
        self._drop_unused(name)
        if not self.accesses(name):
            self.drop_arguments({name})

    def drop_arguments(self, names: set[str]) -> None:
        """Remove those of the named arguments that no operator touches."""
        for name in sorted(names & set(self.sdfg.arrays)):
            if not self.accesses(name):
                self.sdfg.remove_data(name)

    def add(self, node: Operator, inputs: Mapping[str, str], outputs: Mapping[str, str]) -> None:
        """Add an operator; containers that are read get no second access node."""
        self.state.add_node(node)
        for connector, name in inputs.items():
            self.connect_input(node, connector, name)
        for connector, name in outputs.items():
            target = self._source(name)
            node.add_out_connector(connector, force=True)
            self.state.add_edge(node, connector, target, None, make_memlet(self.sdfg, name))

    def connect_input(self, node: Operator, connector: str, name: str) -> None:
        """Let an operator read a container through ``connector``."""
        node.add_in_connector(connector, force=True)
        self.state.add_edge(self._source(name), None, node, connector, make_memlet(self.sdfg, name))

    def _source(self, name: str) -> AccessNode:
        """The access node from which a container is read: the one that is written, if any is."""
        accesses = self.accesses(name)
        written = [access for access in accesses if self.state.in_degree(access) > 0]
        return written[0] if written else accesses[0] if accesses else self.state.add_access(name)

    def _reconnect(self, edge: MultiConnectorEdge, source: object, target: object) -> None:
        memlet = copy.deepcopy(edge.data)
        memlet.data = source.data if isinstance(source, AccessNode) else target.data  # type: ignore[attr-defined]
        self.state.remove_edge(edge)
        self.state.add_edge(source, edge.src_conn, target, edge.dst_conn, memlet)

    def _drop_unused(self, name: str) -> None:
        for access in self.accesses(name):
            if self.state.degree(access) == 0:
                self.state.remove_node(access)
        if self.sdfg.arrays[name].transient and not self.accesses(name):
            self.sdfg.remove_data(name)


def connected(entries: Iterable[tuple[Entry, set[str]]]) -> list[list[Entry]]:
    """Entries that have names in common, directly or through others, set by set; each set in the given order."""
    sets: list[tuple[set[str], list[tuple[int, Entry]]]] = []
    for place, (entry, own) in enumerate(entries):
        joined = [known for known in sets if known[0] & own]
        sets = [known for known in sets if not known[0] & own]
        names = own.union(*(known[0] for known in joined))
        sets.append((names, [*(member for known in joined for member in known[1]), (place, entry)]))
    return [[entry for _, entry in sorted(members, key=itemgetter(0))] for _, members in sets]


def form(sdfg: SDFG, name: str) -> tuple[object, ...]:
    """Type, shape and layout of a container."""
    descriptor = sdfg.arrays[name]
    return (type(descriptor), descriptor.dtype, tuple(descriptor.shape), tuple(descriptor.strides))


def replace_kept(graph: TrainingGraph, old: str, new: str) -> None:
    """Let both graphs read ``new`` wherever they read ``old``, a kept container of the same value and form."""
    assert graph.backward is not None
    forward, backward = Dataflow(graph.forward), Dataflow(graph.backward)
    forward.redirect(old, new)
    graph.forward.arrays[new].transient = False
    backward.declare(graph.forward, new)
    backward.redirect(old, new)
    backward.drop_arguments({old})


def derive_kept(graph: TrainingGraph) -> TrainingGraph:
    """The graph with ``kept`` as the two graphs have it; what is kept no longer becomes a temporary of forward."""
    if graph.backward is None:
        return graph
    kept = kept_containers(graph.forward, graph.backward)
    for name in kept:
        graph.forward.arrays[name].transient = False
    for name in set(graph.kept) - set(kept):
        if name in graph.forward.arrays and not name_is_output(graph.forward, name):
            graph.forward.arrays[name].transient = True
    return replace(graph, kept=kept)
