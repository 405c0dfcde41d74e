"""How a list of statements runs over rows: which dimensions a row has, and in how many passes over it.

Shared by the CPU and CUDA lowerings. The outer dimensions number the rows, the inner ones the elements of a row. A pass
goes once over a row's elements; a value that a reduction over the row gives is ready after its pass.

Dimension legend: B batch, S query position, T key position, H head, P head size, E embedding, U feed-forward size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from stepdown.models.errors import CanonicalFormError
from stepdown.models.operators.operator import Operator
from stepdown.models.operators.statements import Statement


@dataclass
class RowPass:
    """One pass over a row's elements, and what is computed once a row after it."""

    elements: list[Statement] = field(default_factory=list)
    row_reductions: list[Statement] = field(default_factory=list)
    column_reductions: list[Statement] = field(default_factory=list)
    after: list[Statement] = field(default_factory=list)


@dataclass
class RowProgram:
    """Statements in the order of their execution.

    :ivar outer: dimensions that number the rows.
    :ivar inner: dimensions of a row's elements.
    :ivar constants: statements evaluated once, from scalars.
    :ivar before: statements evaluated once a row before the first pass.
    :ivar passes: the passes over a row.
    :ivar final: statements over the inner dimensions after all rows: they store what column reductions gave.
    :ivar buffered: values of a row's elements that a later pass reads again.
    """

    outer: str
    inner: str
    constants: list[Statement]
    before: list[Statement]
    passes: list[RowPass]
    final: list[Statement]
    buffered: list[str]


def row_dims(statements: Sequence[Statement], dims: str) -> tuple[str, str]:
    """The outer and the inner dimensions that every reduction of the statements agrees with.

    :raises CanonicalFormError: when two reductions need different rows.
    """
    found: set[str] = set()
    for statement in statements:
        if statement.reduction is None:
            continue
        kept = statement.dims
        if dims.startswith(kept):
            found.add(kept)
        elif dims.endswith(kept):
            found.add(dims[: len(dims) - len(kept)])
        else:
            raise CanonicalFormError(
                f'reduction to "{kept}" of a group over "{dims}" is neither over its last nor over its first dimensions'
            )
    if len(found) > 1:
        raise CanonicalFormError(f'reductions of a group over "{dims}" need rows over {" and ".join(sorted(found))}')
    outer = found.pop() if found else dims[:-1]
    return outer, dims[len(outer) :]


def plan_rows(statements: Sequence[Statement], dims: str, operands: Mapping[str, str]) -> RowProgram:
    """Sort statements into passes.

    :param operands: dimensions of the operands that are there before the group runs.
    :raises CanonicalFormError: when no order of passes exists (a row needs a sum over all rows).
    """
    outer, inner = row_dims(statements, dims)
    program = RowProgram(outer, inner, [], [], [], [], [])
    # The pass in which a value becomes known: -2 for constants, -1 for row values known before any pass; columns apart.
    level: dict[str, int] = {}
    columns: set[str] = set()
    is_element: dict[str, int] = {}
    for statement in statements:
        needs = statement.names()
        if any(name in columns for name in needs):
            others = [name for name in needs if name not in columns]
            rows_again = any(name not in operands or set(operands[name]) & set(outer) for name in others)
            if statement.reduction is not None or rows_again or set(statement.dims) & set(outer):
                raise CanonicalFormError(f'statement "{statement.target}" needs a sum over all rows and the rows again')
            columns.add(statement.target)
            program.final.append(statement)
            continue
        ready = max((level.get(name, -2 if operands.get(name) in ("", "2") else -1) for name in needs), default=-2)
        if statement.reduction is not None:
            place = max(ready, 0)
            _grow(program, place)
            if statement.dims == outer:
                program.passes[place].row_reductions.append(statement)
                level[statement.target] = place + 1
            else:
                program.passes[place].column_reductions.append(statement)
                columns.add(statement.target)
        elif statement.dims == "" and ready == -2:
            program.constants.append(statement)
            level[statement.target] = -2
            continue
        elif all(letter in outer for letter in statement.dims) and statement.random is None and inner:
            _row_value(program, statement, ready, level)
            continue
        else:
            place = max(ready, 0)
            _grow(program, place)
            program.passes[place].elements.append(statement)
            level[statement.target] = place
            if statement.random is None:  # the words of a row lie in a buffer of their own anyway
                is_element[statement.target] = place
        _note_buffers(program, statement, place, is_element)
    return program


def plan_operator(node: Operator) -> RowProgram:
    """The passes of a row or element-wise operator, or of a group of them.

    :raises CanonicalFormError: when no order of passes exists.
    """
    inputs = {name: dims for name, dims in node.operand_dims().items() if name in node.in_connectors}
    return plan_rows(node.statements(), node.dims, inputs)


def _row_value(program: RowProgram, statement: Statement, ready: int, level: dict[str, int]) -> None:
    """Place a statement that gives one value a row."""
    if ready <= 0:
        program.before.append(statement)
        level[statement.target] = -1
    else:
        _grow(program, ready - 1)
        program.passes[ready - 1].after.append(statement)
        level[statement.target] = ready


def _grow(program: RowProgram, place: int) -> None:
    while len(program.passes) <= place:
        program.passes.append(RowPass())


def _note_buffers(program: RowProgram, statement: Statement, place: int, is_element: Mapping[str, int]) -> None:
    for name in statement.names():
        if is_element.get(name, place) < place and name not in program.buffered:
            program.buffered.append(name)
