"""Layouts: the order in which a container's logical dimensions lie in memory, and padding, as strides.

Dimension legend: B batch, S query position, T key position, H head, P head size, E embedding, U feed-forward size.
N projection in a stack.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
from dace.sdfg import SDFG
from dace.symbolic import int_ceil

from stepdown.models.errors import OptionError
from stepdown.models.operators.operator import LEGEND, PAIR
from stepdown.transformations.canonical_form import container_dims, the_state

NOMINAL = {"B": 7, "S": 509}
"""Sizes at which strides are put in order where batch or sequence length is symbolic: any sizes above 1 do."""


@dataclass(frozen=True)
class Layout:
    """Dimensions from the slowest to the fastest, and multiples of elements that strides are rounded up to.

    :ivar order: one letter for each dimension, for example ``"BHTS"``.
    :ivar pad: by dimension, what its stride is rounded up to a multiple of; not of the fastest one, whose stride is 1.
        ``("U", 16)`` with the order ``"BUS"`` lets each run of S positions begin at a multiple of 16 elements.
    """

    order: str
    pad: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        if not self.order or len(set(self.order)) != len(self.order) or any(x not in LEGEND for x in self.order):
            raise OptionError(
                f'order "{self.order}" was given; accepted are the letters of a container\'s dimensions, each once.'
            )
        for letter, multiple in self.pad:
            if letter not in self.order[:-1]:
                accepted = ", ".join(f'"{x}"' for x in self.order[:-1]) or "none, because there is one dimension only"
                raise OptionError(
                    f'padding of dimension "{letter}" in order "{self.order}" was given; accepted are dimensions but '
                    f"for the fastest: {accepted}."
                )
            if isinstance(multiple, bool) or not isinstance(multiple, int) or multiple < 1:
                raise OptionError(
                    f'padding {multiple!r} of order "{self.order}" was given; accepted are whole numbers of elements '
                    f"from 1."
                )

    def renamed(self, letters: Mapping[str, str]) -> Layout:
        """The same layout with dimensions under other letters."""
        order = "".join(letters.get(x, x) for x in self.order)
        return Layout(order, tuple((letters.get(x, x), multiple) for x, multiple in self.pad))

    def strides(self, dims: str, shape: Sequence[Any]) -> tuple[tuple[Any, ...], Any]:
        """Strides by logical dimension, and the elements that the container takes, padding included."""
        extents = dict(zip(dims, shape, strict=True))
        pad = dict(self.pad)
        found: dict[str, Any] = {}
        distance: Any = 1
        for letter in reversed(self.order):
            distance = round_up(distance, pad.get(letter, 1))
            found[letter] = distance
            distance = distance * extents[letter]
        return tuple(found[letter] for letter in dims), distance


def round_up(distance: Any, multiple: int) -> Any:
    """``distance`` rounded up to a multiple, as an expression where it has symbols."""
    if isinstance(distance, int):
        return -(-distance // multiple) * multiple
    if multiple == 1 or sympy.expand(distance / multiple).is_integer:
        return distance
    return multiple * int_ceil(distance, multiple)


def row_major(dims: str) -> Layout:
    """The default: the logical dimensions in their order, dense."""
    return Layout(dims)


def logical_dims(sdfg: SDFG) -> dict[str, str]:
    """The dimensions of every container that operators use, by letter; empty for what has no layout to choose."""
    found = dict.fromkeys(sdfg.arrays, "") | container_dims(sdfg)
    used = {access.data for access in the_state(sdfg).data_nodes()}
    return {name: "" if dims == PAIR else dims for name, dims in found.items() if name in used}


def physical_order(dims: str, strides: Sequence[Any]) -> str:
    """The dimensions from the longest stride to the shortest; equal ones in their logical order."""
    distance = {letter: _nominal(stride) for letter, stride in zip(dims, strides, strict=True)}
    return "".join(sorted(dims, key=lambda letter: -distance[letter]))


def padding(dims: str, shape: Sequence[Any], strides: Sequence[Any]) -> dict[str, Any]:
    """By dimension, how many elements its stride is longer than what lies inside it; dense dimensions are left out."""
    extent, stride = dict(zip(dims, shape, strict=True)), dict(zip(dims, strides, strict=True))
    found: dict[str, Any] = {}
    dense: Any = 1
    for letter in reversed(physical_order(dims, strides)):
        extra = sympy.expand(stride[letter] - dense)
        if extra != 0 and extent[letter] != 1:
            found[letter] = extra
        dense = stride[letter] * extent[letter]
    return found


def is_dense(dims: str, shape: Sequence[Any], strides: Sequence[Any], order: str) -> bool:
    """Whether a container lies in ``order`` without padding."""
    dense, _ = Layout(order).strides(dims, shape)
    return all(
        extent == 1 or sympy.expand(one - other) == 0 for extent, one, other in zip(shape, dense, strides, strict=True)
    )


def _nominal(expression: Any) -> float:
    found = sympy.sympify(expression)
    return float(found.subs({symbol: NOMINAL.get(symbol.name, 1) for symbol in found.free_symbols}))
