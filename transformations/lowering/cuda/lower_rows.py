"""CUDA lowering of row and element-wise operators: one kernel for a list of statements, rows in registers.

The statements' passes over a row (:mod:`stepdown.transformations.lowering.passes_of_rows`) are strip-mined: some lanes
share a row, each holds some chunks of it, and a chunk is a vector that is loaded and stored in one access of up to 16
bytes. What a later pass reads again stays in registers; a reduction over the row is one value a lane and then one over
the lanes. Sums over rows (gradients of biases and norms) are kept in registers while a thread goes over its rows, are
written as one partial row, and added up by a second kernel.

Dimension legend: B batch, S query position, T key position, H head, P head size, E embedding, U feed-forward size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import dace
import dace.library
from dace.sdfg import SDFG, SDFGState
from dace.symbolic import pystr_to_symbolic, symstr
from dace.transformation.transformation import ExpandTransformation

from stepdown.models.operators import ROW_OPERATORS, Operator, RowGroup, Statement
from stepdown.models.operators.headers import OperatorHeaders
from stepdown.models.operators.pure import INDEX, compute_type
from stepdown.models.operators.scratch import operator_sdfg
from stepdown.transformations.lowering.cuda.lanes import LaneHeaders
from stepdown.transformations.lowering.cuda.rows_on_lanes import (
    BLOCK,
    CHUNK,
    ELEMENT,
    LANE,
    LOCAL,
    NARROW,
    ROW,
    RowsOnLanes,
)
from stepdown.transformations.lowering.maps import add_map, cpp_tasklet, index_of, nest, read_of
from stepdown.transformations.lowering.passes_of_rows import RowPass, plan_operator

IMPLEMENTATION = "cuda"

PARTIAL_BLOCKS = 264
"""Blocks of a kernel that sums over rows: two for each of a large GPU's multiprocessors."""


