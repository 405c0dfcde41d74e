"""Small helpers that expansions share: the nested SDFG an operator becomes."""

from __future__ import annotations

from dace import data
from dace.sdfg import SDFG, SDFGState

from stepdown.models.operators.operator import Operator, fixed_axes


def operator_sdfg(node: Operator, state: SDFGState, parent: SDFG) -> SDFG:
    """An SDFG with one container for each connector of ``node``, shaped and strided as the node sees it.

    An edge that fixes dimensions to constant indices passes a pointer to that part: the container inside has
    the remaining dimensions and strides.
    """
    sdfg = SDFG(f"{node.name}_expansion")
    shapes = node.connected_shapes(parent, state)
    for edge in state.all_edges(node):
        connector = edge.dst_conn if edge.dst is node else edge.src_conn
        if connector is None or connector in sdfg.arrays:
            continue
        descriptor = parent.arrays[edge.data.data].clone()
        descriptor.transient = False
        if isinstance(descriptor, data.Array):
            fixed = fixed_axes(edge.data.subset.size(), descriptor.shape, len(shapes[connector])) or ()
            descriptor = data.Array(
                descriptor.dtype,
                shapes[connector] or (1,),
                strides=tuple(s for axis, s in enumerate(descriptor.strides) if axis not in fixed) or (1,),
                storage=descriptor.storage,
            )
        sdfg.add_datadesc(connector, descriptor)
        for symbol in descriptor.free_symbols:
            if str(symbol) not in sdfg.symbols:
                sdfg.add_symbol(str(symbol), parent.symbols.get(str(symbol), symbol.dtype))
    return sdfg
