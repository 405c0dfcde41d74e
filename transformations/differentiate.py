"""From a forward graph to a training graph: DaCe's automatic differentiation, then a clean-up to canonical form.

The raw backward graph nests one SDFG of operators for each forward operator and accumulates every gradient by
write-conflict resolution into containers that are cleared first. Both graphs are in single-assignment form, so a
gradient is the sum of what is written to it: the clean-up lifts the operators out of the nested SDFGs in topological
order, lets a gradient that only passes through share its source's container, and turns each accumulation into ``Add``
operators. (DaCe's ``simplify`` must not come before that: it drops the accumulation when it inlines.)
"""

from __future__ import annotations

import copy

import dace
from dace import data
from dace.autodiff.backward_pass_generator import BackwardPassGenerator
from dace.sdfg import SDFG, SDFGState, nodes

from stepdown.models.dtypes import DTYPES
from stepdown.models.errors import CanonicalFormError
from stepdown.models.operators import Add, Operator, Scale
from stepdown.models.operators.gradient import GRADIENT, connect_operator
from stepdown.transformations.canonical_form import container_dims, kept_containers, the_state, topological_nodes
from stepdown.transformations.training_graph import TrainingGraph

FLOATING_POINT = frozenset(dtype.dace for dtype in DTYPES.values())


def differentiate(forward: SDFG, output: str, required: list[str]) -> TrainingGraph:
    """The training graph of a layer.

    :param forward: graph in canonical form; the copy in the result has its kept containers as arguments, and any
        statistics that gradients read as further outputs of its operators.
    :param output: container whose gradient is given.
    :param required: containers whose gradients are wanted; the gradient of ``c`` is called ``gradient_c``.
    :raises CanonicalFormError: when an operator has no gradient rule, ``output`` is not computed, or a gradient is
        wanted of something that is not an argument or that ``output`` does not depend on.
    """
    _check_request(forward, output, required)
    forward = copy.deepcopy(forward)
    dims = container_dims(forward)
    raw = SDFG(f"{forward.name}_backward")
    generator = BackwardPassGenerator(
        sdfg=forward, given_gradients=[output], required_gradients=list(required), backward_sdfg=raw
    )
    result, _, _ = generator.backward()
    gradients = {name: result.required_grad_names[name] for name in required}
    backward = _Flattener(raw, result.given_grad_names[output], gradients, dims).flatten()
    kept = kept_containers(forward, backward)
    for name in kept:
        forward.arrays[name].transient = False
    return TrainingGraph(forward, backward, kept)


def _check_request(forward: SDFG, output: str, required: list[str]) -> None:
    """Refuse gradients that do not exist, which DaCe would trip over."""
    state = the_state(forward)
    results = [node for node in state.data_nodes() if node.data == output and state.in_degree(node) > 0]
    if not results:
        raise CanonicalFormError(f'graph "{forward.name}" computes no container "{output}"')
    upstream: set[nodes.Node] = set()
    pending: list[nodes.Node] = list(results)
    while pending:
        node = pending.pop()
        if node not in upstream:
            upstream.add(node)
            pending += [edge.src for edge in state.in_edges(node)]
    accepted = {
        node.data
        for node in upstream
        if isinstance(node, nodes.AccessNode)
        and state.in_degree(node) == 0
        and forward.arrays[node.data].dtype in FLOATING_POINT
        and not isinstance(forward.arrays[node.data], data.Scalar)  # a probability
    }
    for name in required:
        if name not in accepted:
            names = ", ".join(f'"{other}"' for other in sorted(accepted))
            raise CanonicalFormError(
                f'the gradient of "{name}" was asked for; "{output}" of graph "{forward.name}" has gradients of {names}'
            )


