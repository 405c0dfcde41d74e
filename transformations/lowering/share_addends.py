"""``share_addends``: a contraction adds to its addend in place where nobody reads the addend afterwards.

In canonical form ``d = alpha a.b + c`` writes a container of its own (rule 3). Once the order of execution is fixed,
``d`` may take the place of ``c``: the product is added where ``c`` lies, and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence

from dace import data
from dace.sdfg import SDFG, SDFGState

from stepdown.models.operators import Contraction


def share_addends(sdfg: SDFG, states: Sequence[SDFGState]) -> int:
    """Let results and addends share containers, in place.

    The addend must be a temporary that no later state reads and no other operand, and have the type, shape and layout
    of the result. The shared container has the result's name where that is an argument, else the addend's.

    :param states: one operator each, in order of execution; every container is written by at most one.
    :returns: how many contractions add in place.
    """
    shared = 0
    for place, state in enumerate(states):
        for node in [n for n in state.nodes() if isinstance(n, Contraction) and n.accumulate]:
            operands = {edge.dst_conn: edge.data for edge in state.in_edges(node)}
            operands |= {edge.src_conn: edge.data for edge in state.out_edges(node)}
            addend, result = operands["c"].data, operands["d"].data
            if (
                not _interchangeable(sdfg, addend, result)
                or any(operands[c].subset.size() != list(sdfg.arrays[operands[c].data].shape) for c in "cd")
                or addend in (operands["a"].data, operands["b"].data)
                or any(_touches(later, addend) for later in states[place + 1 :])
            ):
                continue
            if sdfg.arrays[result].transient:
                old, new = result, addend
            else:
                old, new = addend, result
            for other in states:
                _rename(other, old, new)
            sdfg.remove_data(old)
            shared += 1
    return shared


def _interchangeable(sdfg: SDFG, addend: str, result: str) -> bool:
    one, other = sdfg.arrays[addend], sdfg.arrays[result]
    return (
        isinstance(one, data.Array)
        and isinstance(other, data.Array)
        and one.transient
        and (one.dtype, tuple(one.shape), tuple(one.strides), one.offset, one.total_size)
        == (other.dtype, tuple(other.shape), tuple(other.strides), other.offset, other.total_size)
    )


def _touches(state: SDFGState, name: str) -> bool:
    return any(access.data == name for access in state.data_nodes())


def _rename(state: SDFGState, old: str, new: str) -> None:
    for access in state.data_nodes():
        if access.data == old:
            access.data = new
    for edge in state.edges():
        if edge.data.data == old:
            edge.data.data = new
