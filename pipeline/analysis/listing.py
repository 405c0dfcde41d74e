"""What stands in the SDFG of a stage: one record for each operator, map, library call and tasklet, in order.

Dimension legend: `B` batch, `S` sequence length. Counting rules: ``docs/counting.md``.
"""

import gzip
import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import dace
import sympy
from dace.sdfg import SDFG, SDFGState, nodes
from dace.sdfg.utils import dfs_topological_sort

from stepdown.models.errors import CanonicalFormError
from stepdown.models.operators.operator import Operator
from stepdown.models.quiet import quiet_dace
from stepdown.pipeline.analysis.expressions import Number, as_number


@dataclass(frozen=True)
class NodeRecord:
    """One node outside any other.

    ``state`` and ``node`` are its numbers in the saved file; ``dims`` what it iterates over, in legend letters, empty
    for nodes that are no operators. ``flop`` is ``None`` where the node does not say, ``bytes_moved`` counts each
    distinct container once on either side.
    """

    state: int
    node: int
    name: str
    kind: str
    detail: str
    dims: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    flop: Number | None
    bytes_moved: Number

    def to_dict(self) -> dict[str, Any]:
        """The record as JSON holds it, without its place in the file."""
        return {name: value for name, value in asdict(self).items() if name not in ("state", "node")}


@dataclass(frozen=True)
class EdgeRecord:
    """What an edge of an outermost state moves.

    ``ends`` are the number of its source and the connector there, and those of its destination.
    """

    state: int
    ends: tuple[int, str | None, int, str | None]
    bytes_moved: Number


def list_edges(sdfg: SDFG, sizes: Mapping[str, int | None] | None = None) -> list[EdgeRecord]:
    """The edges outside maps that move something.

    :param sizes: evaluates bytes; what it leaves open stays text in B and S.
    """
    records = []
    for number, state in enumerate(sdfg.states()):
        scopes = state.scope_dict()
        for edge in state.edges():
            outside = scopes[edge.dst] is None and (scopes[edge.src] is None or isinstance(edge.src, nodes.ExitNode))
            if outside and not edge.data.is_empty():
                ends = (state.node_id(edge.src), edge.src_conn, state.node_id(edge.dst), edge.dst_conn)
                records.append(EdgeRecord(number, ends, as_number(_bytes(sdfg, edge.data), sizes)))
    return records


def list_nodes(sdfg: SDFG, sizes: Mapping[str, int | None] | None = None) -> list[NodeRecord]:
    """The nodes of ``sdfg`` in an order in which they may run; what is inside maps and nested SDFGs belongs to those.

    :param sizes: evaluates counts; what it leaves open stays text in B and S.
    """
    records = []
    for number, state in enumerate(sdfg.states()):
        scopes = state.scope_dict()
        for node in dfs_topological_sort(state):
            if scopes[node] is None and not isinstance(node, nodes.AccessNode | nodes.ExitNode):
                records.append(_record(sdfg, number, state, node, sizes or {}))
    return records


def read_graph(file: Path) -> dict[str, Any]:
    """The JSON of the SDFG in ``file``, a compressed one.

    DaCe's own loader unpickles what is not JSON, which runs whatever a build from elsewhere says; this does not.

    :raises CanonicalFormError: when it is damaged.
    """
    try:
        with gzip.open(file, "rt", encoding="utf-8") as stream:
            content = json.load(stream)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise CanonicalFormError(f'"{file}" cannot be read as an SDFG: {error}.') from error
    if not isinstance(content, dict):
        raise CanonicalFormError(f'"{file}" cannot be read as an SDFG: it holds {type(content).__name__}.')
    return content


def load_graph(file: Path) -> SDFG:
    """The SDFG in ``file``.

    :raises CanonicalFormError: when it holds a library node that no installed module defines (rule 5), or is damaged.
    """
    content = read_graph(file)
    try:
        with quiet_dace():
            sdfg = SDFG.from_json(content)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CanonicalFormError(f'"{file}" cannot be read as an SDFG: {error}.') from error
    for node, _ in sdfg.all_nodes_recursive():
        if isinstance(node, nodes.UnregisteredLibraryNode):
            raise CanonicalFormError(f'"{file}" holds the library node "{node.name}", whose class is not installed.')
    return sdfg


def _record(sdfg: SDFG, number: int, state: SDFGState, node: nodes.Node, sizes: Mapping[str, int | None]) -> NodeRecord:
    out_edges = state.out_edges(state.exit_node(node)) if isinstance(node, nodes.EntryNode) else state.out_edges(node)
    inputs, outputs = _moved(state.in_edges(node)), _moved(out_edges)
    moved = sum((_bytes(sdfg, memlet) for side in (inputs, outputs) for memlet in side.values()), sympy.Integer(0))
    flop, dims, detail = None, "", ""
    if isinstance(node, Operator):
        flop = as_number(node.flop(node.sizes(sdfg, state)), sizes)
        dims, detail = node.dims, str(getattr(node, "einsum", ""))
    elif isinstance(node, nodes.MapEntry):
        ranges = zip(node.map.params, node.map.range, strict=True)
        detail = ", ".join(f"{name}={first}:{last + 1}" for name, (first, last, _) in ranges)
    elif isinstance(node, nodes.LibraryNode):
        detail = str(node.implementation or node.default_implementation or "")
    return NodeRecord(
        state=number,
        node=state.node_id(node),
        name=str(getattr(node, "label", node)),
        kind="Map" if isinstance(node, nodes.MapEntry) else type(node).__name__,
        detail=detail,
        dims=dims,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        flop=flop,
        bytes_moved=as_number(moved, sizes),
    )


def _moved(edges: list[Any]) -> dict[str, dace.Memlet]:
    """What each container has moved, containers in alphabetical order."""
    moved: dict[str, dace.Memlet] = {}
    for edge in sorted(edges, key=lambda edge: str(edge.data.data)):
        if not edge.data.is_empty():
            moved.setdefault(edge.data.data, edge.data)
    return moved


def _bytes(sdfg: SDFG, memlet: dace.Memlet) -> sympy.Expr:
    return sympy.sympify(memlet.subset.num_elements()) * sdfg.arrays[memlet.data].dtype.bytes
