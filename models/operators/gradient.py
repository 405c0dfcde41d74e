"""Gradient rules: how an operator's ``differentiate`` reaches DaCe's automatic differentiation.

A rule is a nested SDFG of operators (``docs/canonical_form.md``, rule 1): it reads the gradients of the operator's
outputs and whatever it needs of the forward pass, and writes the gradients of the inputs that require one. Every
operator of the vocabulary is registered with :mod:`dace.autodiff` through :class:`OperatorBackward`.
"""

from __future__ import annotations

import copy

from dace.autodiff.base_abc import BackwardContext, BackwardImplementation, BackwardResult
from dace.autodiff.utils import backward_symbol_mapping, connect_output_from_forward
from dace.registry import autoregister_params
from dace.sdfg import SDFG, SDFGState, nodes

from stepdown.models.errors import CanonicalFormError
from stepdown.models.operators.operator import Operator, add_container, make_memlet

GRADIENT = "gradient_"


class GradientRule:
    """The nested SDFG of one operator's gradient while its rule writes it."""

    def __init__(self, node: Operator, context: BackwardContext, given: list[str], required: list[str]) -> None:
        self.node = node
        self.context = context
        optional = sorted(set(node.in_connectors) - set(node.inputs))
        self.required = tuple(name for name in (*node.inputs, *optional) if name in required)
        self.sdfg = SDFG(f"{node.name}_gradient")
        self.state = self.sdfg.add_state("gradient")
        self.result = BackwardResult.empty()
        self._given = given
        self._inputs: set[str] = set()
        self._from_forward: list[str] = []

    def given(self, output: str) -> str:
        """Container of the gradient of ``output``."""
        if output not in self._given:
            raise CanonicalFormError(f'operator "{self.node.name}" has no gradient of its output "{output}"')
        name = GRADIENT + output
        if name not in self.sdfg.arrays:
            self._copy_descriptor(output, name)
            self.result.given_grad_names[output] = name
            self._inputs.add(name)
        return name

    def operand(self, connector: str) -> str:
        """Container of an input of the forward operator."""
        if connector not in self.sdfg.arrays:
            self._copy_descriptor(connector, connector)
            self._inputs.add(connector)
        return connector

    def output(self, connector: str) -> str:
        """Container of an output of the forward operator, which is added to the forward graph where it is absent."""
        if connector not in self.sdfg.arrays:
            ensure_output(self.node, self.context.forward_sdfg, self.context.forward_state, connector)
            self._copy_descriptor(connector, connector)
            self._inputs.add(connector)
            self._from_forward.append(connector)
        return connector

    def gradient_of(self, connector: str) -> str:
        """Container that receives the gradient of an input; ask for those in ``required`` only."""
        name = GRADIENT + connector
        if name not in self.sdfg.arrays:
            self._copy_descriptor(connector, name)
            self.result.required_grad_names[connector] = name
        return name

    def add(self, operator: Operator, inputs: dict[str, str], outputs: dict[str, str]) -> None:
        """Add an operator between containers of the rule."""
        connect_operator(self.sdfg, self.state, operator, inputs, outputs)

    def forward(self, source: str, connector: str) -> None:
        """The gradient of ``connector`` is the container ``source`` itself."""
        target = self.gradient_of(connector)
        self.state.add_nedge(self.state.add_read(source), self.state.add_write(target), make_memlet(self.sdfg, source))

    def finish(self) -> tuple[nodes.NestedSDFG, BackwardResult]:
        """Add the rule to the backward graph."""
        nested = self.context.backward_state.add_nested_sdfg(
            self.sdfg,
            sorted(self._inputs),
            sorted(self.result.required_grad_names.values()),
            symbol_mapping=backward_symbol_mapping(self.sdfg, self.context.backward_state),
        )
        for connector in self._from_forward:
            connect_output_from_forward(self.node, nested, self.context, connector)
        return nested, self.result

    def _copy_descriptor(self, connector: str, name: str) -> None:
        state = self.context.forward_state
        edges = [e for e in state.all_edges(self.node) if connector in (e.src_conn, e.dst_conn)]
        descriptor = copy.deepcopy(self.context.forward_sdfg.arrays[edges[0].data.data])
        descriptor.transient = False
        self.sdfg.add_datadesc(name, descriptor)
        for symbol in descriptor.free_symbols:
            if str(symbol) not in self.sdfg.symbols:
                self.sdfg.add_symbol(str(symbol), symbol.dtype)


def connect_operator(
    sdfg: SDFG, state: SDFGState, operator: Operator, inputs: dict[str, str], outputs: dict[str, str]
) -> None:
    """Put ``operator`` into ``state``, with an access node for each operand; a container's last one is reused."""
    state.add_node(operator)
    for connector, name in inputs.items():
        written = [n for n in state.data_nodes() if n.data == name and state.in_degree(n) > 0]
        read = [n for n in state.data_nodes() if n.data == name]
        source = written[-1] if written else read[0] if read else state.add_read(name)
        operator.add_in_connector(connector)
        state.add_edge(source, None, operator, connector, make_memlet(sdfg, name))
    for connector, name in outputs.items():
        operator.add_out_connector(connector)
        state.add_edge(operator, connector, state.add_write(name), None, make_memlet(sdfg, name))


def ensure_output(node: Operator, sdfg: SDFG, state: SDFGState, connector: str) -> None:
    """Give ``node`` its output ``connector`` with a container of its own, if nothing reads it yet."""
    if any(edge.src_conn == connector for edge in state.out_edges(node)):
        return
    operands = {e.dst_conn: sdfg.arrays[e.data.data] for e in state.in_edges(node) if e.dst_conn is not None}
    shape, dtype = node.infer(operands)[connector]
    name = add_container(sdfg, f"{node.name}_{connector}", shape, dtype)
    node.add_out_connector(connector, force=True)
    state.add_edge(node, connector, state.add_write(name), None, make_memlet(sdfg, name))


@autoregister_params(node_type=Operator, name="stepdown")
class OperatorBackward(BackwardImplementation):
    """Hands a node to its own ``differentiate``."""

    @staticmethod
    def backward(
        forward_node: Operator,
        context: BackwardContext,
        given_gradients: list[str],
        required_gradients: list[str],
    ) -> tuple[nodes.NestedSDFG, BackwardResult]:
        rule = GradientRule(forward_node, context, given_gradients, required_gradients)
        forward_node.differentiate(rule)
        return rule.finish()
