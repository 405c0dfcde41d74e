"""How a contraction becomes calls of a matrix product: letters to rows, columns and sums, from strides alone.

Dimension legend: B batch, S query position, T key position, H head, P head size, E embedding, U feed-forward size.

``d = alpha * einsum(a, b) + c`` has four kinds of letters: in all three terms (batch), in ``a`` and ``d`` (rows), in
``b`` and ``d`` (columns), in ``a`` and ``b`` (sums). A matrix product takes one index of each of the last three kinds,
and each operand must have unit distance along one of its two. Letters of a kind are merged into one index where the
strides of both operands allow it; indices that are left become loops around the call; an operand that cannot be used as
it lies is packed: copied into a dense container first. :func:`plan_contraction` weighs these against each other.

Sizes and strides may hold symbols. Whatever is decided holds for all sizes from 1 on: what cannot be shown symbolically
is not assumed, and leads to packing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import sympy
from dace.symbolic import int_ceil

from stepdown.models.errors import CanonicalFormError

Layout = Literal["direct", "dense", "canonical"]

# Blocks of the result that keep BLAS efficient (measured: within about 5% of one call for the whole), multiples of
# every micro-kernel's rows and columns.
ROW_BLOCK, COLUMN_BLOCK = 192, 256

# Sizes that symbols are given to weigh alternatives (not to decide what is right).
NOMINAL = {"B": 8, "S": 128}
NOMINAL_OTHER = 64

# Rough costs in nanoseconds: of a call, of an element that BLAS packs for itself (again for every block), of an element
# of the result that is read and written again, of a multiplication, and of an element that we pack (in order, and
# transposed).
_CALL, _BLAS_PACKS, _UPDATE, _MULTIPLY = 500.0, 0.3, 1.0, 0.03
_PACK, _PACK_TRANSPOSED = 2.0, 6.0


def normalise(expression: object) -> sympy.Expr:
    """The expression over symbols that are equal when their names are, known to be positive integers, expanded."""
    found = sympy.sympify(expression)
    names = {symbol: sympy.Symbol(symbol.name, integer=True, positive=True) for symbol in found.free_symbols}
    return sympy.expand(found.xreplace(names))


@lru_cache(maxsize=4096)
def at_least(larger: sympy.Expr, smaller: sympy.Expr) -> bool:
    """Whether ``larger >= smaller`` is certain for all symbols from 1 on.

    A quotient that is rounded up, as in the strides of padded containers, is the quotient and something not negative.
    """
    difference = sympy.expand(larger - smaller)
    while quotients := [q for q in difference.atoms(int_ceil) if q.args[1].is_Integer and not q.args[0].has(int_ceil)]:
        difference = difference.xreplace({q: q.args[0] / q.args[1] + sympy.Dummy(nonnegative=True) for q in quotients})
    integers = [symbol for symbol in difference.free_symbols if symbol.is_integer]
    shifted = {s: sympy.Symbol(s.name, integer=True, nonnegative=True) + 1 for s in integers}
    difference = sympy.expand(difference.xreplace(shifted))
    if not difference.is_polynomial(*difference.free_symbols):
        return False
    return all(term.as_coeff_Mul()[0] >= 0 for term in sympy.Add.make_args(difference))


@lru_cache(maxsize=4096)
def nominal(expression: sympy.Expr) -> float:
    """The expression's value for the nominal sizes."""
    return float(expression.subs({s: NOMINAL.get(s.name, NOMINAL_OTHER) for s in expression.free_symbols}))


@lru_cache(maxsize=4096)
def _fits(outer: sympy.Expr, inner: sympy.Expr, extent: sympy.Expr) -> bool:
    return bool(sympy.expand(outer - inner * extent) == 0)


@dataclass(frozen=True)
class Index:
    """One or more letters, outermost first, as a single index: its extent and, by operand, its stride in elements."""

    letters: str
    extent: sympy.Expr
    strides: Mapping[str, sympy.Expr]

    def merged(self, inner: Index) -> Index | None:
        """Both as one index with ``inner`` varying faster, or nothing where the strides do not fit."""
        for name, stride in self.strides.items():
            if not _fits(stride, inner.strides[name], inner.extent):
                return None
        return Index(self.letters + inner.letters, sympy.expand(self.extent * inner.extent), inner.strides)


@dataclass(frozen=True)
class Packing:
    """A dense copy of an operand: its letters in the order of the copy, outermost first, and their strides in it.

    Letters along which the source is a broadcast of one element (stride 0) may be absent. ``transposed``: the copy's
    fastest letter is not the source's.
    """

    letters: str
    strides: Mapping[str, sympy.Expr]
    transposed: bool


