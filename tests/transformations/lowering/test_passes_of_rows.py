"""Rows in passes: an interpreter that goes over rows as the lowerings do gives what the statements say.

Dimension legend: B batch, S query position, T key position, H head, E embedding.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepdown.models.errors import CanonicalFormError
from stepdown.models.operators import LayerNorm, LayerNormGradient, LayerNormParameterGradient, Softmax
from stepdown.models.operators.statements import Statement
from stepdown.transformations.lowering.passes_of_rows import RowPass, RowProgram, plan_rows, row_dims

DIMS, OUTER, INNER = "BSE", "BS", "E"
SIZES = {"B": 2, "S": 3, "E": 5, "2": 2}
OPERANDS = {"x": "BSE", "m": "BS", "b": "B", "w": "E", "t": "SE", "p": "", "rng": "2"}
FUNCTIONS = {
    "exp": np.exp,
    "sqrt": np.sqrt,
    "tanh": np.tanh,
    "maximum": np.maximum,
    "NEGATIVE_INFINITY": -math.inf,
    "size_E": SIZES["E"],
}
Values = dict[str, np.ndarray]
REDUCE = {"sum": (np.add, 0.0), "max": (np.maximum, -math.inf)}


def draw_values(seed: int = 0) -> Values:
    generator = np.random.default_rng(seed)
    return {name: generator.standard_normal([SIZES[d] for d in dims]) for name, dims in OPERANDS.items()}


def word(site: int, place: tuple[int, ...]) -> float:
    """Stands for the random word of an element."""
    return math.sin(100 * site + sum(7**i * at for i, at in enumerate(place)))


# ---- what the statements say: each over whole arrays, one after the other ----


def spread(value: np.ndarray, dims: str) -> np.ndarray:
    """A value with an axis for each of DIMS."""
    shape = [SIZES[letter] if letter in dims else 1 for letter in DIMS]
    return np.asarray(value).reshape(shape)


def evaluate(statements: Iterable[Statement], operands: Values) -> Values:
    values, dims = dict(operands), dict(OPERANDS)
    full = [SIZES[letter] for letter in DIMS]
    for statement in statements:
        if statement.random is not None:
            values[statement.target] = np.array([word(statement.random, at) for at in np.ndindex(*full)]).reshape(full)
        else:
            names = {name: spread(values[name], dims[name]) for name in statement.names()}
            found = np.broadcast_to(eval(statement.expression, {}, names | FUNCTIONS), full)
            lost = tuple(axis for axis, letter in enumerate(DIMS) if letter not in statement.dims)
            if statement.reduction is not None:
                values[statement.target] = REDUCE[statement.reduction][0].reduce(found, axis=lost)
            else:
                values[statement.target] = found[tuple(0 if axis in lost else slice(None) for axis in range(len(full)))]
        dims[statement.target] = statement.dims
    return values


# ---- what the program does: row by row, with the memory that a lowering has ----


class Rows:
    """Runs a row program; reading a value before it is there, or one that nobody kept, is a KeyError."""

    def __init__(self, program: RowProgram, operands: Values, dims: Mapping[str, str] = OPERANDS) -> None:
        self.program, self.operands, self.dims = program, operands, dims
        self.stored: Values = {}
        self.columns: Values = {}

    def read(self, name: str, at: Mapping[str, int], *known: Mapping[str, float]) -> float:
        for values in known:
            if name in values:
                return values[name]
        return float(self.operands[name][tuple(at[letter] for letter in self.dims[name])])

    def value(self, statement: Statement, at: Mapping[str, int], *known: Mapping[str, float]) -> float:
        if statement.random is not None:
            return word(statement.random, tuple(at[letter] for letter in DIMS))
        names = {name: self.read(name, at, *known) for name in statement.names()}
        return float(eval(statement.expression, {}, names | FUNCTIONS))

    def store(self, statement: Statement, at: Mapping[str, int], value: float) -> None:
        shape = [SIZES[letter] for letter in statement.dims]
        memory = self.stored.setdefault(statement.target, np.full(shape, np.nan))
        memory[tuple(at[letter] for letter in statement.dims)] = value

    def positions(self, dims: str) -> Iterable[dict[str, int]]:
        for place in itertools.product(*(range(SIZES[letter]) for letter in dims)):
            yield dict(zip(dims, place, strict=True))

    def run(self) -> Values:
        constants: dict[str, float] = {}
        for statement in self.program.constants:
            constants[statement.target] = self.value(statement, {}, constants)
            self.store(statement, {}, constants[statement.target])
        for row in self.positions(self.program.outer):
            self.row(row, constants)
        for at in self.positions(self.program.inner):
            known = {name: float(sums[tuple(at.values())]) for name, sums in self.columns.items()}
            for statement in self.program.final:
                known[statement.target] = self.value(statement, at, known)
                self.store(statement, at, known[statement.target])
        return self.stored | self.columns

    def row(self, row: Mapping[str, int], constants: Mapping[str, float]) -> None:
        once: dict[str, float] = dict(constants)
        kept: dict[tuple[int, ...], dict[str, float]] = {}
        for statement in self.program.before:
            once[statement.target] = self.value(statement, row, once)
            self.store(statement, row, once[statement.target])
        for row_pass in self.program.passes:
            found = {s.target: REDUCE[s.reduction or "sum"][1] for s in row_pass.row_reductions}
            for inner in self.positions(self.program.inner):
                place, at = tuple(inner.values()), {**row, **inner}
                buffered = kept.setdefault(place, {})
                element: dict[str, float] = {}
                for statement in row_pass.elements:
                    element[statement.target] = self.value(statement, at, element, buffered, once)
                    self.store(statement, at, element[statement.target])
                for statement in row_pass.row_reductions:
                    combine = REDUCE[statement.reduction or "sum"][0]
                    new = self.value(statement, at, element, buffered, once)
                    found[statement.target] = float(combine(found[statement.target], new))
                for statement in row_pass.column_reductions:
                    shape = [SIZES[letter] for letter in self.program.inner]
                    combine, start = REDUCE[statement.reduction or "sum"]
                    sums = self.columns.setdefault(statement.target, np.full(shape, start))
                    sums[place] = combine(sums[place], self.value(statement, at, element, buffered, once))
                for statement in row_pass.elements:
                    if statement.target in self.program.buffered or statement.random is not None:
                        buffered[statement.target] = element[statement.target]
            once |= found
            for statement in row_pass.row_reductions:
                self.store(statement, row, found[statement.target])
            for statement in row_pass.after:
                once[statement.target] = self.value(statement, row, once)
                self.store(statement, row, once[statement.target])


def parts(row_pass: RowPass) -> list[Statement]:
    return [*row_pass.elements, *row_pass.row_reductions, *row_pass.column_reductions, *row_pass.after]


def places(program: RowProgram) -> list[Statement]:
    """Every statement, in the order in which it first runs."""
    inside = [statement for row_pass in program.passes for statement in parts(row_pass)]
    return [*program.constants, *program.before, *inside, *program.final]


# ---- drawn programs ----


@st.composite
def programs(draw: st.DrawFn, *, columns: bool = True) -> list[Statement]:
    """Statements over rows of five elements, each reading what is there before it."""
    dims = {name: letters for name, letters in OPERANDS.items() if name != "rng"}
    column: set[str] = set()
    statements: list[Statement] = []

    def formula(names: list[str]) -> str:
        chosen = draw(st.lists(st.sampled_from(names), min_size=1, max_size=3))
        return " + ".join(f"tanh({scale} * {name})" for scale, name in zip((0.5, -1.25, 2.0), chosen, strict=False))

    for number in range(draw(st.integers(1, 10))):
        target = f"v{number}"
        rows = [name for name, letters in dims.items() if set(letters) <= set(OUTER) and name not in column]
        scalars = [name for name in rows if dims[name] == ""]
        plain = [name for name in dims if name not in column]
        kinds = ["constant", "row", "element", "element", "row sum", "row max", "random"]
        kinds += ["column sum"] * columns + ["final"] * bool(column)
        kind = draw(st.sampled_from(kinds))
        if kind == "constant":
            statements.append(Statement(target, "", formula(scalars)))
        elif kind == "row":
            statements.append(Statement(target, OUTER, formula(rows)))
        elif kind == "element":
            statements.append(Statement(target, DIMS, formula(plain)))
        elif kind in ("row sum", "row max"):
            reduction = "sum" if kind == "row sum" else "max"
            statements.append(Statement(target, OUTER, formula(plain), reduction=reduction))  # type: ignore[arg-type]
        elif kind == "column sum":
            statements.append(Statement(target, INNER, formula(plain), reduction="sum"))
            column.add(target)
        elif kind == "random":
            statements.append(Statement(target, DIMS, "", kind="word", random=number))
        else:
            statements.append(Statement(target, INNER, formula([*sorted(column), "w", "p"])))
            if column.isdisjoint(statements[-1].names()):
                statements.pop()
                continue
            column.add(target)
        dims[target] = statements[-1].dims
    return statements


def pinned(statements: list[Statement]) -> list[Statement]:
    """The statements, and one that says which dimensions number the rows."""
    return [*statements, Statement("pin", OUTER, "x", reduction="max")]


@settings(deadline=None, max_examples=60)
@given(programs())
def test_rows_in_passes_give_what_the_statements_say(statements: list[Statement]) -> None:
    statements = pinned(statements)
    program = plan_rows(statements, DIMS, OPERANDS)
    assert (program.outer, program.inner) == (OUTER, INNER)
    values = draw_values()
    found, expected = Rows(program, values).run(), evaluate(statements, values)
    assert set(found) == {statement.target for statement in statements}
    for name, value in found.items():
        full = np.broadcast_to(expected[name], value.shape)
        np.testing.assert_allclose(value, full, rtol=1e-12, atol=1e-12, err_msg=name)


@settings(max_examples=60)
@given(programs())
def test_every_statement_has_one_place_and_reads_no_sum_before_its_pass_ended(statements: list[Statement]) -> None:
    statements = pinned(statements)
    program = plan_rows(statements, DIMS, OPERANDS)
    order = places(program)
    assert sorted(map(id, order)) == sorted(map(id, statements))
    ended: set[str] = set()
    reductions = {s.target for s in statements if s.reduction is not None}
    for row_pass in program.passes:
        loop = (*row_pass.elements, *row_pass.row_reductions, *row_pass.column_reductions)
        assert all(name in ended for statement in loop for name in statement.names() if name in reductions)
        ended |= {statement.target for statement in row_pass.row_reductions}
        assert all(name in ended for statement in row_pass.after for name in statement.names() if name in reductions)


@settings(max_examples=60)
@given(programs())
def test_passes_are_as_few_as_the_sums_demand(statements: list[Statement]) -> None:
    """The longest chain of sums over a row is how often a row must be read."""
    statements = pinned(statements)
    depth: dict[str, int] = {}
    longest = 0
    columns = {s.target for s in statements if s.reduction and s.dims == INNER}
    for statement in statements:
        if columns & set(statement.names()):
            columns.add(statement.target)
            continue
        ready = max((depth.get(name, 0) for name in statement.names()), default=0)
        over_elements = statement.reduction is not None or statement.random is not None or statement.dims == DIMS
        longest = max(longest, ready + 1) if over_elements else longest
        depth[statement.target] = ready + (statement.reduction is not None and statement.dims == OUTER)
    program = plan_rows(statements, DIMS, OPERANDS)
    assert len(program.passes) == longest
    assert all(
        row_pass.elements or row_pass.row_reductions or row_pass.column_reductions for row_pass in program.passes
    )


@settings(max_examples=60)
@given(programs(columns=False))
def test_only_what_a_later_pass_reads_is_buffered(statements: list[Statement]) -> None:
    """Every buffer is memory: no value has one that its own pass alone reads, and random words have their own."""
    program = plan_rows(pinned(statements), DIMS, OPERANDS)
    place = {s.target: number for number, row_pass in enumerate(program.passes) for s in row_pass.elements}
    random = {s.target for row_pass in program.passes for s in row_pass.elements if s.random is not None}
    later = {
        name
        for number, row_pass in enumerate(program.passes)
        for statement in parts(row_pass)
        for name in statement.names()
        if place.get(name, number) < number
    }
    assert sorted(program.buffered) == sorted(later - random)


# ---- operators ----


@pytest.mark.parametrize(
    ("node", "passes", "buffered"),
    [(Softmax("softmax", "BSE"), 3, 1), (LayerNorm("norm", "BSE", 1e-5), 3, 0)],
    ids=["softmax", "layer-norm"],
)
def test_passes_of_the_statistical_normalizations(node: Softmax | LayerNorm, passes: int, buffered: int) -> None:
    """Softmax: maximum, sum, division; LayerNorm: mean, variance, result. A value read again comes from a buffer."""
    dims = {name: letters for name, letters in node.operand_dims().items() if name in node.inputs}
    program = plan_rows(node.statements(), "BSE", dims)
    assert len(program.passes) == passes
    assert len(program.buffered) == buffered


def test_sums_over_rows_wait_for_all_rows() -> None:
    node = LayerNormParameterGradient("parameters", "BSE")
    dims = {name: letters for name, letters in node.operand_dims().items() if name in node.inputs}
    program = plan_rows(node.statements(), "BSE", dims)
    assert (program.outer, program.inner) == ("BS", "E")
    assert len(program.passes) == 1
    assert {statement.target for statement in program.final} == {"dweight", "dbias"}


# ---- which dimensions a row has ----


@pytest.mark.parametrize(
    ("dims", "kept", "outer"),
    [
        ("BHST", "BHS", "BHS"),
        ("BHST", "BH", "BH"),
        ("BSE", "E", "BS"),
        ("BSE", "SE", "B"),
        ("E", "", ""),
        ("BSE", "", ""),
    ],
)
def test_a_reduction_says_what_a_row_is(dims: str, kept: str, outer: str) -> None:
    statement = Statement("r", kept, "x", reduction="sum")
    assert row_dims([statement], dims) == (outer, dims.removeprefix(outer))


@pytest.mark.parametrize("dims", ["BSE", "BHST", "E", ""])
def test_without_a_reduction_the_last_dimension_is_a_row(dims: str) -> None:
    assert row_dims([Statement("y", dims, "x")], dims) == (dims[:-1], dims[-1:])


def refused(statements: list[Statement], message: str, dims: str = DIMS) -> None:
    with pytest.raises(CanonicalFormError, match=f"^{re.escape(message)}$"):
        plan_rows(statements, dims, OPERANDS)


def test_reductions_over_other_dimensions_are_refused() -> None:
    refused(
        [Statement("r", "S", "x", reduction="sum")],
        'reduction to "S" of a group over "BSE" is neither over its last nor over its first dimensions',
    )
    refused(
        [Statement("r", "BE", "x", reduction="max")],
        'reduction to "BE" of a group over "BSE" is neither over its last nor over its first dimensions',
    )


def test_reductions_that_need_different_rows_are_refused() -> None:
    refused(
        [Statement("r", "B", "x", reduction="sum"), Statement("s", "BS", "x", reduction="sum")],
        'reductions of a group over "BSE" need rows over B and BS',
    )
    refused(
        [Statement("c", "SE", "x", reduction="sum"), Statement("s", "BS", "x", reduction="sum")],
        'reductions of a group over "BSE" need rows over B and BS',
    )


COLUMN = Statement("total", INNER, "x", reduction="sum")


@pytest.mark.parametrize(
    "reader",
    [
        Statement("y", "BSE", "x - total"),
        Statement("y", "E", "w * total + s"),
        Statement("y", "BS", "total * x", reduction="sum"),
        Statement("y", "E", "total", reduction="sum"),
        Statement("y", "BSE", "total"),
    ],
    ids=["a row", "a row's value", "a row's sum", "a sum again", "every row"],
)
def test_rows_that_need_a_sum_over_all_rows_are_refused(reader: Statement) -> None:
    row = Statement("s", "BS", "x", reduction="sum")
    refused([COLUMN, row, reader], 'statement "y" needs a sum over all rows and the rows again')


def test_a_sum_over_all_rows_goes_with_parameters() -> None:
    after = [Statement("y", "E", "w * total + p"), Statement("z", "E", "y * y")]
    program = plan_rows([COLUMN, *after], DIMS, OPERANDS)
    assert program.final == after
    values = draw_values()
    found, expected = Rows(program, values).run(), evaluate([COLUMN, *after], values)
    for name in ("total", "y", "z"):
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-12)


def test_a_gradient_reads_what_forward_kept_in_two_passes() -> None:
    """dx of LayerNorm: two sums over the row, and the row again."""
    node = LayerNormGradient("dx", "BSE")
    dims = {name: letters for name, letters in node.operand_dims().items() if name in node.inputs}
    program = plan_rows(node.statements(), "BSE", dims)
    assert len(program.passes) == 2
    assert [len(row_pass.row_reductions) for row_pass in program.passes] == [2, 0]
