"""``StackProjections``: contractions of one input with several parameters become one contraction with their stack.

Dimension legend: B batch, S query position, T key position, H head, P head size, E embedding, U feed-forward size,
N projection in a stack.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dace import data
from dace.sdfg import SDFG
from dace.sdfg.graph import MultiConnectorEdge

from stepdown.models.errors import OptionError
from stepdown.models.operators import Add, Bias, Contraction, Operator, SumRows
from stepdown.models.operators.contraction import split_einsum
from stepdown.models.operators.gradient import GRADIENT
from stepdown.models.operators.operator import STACK, add_container, canonical_dims, data_type
from stepdown.transformations.canonical_form import name_is_output, operators
from stepdown.transformations.dataflow import Dataflow, derive_kept, form
from stepdown.transformations.training_graph import TrainingGraph

OF_DATA = frozenset("BST")
"""Dimensions that depend on the data: an argument with one of them is no parameter."""


@dataclass(frozen=True)
class StackProjections:
    """The pass; ``stack-projections`` on the command line.

    ``p_i = alpha x.w_i`` for parameters ``w_i`` of one shape becomes ``p = alpha x.w``: ``w`` is an argument that holds
    the parameters one after the other, ``p`` holds the products, and the dimension ``N`` numbers them. Readers of a
    product or a parameter read a part. Where a bias of its own follows every product, the biases are stacked, too.

    In backward the gradients of the products become parts of one container, where each has a container of its own. The
    gradients of the parameters, and those of the biases, are then one operator each, and the gradients of ``x``, where
    they are only added up, are one contraction that sums over ``N``, too.

    ``x`` is read once instead of once a product (paper, section III-D and Table 2: unfused, QK, QKV), and the products
    of its gradient are added inside the contraction.

    It relies on rules 2 and 3 of the canonical form.

    :ivar most: at most so many contractions become one; None for all. 2 stacks Q and K only.
    """

    most: int | None = None

    def __post_init__(self) -> None:
        most = self.most
        if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 2):
            raise OptionError(f'"most" of pass "stack-projections" is {most!r}; accepted are None and numbers from 2.')

    def apply(self, graph: TrainingGraph) -> tuple[TrainingGraph, str]:
        """Stack in place; returns the graph and a line about what changed."""
        before = sum(len(operators(sdfg)) for _, sdfg in graph.graphs())
        stacks = dict(graph.stacks)
        found = [nodes for siblings in _siblings(graph) for nodes in self._portions(siblings)]
        for nodes in found:
            stacks |= _Stack(graph, nodes).write()
        if not found:
            return graph, "no projections of one input"
        graph = replace(derive_kept(graph), stacks=stacks)
        after = sum(len(operators(sdfg)) for _, sdfg in graph.graphs())
        stacked = sum(map(len, found))
        return graph, f"{stacked} projections in {len(found)} stacks, {before - after} operators less"

    def _portions(self, nodes: list[Contraction]) -> Iterator[list[Contraction]]:
        most = len(nodes) if self.most is None else self.most
        for first in range(0, len(nodes), most):
            if len(nodes[first : first + most]) > 1:
                yield nodes[first : first + most]


def common_name(names: Sequence[str]) -> str:
    """One name for several: what they begin and end with once, and what they differ in one after the other.

    ``query_weight``, ``key_weight`` and ``value_weight`` give ``query_key_value_weight``.
    """
    words = [name.split("_") for name in names]
    shortest = min(map(len, words))
    begin = _equal(lambda place: {tuple(own[: place + 1]) for own in words}, shortest - 1)
    end = _equal(lambda place: {tuple(own[-place - 1 :]) for own in words}, shortest - 1 - begin)
    middle = [word for own in words for word in own[begin : len(own) - end]]
    return "_".join([*words[0][:begin], *middle, *words[0][len(words[0]) - end :]])


def _equal(of: Callable[[int], set[Any]], limit: int) -> int:
    count = 0
    while count < limit and len(of(count)) == 1:
        count += 1
    return count


def is_parameter(sdfg: SDFG, flow: Dataflow, name: str, dims: str) -> bool:
    """Whether a container is given to the graph and has no dimension of the data."""
    descriptor = sdfg.arrays[name]
    given = isinstance(descriptor, data.Array) and not descriptor.transient and flow.writer(name) is None
    return given and not OF_DATA & set(dims)


def _siblings(graph: TrainingGraph) -> list[list[Contraction]]:
    """Contractions of one container with different parameters of one form, in order of execution."""
    sdfg = graph.forward
    flow = Dataflow(sdfg)
    found: dict[tuple[Any, ...], list[Contraction]] = {}
    for node in operators(sdfg):
        if not isinstance(node, Contraction) or node.accumulate or not flow.reads_whole(node):
            continue
        terms = tuple(map(canonical_dims, split_einsum(node.einsum)))
        if STACK in node.einsum or any(len(set(term)) < len(term) for term in terms):
            continue
        operands = flow.operands(node)
        weight, product = operands["b"], operands["d"]
        if operands["a"] == weight or not is_parameter(sdfg, flow, weight, terms[1]):
            continue
        if name_is_output(sdfg, product) or not _all_whole(graph, (weight, product)):
            continue
        kept = product in graph.kept
        if not (kept or sdfg.arrays[product].transient):
            continue
        key = (operands["a"], terms, node.alpha, form(sdfg, weight), form(sdfg, product), kept)
        siblings = found.setdefault(key, [])
        if weight not in {flow.operands(other)["b"] for other in siblings}:
            siblings.append(node)
    return [siblings for siblings in found.values() if len(siblings) > 1]


def _all_whole(graph: TrainingGraph, names: Sequence[str]) -> bool:
    """Whether nobody reads parts of the containers already."""
    for _, sdfg in graph.graphs():
        flow = Dataflow(sdfg)
        for name in set(names) & set(sdfg.arrays):
            if any(not _whole(sdfg, edge) for edge in flow.readers(name)):
                return False
    return True


def _whole(sdfg: SDFG, edge: MultiConnectorEdge) -> bool:
    return edge.data.subset.size() == list(sdfg.arrays[edge.data.data].shape)


class _Stack:
    """Contractions of forward that become one, and what follows from that."""

    def __init__(self, graph: TrainingGraph, nodes: Sequence[Contraction]) -> None:
        self.graph = graph
        self.nodes = list(nodes)
        self.flow = Dataflow(graph.forward)
        operands = [self.flow.operands(node) for node in nodes]
        self.input = operands[0]["a"]
        self.weights = [own["b"] for own in operands]
        self.products = [own["d"] for own in operands]
        self.a, self.b, self.d = map(canonical_dims, split_einsum(nodes[0].einsum))
        # Before the first dimension that comes from the parameter: rows stay rows and columns columns.
        columns = [place for place, letter in enumerate(self.d) if letter not in self.a]
        self.axis = min(columns, default=len(self.d))
        self.stacked_b = STACK + self.b
        self.stacked_d = self._stacked(self.d)

    def write(self) -> dict[str, tuple[str, ...]]:
        """Change both graphs; returns the parameters of each new argument."""
        alpha, name = self.nodes[0].alpha, common_name([node.name for node in self.nodes])
        biases = self._biases()
        stacks = {self._argument(self.weights): tuple(self.weights)}
        (weight,) = stacks
        bias = None
        if biases is not None:
            bias = self._argument(biases)
            stacks[bias] = tuple(biases)
        product = self.container(self.graph.forward, self.products, self.axis, self.products[0] not in self.graph.kept)
        for node in self.nodes:
            self.flow.remove_operator(node)
        node = Contraction(name, f"{self.a},{self.stacked_b}->{self.stacked_d}", alpha)
        self.flow.add(node, {"a": self.input, "b": weight}, {"d": product})
        if biases is not None:
            assert bias is not None
            self._stack_biases(biases, product, bias)
        else:
            self._read_parts(self.products, product, self.axis)
        if self.graph.backward is not None:
            _BackwardStack(self, self.graph.backward, stacks).write()
        for stack, members in stacks.items():
            self._read_parts(list(members), stack, 0)
        return stacks

    def _stacked(self, dims: str) -> str:
        return dims[: self.axis] + STACK + dims[self.axis :]

    def _argument(self, names: Sequence[str]) -> str:
        return self.container(self.graph.forward, names, 0, False)

    def container(self, sdfg: SDFG, names: Sequence[str], axis: int, transient: bool, name: str = "") -> str:
        """A container for as many parts as there are names, of their form, row-major."""
        shape = list(sdfg.arrays[names[0]].shape)
        shape.insert(axis, len(names))
        dtype = data_type(sdfg.arrays[names[0]])
        return add_container(sdfg, name or common_name(names), tuple(shape), dtype, transient=transient)

    def _read_parts(self, names: Sequence[str], stack: str, axis: int) -> None:
        """Let both graphs read parts of a stack of forward instead of its members."""
        for _, sdfg in self.graph.graphs():
            flow = Dataflow(sdfg)
            if any(name in sdfg.arrays and flow.readers(name) for name in names):
                flow.declare(self.graph.forward, stack)
            for index, name in enumerate(names):
                if name in sdfg.arrays:
                    flow.read_part(name, stack, axis, index)

    # ---- biases ----------------------------------------------------------------------------------------------------

    def _biases(self) -> list[str] | None:
        """The parameters that are added to the products, where each product has one of its own and no other reader."""
        forms: set[tuple[Any, ...]] = set()
        found: list[str] = []
        for product in self.products:
            readers = self.flow.readers(product)
            if len(readers) != 1 or product in self.graph.kept:
                return None
            node = readers[0].dst
            if not isinstance(node, Bias) or readers[0].dst_conn != "x" or not self.flow.reads_whole(node):
                return None
            operands, dims = self.flow.operands(node), canonical_dims(node.bias_dims)
            name, result = operands["bias"], operands["y"]
            parameter = is_parameter(self.graph.forward, self.flow, name, dims)
            if (
                not parameter
                or not _all_whole(self.graph, (name, result))
                or name_is_output(self.graph.forward, result)
            ):
                return None
            kept = result in self.graph.kept
            if not (kept or self.graph.forward.arrays[result].transient):
                return None
            forms.add((dims, kept, form(self.graph.forward, name), form(self.graph.forward, result)))
            found.append(name)
        return found if len(forms) == 1 and len(set(found)) == len(found) else None

    def _stack_biases(self, biases: Sequence[str], product: str, bias: str) -> None:
        nodes = [self.flow.readers(name)[0].dst for name in self.products]
        results = [self.flow.operands(node)["y"] for node in nodes]
        result = self.container(self.graph.forward, results, self.axis, results[0] not in self.graph.kept)
        for node in nodes:
            self.flow.remove_operator(node)
        dims = STACK + canonical_dims(nodes[0].bias_dims)
        node = Bias(common_name([node.name for node in nodes]), self.stacked_d, dims)
        self.flow.add(node, {"x": product, "bias": bias}, {"y": result})
        for name in self.products:
            self.flow.drop(name)
        self._read_parts(results, result, self.axis)


class _BackwardStack:
    """What becomes one operator in backward, once the gradients of the products are parts of one container.

    :param stacks: the parameters by the argument that holds them, those of the contractions first.
    """

    def __init__(self, stack: _Stack, sdfg: SDFG, stacks: Mapping[str, Sequence[str]]) -> None:
        self.stack = stack
        self.sdfg = sdfg
        self.flow = Dataflow(sdfg)
        self.stacks = stacks
        self.weight = next(iter(stacks))

    def write(self) -> None:
        """Change the graph, as far as its gradients have the form for it."""
        stack = self.stack
        for_weights = [self._for_weight(name) for name in stack.weights]
        for_input = [self._for_input(name) for name in stack.weights]
        given: list[str] = []
        for nodes in zip(for_weights, for_input, strict=True):
            found = {self.flow.operands(node)["a"] for node in nodes if node is not None}
            if len(found) != 1:
                return
            given += found
        if not self._can_be_parts(given):
            return
        for_biases = [
            [self._for_bias(name, gradient) for name, gradient in zip(names, given, strict=True)]
            for names in list(self.stacks.values())[1:]
        ]
        gradient = stack.container(self.sdfg, given, stack.axis, True)
        for index, name in enumerate(given):
            self.flow.write_part(name, gradient, stack.axis, index)
            self.flow.read_part(name, gradient, stack.axis, index)
        self._join_parameters(self.weight, for_weights, {"a": gradient, "b": stack.input})
        for bias, sums in zip(list(self.stacks)[1:], for_biases, strict=True):
            self._join_parameters(bias, sums, {"x": gradient})
        self._join_inputs(for_input, gradient)

    # ---- what is there ---------------------------------------------------------------------------------------------

    def _for_weight(self, name: str) -> Contraction | None:
        """The contraction that gives a parameter's gradient, and nobody reads it."""
        node = self._writer_of_argument(GRADIENT + name)
        if not isinstance(node, Contraction) or self.flow.operands(node)["b"] != self.stack.input:
            return None
        return node if self._is(node, f"{self.stack.d},{self.stack.a}->{self.stack.b}") else None

    def _for_input(self, name: str) -> Contraction | None:
        """The contraction that gives the input's gradient: the only reader of the parameter."""
        readers = self.flow.readers(name)
        if len(readers) != 1 or readers[0].dst_conn != "b":
            return None
        node = readers[0].dst
        is_it = isinstance(node, Contraction) and self._is(node, f"{self.stack.d},{self.stack.b}->{self.stack.a}")
        return node if is_it else None

    def _for_bias(self, name: str, gradient: str) -> SumRows | None:
        """The sum over rows that gives a bias' gradient, and nobody reads it."""
        node = self._writer_of_argument(GRADIENT + name)
        if not isinstance(node, SumRows) or not self.flow.reads_whole(node):
            return None
        return node if self.flow.operands(node)["x"] == gradient else None

    def _writer_of_argument(self, name: str) -> Operator | None:
        if name not in self.sdfg.arrays or self.sdfg.arrays[name].transient or self.flow.readers(name):
            return None
        return self.flow.writer(name)

    def _is(self, node: Contraction, einsum: str) -> bool:
        same = ",".join(map(canonical_dims, node.einsum.replace("->", ",").split(","))) == einsum.replace("->", ",")
        return same and node.alpha == self.stack.nodes[0].alpha and not node.accumulate and self.flow.reads_whole(node)

    def _can_be_parts(self, names: Sequence[str]) -> bool:
        """Whether each is a temporary of its own, and none is computed from another."""
        if len(set(names)) < len(names) or len({form(self.sdfg, name) for name in names}) > 1:
            return False
        accesses = [access for name in names for access in self.flow.accesses(name)]
        edges = [edge for access in accesses for edge in self.flow.state.all_edges(access)]
        if any(not self.sdfg.arrays[name].transient for name in names):
            return False
        if any(not _whole(self.sdfg, edge) for edge in edges):
            return False
        writers = {edge.src for access in accesses for edge in self.flow.state.in_edges(access)}
        return not writers & self.flow.below(accesses)

    # ---- what is made of it ----------------------------------------------------------------------------------------

    def _join_parameters(
        self, stack: str, found: Sequence[Contraction | SumRows | None], inputs: Mapping[str, str]
    ) -> None:
        """One operator for the gradients of stacked parameters, if there is one for each."""
        nodes = [node for node in found if node is not None]
        if len(nodes) < len(self.stacks[stack]) or not self._alike(nodes):
            return
        names = [GRADIENT + name for name in self.stacks[stack]]
        result = self.stack.container(self.sdfg, names, 0, False, GRADIENT + stack)
        name = common_name([node.name for node in nodes])
        node: Operator
        if isinstance(nodes[0], SumRows):
            node = SumRows(name, self.stack.stacked_d, STACK + canonical_dims(nodes[0].sum_dims))
            connector = "y"
        else:
            einsum = f"{self.stack.stacked_d},{self.stack.a}->{self.stack.stacked_b}"
            node, connector = Contraction(name, einsum, nodes[0].alpha), "d"
        self.flow.add(node, inputs, {connector: result})
        for old in nodes:
            self.flow.remove_operator(old)
        for old_name in names:
            self.flow.drop(old_name)

    def _alike(self, nodes: Sequence[Operator]) -> bool:
        """Whether sums over rows keep the same dimensions; contractions were compared before."""
        return len({canonical_dims(node.sum_dims) for node in nodes if isinstance(node, SumRows)}) < 2

    def _join_inputs(self, found: Sequence[Contraction | None], gradient: str) -> None:
        """One contraction for the gradients of the input, if all of them are only added up, and in one sum."""
        nodes = [node for node in found if node is not None]
        results = [self.flow.operands(node)["d"] for node in nodes]
        sums = {self._sum_of(name) for name in results}
        if len(nodes) < len(found) or len(sums) > 1 or None in sums:
            return
        for other in results[1:]:
            self._take_out(other)
        result = self.flow.operands(nodes[0])["d"]
        if result == results[0]:
            shape, dtype = self.sdfg.arrays[result].shape, data_type(self.sdfg.arrays[result])
            result = add_container(self.sdfg, common_name(results), shape, dtype)
            self.flow.redirect(results[0], result)
        for node in nodes:
            self.flow.remove_operator(node)
        einsum = f"{self.stack.stacked_d},{self.stack.stacked_b}->{self.stack.a}"
        joined = Contraction(common_name([node.name for node in nodes]), einsum, nodes[0].alpha)
        self.flow.declare(self.stack.graph.forward, self.weight)
        self.flow.add(joined, {"a": gradient, "b": self.weight}, {"d": result})

    def _sum_of(self, name: str) -> str | None:
        """The sum that a container is part of and of no use besides; None where there is none."""
        total = None
        while self.sdfg.arrays[name].transient:
            readers = self.flow.readers(name)
            if len(readers) != 1 or not isinstance(readers[0].dst, Add) or not self.flow.reads_whole(readers[0].dst):
                break
            total = name = self.flow.operands(readers[0].dst)["y"]
        return total

    def _take_out(self, name: str) -> None:
        """Take one part, which is not the only one, out of a sum: the rest is the sum."""
        addition = self.flow.readers(name)[0].dst
        operands = self.flow.operands(addition)
        rest, total = operands["b" if operands["a"] == name else "a"], operands["y"]
        self.flow.remove_operator(addition)
        if self.sdfg.arrays[total].transient:
            self.flow.redirect(total, rest)
            return
        writer = self.flow.writer(rest)
        assert writer is not None  # one of the projections, or a sum of which one is a part
        edge = next(edge for edge in self.flow.state.out_edges(writer) if edge.data.data == rest)
        self.flow.write_instead(writer, edge.src_conn, total)
