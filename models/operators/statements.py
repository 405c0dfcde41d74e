"""Statements: what a row or element-wise operator computes, one scalar formula at a time.

Every operator that is not a contraction is a list of :class:`Statement`. The expansions (pure, CPU, CUDA) turn the
list into maps, the analysis counts its arithmetic, and fusing operators means concatenating their lists. A formula is
written in a small subset of Python over the names of operands and of earlier statements:

* arithmetic, comparisons, ``a if condition else b``;
* ``exp erf tanh sqrt maximum dropout_threshold dropout_scale``;
* ``NEGATIVE_INFINITY``; ``size_X``, the extent of dimension ``X``; ``position_X``, the element's index in it.

The target of a reduction is a temporary; a further statement stores it.

Dimension legend: B batch, S query position, T key position, H head, P head size, E embedding, U feed-forward size.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from stepdown.models.errors import CanonicalFormError

FUNCTIONS = ("exp", "erf", "tanh", "sqrt", "maximum", "dropout_threshold", "dropout_scale")
NEGATIVE_INFINITY = "NEGATIVE_INFINITY"
EXTENT_PREFIX = "size_"
POSITION_PREFIX = "position_"

Reduction = Literal["sum", "max"]
ScalarKind = Literal["compute", "word"]


@dataclass(frozen=True)
class Statement:
    """``target[dims] = expression``, or its sum or maximum over the operator's other dimensions.

    :param target: name of an output connector, or of a temporary that later statements read.
    :param dims: dimensions of the target, in the order of the operator's own.
    :param expression: the formula; empty for a random word.
    :param reduction: combines the formula over the operator's dimensions that ``dims`` lacks.
    :param kind: ``compute``: the accumulation type; ``word``: an unsigned 32-bit integer.
    :param random: number of the dropout site whose Philox word of the element is the value.
    :param guard: a random word need not be made where this earlier constant is zero (nobody will look at it).
    :param rng: operand with the generator's (seed, offset), for a random word.
    """

    target: str
    dims: str
    expression: str
    reduction: Reduction | None = None
    kind: ScalarKind = "compute"
    random: int | None = None
    guard: str | None = None
    rng: str = "rng"

    def names(self) -> list[str]:
        """Operands and temporaries that the formula reads, in order of appearance."""
        if self.random is not None:
            return [self.rng] + ([self.guard] if self.guard is not None else [])
        found: list[str] = []
        for node in ast.walk(ast.parse(self.expression, mode="eval")):
            if isinstance(node, ast.Name) and node.id not in found:
                name = node.id
                if name not in FUNCTIONS and name != NEGATIVE_INFINITY and not is_dimension_name(name):
                    found.append(name)
        return found

    def renamed(self, names: Mapping[str, str]) -> Statement:
        """The same statement with target and operands renamed by ``names``."""
        tree = ast.parse(self.expression, mode="eval") if self.expression else None
        if tree is not None:
            for node in ast.walk(tree):
                if isinstance(node, ast.Name):
                    node.id = names.get(node.id, node.id)
        return replace(
            self,
            target=names.get(self.target, self.target),
            expression=ast.unparse(tree) if tree is not None else "",
            guard=names.get(self.guard, self.guard) if self.guard is not None else None,
            rng=names.get(self.rng, self.rng),
        )

    def flop(self) -> int:
        """Floating-point operations of one evaluation, by the rule of ``docs/counting.md``.

        Every arithmetic operator, function, maximum or select counts one, comparisons none; a reduction adds one.
        """
        count = 1 if self.reduction is not None else 0
        if not self.expression:
            return count
        for node in ast.walk(ast.parse(self.expression, mode="eval")):
            if isinstance(node, (ast.BinOp, ast.Call, ast.IfExp)):
                count += 1
        return count


def is_dimension_name(name: str) -> bool:
    """Whether the name stands for a dimension's extent or for the element's position in it."""
    return name.startswith((EXTENT_PREFIX, POSITION_PREFIX)) and len(name.rpartition("_")[2]) == 1


class _CppPrinter:
    """Prints a formula as C++ in one scalar type."""

    OPERATORS: Mapping[type, str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
    COMPARISONS: Mapping[type, str] = {
        ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=",
    }  # fmt: skip

    def __init__(
        self, scalar: str, extent: Callable[[str], str], position: Callable[[str], str], rename: Callable[[str], str]
    ) -> None:
        self.scalar = scalar
        self.extent = extent
        self.position = position
        self.rename = rename

    def print(self, node: ast.expr) -> str:
        if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
            return f"{self.scalar}({node.value!r})"
        if isinstance(node, ast.Name):
            return self._name(node.id)
        if isinstance(node, ast.BinOp) and type(node.op) in self.OPERATORS:
            return f"({self.print(node.left)} {self.OPERATORS[type(node.op)]} {self.print(node.right)})"
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return f"(-{self.print(node.operand)})"
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in self.COMPARISONS:
            return f"({self.print(node.left)} {self.COMPARISONS[type(node.ops[0])]} {self.print(node.comparators[0])})"
        if isinstance(node, ast.IfExp):
            return f"({self.print(node.test)} ? {self.print(node.body)} : {self.print(node.orelse)})"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS:
            template = f"<{self.scalar}>" if node.func.id == "dropout_scale" else ""
            return f"stepdown::{node.func.id}{template}({', '.join(self.print(a) for a in node.args)})"
        raise CanonicalFormError(
            f'formula "{ast.unparse(node)}" is not in the statement language; it takes arithmetic, comparisons, '
            f"conditional expressions and {', '.join(FUNCTIONS)}"
        )

    def _name(self, name: str) -> str:
        if name == NEGATIVE_INFINITY:
            return f"stepdown::negative_infinity<{self.scalar}>()"
        if is_dimension_name(name) and name.startswith(EXTENT_PREFIX):
            return f"{self.scalar}({self.extent(name[-1])})"
        if is_dimension_name(name):
            return f"({self.position(name[-1])})"
        return self.rename(name)


def to_cpp(
    expression: str,
    scalar: str,
    extent: Callable[[str], str],
    position: Callable[[str], str],
    rename: Callable[[str], str] = lambda name: name,
) -> str:
    """The formula as a C++ expression.

    :param scalar: C++ type of the arithmetic, ``float`` or ``double``; constants are written in it.
    :param extent: C++ text of a dimension's extent.
    :param position: C++ text of the element's index in a dimension.
    :param rename: C++ text of an operand.
    :raises CanonicalFormError: for syntax outside the statement language.
    """
    return _CppPrinter(scalar, extent, position, rename).print(ast.parse(expression, mode="eval").body)
