"""The canonical form's validator, run between passes; the rules are those of ``docs/canonical_form.md``.

Dimension legend: B batch, S query position, T key position, H head, P head size, E embedding, U feed-forward size,
N projection in a stack.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import combinations

from dace import data
from dace.sdfg import SDFG, SDFGState, nodes
from dace.sdfg.graph import MultiConnectorEdge
from dace.sdfg.validation import InvalidSDFGError
from sympy import sympify

from stepdown.models.errors import CanonicalFormError
from stepdown.models.operators.gradient import GRADIENT
from stepdown.models.operators.operator import STACK, Operator, canonical_dims, data_type, fixed_axes
from stepdown.transformations.training_graph import TrainingGraph


def the_state(sdfg: SDFG) -> SDFGState:
    """The single state of a graph in canonical form.

    :raises CanonicalFormError: when there is any other number of states (rule 3).
    """
    blocks = sdfg.nodes()
    if len(blocks) != 1 or not isinstance(blocks[0], SDFGState):
        raise CanonicalFormError(f'graph "{sdfg.name}" has {len(blocks)} states, the canonical form takes one (rule 3)')
    return blocks[0]


def operators(sdfg: SDFG) -> list[Operator]:
    """The operators of a graph in canonical form, in a topological order that is the same at every call."""
    return [node for node in topological_nodes(the_state(sdfg)) if isinstance(node, Operator)]


def topological_nodes(state: SDFGState) -> list[nodes.Node]:
    """Nodes in topological order; ties are broken by the order in which the nodes were added."""
    position = {node: place for place, node in enumerate(state.nodes())}
    missing = {node: len({edge.src for edge in state.in_edges(node)}) for node in state.nodes()}
    ready = sorted((node for node, count in missing.items() if count == 0), key=position.__getitem__)
    order: list[nodes.Node] = []
    while ready:
        node = ready.pop(0)
        order.append(node)
        for successor in sorted({edge.dst for edge in state.out_edges(node)}, key=position.__getitem__):
            missing[successor] -= 1
            if missing[successor] == 0:
                ready.append(successor)
        ready.sort(key=position.__getitem__)
    return order


def operand_edges(state: SDFGState, node: Operator) -> Iterator[tuple[str, str, bool]]:
    """Connector, container and whether it is written, for every operand of an operator."""
    for edge in state.in_edges(node):
        yield edge.dst_conn, edge.data.data, False
    for edge in state.out_edges(node):
        yield edge.src_conn, edge.data.data, True


def container_dims(sdfg: SDFG) -> dict[str, str]:
    """The logical dimensions of every container that an operator reads or writes.

    S and T of self-attention share an extent: where operators differ in that, the name with S is given. The dimension
    that numbers the parts of a container which operators use part by part only is called N.
    """
    state = the_state(sdfg)
    found: dict[str, str] = {}
    for node in operators(sdfg):
        dims = node.operand_dims()
        for edge in state.all_edges(node):
            connector, name = edge.dst_conn if edge.dst is node else edge.src_conn, edge.data.data
            letters = dims[connector]
            excess = len(sdfg.arrays[name].shape) - max(len(letters), 1)  # DaCe has no shape ()
            if excess == 1 and STACK not in letters:
                fixed = fixed_axes(edge.data.subset.size(), sdfg.arrays[name].shape, len(letters)) or (0,)
                letters = letters[: fixed[0]] + STACK + letters[fixed[0] :]
            elif excess != 0:
                continue
            if name not in found or ("T" in found[name] and "T" not in letters):
                found[name] = letters
    return found


def kept_containers(forward: SDFG, backward: SDFG) -> tuple[str, ...]:
    """What backward reads of what forward computes, beyond the layer's inputs and output (rule 4)."""
    written = {name for name in written_containers(forward) if not name_is_output(forward, name)}
    read = {node.data for node in the_state(backward).data_nodes() if not backward.arrays[node.data].transient}
    return tuple(sorted(read & written))


