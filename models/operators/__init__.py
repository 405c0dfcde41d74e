"""The vocabulary of the canonical form: one library node for each operator, and functions to call in programs."""

from stepdown.models.operators.activation import Gelu, GeluGradient, Relu, ReluGradient
from stepdown.models.operators.contraction import Contraction, split_einsum
from stepdown.models.operators.dropout import Dropout
from stepdown.models.operators.element_wise import Add, Bias, CausalMask, KeyPaddingMask, Scale, SumRows
from stepdown.models.operators.normalization import (
    LayerNorm,
    LayerNormGradient,
    LayerNormParameterGradient,
    Softmax,
    SoftmaxGradient,
)
from stepdown.models.operators.operator import Operator, OperatorClass
from stepdown.models.operators.pure import ExpandStatementsPure
from stepdown.models.operators.relayout import Relayout
from stepdown.models.operators.row_group import MEMBER_KINDS, Member, RowGroup
from stepdown.models.operators.statements import Statement
from stepdown.models.operators.tiled_group import TiledGroup

ROW_OPERATORS: tuple[type[Operator], ...] = (
    Add,
    Bias,
    CausalMask,
    Dropout,
    Gelu,
    GeluGradient,
    KeyPaddingMask,
    LayerNorm,
    LayerNormGradient,
    LayerNormParameterGradient,
    Relayout,
    Relu,
    ReluGradient,
    Scale,
    Softmax,
    SoftmaxGradient,
    SumRows,
)
"""Every operator that is a list of statements."""

OPERATORS: tuple[type[Operator], ...] = (Contraction, *ROW_OPERATORS)
"""Every operator of the vocabulary; besides them a graph holds groups of them only (canonical form, rule 5)."""

_expanded: tuple[type[Operator], ...] = (*ROW_OPERATORS, RowGroup)
for _operator in _expanded:
    _operator.register_implementation("pure", ExpandStatementsPure)

__all__ = [
    "MEMBER_KINDS",
    "OPERATORS",
    "ROW_OPERATORS",
    "Add",
    "Bias",
    "CausalMask",
    "Contraction",
    "Dropout",
    "Gelu",
    "GeluGradient",
    "KeyPaddingMask",
    "LayerNorm",
    "LayerNormGradient",
    "LayerNormParameterGradient",
    "Member",
    "Operator",
    "OperatorClass",
    "Relayout",
    "Relu",
    "ReluGradient",
    "RowGroup",
    "Scale",
    "Softmax",
    "SoftmaxGradient",
    "Statement",
    "SumRows",
    "TiledGroup",
    "split_einsum",
]
