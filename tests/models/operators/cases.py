"""Cases and tools for the tests of the vocabulary: every operator, drawn operands, an evaluator of statements.

Dimension legend: B batch, S query position, T key position, H head, P head size, E embedding, U feed-forward size.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import dace
import pytest
import torch
from dace.sdfg import SDFG

from stepdown.models.dtypes import DTYPES, DataType
from stepdown.models.errors import CanonicalFormError
from stepdown.models.operators import (
    Add,
    Bias,
    CausalMask,
    Contraction,
    Dropout,
    Gelu,
    GeluGradient,
    KeyPaddingMask,
    LayerNorm,
    LayerNormGradient,
    LayerNormParameterGradient,
    Operator,
    Relayout,
    Relu,
    ReluGradient,
    Scale,
    Softmax,
    SoftmaxGradient,
    SumRows,
)
from stepdown.models.operators.operator import PAIR, broadcast, make_memlet
from stepdown.models.operators.philox import dropout_threshold, philox_words
from stepdown.models.operators.statements import Statement, is_dimension_name

SIZES = {"B": 2, "S": 3, "T": 4, "H": 2, "P": 5, "E": 6, "U": 7, "N": 3}
"""Extents of the cases, all but two different, so that no dimension passes for another one unnoticed."""


@dataclass(frozen=True)
class Case:
    """An operator with its counts at ``SIZES``, worked out by hand.

    :param flop: floating-point operations.
    :param words_in: of every input once; ``words_out`` of every output, extra outputs included.
    """

    name: str
    make: Callable[[], Operator]
    flop: int
    words_in: int
    words_out: int

    @property
    def node(self) -> Operator:
        """A new node."""
        return self.make()

    @property
    def differentiable(self) -> bool:
        """Whether the operator belongs to a forward graph."""
        return not self.name.endswith("_gradient")


def with_statistics() -> Operator:
    """LayerNorm with the outputs that its gradient reads."""
    node = LayerNorm(dims="BSE", eps=1e-5)
    for connector in node.extra_outputs:
        node.add_out_connector(connector)
    return node


CASES = (
    Case("contraction_projection", lambda: Contraction(einsum="BSE,HPE->BSHP"), 2 * 360, 36 + 60, 60),
    Case("contraction_scores", lambda: Contraction(einsum="BSHP,BTHP->BHST", alpha=0.25), 2 * 240, 60 + 80, 48),
    Case("contraction_permuted", lambda: Contraction(einsum="HPB,UPH->BU", alpha=-1.5), 2 * 140, 20 + 70, 14),
    Case("contraction_total", lambda: Contraction(einsum="SE,ES->"), 2 * 18, 18 + 18, 1),
    Case("contraction_outer", lambda: Contraction(einsum="S,E->ES"), 2 * 18, 3 + 6, 18),
    Case(
        "contraction_onto", lambda: Contraction(einsum="BSU,EU->BSE", alpha=0.5, accumulate=True), 504, 42 + 42 + 36, 36
    ),
    Case("bias", lambda: Bias(dims="BSE", bias_dims="E"), 36, 36 + 6, 36),
    Case("bias_permuted", lambda: Bias(dims="BSHP", bias_dims="PH"), 60, 60 + 10, 60),
    Case("add", lambda: Add(dims="BSE"), 36, 72, 36),
    Case("scale", lambda: Scale(dims="BSE", factor=-0.125), 36, 36, 36),
    Case("key_padding_mask", lambda: KeyPaddingMask(dims="BHST"), 48, 48 + 8, 48),
    Case("key_padding_mask_zero", lambda: KeyPaddingMask(dims="BHST", gradient=True), 48, 48 + 8, 48),
    Case("causal_mask", lambda: CausalMask(dims="BHST"), 48, 48, 48),
    Case("causal_mask_zero", lambda: CausalMask(dims="BHST", gradient=True), 48, 48, 48),
    # Four passes over the row (maximum; shift and exponential; sum; product), and select, select and division a row.
    Case("softmax", lambda: Softmax(dims="BHST"), (1 + 2 + 1 + 1) * 48 + (1 + 2) * 12, 48, 48),
    Case("softmax_vector", lambda: Softmax(dims="E"), 5 * 6 + 3, 6, 6),
    Case("softmax_gradient", lambda: SoftmaxGradient(dims="BHST"), (2 + 2) * 48, 96, 48),
    # Sum; two subtractions, product, sum; subtraction, product, product, addition. Row: /; /, +, sqrt, /.
    Case("layer_norm", lambda: LayerNorm(dims="BSE", eps=1e-5), (1 + 4 + 4) * 36 + 5 * 6, 36 + 12, 36),
    Case("layer_norm_statistics", with_statistics, (1 + 4 + 4) * 36 + 5 * 6, 36 + 12, 36 + 6 + 6),
    Case("layer_norm_gradient", lambda: LayerNormGradient(dims="BSE"), (2 + 5 + 7) * 36 + 2 * 6, 72 + 6 + 12, 36),
    Case("layer_norm_parameter_gradient", lambda: LayerNormParameterGradient(dims="BSE"), (4 + 1) * 36, 72 + 12, 12),
    Case("gelu", lambda: Gelu(dims="BSU"), 5 * 42, 42, 42),
    Case("gelu_tanh", lambda: Gelu(dims="BSU", approximate="tanh"), (4 + 3) * 42, 42, 42),
    Case("gelu_gradient", lambda: GeluGradient(dims="BSU"), (4 + 4 + 3) * 42, 84, 42),
    Case("gelu_tanh_gradient", lambda: GeluGradient(dims="BSU", approximate="tanh"), (4 + 3 + 9) * 42, 84, 42),
    Case("relu", lambda: Relu(dims="BSU"), 42, 42, 42),
    Case("relu_gradient", lambda: ReluGradient(dims="BSU"), 42, 84, 42),
    Case("relayout", lambda: Relayout(dims="UBS", container_dims="BSU"), 0, 42, 42),
    # Select and product for each element; threshold and scale once.
    Case("dropout", lambda: Dropout(dims="BSU", site=2), 2 * 42 + 2, 42 + 2 + 1, 42),
    Case("sum_rows_gradient", lambda: SumRows(dims="BSHP", sum_dims="PH"), 60, 60, 10),
    Case("sum_nothing_gradient", lambda: SumRows(dims="BSE", sum_dims="SBE"), 36, 36, 36),
)


each_operator = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
"""Runs a test for every case."""

each_forward_operator = pytest.mark.parametrize(
    "case", [case for case in CASES if case.differentiable], ids=lambda case: case.name
)
"""Runs a test for every operator that has a gradient."""


def refused(message: str) -> AbstractContextManager[Any]:
    """Expects the block to be refused by the canonical form with exactly this sentence."""
    return pytest.raises(CanonicalFormError, match="^" + re.escape(message) + "$")


def shape_of(dims: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Extents of ``dims``."""
    return tuple(2 if letter == PAIR else sizes[letter] for letter in dims)


