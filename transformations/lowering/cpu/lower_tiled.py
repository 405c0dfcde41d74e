"""CPU lowering of tiled groups: attention whose scores never leave the cache.

Independent problems (a head of a sequence) are shared out to lanes, each on a thread of its own with buffers of its
own; what is computed does not depend on the number of threads. A problem goes over its rows in tiles. Contractions are
BLAS calls on a tile; operands are copied into buffers first, in the type of the arithmetic and in an order that BLAS
takes, so that any layout and any type of their containers will do. Row operators run as in
:mod:`stepdown.transformations.lowering.cpu.lower_rows`. A result that is a sum over rows adds up over the tiles.

Dimension legend: B batch, S query position, T key position, H head, P head size, E embedding, U feed-forward size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import dace
import dace.library
from dace.sdfg import SDFG, SDFGState
from dace.sdfg.state import LoopRegion
from dace.symbolic import pystr_to_symbolic, symstr
from dace.transformation.transformation import ExpandTransformation

from stepdown.models.errors import CanonicalFormError
from stepdown.models.operators import Contraction, Member, RowGroup, TiledGroup
from stepdown.models.operators.contraction import split_einsum
from stepdown.models.operators.headers import OperatorHeaders
from stepdown.models.operators.operator import extent_product
from stepdown.models.operators.pure import INDEX, compute_type
from stepdown.models.operators.scratch import operator_sdfg
from stepdown.transformations.lowering.cpu.blas import OpenBLAS
from stepdown.transformations.lowering.cpu.contraction_plan import nominal, normalise
from stepdown.transformations.lowering.cpu.lower_rows import BLOCK, BLOCKS, ROW, ROW_BEGIN, ROW_END, RowLowering
from stepdown.transformations.lowering.maps import add_map, cpp_tasklet, index_of, inner_sdfg, nest
from stepdown.transformations.lowering.passes_of_rows import plan_operator

TILE = 64
"""Rows of a tile: with some hundred keys a tile of scores fits a core's second-level cache."""

PROBLEM, TILE_NUMBER, TILE_BEGIN, TILE_ROWS = "i_problem", "i_tile", "tile_begin", "tile_rows"


@dataclass
class TileRows(RowLowering):
    """The rows of one tile; a lane's buffers take the place of a block's.

    :ivar tiled: values that exist for one tile only.
    """

    tiled: frozenset[str] = frozenset()

    def rows_of_tile(self) -> SDFG:
        """A nested SDFG that goes over rows ``row_begin`` to ``row_end`` (all rows are numbered through)."""
        inner = [self.sizes[letter] for letter in self.program.inner]
        for name in self._buffers():
            self._top_array(f"buffer_{name}", [BLOCKS, *inner], self._type(name))
        for statement in self._random():
            self._words_array(statement)
        sdfg = self._inner_sdfg("rows", self._memory_names(), {BLOCK, ROW_BEGIN, ROW_END, TILE_BEGIN})
        last = self._constants(sdfg)
        last = sdfg.add_state_after(last, "rows")
        entry, exit_ = last.add_map("rows", {ROW: f"{ROW_BEGIN}:{ROW_END}"}, dace.ScheduleType.Sequential)
        nest(last, self._row([s.target for s in self.program.constants]), [entry], [exit_], self._row_index())
        return sdfg

    def _memory_memlet(self, name: str) -> dace.Memlet:
        if name not in self.tiled:
            return super()._memory_memlet(name)
        row, element = (INDEX + letter for letter in self.dims[-2:])
        return dace.Memlet(f"{name}[{BLOCK}, {row} - {TILE_BEGIN}, {element}]")


@dace.library.expansion
class ExpandTiledCPU(ExpandTransformation):
    """The loops over problems and tiles around BLAS calls and rows."""

    environments: list[Any] = [OperatorHeaders, OpenBLAS]

    @staticmethod
    def expansion(node: TiledGroup, parent_state: SDFGState, parent_sdfg: SDFG) -> SDFG:
        return _Lowering(node, parent_state, parent_sdfg).sdfg


def register() -> None:
    """Attach the ``cpu`` expansion to :class:`~stepdown.models.operators.tiled_group.TiledGroup`."""
    TiledGroup.register_implementation("cpu", ExpandTiledCPU)