class LaneLowering(RowsOnLanes):
    """Writes the kernels of one row program into ``sdfg``."""

    # ---- levels: all blocks, a thread, a row -----------------------------------------------------------------------

    def lower(self) -> SDFG:
        """The kernels; returns ``sdfg``."""
        plan = self.plan
        blocks = f"int_ceil({symstr(self._rows())}, {plan.rows})"
        if self._columns():
            blocks = f"Min({PARTIAL_BLOCKS}, {blocks})"
            for name in self._columns():
                self.sdfg.add_array(
                    f"partial_{name}",
                    [PARTIAL_BLOCKS * plan.rows, self.extent],
                    self.scalar,
                    dace.StorageType.GPU_Global,
                    transient=True,
                )
        state = self.sdfg.add_state("rows")
        self._kernel(
            state,
            "rows",
            {BLOCK: f"0:{blocks}"},
            {LOCAL: f"0:{plan.rows}", LANE: f"0:{plan.lanes}"},
            self._thread(blocks),
        )
        if self._columns():
            self._columns_kernel(self.sdfg.add_state_after(state, "columns"), blocks)
        return self.sdfg

    def _kernel(
        self, state: SDFGState, label: str, grid: Mapping[str, str], block: Mapping[str, str], body: SDFG
    ) -> None:
        """A kernel whose threads run ``body``."""
        outer, outer_exit = state.add_map(label, dict(grid), dace.ScheduleType.GPU_Device)
        inner, inner_exit = state.add_map(f"{label}_threads", dict(block), dace.ScheduleType.GPU_ThreadBlock)
        nest(state, body, [outer, inner], [outer_exit, inner_exit], {})

    def _thread(self, blocks: str) -> SDFG:
        plan = self.plan
        sdfg = self._inner("thread", {BLOCK, LOCAL, LANE})
        last = sdfg.add_state("constants")
        self._scalar_tasklet(sdfg, last, self.program.constants)
        if self._columns():
            last = sdfg.add_state_after(last, "clear")
            for name in self._columns():
                self._register(sdfg, f"column_{name}", self.scalar)
                ranges = {"i_held": f"0:{plan.held}"}
                self._unrolled(
                    last,
                    f"clear_{name}",
                    ranges,
                    {},
                    f"out = {self.scalar.ctype}(0);",
                    {"out": dace.Memlet(f"column_{name}[i_held]")},
                )
        last = sdfg.add_state_after(last, "rows")
        first = f"{BLOCK} * {plan.rows} + {LOCAL}"
        rows = symstr(self._rows())
        if self._columns():
            span = f"{first}:{rows}:{plan.rows} * {blocks}"
        else:
            span = f"{first}:Min({rows}, {first} + 1)"
        body = self._row([s.target for s in self.program.constants])
        entry, exit_ = last.add_map("rows_of_thread", {ROW: span}, dace.ScheduleType.Sequential)
        nest(last, body, [entry], [exit_], self._row_index())
        if self._columns():
            last = sdfg.add_state_after(last, "flush")
            for name in self._columns():
                part = f"{first}"
                self._store_map(last, f"column_{name}", f"partial_{name}", f"{part}, {{element}}", self.scalar)
        return sdfg

    def _row_index(self) -> dict[str, Any]:
        """Index in each outer dimension from the number of the row."""
        index = index_of(pystr_to_symbolic(ROW), self.program.outer, self.sizes)
        return {INDEX + letter: place for letter, place in index.items()}

    def _row(self, constants: list[str]) -> SDFG:
        symbols = {BLOCK, LOCAL, LANE, ROW, *(INDEX + letter for letter in self.program.outer)}
        sdfg = self._inner("row", symbols)
        for name in constants:
            self._scalar(sdfg, name, transient=False)
        for name in self._columns():
            self._register(sdfg, f"column_{name}", self.scalar, transient=False)
        last = sdfg.add_state("before")
        self._scalar_tasklet(sdfg, last, self.program.before)
        loaded: set[str] = set()
        for number, row_pass in enumerate(self.program.passes):
            last = self._pass(sdfg, last, row_pass, number, loaded)
        return sdfg

    # ---- one pass over a row ---------------------------------------------------------------------------------------

    def _pass(self, sdfg: SDFG, last: SDFGState, row_pass: RowPass, number: int, loaded: set[str]) -> SDFGState:
        load = sdfg.add_state_after(last, f"load_{number}")
        statements = (*row_pass.elements, *row_pass.row_reductions, *row_pass.column_reductions)
        needed = {name for s in statements if s.random is None for name in s.names()}
        for name in sorted(needed - loaded):
            if name in self.operands and name not in self.elements and self._is_vector(name):
                self._load_map(load, sdfg, name)
                loaded.add(name)
        for statement in row_pass.elements:
            if statement.random is not None:
                self._words(sdfg, load, statement)
        for statement in row_pass.row_reductions:
            own = self._scalar(sdfg, statement.target)
            identity = "0" if statement.reduction == "sum" else f"stepdown::negative_infinity<{self.scalar.ctype}>()"
            tasklet = cpp_tasklet(
                load, f"clear_{statement.target}", {}, {"out"}, f"out = {self.scalar.ctype}({identity});"
            )
            load.add_edge(tasklet, "out", load.add_write(own), None, dace.Memlet(f"{own}[0]"))
        compute = sdfg.add_state_after(load, f"pass_{number}")
        self._elements(sdfg, compute, row_pass, number)
        store = sdfg.add_state_after(compute, f"store_{number}")
        for statement in row_pass.elements:
            if statement.target in self.outputs:
                self._store_output(store, statement.target)
        last = store
        if row_pass.row_reductions:
            last = sdfg.add_state_after(store, f"reduce_{number}")
            for statement in row_pass.row_reductions:
                own = self._scalar(sdfg, statement.target)
                operation = "Sum" if statement.reduction == "sum" else "Maximum"
                how = f"stepdown::{operation}, {self.plan.lanes}, {self.plan.rows}"
                code = f"out = stepdown::over_lanes<{how}>(value, {LOCAL});"
                tasklet = cpp_tasklet(last, f"reduce_{statement.target}", {"value"}, {"out"}, code)
                last.add_edge(last.add_read(own), None, tasklet, "value", dace.Memlet(f"{own}[0]"))
                last.add_edge(tasklet, "out", last.add_write(own), None, dace.Memlet(f"{own}[0]"))
        after = sdfg.add_state_after(last, f"after_{number}")
        self._scalar_tasklet(sdfg, after, row_pass.after)
        return after

    def _elements(self, sdfg: SDFG, state: SDFGState, row_pass: RowPass, number: int) -> None:
        """A map over what a lane holds, with every statement of the pass in its tasklet."""
        held = f"{CHUNK} * {self.plan.vector} + {ELEMENT}"
        local: set[str] = set()
        code: list[str] = []
        inputs: dict[str, dace.Memlet] = {}
        outputs: dict[str, dace.Memlet] = {}
        row_values = self._row_values()
        here = {s.target for s in row_pass.elements}

        def rename(name: str) -> str:
            if name in local:
                return f"v_{name}"
            if f"in_{name}" not in inputs:
                if name in row_values:
                    inputs[f"in_{name}"] = dace.Memlet(f"{self._scalar(sdfg, name)}[0]")
                elif name in self.elements or self._is_vector(name):
                    inputs[f"in_{name}"] = dace.Memlet(f"held_{name}[{held}]")
                else:
                    inputs[f"in_{name}"] = self._memory(name, self._position())
            narrow = name in self.sdfg.arrays and self.sdfg.arrays[name].dtype in NARROW
            return (
                f"static_cast<float>(in_{name})"
                if narrow and f"held_{name}" not in inputs[f"in_{name}"].data
                else f"in_{name}"
            )

        kept = self._kept(here)
        for statement in row_pass.elements:
            kind = self._type(statement.target).ctype
            if statement.random is not None:
                inputs[f"in_{statement.target}"] = dace.Memlet(f"held_{statement.target}[{held}]")
                code.append(f"const {kind} v_{statement.target} = in_{statement.target};")
            else:
                code.append(f"const {kind} v_{statement.target} = {self._text(statement, rename)};")
            local.add(statement.target)
            if statement.target in kept and statement.random is None:
                self._register(sdfg, f"held_{statement.target}", self._type(statement.target))
                outputs[f"out_{statement.target}"] = dace.Memlet(f"held_{statement.target}[{held}]")
                code.append(f"out_{statement.target} = v_{statement.target};")
        for statement in (*row_pass.row_reductions, *row_pass.column_reductions):
            text = self._text(statement, rename)
            if self.plan.tail:
                text = f"{self._valid()} ? ({text}) : {self._identity(statement)}"
            code.append(f"out_{statement.target} = {text};")
            target = f"{self._scalar(sdfg, statement.target)}[0]"
            if statement in row_pass.column_reductions:
                target = f"column_{statement.target}[{held}]"
            wcr = "lambda x, y: x + y" if statement.reduction == "sum" else "lambda x, y: max(x, y)"
            memlet = dace.Memlet(target, wcr=wcr)
            memlet.wcr_nonatomic = True
            outputs[f"out_{statement.target}"] = memlet
        ranges = {CHUNK: f"0:{self.plan.chunks}", ELEMENT: f"0:{self.plan.vector}"}
        if code:
            self._unrolled(state, f"pass_{number}", ranges, inputs, "\n".join(code), outputs)

    def _kept(self, targets: set[str]) -> set[str]:
        """Element values that something reads after the pass that computes them."""
        return {name for name in targets if name in self.outputs or name in self.program.buffered}

    # ---- scalars and columns ---------------------------------------------------------------------------------------

    def _scalar_tasklet(self, sdfg: SDFG, state: SDFGState, statements: list[Statement]) -> None:
        """Statements that give one value a row, or one for all rows; the first lane stores what is an output."""
        if not statements:
            return
        local: set[str] = set()
        inputs: dict[str, dace.Memlet] = {}
        outputs: dict[str, dace.Memlet] = {}
        code: list[str] = []
        stored: list[tuple[str, dace.typeclass]] = []
        row_values = self._row_values()

        def rename(name: str) -> str:
            if name in local:
                return f"v_{name}"
            if name in row_values:
                inputs[f"in_{name}"] = dace.Memlet(f"{self._scalar(sdfg, name)}[0]")
                return f"in_{name}"
            inputs[f"in_{name}"] = self._memory(name, pystr_to_symbolic("0"))
            narrow = self.sdfg.arrays[name].dtype in NARROW
            return f"static_cast<float>(in_{name})" if narrow else f"in_{name}"

        for statement in statements:
            text = self._text(statement, rename)
            code.append(f"const {self._type(statement.target).ctype} v_{statement.target} = {text};")
            local.add(statement.target)
            outputs[f"value_{statement.target}"] = dace.Memlet(f"{self._scalar(sdfg, statement.target)}[0]")
            code.append(f"value_{statement.target} = v_{statement.target};")
            if statement.target in self.outputs:
                dtype = self.sdfg.arrays[statement.target].dtype
                outputs[f"out_{statement.target}"] = self._memory(statement.target, pystr_to_symbolic("0"))
                code.append(
                    f"if ({LANE} == 0) *out_{statement.target} = "
                    f"stepdown::converted<{dtype.ctype}>(v_{statement.target});"
                )
                stored.append((f"out_{statement.target}", dtype))
        label = "_".join(statement.target for statement in statements[:3])
        tasklet = cpp_tasklet(state, label, inputs, outputs, "\n".join(code))
        for connector, dtype in stored:
            tasklet.out_connectors[connector] = dace.pointer(dtype)
        for connector, memlet in inputs.items():
            state.add_edge(read_of(state, memlet.data), None, tasklet, connector, memlet)
        for connector, memlet in outputs.items():
            state.add_edge(tasklet, connector, state.add_write(memlet.data), None, memlet)

    def _columns_kernel(self, state: SDFGState, blocks: str) -> None:
        """Add the partial rows up, 32 threads a column, and store what follows from the sums."""
        names = self._columns()
        sdfg = self._inner("column", {"i_tile", "i_high", "i_wide"})
        column = pystr_to_symbolic(f"Min({self.extent - 1}, i_tile * 32 + i_wide)")
        last = sdfg.add_state("clear")
        for name in names:
            own = self._scalar(sdfg, name)
            tasklet = cpp_tasklet(last, f"clear_{name}", {}, {"out"}, f"out = {self.scalar.ctype}(0);")
            last.add_edge(tasklet, "out", last.add_write(own), None, dace.Memlet(f"{own}[0]"))
        last = sdfg.add_state_after(last, "add_up")
        inputs = {f"in_{name}": dace.Memlet(f"partial_{name}[i_part, {symstr(column)}]") for name in names}
        outputs = {}
        for name in names:
            memlet = dace.Memlet(f"{self._scalar(sdfg, name)}[0]", wcr="lambda x, y: x + y")
            memlet.wcr_nonatomic = True
            outputs[f"out_{name}"] = memlet
        parts = f"{self.plan.rows} * {blocks}"
        add_map(
            last,
            "parts",
            {"i_part": f"i_high:{parts}:32"},
            inputs,
            "\n".join(f"out_{n} = in_{n};" for n in names),
            outputs,
        )
        last = sdfg.add_state_after(last, "over_column")
        for name in names:
            own = self._scalar(sdfg, name)
            tasklet = cpp_tasklet(last, f"reduce_{name}", {"value"}, {"out"}, "out = stepdown::over_column(value);")
            last.add_edge(last.add_read(own), None, tasklet, "value", dace.Memlet(f"{own}[0]"))
            last.add_edge(tasklet, "out", last.add_write(own), None, dace.Memlet(f"{own}[0]"))
        last = sdfg.add_state_after(last, "store")
        self._final(sdfg, last, column)
        self._kernel(
            state, "columns", {"i_tile": f"0:int_ceil({self.extent}, 32)"}, {"i_high": "0:32", "i_wide": "0:32"}, sdfg
        )

    def _final(self, sdfg: SDFG, state: SDFGState, column: Any) -> None:
        local: set[str] = set()
        inputs: dict[str, dace.Memlet] = {}
        outputs: dict[str, dace.Memlet] = {}
        code: list[str] = []
        columns = set(self._columns())

        def rename(name: str) -> str:
            if name in local:
                return f"v_{name}"
            if name in columns:
                inputs[f"in_{name}"] = dace.Memlet(f"{self._scalar(sdfg, name)}[0]")
            else:
                inputs[f"in_{name}"] = self._memory(name, column)
            narrow = name in self.sdfg.arrays and self.sdfg.arrays[name].dtype in NARROW
            return f"static_cast<float>(in_{name})" if narrow else f"in_{name}"

        for statement in self.program.final:
            code.append(f"const {self.scalar.ctype} v_{statement.target} = {self._text(statement, rename)};")
            local.add(statement.target)
            if statement.target in self.outputs:
                dtype = self.sdfg.arrays[statement.target].dtype
                outputs[f"out_{statement.target}"] = self._memory(statement.target, column)
                code.append(
                    f"if (i_high == 0 && i_tile * 32 + i_wide < {self.extent}) *out_{statement.target} = "
                    f"stepdown::converted<{dtype.ctype}>(v_{statement.target});"
                )
        tasklet = cpp_tasklet(state, "final", inputs, outputs, "\n".join(code))
        for connector, memlet in outputs.items():
            tasklet.out_connectors[connector] = dace.pointer(self.sdfg.arrays[memlet.data].dtype)
        for connector, memlet in inputs.items():
            state.add_edge(read_of(state, memlet.data), None, tasklet, connector, memlet)
        for connector, memlet in outputs.items():
            state.add_edge(tasklet, connector, state.add_write(memlet.data), None, memlet)


@dace.library.expansion
class ExpandRowsCUDA(ExpandTransformation):
    """The kernels of one row or element-wise operator, or of a group of them."""

    environments: list[Any] = [OperatorHeaders, LaneHeaders]

    @staticmethod
    def expansion(node: Operator, parent_state: SDFGState, parent_sdfg: SDFG) -> SDFG:
        sdfg = operator_sdfg(node, parent_state, parent_sdfg)
        operands = {name: dims for name, dims in node.operand_dims().items() if name in sdfg.arrays}
        lowering = LaneLowering(
            sdfg,
            plan_operator(node),
            operands,
            frozenset(node.out_connectors),
            node.sizes(parent_sdfg, parent_state),
            compute_type(node, sdfg),
            {statement.target: statement.kind for statement in node.statements()},
        )
        return lowering.lower()


def register() -> None:
    """Attach the ``cuda`` expansion to every row and element-wise operator, and to groups of them."""
    expanded: tuple[type[Operator], ...] = (*ROW_OPERATORS, RowGroup)
    for operator in expanded:
        operator.register_implementation(IMPLEMENTATION, ExpandRowsCUDA)