def draw_operands(
    node: Operator, sizes: Mapping[str, int], dtype: DataType = DTYPES["float64"], probability: float = 0.3
) -> dict[str, torch.Tensor]:
    """Operands of the operator's shapes and types from PyTorch's generator; each mask hides one query's keys fully."""
    dims = node.operand_dims()
    operands: dict[str, torch.Tensor] = {}
    for name in sorted(node.in_connectors):
        shape = shape_of(dims[name], sizes)
        if name == "mask":
            mask = torch.rand(shape) < 0.6
            mask[0] = False
            operands[name] = mask
        elif name == "rng":
            operands[name] = torch.randint(-(2**63), 2**63 - 1, shape)
        elif name == "p":
            operands[name] = torch.tensor(probability, dtype=torch.float64)
        elif name in ("mean", "rstd"):
            drawn = torch.randn(shape, dtype=torch.float64)
            operands[name] = (drawn.abs() + 0.5 if name == "rstd" else drawn).to(dtype.accumulate.torch)
        else:
            operands[name] = torch.randn(shape, dtype=torch.float64).to(dtype.torch)
    return operands


class _Selections(ast.NodeTransformer):
    """``a if c else b`` as ``select(c, a, b)``."""

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        self.generic_visit(node)
        return ast.Call(ast.Name("select", ast.Load()), [node.test, node.body, node.orelse], [])


FUNCTIONS: dict[str, Any] = {
    "exp": lambda x: torch.exp(torch.as_tensor(x)),
    "erf": lambda x: torch.erf(torch.as_tensor(x)),
    "tanh": lambda x: torch.tanh(torch.as_tensor(x)),
    "sqrt": lambda x: torch.sqrt(torch.as_tensor(x)),
    "maximum": lambda a, b: torch.maximum(torch.as_tensor(a), torch.as_tensor(b)),
    "dropout_threshold": lambda p: torch.tensor(dropout_threshold(float(p))),
    "dropout_scale": lambda p: 1.0 / (1.0 - p),
    "select": lambda c, a, b: torch.where(torch.as_tensor(c), a, b),
    "NEGATIVE_INFINITY": -math.inf,
}