class _Lowering:
    """One tiled group while it becomes an SDFG."""

    def __init__(self, node: TiledGroup, parent_state: SDFGState, parent_sdfg: SDFG) -> None:
        self.node = node
        self.sdfg = operator_sdfg(node, parent_state, parent_sdfg)
        self.sizes = node.sizes(parent_sdfg, parent_state)
        self.scalar = compute_type(node, self.sdfg)
        self.dims = node.operand_dims()
        self.rows, self.elements = node.dims[-2:]
        self.matrices = self._matrices()
        self._add_buffers()
        state = self.sdfg.add_state("lanes")
        entry, exit_ = state.add_map("lanes", {BLOCK: f"0:{BLOCKS}"}, dace.ScheduleType.CPU_Multicore)
        # Lane k on thread k: those without work come after those with it.
        entry.map.omp_schedule = dace.OMPScheduleType.Static
        entry.map.omp_chunk_size = 1
        nest(state, self._lane(), [entry], [exit_], {})

    # ---- what is where ---------------------------------------------------------------------------------------------

    def _matrices(self) -> dict[str, str]:
        """Values that contractions take from or give to containers, by name: their dimensions inside a problem."""
        found: dict[str, str] = {}
        for run in self.node.runs():
            if isinstance(run, RowGroup):
                continue
            for value in run.values.values():
                dims = self.dims[value]
                if dims == self.node.dims:
                    continue
                inside = "".join(letter for letter in dims if letter not in self.node.outer)
                positions = [letter for letter in inside if letter in (self.rows, self.elements)]
                if len(positions) != 1:
                    raise CanonicalFormError(
                        f'"{value}" of group "{self.node.name}" has dimensions "{dims}"; a tile takes "{self.rows}" or '
                        f'"{self.elements}" among them'
                    )
                found[value] = positions[0] + inside.replace(positions[0], "")
        return found

    def _add_buffers(self) -> None:
        tiled = [self.sizes[self.elements]]
        for name, dims in self.dims.items():
            if dims == self.node.dims and name not in self.sdfg.arrays and self._between(name):
                self.sdfg.add_array(name, [BLOCKS, TILE, *tiled], self.scalar, transient=True)
        for name, inside in self.matrices.items():
            first = TILE if inside[0] == self.rows else self.sizes[self.elements]
            shape = [BLOCKS, first, extent_product(inside[1:], self.sizes)]
            self.sdfg.add_array(f"local_{name}", shape, self.scalar, transient=True)

    def _between(self, name: str) -> bool:
        """Whether a value over all dimensions passes from one run to another."""
        for run in self.node.runs():
            used = run.values.values() if isinstance(run, Member) else (*run.in_connectors, *run.out_connectors)
            if name in used:
                return True
        return False

    def _selected(self, *, written: bool, over_rows: bool) -> list[str]:
        return [
            name
            for name, inside in self.matrices.items()
            if (name in self.node.out_connectors) == written and (inside[0] == self.rows) == over_rows
        ]

    # ---- lanes, problems and tiles ---------------------------------------------------------------------------------

    def _inner(self, label: str, symbols: set[str]) -> SDFG:
        return inner_sdfg(self.sdfg, f"{self.node.name}_{label}", self.sdfg.arrays, symbols, dace.int64)

    def _lane(self) -> SDFG:
        """Every so many problems, beginning with the lane's number."""
        body = self._problem()
        sdfg = self._inner("lane", {BLOCK})
        state = sdfg.add_state("problems")
        count = symstr(extent_product(self.node.outer, self.sizes), cpp_mode=True)
        code = (
            f"const std::int64_t lanes = std::min<std::int64_t>({BLOCKS}, omp_get_num_threads());\n"
            f"out_end = {count};\n"
            f"out_begin = {BLOCK} < lanes ? std::int64_t({BLOCK}) : out_end;\n"
            "out_step = lanes;"
        )
        names = ("begin", "end", "step")
        tasklet = cpp_tasklet(state, "problems_of_lane", (), [f"out_{name}" for name in names], code)
        entry, exit_ = state.add_map(
            "problems", {PROBLEM: "problem_begin:problem_end:problem_step"}, dace.ScheduleType.Sequential
        )
        for name in names:
            scalar, _ = sdfg.add_scalar(
                f"lane_{name}", dace.int64, transient=True, storage=dace.StorageType.Register, find_new_name=True
            )
            access = state.add_access(scalar)
            state.add_edge(tasklet, f"out_{name}", access, None, dace.Memlet(f"{scalar}[0]"))
            entry.add_in_connector(f"problem_{name}")
            state.add_edge(access, None, entry, f"problem_{name}", dace.Memlet(f"{scalar}[0]"))
        index = index_of(pystr_to_symbolic(PROBLEM), self.node.outer, self.sizes)
        nest(state, body, [entry], [exit_], {INDEX + letter: place for letter, place in index.items()})
        return sdfg

    def _outer_symbols(self) -> set[str]:
        return {BLOCK, PROBLEM, *(INDEX + letter for letter in self.node.outer)}

    def _problem(self) -> SDFG:
        """Load what has no rows, go over the tiles, store the sums over rows."""
        tile = self._tile()
        sdfg = self._inner("problem", self._outer_symbols())
        before = sdfg.add_state("before")
        for name in self._selected(written=False, over_rows=False):
            self._load(before, name)
        for name in self._selected(written=True, over_rows=False):
            self._clear(before, name)
        size = symstr(self.sizes[self.rows])
        tiles = LoopRegion(
            "tiles",
            f"{TILE_NUMBER} < int_ceil({size}, {TILE})",
            TILE_NUMBER,
            f"{TILE_NUMBER} = 0",
            f"{TILE_NUMBER} = {TILE_NUMBER} + 1",
        )
        sdfg.add_node(tiles)
        sdfg.add_edge(before, tiles, dace.InterstateEdge())
        state = tiles.add_state("tile", is_start_block=True)
        number = pystr_to_symbolic(TILE_NUMBER)
        begin = TILE * number
        rows = pystr_to_symbolic(f"Min({TILE}, {size} - {TILE} * {TILE_NUMBER})")
        first = pystr_to_symbolic(PROBLEM) * self.sizes[self.rows] + begin
        nest(state, tile, [], [], {TILE_BEGIN: begin, TILE_ROWS: rows, ROW_BEGIN: first, ROW_END: first + rows})
        after = sdfg.add_state("after")
        sdfg.add_edge(tiles, after, dace.InterstateEdge())
        for name in self._selected(written=True, over_rows=False):
            self._store(after, name)
        return sdfg

    def _tile(self) -> SDFG:
        """Load the tile's rows, run the members in order, store the tile's rows."""
        runs = [self._rows(run) if isinstance(run, RowGroup) else run for run in self.node.runs()]
        symbols = self._outer_symbols() | {TILE_BEGIN, TILE_ROWS, ROW_BEGIN, ROW_END}
        sdfg = self._inner("tile", symbols)
        last = sdfg.add_state("load")
        for name in self._selected(written=False, over_rows=True):
            self._load(last, name)
        for number, run in enumerate(runs):
            last = sdfg.add_state_after(last, f"member_{number}")
            if isinstance(run, SDFG):
                nest(last, run, [], [], {})
            else:
                self._multiply(last, run)
        last = sdfg.add_state_after(last, "store")
        for name in self._selected(written=True, over_rows=True):
            self._store(last, name)
        return sdfg

    def _rows(self, run: RowGroup) -> SDFG:
        used = {name: dims for name, dims in run.operand_dims().items() if name in self.sdfg.arrays}
        lowering = TileRows(
            self.sdfg,
            plan_operator(run),
            run.dims,
            used,
            frozenset(run.out_connectors),
            self.sizes,
            self.scalar,
            {statement.target: statement.kind for statement in run.statements()},
            frozenset({TILE_BEGIN}),
            frozenset(name for name, dims in used.items() if dims == self.node.dims),
        )
        return lowering.rows_of_tile()

    # ---- buffers ---------------------------------------------------------------------------------------------------

    def _copy_memlets(self, name: str) -> tuple[dict[str, str], dace.Memlet, dace.Memlet]:
        """A map over a matrix in the order of its container's memory, the container's element and the buffer's."""
        inside = self.matrices[name]
        strides = dict(zip(self.dims[name], self.sdfg.arrays[name].strides, strict=True))
        order = sorted(inside, key=lambda letter: -nominal(normalise(strides[letter])))
        ranges = {INDEX + letter: f"0:{symstr(self.sizes[letter])}" for letter in order}
        position = INDEX + inside[0]
        row = position
        if inside[0] == self.rows:
            ranges[position] = f"{TILE_BEGIN}:{TILE_BEGIN} + {TILE_ROWS}"
            row = f"{position} - {TILE_BEGIN}"
        column: Any = 0
        for letter in inside[1:]:
            column = column * self.sizes[letter] + pystr_to_symbolic(INDEX + letter)
        element = dace.Memlet(f"{name}[{', '.join(INDEX + letter for letter in self.dims[name])}]")
        return ranges, element, dace.Memlet(f"local_{name}[{BLOCK}, {row}, {symstr(column)}]")

    def _load(self, state: SDFGState, name: str) -> None:
        ranges, element, local = self._copy_memlets(name)
        code = f"out_value = static_cast<{self.scalar.ctype}>(in_value);"
        add_map(state, f"load_{name}", ranges, {"in_value": element}, code, {"out_value": local})

    def _store(self, state: SDFGState, name: str) -> None:
        ranges, element, local = self._copy_memlets(name)
        code = f"out_value = static_cast<{self.sdfg.arrays[name].dtype.ctype}>(in_value);"
        add_map(state, f"store_{name}", ranges, {"in_value": local}, code, {"out_value": element})

    def _clear(self, state: SDFGState, name: str) -> None:
        shape = self.sdfg.arrays[f"local_{name}"].shape
        ranges = {"i_first": f"0:{symstr(shape[1])}", "i_second": f"0:{symstr(shape[2])}"}
        out = dace.Memlet(f"local_{name}[{BLOCK}, i_first, i_second]")
        add_map(state, f"clear_{name}", ranges, {}, f"out_value = {self.scalar.ctype}(0);", {"out_value": out})

    # ---- contractions ----------------------------------------------------------------------------------------------

    def _multiply(self, state: SDFGState, member: Member) -> None:
        """One BLAS call on the tile's buffers."""
        node = member.operator
        assert isinstance(node, Contraction)
        terms = dict(zip("abd", split_einsum(node.einsum), strict=True))
        tiled = [name for name in "abd" if terms[name] == self.node.dims]
        if len(tiled) != 1:
            raise CanonicalFormError(f'contraction "{node.name}" has {len(tiled)} values over "{self.node.dims}"')
        keys = symstr(self.sizes[self.elements], cpp_mode=True)
        other = {name: member.values[name] for name in "abd" if name != tiled[0]}
        by_row = {name: self.matrices[value][0] == self.rows for name, value in other.items()}
        inputs: dict[str, str]
        if tiled[0] == "d":
            # d[s, t] = sum_r rows[s, r] keys[t, r]
            left, right = sorted("ab", key=lambda name: not by_row[name])
            if by_row[right] or not by_row[left]:
                raise CanonicalFormError(f'contraction "{node.name}" does not span a tile')
            width = self._width(other[left])
            call = ("false", "true", TILE_ROWS, keys, width, width, width, "0", keys)
            inputs = {"in_left": f"local_{other[left]}", "in_right": f"local_{other[right]}"}
            result = member.values["d"]
        else:
            operand = "b" if tiled[0] == "a" else "a"
            width = self._width(other[operand])
            result = f"local_{other['d']}"
            inputs = {"in_left": member.values[tiled[0]], "in_right": f"local_{other[operand]}"}
            if by_row["d"] and not by_row[operand]:
                # d[s, r] = sum_t tile[s, t] keys[t, r]
                call = ("false", "false", TILE_ROWS, width, keys, keys, width, "0", width)
            elif by_row[operand] and not by_row["d"]:
                # d[t, r] += sum_s tile[s, t] rows[s, r]
                call = ("true", "false", keys, width, TILE_ROWS, keys, width, "1", width)
                inputs["in_initial"] = result
            else:
                raise CanonicalFormError(f'contraction "{node.name}" sums over no dimension of a tile')
        self._check_order(node, terms, tiled[0])
        transpose_a, transpose_b, m, n, k, lda, ldb, beta, ldd = call
        scalar = self.scalar.ctype
        code = (
            f"stepdown::gemm<{scalar}>({transpose_a}, {transpose_b}, {m}, {n}, {k}, {scalar}({node.alpha!r}), "
            f"in_left, {lda}, in_right, {ldb}, {scalar}({beta}), out_result, {ldd});"
        )
        pointer = dace.pointer(self.scalar)
        tasklet = state.add_tasklet(
            node.name, dict.fromkeys(inputs, pointer), {"out_result": pointer}, code, language=dace.Language.CPP
        )
        for connector, name in inputs.items():
            state.add_edge(state.add_read(name), None, tasklet, connector, self._lane_part(name))
        state.add_edge(tasklet, "out_result", state.add_write(result), None, self._lane_part(result))

    def _check_order(self, node: Contraction, terms: dict[str, str], tiled: str) -> None:
        """Refuse matrices whose further dimensions are in different orders."""
        orders = set()
        for name in "abd":
            if name != tiled:
                orders.add("".join(x for x in terms[name] if x not in self.node.dims))
        if len(orders) > 1:
            raise CanonicalFormError(f'contraction "{node.name}" takes dimensions in the orders {sorted(orders)}')

    def _width(self, value: str) -> str:
        return symstr(extent_product(self.matrices[value][1:], self.sizes), cpp_mode=True)

    def _lane_part(self, name: str) -> dace.Memlet:
        _, first, second = self.sdfg.arrays[name].shape
        return dace.Memlet(f"{name}[{BLOCK}, 0:{symstr(first)}, 0:{symstr(second)}]")
