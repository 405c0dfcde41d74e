"""Contractions as calls of OpenBLAS, for any strides of any operand.

Dimension legend: B batch, S query position, T key position, H head, P head size, E embedding, U feed-forward size.

:mod:`~stepdown.transformations.lowering.cpu.contraction_plan` decides what is called. Here the plan becomes an SDFG:
maps that pack operands, and one parallel map over the loops and over blocks of rows and columns of the result, around
a call that computes one block on its own thread. The number of blocks follows from the sizes alone, so that a result
does not depend on the number of threads.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import dace
import dace.library
import sympy
from dace import data
from dace.sdfg import SDFG, SDFGState, nodes
from dace.sdfg.state import LoopRegion
from dace.transformation.transformation import ExpandTransformation

from stepdown.models.errors import CanonicalFormError
from stepdown.models.operators.contraction import Contraction, split_einsum
from stepdown.models.operators.operator import data_type
from stepdown.models.operators.scratch import operator_sdfg
from stepdown.transformations.lowering.cpu.blas import OpenBLAS
from stepdown.transformations.lowering.cpu.contraction_plan import (
    COLUMN_BLOCK,
    ROW_BLOCK,
    Index,
    Packing,
    nominal,
    normalise,
    plan_contraction,
)
from stepdown.transformations.lowering.maps import connect_out, connect_through

IMPLEMENTATION = "cpu"

# The smallest blocks of the result that are worth a thread of their own.
SMALL_ROW_BLOCK, SMALL_COLUMN_BLOCK = 32, 64
# Small results are cut into up to this many blocks, unless there are this many independent products anyway.
SMALL_ROW_PARTS, SMALL_COLUMN_PARTS, ENOUGH_LOOPS = 4, 2, 8


@dace.library.expansion
class ExpandContractionCPU(ExpandTransformation):
    """``d = alpha * einsum(a, b) [+ c]`` through ``sgemm`` or ``dgemm``; 16-bit operands are converted to float32.

    One state, unless letters that are summed over cannot be merged: those make sequential loops of calls that add up.
    """

    environments = [OpenBLAS]

    @staticmethod
    def expansion(node: Contraction, parent_state: SDFGState, parent_sdfg: SDFG) -> SDFG:
        return _Lowering(node, parent_state, parent_sdfg).sdfg


def register() -> None:
    """Attach the expansion to :class:`~stepdown.models.operators.contraction.Contraction` as ``"cpu"``."""
    Contraction.register_implementation(IMPLEMENTATION, ExpandContractionCPU)


def block_count(index: Index | None, block: int, small_block: int, small_parts: int) -> sympy.Expr:
    """Into how many blocks the extent of an index is cut: a function of the extent alone."""
    if index is None:
        return sympy.Integer(1)
    ceil = dace.symbolic.int_ceil
    if index.extent.is_Integer:
        extent = int(index.extent)
        return sympy.Integer(max(1, -(-extent // block), min(small_parts, -(-extent // small_block))))
    return sympy.Max(ceil(index.extent, block), sympy.Min(small_parts, ceil(index.extent, small_block)))


def cpp(expression: sympy.Expr) -> str:
    """The expression in C++ with 64-bit symbols: offsets exceed what 32 bits hold."""
    text = dace.symbolic.symstr(expression, cpp_mode=True)
    return re.sub(r"\b[A-Za-z_]\w*\b(?!\s*\()", lambda match: f"std::int64_t({match[0]})", text)


def python(expression: object) -> str:
    """The expression as DaCe reads it in ranges and memlets."""
    return dace.symbolic.symstr(expression, cpp_mode=False)


class _Lowering:
    """One contraction while it becomes an SDFG."""

    def __init__(self, node: Contraction, parent_state: SDFGState, parent_sdfg: SDFG) -> None:
        self.node = node
        self.sdfg = operator_sdfg(node, parent_state, parent_sdfg)
        self.sizes = {letter: normalise(size) for letter, size in node.sizes(parent_sdfg, parent_state).items()}
        self.dims = {**dict(zip("abd", split_einsum(node.einsum), strict=True)), "c": node.operand_dims()["d"]}
        self.scalar = self._scalar()
        containers = _containers(node, parent_state)
        for name in "ab":
            if containers[name] == containers["d"]:
                raise CanonicalFormError(
                    f'operand "{name}" of contraction "{node.name}" is the container "{containers["d"][0]}" of the '
                    f'result; only operand "c" can be'
                )
        self.plan = plan_contraction(
            (self.dims["a"], self.dims["b"], self.dims["d"]),
            self.sizes,
            {name: self._strides(name) for name in "abd"},
            [name for name in "abd" if self.sdfg.arrays[name].dtype != self.scalar],
        )
        for name, packing in self.plan.packed.items():
            self._add_copy(name, packing)
        self.target = "d_packed" if "d" in self.plan.packed else "d"
        self.in_place = node.accumulate and containers["c"] == containers["d"] and self.target == "d"
        self._build()

    def _scalar(self) -> dace.typeclass:
        """The scalar type of the product."""
        types = {name: data_type(descriptor) for name, descriptor in self.sdfg.arrays.items()}
        scalar = types["d"].accumulate
        for name, dtype in types.items():
            if dtype.accumulate != scalar:
                raise CanonicalFormError(
                    f'operand "{name}" of contraction "{self.node.name}" is "{dtype.name}" and the result '
                    f'"{types["d"].name}"; "float64" goes with "float64" only'
                )
        return scalar.dace

    def _strides(self, name: str) -> tuple[Any, ...]:
        descriptor = self.sdfg.arrays[name]
        return () if isinstance(descriptor, data.Scalar) or not self.dims[name] else tuple(descriptor.strides)

    def _add_copy(self, name: str, packing: Packing) -> None:
        shape = [_symbolic(self.sizes[letter]) for letter in packing.letters] or [1]
        self.sdfg.add_array(f"{name}_packed", shape, self.scalar, dace.StorageType.CPU_Heap, transient=True)
        self.dims[f"{name}_packed"] = packing.letters

    # ---- the graph ------------------------------------------------------------------------------------------------

    def _build(self) -> None:
        """One state; where sums need several calls, a state before and one after a loop of calls."""
        loops = self.plan.sum_loops
        prepare = self.sdfg.add_state("prepare" if loops else "multiply")
        inputs = {name: self._packed(prepare, name) for name in "ab"}
        initial: nodes.AccessNode | None = None
        if self.in_place:
            initial = prepare.add_read("c")
        elif self.node.accumulate:
            initial = self._copy(prepare, prepare.add_read("c"), self.target)
        elif loops:
            initial = self._clear(prepare)
        if not loops:
            result = self._multiply(prepare, inputs, initial)
            self._store(prepare, result)
            return
        for node in (*inputs.values(), initial):
            if node is not None and prepare.degree(node) == 0:
                prepare.remove_node(node)
        body = self._sum_loops(prepare)
        again = {name: body.add_read(node.data) for name, node in inputs.items()}
        self._multiply(body, again, body.add_read("c" if self.in_place else self.target))
        if self.target != "d":
            outermost = self.sdfg.out_edges(prepare)[0].dst
            store = self.sdfg.add_state_after(outermost, "store")
            self._store(store, store.add_read(self.target))

    def _sum_loops(self, after: SDFGState) -> SDFGState:
        """Sequential loops over the sums that are left, and the state inside."""
        graph: Any = self.sdfg
        before: Any = after
        for number, index in enumerate(self.plan.sum_loops):
            variable = f"sum_{number}"
            loop = LoopRegion(
                f"add_{index.letters}",
                f"{variable} < {python(index.extent)}",
                variable,
                f"{variable} = 0",
                f"{variable} = {variable} + 1",
            )
            graph.add_node(loop, is_start_block=before is None)
            if before is not None:
                graph.add_edge(before, loop, dace.InterstateEdge())
            graph, before = loop, None
        return graph.add_state("multiply", is_start_block=True)

    def _packed(self, state: SDFGState, name: str) -> nodes.AccessNode:
        """Operand ``name`` as the product reads it."""
        read = state.add_read(name)
        return self._copy(state, read, f"{name}_packed") if name in self.plan.packed else read

    def _store(self, state: SDFGState, result: nodes.AccessNode) -> None:
        if result.data != "d":
            self._copy(state, result, "d")

    def _copy(self, state: SDFGState, source: nodes.AccessNode, target: str) -> nodes.AccessNode:
        """A map that copies, permutes and converts a container; writes in the order of memory."""
        write = state.add_write(target)
        code = f"out = static_cast<{self.sdfg.arrays[target].dtype.ctype}>(value);"
        self._map(state, f"copy_{source.data}", target, code, {"value": source}, write)
        return write

    def _clear(self, state: SDFGState) -> nodes.AccessNode:
        write = state.add_write(self.target)
        self._map(state, "clear", self.target, f"out = {self.scalar.ctype}(0);", {}, write)
        return write

    def _map(
        self,
        state: SDFGState,
        label: str,
        target: str,
        code: str,
        inputs: Mapping[str, nodes.AccessNode],
        write: nodes.AccessNode,
    ) -> None:
        letters = self._by_stride(target)
        _, entry, _ = state.add_mapped_tasklet(
            label,
            {f"i_{letter}": f"0:{python(self.sizes[letter])}" for letter in letters} or {"i_": "0:1"},
            {name: self._element(node.data, letters) for name, node in inputs.items()},
            code,
            {"out": self._element(target, letters)},
            language=dace.Language.CPP,
            schedule=dace.ScheduleType.CPU_Multicore,
            external_edges=True,
            input_nodes={node.data: node for node in inputs.values()},
            output_nodes={target: write},
        )
        # The fastest dimension stays a plain loop, which compilers vectorise.
        entry.map.collapse = max(1, len(letters) - 1)

    def _by_stride(self, name: str) -> str:
        """The dimensions of a container that have an extent, the longest stride first."""
        descriptor = self.sdfg.arrays[name]
        if not self.dims[name] or isinstance(descriptor, data.Scalar):
            return ""
        distance = dict(zip(self.dims[name], descriptor.strides, strict=True))
        letters = [letter for letter in self.dims[name] if self.sizes[letter] != 1]
        return "".join(sorted(letters, key=lambda letter: -nominal(normalise(distance[letter]))))

    def _element(self, name: str, letters: Iterable[str]) -> dace.Memlet:
        """The element at the map's indices; 0 along dimensions of extent 1 and those that are a broadcast."""
        inside = set(letters)
        return dace.Memlet(f"{name}[{', '.join(f'i_{x}' if x in inside else '0' for x in self.dims[name]) or '0'}]")

    # ---- the call -------------------------------------------------------------------------------------------------

    def _multiply(
        self, state: SDFGState, inputs: Mapping[str, nodes.AccessNode], initial: nodes.AccessNode | None
    ) -> nodes.AccessNode:
        """The parallel map around the call; ``initial`` holds what the product is added to, in the result's place."""
        plan = self.plan
        many = plan.loops and sympy.prod([x.extent for x in plan.loops if x.extent.is_Integer]) >= ENOUGH_LOOPS
        parts = (1, 1) if many else (SMALL_ROW_PARTS, SMALL_COLUMN_PARTS)
        counts = {
            "row_block": block_count(plan.rows, ROW_BLOCK, SMALL_ROW_BLOCK, parts[0]),
            "column_block": block_count(plan.columns, COLUMN_BLOCK, SMALL_COLUMN_BLOCK, parts[1]),
        }
        ranges = {f"loop_{number}": f"0:{python(index.extent)}" for number, index in enumerate(plan.loops)}
        ranges |= {f"at_{number}": f"sum_{number}:sum_{number} + 1" for number in range(len(plan.sum_loops))}
        ranges |= {name: f"0:{python(count)}" for name, count in counts.items()}
        entry, exit_ = state.add_map("blocks", ranges, schedule=dace.ScheduleType.CPU_Multicore)
        entry.map.collapse = len(ranges)
        entry.map.omp_schedule = dace.OMPScheduleType.Dynamic

        pointer = dace.pointer(self.scalar)
        operands = {"left": inputs["a"], "right": inputs["b"]} | ({"initial": initial} if initial is not None else {})
        tasklet = state.add_tasklet(
            "gemm",
            dict.fromkeys(operands, pointer),
            {"result": pointer},
            self._code(counts, initial is not None),
            language=dace.Language.CPP,
        )
        write = state.add_write(self.target)
        reads = {connector: self._whole(node.data) for connector, node in operands.items()}
        connect_through(state, [entry], tasklet, reads, operands)
        connect_out(state, tasklet, [exit_], {"result": self._whole(self.target)}, {"result": write})
        return write

    def _whole(self, name: str) -> dace.Memlet:
        return dace.Memlet.from_array(name, self.sdfg.arrays[name])

    def _code(self, counts: Mapping[str, sympy.Expr], add: bool) -> str:
        plan = self.plan
        lines: list[str] = []
        terms: dict[str, list[str]] = {"a": [], "b": [], "d": []}
        indices = [(f"loop_{number}", index) for number, index in enumerate(plan.loops)]
        indices += [(f"at_{number}", index) for number, index in enumerate(plan.sum_loops)]
        for variable, index in indices:
            for name, stride in index.strides.items():
                if stride != 0:
                    terms[name].append(f"std::int64_t({variable}) * ({cpp(stride)})")
        size = {"rows": "1", "columns": "1"}
        for variable, whole, count in (("rows", plan.rows, "row_block"), ("columns", plan.columns, "column_block")):
            if whole is None:
                continue
            lines.append(f"const stepdown::Block {variable}({cpp(whole.extent)}, {cpp(counts[count])}, {count});")
            size[variable] = f"{variable}.size"
            for name, stride in whole.strides.items():
                terms[name].append(f"{variable}.begin * ({cpp(stride)})")
        at = {
            name: " + ".join([pointer, *terms[name]])
            for name, pointer in (("a", "left"), ("b", "right"), ("d", "result"))
        }
        operand = {name: f"{at[name]}, {cpp(plan.matrices[name].leading)}" for name in "abd"}
        order = [("a", "rows"), ("b", "columns")]
        if plan.swapped:
            order.reverse()
        transposed = ", ".join("true" if plan.matrices[name].transposed else "false" for name, _ in order)
        extent = "1" if plan.sums is None else cpp(plan.sums.extent)
        scalar = self.scalar.ctype
        lines.append(
            f"stepdown::gemm<{scalar}>({transposed}, {size[order[0][1]]}, {size[order[1][1]]}, {extent}, "
            f"{scalar}({self.node.alpha!r}), {operand[order[0][0]]}, {operand[order[1][0]]}, {scalar}({int(add)}), "
            f"{operand['d']});"
        )
        return "\n".join(lines)


def _containers(node: Contraction, state: SDFGState) -> dict[str, tuple[str, str]]:
    """By connector: the container outside and the part of it."""
    edges = [(edge.dst_conn, edge) for edge in state.in_edges(node)] + [(e.src_conn, e) for e in state.out_edges(node)]
    return {name: (edge.data.data, str(edge.data.subset)) for name, edge in edges if name is not None}


def _symbolic(expression: sympy.Expr) -> Any:
    return dace.symbolic.pystr_to_symbolic(python(expression))
