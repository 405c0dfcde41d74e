"""What the CUDA lowering of rows builds on: registers of a lane, memlets of a row's elements, vector accesses.

Dimension legend: B batch, S query position, T key position, H head, P head size, E embedding, U feed-forward size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import dace
from dace import data
from dace.sdfg import SDFG, SDFGState
from dace.symbolic import pystr_to_symbolic, symstr

from stepdown.models.errors import CanonicalFormError
from stepdown.models.operators import Statement
from stepdown.models.operators.operator import PAIR, extent_product
from stepdown.models.operators.pure import INDEX
from stepdown.models.operators.statements import to_cpp
from stepdown.transformations.lowering.cuda.lanes import plan_lanes
from stepdown.transformations.lowering.maps import (
    add_map,
    connect_out,
    connect_through,
    cpp_tasklet,
    index_of,
    inner_sdfg,
)
from stepdown.transformations.lowering.passes_of_rows import RowProgram

BLOCK, LOCAL, LANE, ROW, CHUNK, ELEMENT = "i_block", "i_local", "i_lane", "i_row", "i_chunk", "i_element"
NARROW = (dace.float16, dace.bfloat16)


class RowsOnLanes:
    """One row program whose rows lie on lanes; ``sdfg`` holds a container for each operand."""

    def __init__(
        self,
        sdfg: SDFG,
        program: RowProgram,
        operands: Mapping[str, str],
        outputs: frozenset[str],
        sizes: Mapping[str, Any],
        scalar: dace.typeclass,
        kinds: Mapping[str, str],
    ) -> None:
        self.sdfg = sdfg
        self.program = program
        self.operands = operands
        self.outputs = outputs
        self.sizes = sizes
        self.scalar = scalar
        self.kinds = kinds
        extent = extent_product(program.inner, sizes)
        if not extent.is_Integer:
            raise CanonicalFormError(
                f'rows over "{program.inner}" have {extent} elements; a kernel takes a fixed number'
            )
        self.extent = int(extent)
        item = max((sdfg.arrays[name].dtype.bytes for name in operands if self._is_vector(name)), default=4)
        self.plan = plan_lanes(self.extent, item, columns=bool(self._columns()))
        self.elements = {s.target for row_pass in program.passes for s in row_pass.elements}

    # ---- names -----------------------------------------------------------------------------------------------------

    def _columns(self) -> list[str]:
        return [s.target for row_pass in self.program.passes for s in row_pass.column_reductions]

    def _is_vector(self, name: str) -> bool:
        """Whether the elements of a row lie side by side in a container."""
        dims = self.operands[name]
        if name not in self.sdfg.arrays or not dims.endswith(self.program.inner) or dims == PAIR:
            return False
        descriptor = self.sdfg.arrays[name]
        if isinstance(descriptor, data.Scalar):
            return False
        step = 1
        for letter, stride in reversed(list(zip(dims, descriptor.strides, strict=True))):
            if letter not in self.program.inner:
                break
            if stride != step:
                return False
            step = step * self.sizes[letter]
        return True

    def _type(self, name: str) -> dace.typeclass:
        return dace.uint32 if self.kinds.get(name) == "word" else self.scalar

    def _row_values(self) -> set[str]:
        statements = [*self.program.constants, *self.program.before]
        for row_pass in self.program.passes:
            statements += [*row_pass.row_reductions, *row_pass.after]
        return {statement.target for statement in statements}

    def _rows(self) -> Any:
        return extent_product(self.program.outer, self.sizes)

    def _inner(self, label: str, symbols: Iterable[str]) -> SDFG:
        label = f"{self.sdfg.name.removesuffix('_expansion')}_{label}"
        return inner_sdfg(self.sdfg, label, self.sdfg.arrays, symbols, dace.int32)

    def _register(self, sdfg: SDFG, name: str, dtype: dace.typeclass, *, transient: bool = True) -> str:
        """An array in the registers of a lane, with an element for each that the lane holds."""
        if name not in sdfg.arrays:
            sdfg.add_array(name, [self.plan.held], dtype, dace.StorageType.Register, transient=transient)
        return name

    def _scalar(self, sdfg: SDFG, name: str, *, transient: bool = True) -> str:
        own = f"row_{name}"
        if own not in sdfg.arrays:
            sdfg.add_scalar(own, self._type(name), storage=dace.StorageType.Register, transient=transient)
        return own

    def _identity(self, statement: Statement) -> str:
        """C++ of what a reduction begins with."""
        if statement.reduction == "sum":
            return f"{self.scalar.ctype}(0)"
        return f"stepdown::negative_infinity<{self.scalar.ctype}>()"

    def _position(self) -> Any:
        """The position in its row of the element that a lane's map is at."""
        plan = self.plan
        return pystr_to_symbolic(f"({CHUNK} * {plan.lanes} + {LANE}) * {plan.vector} + {ELEMENT}")

    def _valid(self) -> str:
        return f"(({CHUNK} * {self.plan.lanes} + {LANE}) * {self.plan.vector} < {self.extent})"

    def _inner_index(self, position: Any) -> dict[str, Any]:
        """Index in each inner dimension from the position in the row."""
        return index_of(position, self.program.inner, self.sizes)

    def _memory(self, name: str, position: Any) -> dace.Memlet:
        """The element of an operand; lanes beyond the end of a row read its last one."""
        dims = self.operands[name]
        if dims == PAIR:
            return dace.Memlet(f"{name}[0:2]")
        if self.plan.tail:
            position = pystr_to_symbolic(f"Min({self.extent - 1}, {symstr(position)})")
        inner = self._inner_index(position)
        index = [symstr(inner[letter]) if letter in inner else INDEX + letter for letter in dims]
        return dace.Memlet(f"{name}[{', '.join(index) or '0'}]")

    def _unrolled(
        self,
        state: SDFGState,
        label: str,
        ranges: Mapping[str, str],
        inputs: dict[str, dace.Memlet],
        code: str,
        outputs: dict[str, dace.Memlet],
    ) -> None:
        add_map(state, label, ranges, inputs, code, outputs)
        for node in state.nodes():
            if isinstance(node, dace.nodes.MapEntry) and node.map.label == label:
                node.map.unroll = True

    # ---- memory ----------------------------------------------------------------------------------------------------

    def _access(
        self,
        state: SDFGState,
        label: str,
        code: str,
        source: tuple[str, dace.Memlet, Any],
        target: tuple[str, dace.Memlet, Any],
    ) -> None:
        """A map over a lane's chunks around a tasklet that moves one vector."""
        entry, exit_ = state.add_map(label, {CHUNK: f"0:{self.plan.chunks}"}, dace.ScheduleType.Sequential, unroll=True)
        if self.plan.tail:
            code = f"if {self._valid()} {{ {code} }}"
        tasklet = cpp_tasklet(state, label, {source[0]}, {target[0]}, code)
        tasklet.in_connectors[source[0]] = dace.pointer(source[2])
        tasklet.out_connectors[target[0]] = dace.pointer(target[2])
        connect_through(state, [entry], tasklet, {source[0]: source[1]})
        connect_out(state, tasklet, [exit_], {target[0]: target[1]})

    def _held_chunk(self, name: str) -> dace.Memlet:
        vector = self.plan.vector
        return dace.Memlet(f"{name}[{CHUNK} * {vector}:{CHUNK} * {vector} + {vector}]")

    def _vector_memlet(self, name: str, dims: str) -> dace.Memlet:
        """A vector of a row in a container."""
        plan = self.plan
        first = pystr_to_symbolic(f"({CHUNK} * {plan.lanes} + {LANE}) * {plan.vector}")
        inner = self._inner_index(first)
        index = []
        for letter in dims:
            if letter not in inner:
                index.append(INDEX + letter)
            elif letter == self.program.inner[-1] and self.sizes[letter] % plan.vector == 0:
                index.append(f"{symstr(inner[letter])}:{symstr(inner[letter] + plan.vector)}")
            else:
                index.append(symstr(inner[letter]))
        return dace.Memlet(f"{name}[{', '.join(index)}]")

    def _load_map(self, state: SDFGState, sdfg: SDFG, name: str) -> None:
        held = self._register(sdfg, f"held_{name}", self._held_type(name))
        memory = self.sdfg.arrays[name].dtype
        code = f"stepdown::load_vector<{self.plan.vector}>(in_memory, out_held);"
        source = ("in_memory", self._vector_memlet(name, self.operands[name]), memory)
        self._access(state, f"load_{name}", code, source, ("out_held", self._held_chunk(held), self._held_type(name)))

    def _held_type(self, name: str) -> dace.typeclass:
        dtype = self.sdfg.arrays[name].dtype
        return self.scalar if dtype in (*NARROW, dace.float32, dace.float64) else dtype

    def _store_output(self, state: SDFGState, name: str) -> None:
        memory = self.sdfg.arrays[name].dtype
        if not self._is_vector(name):
            raise CanonicalFormError(f'output "{name}" has rows that do not lie side by side')
        code = f"stepdown::store_vector<{self.plan.vector}>(in_held, out_memory);"
        target = ("out_memory", self._vector_memlet(name, self.operands[name]), memory)
        self._access(state, f"store_{name}", code, ("in_held", self._held_chunk(f"held_{name}"), self.scalar), target)

    def _store_map(self, state: SDFGState, held: str, name: str, index: str, dtype: dace.typeclass) -> None:
        plan = self.plan
        first = f"({CHUNK} * {plan.lanes} + {LANE}) * {plan.vector}"
        element = f"{first}:{first} + {plan.vector}"
        code = f"stepdown::store_vector<{plan.vector}>(in_held, out_memory);"
        target = ("out_memory", dace.Memlet(f"{name}[{index.format(element=element)}]"), dtype)
        self._access(state, f"store_{name}", code, ("in_held", self._held_chunk(held), dtype), target)

    def _words(self, sdfg: SDFG, state: SDFGState, statement: Statement) -> None:
        """The random words of what a lane holds: four an evaluation where the row's length lets vectors start there."""
        plan = self.plan
        held = self._register(sdfg, f"held_{statement.target}", dace.uint32)
        first = f"static_cast<std::uint64_t>({ROW}) * {self.extent} + ({CHUNK} * {plan.lanes} + {LANE}) * {plan.vector}"
        if plan.vector % 4 == 0:
            count = plan.vector // 4
            stream = f"in_rng[0], in_rng[1], {statement.random}u"
            body = f"stepdown::philox_blocks({stream}, ({first}) >> 2, {count}, out_held);"
        else:
            body = "\n".join(
                f"out_held[{i}] = stepdown::philox_word(in_rng[0], in_rng[1], {statement.random}u, {first} + {i});"
                for i in range(plan.vector)
            )
        inputs = {"in_rng": dace.Memlet(f"{statement.rng}[0:2]")}
        if statement.guard is not None:
            inputs["in_guard"] = dace.Memlet(f"{self._scalar(sdfg, statement.guard)}[0]")
            body = f"if (in_guard != 0) {{\n{body}\n}}"
        label = f"words_{statement.target}"
        entry, exit_ = state.add_map(label, {CHUNK: f"0:{plan.chunks}"}, dace.ScheduleType.Sequential, unroll=True)
        tasklet = cpp_tasklet(state, label, inputs, {"out_held"}, body)
        tasklet.in_connectors["in_rng"] = dace.pointer(dace.int64)
        tasklet.out_connectors["out_held"] = dace.pointer(dace.uint32)
        connect_through(state, [entry], tasklet, inputs)
        connect_out(state, tasklet, [exit_], {"out_held": self._held_chunk(held)})

    def _text(self, statement: Statement, rename: Any) -> str:
        position = self._inner_index(self._position())
        return to_cpp(
            statement.expression,
            self.scalar.ctype,
            extent=lambda letter: symstr(self.sizes[letter], cpp_mode=True),
            position=lambda letter: symstr(position[letter], cpp_mode=True) if letter in position else INDEX + letter,
            rename=rename,
        )
