"""Numbers of a build as they stand in its manifest: integers, or text in the symbolic sizes.

Dimension legend: `B` batch, `S` sequence length.

The text is read by a small parser of arithmetic, never by ``eval``: a build folder may come from anywhere.
"""

import ast
import math
import operator
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import sympy

from stepdown.models.errors import OptionError

Number = int | float | str
"""A number of the manifest: known, or sympy's text of it in ``B`` and ``S``."""

_BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda left, right: Fraction(left // right),
    ast.Mod: operator.mod,
}
_FUNCTIONS: dict[str, Callable[..., Fraction]] = {
    "Max": lambda *values: max(values),
    "Min": lambda *values: min(values),
    "ceiling": lambda value: Fraction(math.ceil(value)),
    "floor": lambda value: Fraction(math.floor(value)),
    "int_ceil": lambda left, right: Fraction(math.ceil(left / right)),
    "int_floor": lambda left, right: Fraction(math.floor(left / right)),
}
_LARGEST_POWER = 16


class _UnknownSize(Exception):
    """A size that nobody gave."""


def evaluate(value: Number, sizes: Mapping[str, int | None]) -> Number:
    """``value`` as a number where ``sizes`` says enough, else ``value`` itself.

    :param sizes: by letter; ``None`` or a missing letter is an unknown size.
    :returns: an integer where the result is one.
    :raises OptionError: when ``value`` is not an arithmetic expression.
    """
    if not isinstance(value, str):
        return value
    try:
        result = _value(ast.parse(value.strip(), mode="eval").body, sizes)
    except _UnknownSize:
        return value
    except (SyntaxError, ValueError, TypeError, ZeroDivisionError, RecursionError) as error:
        raise OptionError(
            f'"{value}" is not a number of a build ({error}); accepted are sums, products and powers of numbers, "B" '
            f'and "S".'
        ) from error
    return int(result) if result.denominator == 1 else float(result)


def as_number(expression: Any, sizes: Mapping[str, int | None] | None = None) -> Number:
    """A SymPy expression as the manifest holds it: an integer, or text in the sizes that ``sizes`` leaves open.

    DaCe's symbols differ from SymPy's by their assumptions; their text does not.
    """
    expanded = sympy.expand(expression)
    return int(expanded) if expanded.is_Integer else evaluate(str(expanded), sizes or {})


def _value(node: ast.expr, sizes: Mapping[str, int | None]) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as constant):
            return Fraction(constant)
        case ast.Name(id=name):
            size = sizes.get(name)
            if size is None:
                raise _UnknownSize(name)
            return Fraction(size)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, sizes)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            exponent = _value(right, sizes)
            if exponent.denominator != 1 or abs(exponent) > _LARGEST_POWER:
                raise ValueError(f"power {exponent}")
            return Fraction(_value(left, sizes) ** int(exponent))
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in _BINARY:
            return _BINARY[type(operation)](_value(left, sizes), _value(right, sizes))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            return _FUNCTIONS[name](*(_value(argument, sizes) for argument in arguments))
    raise ValueError(f"unexpected {type(node).__name__}")
