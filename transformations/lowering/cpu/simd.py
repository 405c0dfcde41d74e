"""Code generation: innermost sequential maps become vectorised loops.

A map's iterations are independent by DaCe's semantics, so an innermost sequential one may always run in vector lanes.
DaCe's CPU generator writes a plain loop, which the compiler must prove to be that; this target, registered as ``cpu``,
adds ``#pragma omp simd`` with the reductions that leave the map. Maps in GPU code are left alone.
"""

from __future__ import annotations

import re
from typing import Any

from dace import data, dtypes, registry
from dace.codegen.prettycode import CodeIOStream
from dace.codegen.targets.cpu import CPUCodeGen
from dace.frontend.operations import detect_reduction_type
from dace.sdfg import SDFG, SDFGState, nodes
from dace.sdfg.scope import is_devicelevel_gpu
from dace.sdfg.state import ControlFlowRegion, StateSubgraphView
from dace.subsets import Range
from sympy import sympify

REDUCTIONS = {dtypes.ReductionType.Sum: "+", dtypes.ReductionType.Max: "max"}
"""OpenMP's names of the reductions that the statement language has."""

_LOOP = re.compile(r"^\s*for \(", re.MULTILINE)


def simd_pragma(sdfg: SDFG, state: SDFGState, entry: nodes.MapEntry) -> str | None:
    """The pragma for a map's innermost loop, or None where it may not run in lanes.

    Refused: other schedules, maps with scopes or nested SDFGs inside, steps other than one, and accumulation into
    anything but scalars (by sum or maximum, once each) or elements that the innermost parameter tells apart.
    """
    if entry.map.schedule is not dtypes.ScheduleType.Sequential or entry.map.unroll:
        return None
    if entry.map.range.ranges[-1][2] != 1 or is_devicelevel_gpu(sdfg, state, entry):
        return None
    body = state.all_nodes_between(entry, state.exit_node(entry))
    if any(not isinstance(node, (nodes.Tasklet, nodes.AccessNode)) for node in body):
        return None
    if any(isinstance(node, nodes.Tasklet) and node.side_effects for node in body):
        return None
    clauses: dict[str, list[str]] = {}
    for edge in state.in_edges(state.exit_node(entry)):
        memlet = edge.data
        if memlet.wcr is None:
            continue
        if isinstance(sdfg.arrays[memlet.data], data.Scalar):
            operator = REDUCTIONS.get(detect_reduction_type(memlet.wcr))
            if operator is None or any(memlet.data in names for names in clauses.values()):
                return None
            clauses.setdefault(operator, []).append(memlet.data)
        elif not _tells_apart(memlet.subset, entry.map.params[-1]):
            return None
    text = "".join(f" reduction({operator}:{', '.join(names)})" for operator, names in clauses.items())
    return f"#pragma omp simd{text}"


def _tells_apart(subset: Range, parameter: str) -> bool:
    """Whether iterations with different values of ``parameter`` surely have different elements.

    That is so where an index is a multiple of it plus what does not depend on it; ``i // 2`` or ``i % 3`` are not.
    """
    for low, high, _ in subset.ranges:
        index = sympify(low)
        symbol = next((symbol for symbol in index.free_symbols if str(symbol) == parameter), None)
        if symbol is None or low != high:
            continue
        step = (index.subs(symbol, symbol + 1) - index).expand()
        if step != 0 and symbol not in step.free_symbols:
            return True
    return False


@registry.autoregister_params(name="cpu")
class VectorisingCPUCodeGen(CPUCodeGen):
    """DaCe's CPU target with vectorised innermost loops."""

    def generate_scope(
        self,
        sdfg: SDFG,
        cfg: ControlFlowRegion,
        dfg_scope: StateSubgraphView,
        state_id: int,
        function_stream: CodeIOStream,
        callsite_stream: CodeIOStream,
    ) -> None:
        entry: Any = dfg_scope.source_nodes()[0]
        pragma = simd_pragma(sdfg, cfg.state(state_id), entry) if isinstance(entry, nodes.MapEntry) else None
        if pragma is None:
            super().generate_scope(sdfg, cfg, dfg_scope, state_id, function_stream, callsite_stream)
            return
        stream = CodeIOStream()
        super().generate_scope(sdfg, cfg, dfg_scope, state_id, function_stream, stream)
        text = stream.getvalue()
        loops = list(_LOOP.finditer(text))
        innermost = loops[len(entry.map.params) - 1].start()
        callsite_stream.write(f"{text[:innermost]}{pragma}\n{text[innermost:].lstrip()}")