def evaluate_formula(expression: str, names: Mapping[str, Any]) -> torch.Tensor:
    """The value of a formula of the statement language over broadcastable tensors."""
    tree = ast.fix_missing_locations(_Selections().visit(ast.parse(expression, mode="eval")))
    return torch.as_tensor(eval(compile(tree, "formula", "eval"), FUNCTIONS, dict(names)))


def evaluate(node: Operator, operands: Mapping[str, torch.Tensor], sizes: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """Every operand and every target of the operator's statements, in float64."""
    dims = dict(node.operand_dims())
    values = {name: v.double() if v.is_floating_point() else v for name, v in operands.items()}
    for statement in node.statements():
        over = node.dims if statement.reduction or statement.random is not None else statement.dims
        values[statement.target] = _evaluate_statement(statement, over, dims, values, sizes)
        dims[statement.target] = statement.dims
    return values


def _evaluate_statement(
    statement: Statement,
    over: str,
    dims: Mapping[str, str],
    values: Mapping[str, torch.Tensor],
    sizes: Mapping[str, int],
) -> torch.Tensor:
    shape = shape_of(over, sizes)
    if statement.random is not None:
        seed, offset = (int(word) for word in values["rng"])
        words = philox_words(seed, offset, statement.random, math.prod(shape))
        return torch.from_numpy(words.astype("int64")).reshape(shape)
    names: dict[str, Any] = {name: broadcast(values[name], dims[name], over) for name in statement.names()}
    for letter in over:
        names[f"position_{letter}"] = broadcast(torch.arange(sizes[letter]), letter, over)
    for found in ast.walk(ast.parse(statement.expression, mode="eval")):
        if isinstance(found, ast.Name) and is_dimension_name(found.id) and found.id not in names:
            names[found.id] = float(sizes[found.id[-1]])
    value = evaluate_formula(statement.expression, names).expand(shape)
    if statement.reduction is not None:
        for axis in sorted((over.index(letter) for letter in over if letter not in statement.dims), reverse=True):
            value = value.sum(axis) if statement.reduction == "sum" else value.amax(axis)
        over = "".join(letter for letter in over if letter in statement.dims)
    return value.permute([over.index(letter) for letter in statement.dims])


def container_name(node: Operator, connector: str, prefix: str = "") -> str:
    """What :func:`single_operator` calls the container of a connector."""
    if not prefix and connector == node.outputs[0]:
        return "y"
    clash = not prefix and connector == "y"
    return prefix + ("output_y" if clash else connector)


def single_operator(
    node: Operator,
    sizes: Mapping[str, Any],
    dtype: DataType = DTYPES["float64"],
    name: str = "single",
    *,
    sdfg: SDFG | None = None,
    prefix: str = "",
    strides: Callable[[tuple[Any, ...]], tuple[Any, ...]] | None = None,
) -> SDFG:
    """A graph in canonical form of one operator; containers are called like its connectors, its main output ``y``.

    :param sdfg: add the operator to this graph instead of a new one, containers called ``<prefix><connector>``.
    :param strides: layout of every container from its shape; row-major unless given.
    """
    if sdfg is None:
        sdfg = SDFG(name)
        sdfg.add_state("state")
    state = sdfg.nodes()[0]
    state.add_node(node)
    types = dict.fromkeys(node.in_connectors, dtype.dace)
    types |= {"mask": dace.bool_, "rng": dace.int64}
    types |= {"p": DTYPES["float64"].dace, "mean": dtype.accumulate.dace, "rstd": dtype.accumulate.dace}
    types |= {name: kind.dace for name, kind in node.result_types(dtype).items()}
    for connector in (*sorted(node.in_connectors), *sorted(node.out_connectors)):
        shape = tuple(2 if letter == PAIR else sizes[letter] for letter in node.operand_dims()[connector])
        container = container_name(node, connector, prefix)
        if connector == "p":
            sdfg.add_scalar(container, types[connector])
        else:
            layout = strides(shape) if strides is not None and shape else None
            sdfg.add_array(container, shape or (1,), types[connector], strides=layout)
        if connector in node.in_connectors:
            state.add_edge(state.add_read(container), None, node, connector, make_memlet(sdfg, container))
        else:
            state.add_edge(node, connector, state.add_write(container), None, make_memlet(sdfg, container))
    return sdfg