@dataclass(frozen=True)
class Matrix:
    """An operand as BLAS sees it, row-major: its leading dimension, and whether it lies transposed in memory."""

    leading: sympy.Expr
    transposed: bool


@dataclass(frozen=True)
class ContractionPlan:
    """The chosen way.

    :ivar rows, columns, sums: the indices of the matrix product; nothing stands for an extent of 1.
    :ivar loops: indices of independent calls, each with its stride in every operand that has it.
    :ivar sum_loops: indices over which calls add to the same result, one after the other.
    :ivar matrices: each operand as BLAS sees it. ``swapped``: the result lies column-major, so that BLAS computes its
        transpose, with ``b`` as the left operand.
    :ivar packed: the operands (``d`` among them) that are copied.
    """

    rows: Index | None
    columns: Index | None
    sums: Index | None
    loops: tuple[Index, ...]
    sum_loops: tuple[Index, ...]
    matrices: Mapping[str, Matrix]
    swapped: bool
    packed: Mapping[str, Packing]
    cost: float


@dataclass(frozen=True)
class _Kinds:
    """The letters of each kind, without those of extent 1."""

    batch: str
    rows: str
    columns: str
    sums: str


def plan_contraction(
    terms: tuple[str, str, str],
    sizes: Mapping[str, object],
    strides: Mapping[str, Sequence[object]],
    copied: Sequence[str] = (),
) -> ContractionPlan:
    """The cheapest way to compute a contraction with matrix products.

    :param terms: dimensions of ``a``, ``b`` and ``d``.
    :param sizes: extent of every letter.
    :param strides: strides of ``a``, ``b`` and ``d`` in elements, in the order of their dimensions.
    :param copied: operands that are converted to another scalar type, so that a copy is made in any case.
    :raises CanonicalFormError: when elements of ``d`` share memory.
    """
    extents = {letter: normalise(size) for letter, size in sizes.items()}
    dims = dict(zip("abd", terms, strict=True))
    lying = {
        name: {
            letter: normalise(stride)
            for letter, stride in zip(dims[name], strides[name], strict=True)
            if extents[letter] != 1
        }
        for name in "abd"
    }
    for letter, stride in lying["d"].items():
        if stride == 0:
            raise CanonicalFormError(
                f'the result of a contraction has stride 0 along dimension "{letter}"; a distance between its elements '
                f"is needed"
            )
    letters = [letter for letter in dict.fromkeys("".join(terms)) if extents[letter] != 1]
    kinds = _Kinds(*("".join(x for x in letters if _where(x, dims) == kind) for kind in ("abd", "ad", "bd", "ab")))
    best: ContractionPlan | None = None
    least = _MULTIPLY * nominal(sympy.sympify(sympy.prod(extents[letter] for letter in letters)))
    for choice in itertools.product(*(_layouts(name in copied) for name in "abd")):
        layouts = dict(zip("abd", choice, strict=True))
        packed = _pack(kinds, extents, lying, layouts)
        if best is not None and least + _packing_cost(packed, extents) >= best.cost:
            continue
        for plan in _plans(kinds, extents, lying, packed):
            if best is None or plan.cost < best.cost:
                best = plan
    assert best is not None  # packing all operands always gives a plan
    return best


def _where(letter: str, dims: Mapping[str, str]) -> str:
    return "".join(name for name in "abd" if letter in dims[name])


def _layouts(copied: bool) -> tuple[Layout, ...]:
    return ("dense", "canonical") if copied else ("direct", "dense", "canonical")


def _plans(
    kinds: _Kinds,
    extents: Mapping[str, sympy.Expr],
    lying: Mapping[str, Mapping[str, sympy.Expr]],
    packed: Mapping[str, Packing],
) -> Iterator[ContractionPlan]:
    """Every plan with the given copies."""
    strides = {name: packed[name].strides if name in packed else lying[name] for name in "abd"}
    batch = _merge(kinds.batch, extents, {name: strides[name] for name in "abd"})
    rows = _merge(kinds.rows, extents, {name: strides[name] for name in "ad"})
    columns = _merge(kinds.columns, extents, {name: strides[name] for name in "bd"})
    sums = _merge(kinds.sums, extents, {name: strides[name] for name in "ab"})
    choices: list[Sequence[Index | None]] = [rows or [None], columns or [None], sums or [None]]
    for row, column, inner in itertools.product(*choices):
        result = _matrix(row, column, "d")
        if result is None:
            continue
        swapped = result.transposed
        left = _matrix(inner, row, "a") if swapped else _matrix(row, inner, "a")
        right = _matrix(column, inner, "b") if swapped else _matrix(inner, column, "b")
        if left is None or right is None:
            continue
        loops = [*batch, *(i for i in rows if i is not row), *(i for i in columns if i is not column)]
        # The longest distance outermost: neighbouring calls then touch neighbouring memory.
        loops.sort(key=lambda index: -nominal(index.strides["d"]))
        sum_loops = tuple(index for index in sums if index is not inner)
        plan = (row, column, inner, tuple(loops), sum_loops)
        matrices = {"a": left, "b": right, "d": Matrix(result.leading, False)}
        yield ContractionPlan(*plan, matrices, swapped, packed, _cost(*plan, packed, extents))