def written_containers(sdfg: SDFG) -> set[str]:
    """Containers that some operator writes."""
    state = the_state(sdfg)
    return {node.data for node in state.data_nodes() if state.in_degree(node) > 0}


def name_is_output(sdfg: SDFG, name: str) -> bool:
    """Whether ``name`` is the layer's own output, as recorded when the graph was parsed."""
    return name in OUTPUT_NAMES and name in sdfg.arrays


OUTPUT_NAMES = ("y",)
"""Names of the containers that a layer's program returns."""


def validate(graph: TrainingGraph) -> None:
    """Check every rule of the canonical form.

    :raises CanonicalFormError: naming the rule, the node and the container that break it.
    """
    for _, sdfg in graph.graphs():
        validate_sdfg(sdfg)
    if graph.backward is None:
        if graph.kept:
            raise CanonicalFormError(f"a graph without a backward pass keeps {', '.join(graph.kept)} (rule 4)")
        return
    derived = kept_containers(graph.forward, graph.backward)
    if derived != graph.kept:
        raise CanonicalFormError(
            f'graph "{graph.forward.name}" says it keeps {", ".join(graph.kept) or "nothing"}, its backward pass reads '
            f"{', '.join(derived) or 'nothing'} (rule 4)"
        )
    for name in graph.kept:
        if graph.forward.arrays[name].transient:
            raise CanonicalFormError(f'kept container "{name}" is a temporary of the forward graph (rule 4)')
    _validate_shared(graph.forward, graph.backward)


def _validate_shared(forward: SDFG, backward: SDFG) -> None:
    """What backward reads besides gradients is an argument of forward, in the same type, shape and layout."""
    written = written_containers(backward)
    for name, descriptor in backward.arrays.items():
        if descriptor.transient or name in written or name.startswith(GRADIENT):
            continue
        if name not in forward.arrays or forward.arrays[name].transient:
            raise CanonicalFormError(
                f'graph "{backward.name}" reads "{name}", which is no argument of graph "{forward.name}" (rule 4)'
            )
        other = forward.arrays[name]
        if (descriptor.dtype, descriptor.shape, descriptor.strides) != (other.dtype, other.shape, other.strides):
            raise CanonicalFormError(
                f'container "{name}" has another type, shape or layout in graph "{backward.name}" than in graph '
                f'"{forward.name}" (rule 4)'
            )


def validate_sdfg(sdfg: SDFG) -> None:
    """Check the rules that concern one graph (1, 2, 3 and 5)."""
    state = the_state(sdfg)
    written: set[str] = set()
    dims: dict[str, str] = {}
    for node in topological_nodes(state):
        if isinstance(node, nodes.AccessNode):
            _validate_access(sdfg, state, node, written)
        elif isinstance(node, Operator):
            _validate_operator(sdfg, state, node, dims)
        else:
            kind = type(node).__name__
            raise CanonicalFormError(
                f'node "{node}" of graph "{sdfg.name}" is a {kind}, not an operator (rules 1 and 5)'
            )
    used = {node.data for node in state.data_nodes()}
    for name, descriptor in sdfg.arrays.items():
        if isinstance(descriptor, (data.View, data.Reference, data.Stream)):
            raise CanonicalFormError(
                f'container "{name}" is a {type(descriptor).__name__}, not an array or scalar (rule 3)'
            )
        if descriptor.transient and name not in used:
            raise CanonicalFormError(f'temporary "{name}" of graph "{sdfg.name}" is never used (rule 3)')
        if descriptor.transient and name not in written:
            raise CanonicalFormError(f'temporary "{name}" of graph "{sdfg.name}" is read but never written (rule 3)')
    try:
        sdfg.validate()
    except InvalidSDFGError as error:
        raise CanonicalFormError(f'graph "{sdfg.name}" is refused by DaCe: {error.message} (rule 3)') from error


