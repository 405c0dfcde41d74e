"""The pure expansion of row and element-wise operators: a sequential map for each statement, for every layout."""

from __future__ import annotations

from typing import Any

import dace
import dace.library
from dace.sdfg import SDFG, SDFGState
from dace.transformation.transformation import ExpandTransformation

from stepdown.models.operators.headers import OperatorHeaders
from stepdown.models.operators.operator import PAIR, Operator, data_type
from stepdown.models.operators.scratch import operator_sdfg
from stepdown.models.operators.statements import Statement, to_cpp

INDEX = "i_"
OPERAND = "in_"


def compute_type(node: Operator, sdfg: SDFG) -> dace.typeclass:
    """The scalar type of the operator's arithmetic: the accumulation type of its main operand."""
    return data_type(sdfg.arrays[node.main_operand]).accumulate.dace


def linear_index(dims: str, sizes: dict[str, Any]) -> dace.symbolic.SymbolicType:
    """Row-major index of an element over the logical dimensions, in the map parameters."""
    index: Any = 0
    for letter in dims:
        index = index * sizes[letter] + dace.symbolic.pystr_to_symbolic(INDEX + letter)
    return index


def statement_code(statement: Statement, dims: str, sizes: dict[str, Any], scalar: dace.typeclass) -> str:
    """C++ of a statement whose operands are the connectors ``in_<name>`` and whose result is ``out``.

    Operands of a narrower type are widened to ``scalar`` where they are used; booleans, words and doubles that a
    formula passes on to a function stay as they are.
    """
    if statement.random is not None:
        index = dace.symbolic.symstr(linear_index(dims, sizes), cpp_mode=True)
        return (
            f"out = stepdown::philox_word({OPERAND}{statement.rng}[0], {OPERAND}{statement.rng}[1], "
            f"{statement.random}u, "
            f"static_cast<std::uint64_t>({index}));"
        )
    text = to_cpp(
        statement.expression,
        scalar.ctype,
        extent=lambda letter: dace.symbolic.symstr(sizes[letter], cpp_mode=True),
        position=lambda letter: INDEX + letter,
        rename=lambda name: OPERAND + name,
    )
    return f"out = {text};"


def operand_setup(names: list[str], sdfg: SDFG) -> str:
    """C++ that widens 16-bit operands: ``in_x`` becomes a float under the same name in the tasklet's scope."""
    return "".join(f"const float {OPERAND}{name} = static_cast<float>(raw_{name}); " for name in names)


@dace.library.expansion
class ExpandStatementsPure(ExpandTransformation):
    """One state for each statement; a reduction's target is set to its identity in a state before."""

    environments: list[Any] = [OperatorHeaders]

    @staticmethod
    def expansion(node: Operator, parent_state: SDFGState, parent_sdfg: SDFG) -> SDFG:
        sdfg = operator_sdfg(node, parent_state, parent_sdfg)
        sizes = node.sizes(parent_sdfg, parent_state)
        scalar = compute_type(node, sdfg)
        dims = dict(node.operand_dims())
        last: SDFGState | None = None
        for statement in node.statements():
            dims[statement.target] = statement.dims
            if statement.target not in sdfg.arrays:
                shape = [sizes[letter] for letter in statement.dims] or [1]
                dtype = scalar if statement.kind == "compute" else dace.uint32
                sdfg.add_array(statement.target, shape, dtype, transient=True)
            if statement.reduction is not None:
                identity = "0" if statement.reduction == "sum" else f"stepdown::negative_infinity<{scalar.ctype}>()"
                last = _follow(sdfg, last, f"clear_{statement.target}")
                _map(sdfg, last, statement.target, statement.dims, sizes, {}, f"out = {identity};", dims, None)
            last = _follow(sdfg, last, statement.target)
            over = node.dims if statement.reduction is not None or statement.random is not None else statement.dims
            wcr = {None: None, "sum": "lambda x, y: x + y", "max": "lambda x, y: max(x, y)"}[statement.reduction]
            names = {name: dims[name] for name in statement.names() if name != statement.guard}
            code = statement_code(statement, over, sizes, scalar)
            _map(sdfg, last, statement.target, over, sizes, names, code, dims, wcr)
        return sdfg


def _follow(sdfg: SDFG, last: SDFGState | None, label: str) -> SDFGState:
    return sdfg.add_state(label) if last is None else sdfg.add_state_after(last, label)


def _memlet(name: str, dims: str, wcr: str | None = None) -> dace.Memlet:
    if dims == PAIR:
        return dace.Memlet(f"{name}[0:2]")
    return dace.Memlet(f"{name}[{', '.join(INDEX + letter for letter in dims) or '0'}]", wcr=wcr)


def _map(
    sdfg: SDFG,
    state: SDFGState,
    target: str,
    over: str,
    sizes: dict[str, Any],
    operands: dict[str, str],
    code: str,
    dims: dict[str, str],
    wcr: str | None,
) -> None:
    widened = [name for name in operands if sdfg.arrays[name].dtype in (dace.float16, dace.bfloat16)]
    inputs = {("raw_" if name in widened else OPERAND) + name: _memlet(name, dims[name]) for name in operands}
    state.add_mapped_tasklet(
        target,
        {INDEX + letter: f"0:{sizes[letter]}" for letter in over} or {"i_": "0:1"},
        inputs,
        operand_setup(widened, sdfg) + code,
        {"out": _memlet(target, dims[target], wcr)},
        language=dace.Language.CPP,
        schedule=dace.ScheduleType.Sequential,
        external_edges=True,
    )