class _Flattener:
    """Rebuilds a raw backward graph as one state of operators."""

    def __init__(self, raw: SDFG, given: str, required: dict[str, str], dims: dict[str, str]) -> None:
        self.raw = raw
        self.given = given
        self.required = required
        self.forward_dims = dims
        self.sdfg = SDFG(raw.name)
        self.state = self.sdfg.add_state("backward")
        self.parts: dict[str, list[str]] = {given: [given]}
        self.summed: dict[str, str] = {}
        self.writers: dict[str, int] = {}

    def flatten(self) -> SDFG:
        for symbol, dtype in self.raw.symbols.items():
            self.sdfg.add_symbol(symbol, dtype)
        self._declare(self.given, self.raw.arrays[self.given], transient=False)
        rules = self._rules()
        for _, rule in rules:
            for edge in self._outputs(rule):
                self.writers[edge.data.data] = self.writers.get(edge.data.data, 0) + 1
        for state, rule in rules:
            self._lift(state, rule)
        for name, gradient in self.required.items():
            self._finish(name, gradient)
        self._drop_unread()
        return self.sdfg

    def _rules(self) -> list[tuple[SDFGState, nodes.NestedSDFG]]:
        """The nested SDFGs in execution order; everything else may only clear gradients."""
        found: list[tuple[SDFGState, nodes.NestedSDFG]] = []
        for block in self.raw.bfs_nodes(self.raw.start_block):
            if not isinstance(block, SDFGState):
                raise CanonicalFormError(
                    f'backward graph "{self.raw.name}" has control flow, which no operator produces'
                )
            for node in topological_nodes(block):
                if isinstance(node, nodes.NestedSDFG):
                    found.append((block, node))
                elif isinstance(node, (nodes.Tasklet, nodes.LibraryNode)) and any(
                    edge.dst_conn is not None for edge in block.in_edges(node)
                ):
                    raise CanonicalFormError(
                        f'backward graph "{self.raw.name}" computes outside its rules, in "{node}"'
                    )
        return found

    def _outputs(self, rule: nodes.NestedSDFG) -> list[dace.sdfg.graph.MultiConnectorEdge]:
        state = rule.sdfg.parent
        return list(state.out_edges(rule))

    def _declare(self, name: str, descriptor: dace.data.Data, *, transient: bool) -> str:
        clone = copy.deepcopy(descriptor)
        clone.transient = transient
        return self.sdfg.add_datadesc(name, clone, find_new_name=transient)

    def _lift(self, state: SDFGState, rule: nodes.NestedSDFG) -> None:
        """Copy one rule's operators into the flat graph."""
        names: dict[str, str] = {}
        for edge in state.in_edges(rule):
            outer = edge.data.data
            if outer in self.parts:
                names[edge.dst_conn] = self._total(outer)
            else:
                if outer not in self.sdfg.arrays:
                    self._declare(outer, self.raw.arrays[outer], transient=False)
                names[edge.dst_conn] = outer
        targets = {edge.src_conn: edge.data.data for edge in state.out_edges(rule)}
        inner = the_state(rule.sdfg)
        for node in topological_nodes(inner):
            if isinstance(node, Operator):
                self._copy_operator(rule.sdfg, inner, node, names, targets)
            elif isinstance(node, nodes.AccessNode):
                for edge in inner.in_edges(node):
                    if isinstance(edge.src, nodes.AccessNode):
                        names[node.data] = names[edge.src.data]
                        self._contribute(targets[node.data], names[node.data])

    def _copy_operator(
        self, sdfg: SDFG, state: SDFGState, node: Operator, names: dict[str, str], targets: dict[str, str]
    ) -> None:
        clone = copy.deepcopy(node)
        inputs = {edge.dst_conn: names[edge.data.data] for edge in state.in_edges(node)}
        outputs: dict[str, str] = {}
        for edge in state.out_edges(node):
            inner = edge.data.data
            target = targets.get(inner)
            if target is None:
                names[inner] = self._declare(inner, sdfg.arrays[inner], transient=True)
            else:
                sole = self.writers[target] == 1
                wanted = (
                    target
                    if sole
                    else f"{target}_of_{node.name.removesuffix('_gradient_a').removesuffix('_gradient_b')}"
                )
                names[inner] = self._declare(wanted, self.raw.arrays[target], transient=True)
                self._contribute(target, names[inner])
            outputs[edge.src_conn] = names[inner]
        connect_operator(self.sdfg, self.state, clone, inputs, outputs)

    def _contribute(self, gradient: str, part: str) -> None:
        self.parts.setdefault(gradient, []).append(part)

    def _total(self, gradient: str) -> str:
        """Container of a gradient whose parts are all there: the only part, or the sum of the parts in order."""
        if gradient in self.summed:
            return self.summed[gradient]
        parts = self.parts[gradient]
        total = parts[0]
        for number, part in enumerate(parts[1:], start=1):
            last = number == len(parts) - 1
            wanted = gradient if last else f"{gradient}_sum_{number}"
            result = self._declare(wanted, self.raw.arrays[gradient], transient=True)
            node = Add(f"{gradient}_accumulation_{number}", self._dims(gradient))
            connect_operator(self.sdfg, self.state, node, {"a": total, "b": part}, {"y": result})
            total = result
        self.summed[gradient] = total
        return total

    def _dims(self, gradient: str) -> str:
        return self.forward_dims[gradient.removeprefix(GRADIENT)]

    def _finish(self, name: str, gradient: str) -> None:
        """Make a required gradient an argument called ``gradient_<name>``; one that is another container is copied."""
        total = self._total(gradient)
        wanted = GRADIENT + name
        if total == wanted and self.sdfg.arrays[total].transient:
            self.sdfg.arrays[total].transient = False
            return
        self._declare(wanted, self.raw.arrays[gradient], transient=False)
        connect_operator(
            self.sdfg, self.state, Scale(f"{wanted}_copy", self._dims(wanted)), {"x": total}, {"y": wanted}
        )

    def _drop_unread(self) -> None:
        """Remove operators whose results nobody reads, and arguments that no operator reads any more."""
        changed = True
        while changed:
            changed = False
            for node in [n for n in self.state.nodes() if isinstance(n, Operator)]:
                results = [edge.dst for edge in self.state.out_edges(node)]
                if all(self.sdfg.arrays[r.data].transient and self.state.out_degree(r) == 0 for r in results):
                    self.state.remove_nodes_from([node, *results])
                    for result in results:
                        self.sdfg.remove_data(result.data)
                    changed = True
            for access in self.state.data_nodes():
                if self.state.degree(access) == 0:
                    self.state.remove_node(access)
        read = {access.data for access in self.state.data_nodes()}
        for name in [name for name in self.sdfg.arrays if name not in read and name != self.given]:
            self.sdfg.remove_data(name)