def _validate_access(sdfg: SDFG, state: SDFGState, node: nodes.AccessNode, written: set[str]) -> None:
    writers = state.in_edges(node)
    if not writers:
        return
    if node.data in written:
        raise CanonicalFormError(f'container "{node.data}" of graph "{sdfg.name}" is written more than once (rule 3)')
    if not _each_part_once(sdfg.arrays[node.data].shape, writers):
        raise CanonicalFormError(
            f'parts of container "{node.data}" of graph "{sdfg.name}" are written more than once or never (rule 3)'
        )
    written.add(node.data)
    for edge in writers:
        if not isinstance(edge.src, Operator) or edge.data.wcr is not None:
            raise CanonicalFormError(f'container "{node.data}" is not written by an operator alone (rule 3)')


def _each_part_once(shape: Sequence[object], writers: list[MultiConnectorEdge]) -> bool:
    """Whether operators write different parts of a container, and together all of it."""
    subsets = [edge.data.subset for edge in writers]
    axes = {axis for s in subsets for axis, n in enumerate(s.size()) if n == 1 and shape[axis] != 1}
    index = [{axis: s.ranges[axis][0] for axis in axes if s.size()[axis] == 1} for s in subsets]
    apart = all(any(a[axis] != b[axis] for axis in a.keys() & b.keys()) for a, b in combinations(index, 2))
    return apart and len(writers) == math.prod(int(shape[axis]) for axis in axes)  # type: ignore[call-overload]


def _validate_edge(sdfg: SDFG, node: Operator, edge: MultiConnectorEdge, dims: dict[str, str]) -> None:
    """Whole containers, or the part at constant indices, between an access node and a known connector."""
    connector, other = (edge.dst_conn, edge.src) if edge.dst is node else (edge.src_conn, edge.dst)
    if not isinstance(other, nodes.AccessNode) or edge.data.is_empty():
        raise CanonicalFormError(f'operator "{node.name}" has an edge to "{other}" that carries no container (rule 3)')
    if connector not in dims:
        raise CanonicalFormError(f'operator "{node.name}" has no operand "{connector}" (rule 1)')
    descriptor = sdfg.arrays[edge.data.data]
    sizes = edge.data.subset.size()
    fixed = fixed_axes(sizes, descriptor.shape, len(dims[connector]))
    for axis, ((low, _, step), size, extent) in enumerate(
        zip(edge.data.subset.ranges, sizes, descriptor.shape, strict=True)
    ):
        whole = low == 0 and size == extent
        index = not sympify(low).free_symbols
        if step != 1 or fixed is None or not (index if axis in fixed else whole):
            raise CanonicalFormError(
                f'operator "{node.name}" reads or writes "{edge.data.data}[{edge.data.subset}]", an edge takes whole '
                f"dimensions and constant indices (rule 3)"
            )


def _validate_operator(sdfg: SDFG, state: SDFGState, node: Operator, dims: dict[str, str]) -> None:
    own = node.operand_dims()
    for edge in state.all_edges(node):
        _validate_edge(sdfg, node, edge, own)
    node.sizes(sdfg, state)
    connected = {connector for connector, _, _ in operand_edges(state, node)}
    for connector in (*node.inputs, *node.outputs):
        if connector not in connected:
            raise CanonicalFormError(f'operand "{connector}" of operator "{node.name}" is not connected (rule 1)')
    operands = {connector: name for connector, name, _ in operand_edges(state, node)}
    types = node.result_types(data_type(sdfg.arrays[operands[node.main_operand]]))
    for connector, name, written in operand_edges(state, node):
        if written and data_type(sdfg.arrays[name]) is not types[connector]:
            raise CanonicalFormError(
                f'container "{name}" has type "{data_type(sdfg.arrays[name])}", output "{connector}" of operator '
                f'"{node.name}" has type "{types[connector]}" (rule 1)'
            )
        letters = canonical_dims(own[connector])
        if len(sdfg.arrays[name].shape) == len(letters) and dims.setdefault(name, letters) != letters:
            raise CanonicalFormError(
                f'container "{name}" has dimensions "{dims[name]}" for one operator and "{letters}" for '
                f'"{node.name}" (rule 2)'
            )
