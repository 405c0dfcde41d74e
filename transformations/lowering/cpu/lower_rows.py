"""CPU lowering of row and element-wise operators: one loop nest for a list of statements, rows in cache.

The rows are cut into a fixed number of blocks, which OpenMP shares out: what is computed does not depend on the number
of threads. A block goes over its rows one by one and over a row in passes (see
:mod:`stepdown.transformations.lowering.passes_of_rows`); each pass is an innermost map, which
:mod:`stepdown.transformations.lowering.cpu.simd` vectorises. Sums over rows (gradients of biases and norms) are kept
for each block and added up, block after block, at the end.

Dimension legend: B batch, S query position, T key position, H head, P head size, E embedding, U feed-forward size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import dace
import dace.library
from dace.sdfg import SDFG, SDFGState
from dace.symbolic import pystr_to_symbolic, symstr
from dace.transformation.transformation import ExpandTransformation

from stepdown.models.operators import ROW_OPERATORS, Operator, RowGroup, Statement
from stepdown.models.operators.headers import OperatorHeaders
from stepdown.models.operators.operator import PAIR, extent_product
from stepdown.models.operators.pure import INDEX, compute_type
from stepdown.models.operators.scratch import operator_sdfg
from stepdown.models.operators.statements import to_cpp
from stepdown.transformations.lowering.maps import (
    add_map,
    add_nested_maps,
    cpp_tasklet,
    index_of,
    inner_sdfg,
    nest,
    read_of,
)
from stepdown.transformations.lowering.passes_of_rows import RowPass, RowProgram, plan_operator

BLOCKS = 64
"""Blocks of rows: enough for 64 threads; part of the numerical result, so not a matter of the machine."""

COLUMN_CHUNK = 256
"""Columns that one task adds up over the blocks."""

WORDS_MARGIN = 8
"""Words of a random row's buffer besides the row's own: the generator writes whole blocks of four, aligned to four."""

NARROW = (dace.float16, dace.bfloat16)
BLOCK, ROW = "i_block", "i_row"
ROW_BEGIN, ROW_END = "row_begin", "row_end"


@dataclass
class RowLowering:
    """Writes the loop nest of one row program into ``sdfg``.

    :ivar sdfg: holds one container for each operand, under the operand's name.
    :ivar dims: dimensions that the statements iterate over.
    :ivar operands: dimensions of every operand, inputs and outputs.
    :ivar outputs: operands that are written.
    :ivar sizes: extent of each dimension.
    :ivar scalar: type of the arithmetic.
    :ivar kinds: kind of each value that a statement gives (see :class:`Statement`).
    :ivar symbols: further symbols that memlets of a row are written in.
    """

    sdfg: SDFG
    program: RowProgram
    dims: str
    operands: Mapping[str, str]
    outputs: frozenset[str]
    sizes: Mapping[str, Any]
    scalar: dace.typeclass
    kinds: dict[str, str] = field(default_factory=dict)
    symbols: frozenset[str] = frozenset()

    # ---- the three levels: all rows, a block of rows, a row -------------------------------------------------------

    def lower(self) -> SDFG:
        """The loop nest; returns ``sdfg``."""
        program = self.program
        inner_shape = [self.sizes[letter] for letter in program.inner]
        for name in self._columns():
            self._top_array(f"partial_{name}", [BLOCKS, *inner_shape], self.scalar)
            self._top_array(f"lost_{name}", [BLOCKS, *inner_shape], self.scalar)
        for name in self._buffers():
            self._top_array(f"buffer_{name}", [BLOCKS, *inner_shape], self._type(name))
        for statement in self._random():
            self._words_array(statement)
        state = self.sdfg.add_state("rows")
        entry, exit_ = state.add_map("blocks", {BLOCK: f"0:{BLOCKS}"}, dace.ScheduleType.CPU_Multicore)
        nest(state, self._block(), [entry], [exit_], {})
        if self._columns():
            self._columns_state(state)
        return self.sdfg

    def _block(self) -> SDFG:
        sdfg = self._inner_sdfg("block", self._memory_names(), {BLOCK})
        last = self._constants(sdfg)
        if self._columns():
            last = sdfg.add_state_after(last, "clear")
            for name in self._column_memory():
                zero = {"out": self._block_memlet(name)}
                self._element_map(sdfg, last, f"clear_{name}", {}, f"out = {self.scalar.ctype}(0);", zero)
        self._rows_of_block(sdfg, last)
        last = sdfg.add_state_after(last, "rows")
        entry, exit_ = last.add_map("rows", {ROW: f"{ROW_BEGIN}:{ROW_END}"}, dace.ScheduleType.Sequential)
        for name in (ROW_BEGIN, ROW_END):
            entry.add_in_connector(name)
            last.add_edge(last.add_read(f"{name}_value"), None, entry, name, dace.Memlet(f"{name}_value[0]"))
        nest(last, self._row([s.target for s in self.program.constants]), [entry], [exit_], self._row_index())
        return sdfg

    def _constants(self, sdfg: SDFG) -> SDFGState:
        """A state that evaluates what is the same for all rows."""
        state = sdfg.add_state("constants")
        for statement in self.program.constants:
            self._add_scalar(sdfg, statement.target)
        self._scalar_tasklet(sdfg, state, self.program.constants)
        return state

    def _rows_of_block(self, sdfg: SDFG, state: SDFGState) -> None:
        """First row of a block and the one after its last."""
        rows = symstr(extent_product(self.program.outer, self.sizes), cpp_mode=True)
        code = (
            f"const std::int64_t rows = {rows};\n"
            f"const std::int64_t share = (rows + {BLOCKS - 1}) / {BLOCKS};\n"
            f"begin = std::min<std::int64_t>(share * {BLOCK}, rows);\n"
            "end = std::min<std::int64_t>(begin + share, rows);"
        )
        tasklet = cpp_tasklet(state, "rows_of_block", (), ("begin", "end"), code)
        for connector, name in (("begin", ROW_BEGIN), ("end", ROW_END)):
            sdfg.add_scalar(f"{name}_value", dace.int64, transient=True, storage=dace.StorageType.Register)
            write = state.add_write(f"{name}_value")
            state.add_edge(tasklet, connector, write, None, dace.Memlet(f"{name}_value[0]"))

    def _row_index(self) -> dict[str, Any]:
        """Index in each outer dimension from the number of the row."""
        index = index_of(pystr_to_symbolic(ROW), self.program.outer, self.sizes)
        return {INDEX + letter: place for letter, place in index.items()}

    def _row(self, constants: list[str]) -> SDFG:
        symbols = {BLOCK, ROW, *(INDEX + letter for letter in self.program.outer), *self.symbols}
        sdfg = self._inner_sdfg("row", self._memory_names(), symbols)
        for name in constants:
            self._add_scalar(sdfg, name, transient=False)
        last = sdfg.add_state("before")
        for statement in self.program.before:
            self._add_scalar(sdfg, statement.target)
        self._scalar_tasklet(sdfg, last, self.program.before)
        for number, row_pass in enumerate(self.program.passes):
            last = self._pass(sdfg, last, row_pass, number)
        return sdfg

    def _pass(self, sdfg: SDFG, last: SDFGState, row_pass: RowPass, number: int) -> SDFGState:
        prepare = sdfg.add_state_after(last, f"prepare_{number}")
        for statement in row_pass.elements:
            if statement.random is not None:
                self._random_tasklet(sdfg, prepare, statement)
        for statement in row_pass.row_reductions:
            self._add_scalar(sdfg, statement.target)
            zero = f"{self.scalar.ctype}(0)"
            identity = zero if statement.reduction == "sum" else f"stepdown::negative_infinity<{self.scalar.ctype}>()"
            tasklet = cpp_tasklet(prepare, f"clear_{statement.target}", {}, {"out"}, f"out = {identity};")
            prepare.add_edge(
                tasklet, "out", prepare.add_write(statement.target), None, dace.Memlet(f"{statement.target}[0]")
            )
        elements = sdfg.add_state_after(prepare, f"pass_{number}")
        self._element_pass(sdfg, elements, row_pass, number)
        after = sdfg.add_state_after(elements, f"after_{number}")
        for statement in row_pass.after:
            self._add_scalar(sdfg, statement.target)
        self._scalar_tasklet(sdfg, after, row_pass.after)
        return after

    # ---- tasklets --------------------------------------------------------------------------------------------------

    def _element_pass(self, sdfg: SDFG, state: SDFGState, row_pass: RowPass, number: int) -> None:
        """One map over the row's elements with every statement of the pass in its tasklet."""
        local = {statement.target for statement in row_pass.elements}
        code: list[str] = []
        inputs: dict[str, dace.Memlet] = {}
        outputs: dict[str, dace.Memlet] = {}
        for statement in (*row_pass.elements, *row_pass.row_reductions, *row_pass.column_reductions):
            if statement.random is not None:
                inputs[f"in_{statement.target}"] = self._words_memlet(statement.target)
                code.append(f"const {self._type(statement.target).ctype} v_{statement.target} = in_{statement.target};")
                continue
            for name in statement.names():
                if name not in local and f"in_{name}" not in inputs:
                    inputs[f"in_{name}"] = self._element_memlet(name)
            text = self._text(statement, lambda name: self._widened(sdfg, name, local))
            if statement in row_pass.column_reductions:
                code.append(self._compensated(statement.target, text, inputs, outputs))
                continue
            if statement.reduction is not None:
                code.append(f"out_{statement.target} = {text};")
                memlet = dace.Memlet(f"{statement.target}[0]")
                memlet.wcr = "lambda x, y: x + y" if statement.reduction == "sum" else "lambda x, y: max(x, y)"
                memlet.wcr_nonatomic = True
                outputs[f"out_{statement.target}"] = memlet
                continue
            code.append(f"const {self._type(statement.target).ctype} v_{statement.target} = {text};")
            if statement.target in self.outputs:
                outputs[f"out_{statement.target}"] = self._memory_memlet(statement.target)
                ctype = sdfg.arrays[statement.target].dtype.ctype
                code.append(f"out_{statement.target} = static_cast<{ctype}>(v_{statement.target});")
            if statement.target in self._buffers():
                outputs[f"keep_{statement.target}"] = self._block_memlet(f"buffer_{statement.target}")
                code.append(f"keep_{statement.target} = v_{statement.target};")
        self._element_map(sdfg, state, f"pass_{number}", inputs, "\n".join(code), outputs)

    def _compensated(
        self, name: str, text: str, inputs: dict[str, dace.Memlet], outputs: dict[str, dace.Memlet]
    ) -> str:
        """C++ that adds a row's values to the block's sums of columns and keeps what rounding loses (Kahan, 1965).

        A block may have hundreds of rows: plain addition one by one would lose more than PyTorch's cascade does. Where
        a sum is infinite there is nothing to keep.
        """
        scalar = self.scalar.ctype
        for prefix, memory in (("sum", f"partial_{name}"), ("lost", f"lost_{name}")):
            inputs[f"in_{prefix}_{name}"] = self._block_memlet(memory)
            outputs[f"out_{prefix}_{name}"] = self._block_memlet(memory)
        return (
            f"const {scalar} k_added_{name} = {text} - in_lost_{name};\n"
            f"const {scalar} k_sum_{name} = in_sum_{name} + k_added_{name};\n"
            f"const {scalar} k_lost_{name} = (k_sum_{name} - in_sum_{name}) - k_added_{name};\n"
            f"out_sum_{name} = k_sum_{name};\n"
            f"out_lost_{name} = k_lost_{name} == k_lost_{name} ? k_lost_{name} : {scalar}(0);"
        )

    def _element_map(
        self,
        sdfg: SDFG,
        state: SDFGState,
        label: str,
        inputs: dict[str, dace.Memlet],
        code: str,
        outputs: dict[str, dace.Memlet],
    ) -> None:
        ranges = {INDEX + letter: f"0:{self.sizes[letter]}" for letter in self.program.inner} or {"i_one": "0:1"}
        add_map(state, label, ranges, inputs, code, outputs)

    def _scalar_tasklet(self, sdfg: SDFG, state: SDFGState, statements: list[Statement]) -> None:
        """One tasklet with statements that give a value a row, or one for all rows."""
        if not statements:
            return
        local: set[str] = set()
        inputs: dict[str, dace.Memlet] = {}
        outputs: dict[str, dace.Memlet] = {}
        code: list[str] = []
        for statement in statements:
            for name in statement.names():
                if name not in local:
                    inputs.setdefault(f"in_{name}", self._element_memlet(name))
            text = self._text(statement, lambda name: self._widened(sdfg, name, local))
            code.append(f"const {self._type(statement.target).ctype} v_{statement.target} = {text};")
            local.add(statement.target)
            outputs[f"value_{statement.target}"] = dace.Memlet(f"{self._scalar_name(statement.target)}[0]")
            code.append(f"value_{statement.target} = v_{statement.target};")
            if statement.target in self.outputs:
                outputs[f"out_{statement.target}"] = self._memory_memlet(statement.target)
                ctype = sdfg.arrays[statement.target].dtype.ctype
                code.append(f"out_{statement.target} = static_cast<{ctype}>(v_{statement.target});")
        tasklet = cpp_tasklet(state, "_".join(s.target for s in statements[:3]), inputs, outputs, "\n".join(code))
        for connector, memlet in inputs.items():
            state.add_edge(read_of(state, memlet.data), None, tasklet, connector, memlet)
        for connector, memlet in outputs.items():
            state.add_edge(tasklet, connector, state.add_write(memlet.data), None, memlet)

    def _random_tasklet(self, sdfg: SDFG, state: SDFGState, statement: Statement) -> None:
        """The random words of a row, so that the word of its first element stands at position four of the buffer."""
        length = symstr(extent_product(self.program.inner, self.sizes), cpp_mode=True)
        fill = (
            f"const std::uint64_t first = static_cast<std::uint64_t>({ROW}) * ({length});\n"
            "const std::int64_t skipped = static_cast<std::int64_t>(first & 3u);\n"
            f"stepdown::philox_blocks(in_rng[0], in_rng[1], {statement.random}u, first >> 2, "
            f"(skipped + {length} + 3) / 4, words + 4 - skipped);"
        )
        inputs = {"in_rng": dace.Memlet(f"{statement.rng}[0:2]")}
        if statement.guard is not None:
            inputs["guard"] = dace.Memlet(f"{statement.guard}[0]")
            fill = f"if (guard != 0) {{\n{fill}\n}}"
        name = f"words_{statement.target}"
        tasklet = cpp_tasklet(state, name, inputs, {"words"}, fill)
        tasklet.out_connectors["words"] = dace.pointer(dace.uint32)
        for connector, memlet in inputs.items():
            state.add_edge(read_of(state, memlet.data), None, tasklet, connector, memlet)
        extent = sdfg.arrays[name].shape[1]
        state.add_edge(
            tasklet, "words", state.add_write(name), None, dace.Memlet(f"{name}[{BLOCK}, 0:{symstr(extent)}]")
        )

    def _columns_state(self, rows: SDFGState) -> None:
        """After all rows: add the blocks' sums up and store what follows from them."""
        state = self.sdfg.add_state_after(rows, "columns")
        first, rest = self.program.inner[0], self.program.inner[1:]
        extent = self.sizes[first]
        names = [f"partial_{name}" for name in self._columns()]
        final_outputs = [s.target for s in self.program.final if s.target in self.outputs]
        needed = {name for s in self.program.final for name in s.names() if name in self.operands}
        if rest:
            chunk_range, span = f"0:{extent}", "i_chunk:i_chunk + 1"
        else:
            chunk_range = f"0:int_ceil({symstr(extent)}, {COLUMN_CHUNK})"
            span = f"{COLUMN_CHUNK} * i_chunk:Min({COLUMN_CHUNK} * i_chunk + {COLUMN_CHUNK}, {symstr(extent)})"
        ranges = {INDEX + first: span} | {INDEX + letter: f"0:{self.sizes[letter]}" for letter in rest}
        body = self._inner_sdfg("column", [*names, *final_outputs, *sorted(needed)], {"i_chunk"})
        add_up = body.add_state("add_up")
        inner = ", ".join(INDEX + letter for letter in self.program.inner)
        code = "\n".join(f"out_{name} = in_{name};" for name in names)
        # In two levels, eight blocks and then eight sums, so that rounding errors do not grow with the blocks.
        levels = (
            ({"i_eight": f"0:{BLOCKS // 8}", BLOCK: "1:8"}, f"8 * i_eight + {BLOCK}", "8 * i_eight"),
            ({BLOCK: f"1:{BLOCKS // 8}"}, f"8 * {BLOCK}", "0"),
        )
        for outer, source, target in levels:
            inputs = {f"in_{name}": dace.Memlet(f"{name}[{source}, {inner}]") for name in names}
            outputs = {
                f"out_{name}": dace.Memlet(f"{name}[{target}, {inner}]", wcr="lambda x, y: x + y") for name in names
            }
            for memlet in outputs.values():
                memlet.wcr_nonatomic = True
            add_nested_maps(add_up, "add_up", outer, ranges, inputs, code, outputs)
            add_up = body.add_state_after(add_up, "add_up_eights" if target != "0" else "store")
        store = add_up
        local: set[str] = set()
        inputs, outputs, lines = {}, {}, []
        for statement in self.program.final:
            for name in statement.names():
                if name in self._columns():
                    inputs.setdefault(f"in_{name}", dace.Memlet(f"partial_{name}[0, {inner}]"))
                elif name not in local:
                    inputs.setdefault(f"in_{name}", self._memory_memlet(name))
            text = self._text(statement, lambda name: self._widened(self.sdfg, name, local))
            lines.append(f"const {self.scalar.ctype} v_{statement.target} = {text};")
            local.add(statement.target)
            if statement.target in self.outputs:
                outputs[f"out_{statement.target}"] = self._memory_memlet(statement.target)
                ctype = self.sdfg.arrays[statement.target].dtype.ctype
                lines.append(f"out_{statement.target} = static_cast<{ctype}>(v_{statement.target});")
        add_map(store, "store", ranges, inputs, "\n".join(lines), outputs)
        entry, exit_ = state.add_map("columns", {"i_chunk": chunk_range}, dace.ScheduleType.CPU_Multicore)
        nest(state, body, [entry], [exit_], {})

    # ---- names and memlets -----------------------------------------------------------------------------------------

    def _columns(self) -> list[str]:
        return [s.target for row_pass in self.program.passes for s in row_pass.column_reductions]

    def _column_memory(self) -> list[str]:
        """The blocks' sums of columns, and what rounding lost of them."""
        return [f"{kind}_{name}" for name in self._columns() for kind in ("partial", "lost")]

    def _random(self) -> list[Statement]:
        return [s for row_pass in self.program.passes for s in row_pass.elements if s.random is not None]

    def _buffers(self) -> list[str]:
        """Buffered values but for those that a later pass can read where they were stored, unrounded."""
        return [
            name
            for name in self.program.buffered
            if not (name in self.outputs and self.sdfg.arrays[name].dtype == self._type(name))
        ]

    def _type(self, name: str) -> dace.typeclass:
        return dace.uint32 if self.kinds.get(name) == "word" else self.scalar

    def _memory_names(self) -> list[str]:
        """Containers that the blocks use: every operand but those that only the final statements touch."""
        final = {s.target for s in self.program.final}
        used = [name for name in self.operands if name in self.sdfg.arrays and name not in final]
        partials = self._column_memory()
        buffers = [f"buffer_{name}" for name in self._buffers()]
        return used + partials + buffers + [f"words_{s.target}" for s in self._random()]

    def _top_array(self, name: str, shape: list[Any], dtype: dace.typeclass) -> None:
        self.sdfg.add_array(name, shape, dtype, transient=True)

    def _words_array(self, statement: Statement) -> None:
        """Where the random words of a block's current row lie."""
        length = extent_product(self.program.inner, self.sizes) + WORDS_MARGIN
        self._top_array(f"words_{statement.target}", [BLOCKS, length], dace.uint32)

    def _inner_sdfg(self, label: str, names: Iterable[str], symbols: set[str]) -> SDFG:
        """A nested SDFG that sees the named containers and symbols."""
        label = f"{self.sdfg.name.removesuffix('_expansion')}_{label}"
        return inner_sdfg(self.sdfg, label, names, symbols, dace.int64)

    def _add_scalar(self, sdfg: SDFG, name: str, *, transient: bool = True) -> None:
        sdfg.add_scalar(
            self._scalar_name(name), self._type(name), transient=transient, storage=dace.StorageType.Register
        )

    def _scalar_name(self, name: str) -> str:
        """Name of a row's value; one that is also stored keeps the operand's name for the container."""
        return f"row_{name}" if name in self.operands else name

    def _computed_scalar(self, name: str) -> bool:
        statements = [*self.program.constants, *self.program.before]
        for row_pass in self.program.passes:
            statements += [*row_pass.row_reductions, *row_pass.after]
        return any(statement.target == name for statement in statements)

    def _memory_memlet(self, name: str) -> dace.Memlet:
        """The element of an operand at the current indices; a dimension of extent one is at index zero."""
        dims = self.operands[name]
        if dims == PAIR:
            return dace.Memlet(f"{name}[0:2]")
        return dace.Memlet(f"{name}[{', '.join(INDEX + letter for letter in dims) or '0'}]")

    def _element_memlet(self, name: str) -> dace.Memlet:
        """Where a statement reads or writes ``name``."""
        if self._computed_scalar(name):
            return dace.Memlet(f"{self._scalar_name(name)}[0]")
        if name in self._buffers():
            return self._block_memlet(f"buffer_{name}")
        if any(statement.target == name for statement in self._random()):
            return self._words_memlet(name)
        return self._memory_memlet(name)

    def _block_memlet(self, name: str) -> dace.Memlet:
        return dace.Memlet(f"{name}[{', '.join([BLOCK, *(INDEX + letter for letter in self.program.inner)])}]")

    def _words_memlet(self, name: str) -> dace.Memlet:
        position: Any = 0
        for letter in self.program.inner:
            position = position * self.sizes[letter] + pystr_to_symbolic(INDEX + letter)
        return dace.Memlet(f"words_{name}[{BLOCK}, {symstr(position + 4)}]")

    def _widened(self, sdfg: SDFG, name: str, local: set[str]) -> str:
        """C++ of an operand in the type of the arithmetic."""
        if name in local:
            return f"v_{name}"
        in_memory = name in self.sdfg.arrays and not self._computed_scalar(name)
        narrow = in_memory and self.sdfg.arrays[name].dtype in NARROW
        return f"static_cast<float>(in_{name})" if narrow else f"in_{name}"

    def _text(self, statement: Statement, rename: Any) -> str:
        return to_cpp(
            statement.expression,
            self.scalar.ctype,
            extent=lambda letter: symstr(self.sizes[letter], cpp_mode=True),
            position=lambda letter: INDEX + letter,
            rename=rename,
        )


@dace.library.expansion
class ExpandRowsCPU(ExpandTransformation):
    """The loop nest of one row or element-wise operator."""

    environments: list[Any] = [OperatorHeaders]

    @staticmethod
    def expansion(node: Operator, parent_state: SDFGState, parent_sdfg: SDFG) -> SDFG:
        sdfg = operator_sdfg(node, parent_state, parent_sdfg)
        operands = {name: dims for name, dims in node.operand_dims().items() if name in sdfg.arrays}
        lowering = RowLowering(
            sdfg,
            plan_operator(node),
            node.dims,
            operands,
            frozenset(node.out_connectors),
            node.sizes(parent_sdfg, parent_state),
            compute_type(node, sdfg),
            {statement.target: statement.kind for statement in node.statements()},
        )
        return lowering.lower()


def register() -> None:
    """Attach the ``cpu`` expansion to every row and element-wise operator, and to groups of them."""
    expanded: tuple[type[Operator], ...] = (*ROW_OPERATORS, RowGroup)
    for operator in expanded:
        operator.register_implementation("cpu", ExpandRowsCPU)