def _pack(
    kinds: _Kinds,
    extents: Mapping[str, sympy.Expr],
    lying: Mapping[str, Mapping[str, sympy.Expr]],
    layouts: Mapping[str, Layout],
) -> dict[str, Packing]:
    """The copies that the layouts ask for."""
    groups = {"a": (kinds.rows, kinds.sums), "b": (kinds.sums, kinds.columns), "d": (kinds.rows, kinds.columns)}
    found: dict[str, Packing] = {}
    for name, layout in layouts.items():
        if layout == "direct":
            continue
        source = lying[name]
        by_stride = _sorted(source, source)
        if layout == "dense":
            order = "".join(x for x in by_stride if source[x] != 0 or x not in kinds.batch)
        else:
            order = "".join(x for x in by_stride if source[x] != 0 and x in kinds.batch)
            # The group that holds the source's fastest letter stays the fastest.
            for group in sorted(groups[name], key=lambda letters: by_stride[-1:] in letters if letters else False):
                (partner,) = (
                    (other for other in "abd" if other != name and set(group) <= set(lying[other]))
                    if group
                    else (name,)
                )
                follows = partner if layouts[partner] != "canonical" or partner < name else name
                order += _sorted(group, lying[follows])
        strides = {letter: sympy.Integer(0) for letter in source}
        distance = sympy.Integer(1)
        for letter in reversed(order):
            strides[letter] = distance
            distance = sympy.expand(distance * extents[letter])
        found[name] = Packing(order, strides, order[-1:] != by_stride[-1:])
    return found


def _sorted(letters: str | Mapping[str, object], strides: Mapping[str, sympy.Expr]) -> str:
    """The letters, the longest stride first."""
    return "".join(sorted(letters, key=lambda letter: -nominal(strides[letter])))


def _merge(
    letters: str, extents: Mapping[str, sympy.Expr], strides: Mapping[str, Mapping[str, sympy.Expr]]
) -> list[Index]:
    """The letters as few indices as the strides allow."""
    indices = [Index(x, extents[x], {name: of[x] for name, of in strides.items()}) for x in letters]
    merged = True
    while merged:
        merged = False
        for outer, inner in itertools.permutations(indices, 2):
            both = outer.merged(inner)
            if both is not None:
                indices = [both if i is outer else i for i in indices if i is not inner]
                merged = True
                break
    return indices


def _matrix(row: Index | None, column: Index | None, name: str) -> Matrix | None:
    """Operand ``name`` as a row-major matrix with these indices; nothing when neither has unit distance."""
    one = sympy.Integer(1)
    row_stride, row_extent = (row.strides[name], row.extent) if row is not None else (None, one)
    column_stride, column_extent = (column.strides[name], column.extent) if column is not None else (None, one)
    if column_stride in (None, 1):
        leading = column_extent if row_stride is None else row_stride
        if at_least(leading, column_extent):
            return Matrix(leading, False)
    if row_stride in (None, 1):
        leading = row_extent if column_stride is None else column_stride
        if at_least(leading, row_extent):
            return Matrix(leading, True)
    return None


def _cost(
    row: Index | None,
    column: Index | None,
    inner: Index | None,
    loops: tuple[Index, ...],
    sum_loops: tuple[Index, ...],
    packed: Mapping[str, Packing],
    extents: Mapping[str, sympy.Expr],
) -> float:
    """Estimated nanoseconds for the nominal sizes."""
    m, n, k = (1.0 if index is None else nominal(index.extent) for index in (row, column, inner))
    outer = 1.0
    for index in loops:
        outer *= nominal(index.extent)
    steps = 1.0
    for index in sum_loops:
        steps *= nominal(index.extent)
    again = _BLAS_PACKS * (m * k * math.ceil(n / COLUMN_BLOCK) + k * n * math.ceil(m / ROW_BLOCK))
    call = _CALL + again + _UPDATE * m * n + _MULTIPLY * m * n * k
    return outer * steps * call + _packing_cost(packed, extents)


def _packing_cost(packed: Mapping[str, Packing], extents: Mapping[str, sympy.Expr]) -> float:
    total = 0.0
    for packing in packed.values():
        elements = 1.0
        for letter in packing.letters:
            elements *= nominal(extents[letter])
        total += _CALL + elements * (_PACK_TRANSPOSED if packing.transposed else _PACK)
    return total
