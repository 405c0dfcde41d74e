"""Contractions add in place where their addend is dead afterwards, and nowhere else."""

from __future__ import annotations

import copy

import dace
import numpy as np
import pytest
import torch
from dace.sdfg import SDFG

from stepdown.models.operators import Contraction, Gelu, Operator
from stepdown.models.operators.gradient import connect_operator
from stepdown.models.operators.operator import make_memlet
from stepdown.transformations.lowering import cpu
from stepdown.transformations.lowering.lower_operators import lower_operators
from stepdown.transformations.lowering.share_addends import share_addends
from tests.transformations.fusion.test_fuse_row_operators import Builder


def states_of(sdfg: SDFG) -> tuple[SDFG, list[dace.SDFGState]]:
    """Each operator in a state of its own, in the order in which it was added."""
    chain = SDFG("chain")
    for name, descriptor in sdfg.arrays.items():
        chain.add_datadesc(name, copy.deepcopy(descriptor))
    states = []
    source = sdfg.nodes()[0]
    for node in [n for n in source.nodes() if isinstance(n, Operator)]:
        state = chain.add_state(node.name)
        clone = copy.deepcopy(node)
        state.add_node(clone)
        for edge in source.in_edges(node):
            state.add_edge(state.add_read(edge.data.data), None, clone, edge.dst_conn, copy.deepcopy(edge.data))
        for edge in source.out_edges(node):
            state.add_edge(clone, edge.src_conn, state.add_write(edge.data.data), None, copy.deepcopy(edge.data))
        states.append(state)
    return chain, states


def accumulate(builder: Builder, name: str, addend: str, *, argument: bool = False, b: str = "m") -> str:
    """``name[BSE] = h[BSU] m[EU] + addend``."""
    node = Contraction(name, "BSU,EU->BSE", accumulate=True)
    return builder.add(node, {"a": "h", "b": b, "c": addend}, name, argument=argument)


def shared(builder: Builder) -> tuple[int, set[str]]:
    """How many contractions add in place, and the containers that remain."""
    chain, states = states_of(builder.sdfg)
    return share_addends(chain, states), set(chain.arrays)


def test_a_chain_of_sums_is_one_container() -> None:
    builder = Builder()
    builder.add(Gelu("gelu", "BSE"), {"x": "x"}, "s")
    accumulate(builder, "t", "s")
    accumulate(builder, "u", "t")
    accumulate(builder, "y", "u", argument=True)
    assert shared(builder) == (3, {"x", "h", "m", "y"})


def test_a_temporary_result_takes_the_addends_name() -> None:
    builder = Builder()
    builder.add(Gelu("gelu", "BSE"), {"x": "x"}, "s")
    accumulate(builder, "t", "s")
    builder.add(Gelu("last", "BSE"), {"x": "t"}, "y", argument=True)
    assert shared(builder) == (1, {"x", "h", "m", "s", "y"})


def test_an_argument_is_not_written_to() -> None:
    builder = Builder()
    accumulate(builder, "y", "x", argument=True)
    assert shared(builder) == (0, {"x", "h", "m", "y"})


def test_an_addend_that_is_read_later_stays() -> None:
    builder = Builder()
    builder.add(Gelu("gelu", "BSE"), {"x": "x"}, "s")
    accumulate(builder, "y", "s", argument=True)
    builder.add(Gelu("later", "BSE"), {"x": "s"}, "z", argument=True)
    assert shared(builder)[0] == 0


def test_an_addend_that_is_read_before_is_no_hindrance() -> None:
    builder = Builder()
    builder.add(Gelu("gelu", "BSE"), {"x": "x"}, "s")
    builder.add(Gelu("before", "BSE"), {"x": "s"}, "z", argument=True)
    accumulate(builder, "y", "s", argument=True)
    assert shared(builder) == (1, {"x", "h", "m", "y", "z"})


def test_an_addend_that_is_a_factor_too_stays() -> None:
    builder = Builder()
    sdfg = builder.sdfg
    for name in ("p", "q", "y"):
        sdfg.add_array(name, [4, 4], dace.float64, transient=name == "q")
    connect_operator(sdfg, builder.state, Gelu("gelu", "ST"), {"x": "p"}, {"y": "q"})
    product = Contraction("product", "SE,ET->ST", accumulate=True)
    connect_operator(sdfg, builder.state, product, {"a": "q", "b": "p", "c": "q"}, {"d": "y"})
    assert shared(builder)[0] == 0


def test_another_type_or_layout_stays() -> None:
    for change in ("strides", "dtype"):
        builder = Builder()
        builder.add(Gelu("gelu", "BSE"), {"x": "x"}, "s")
        accumulate(builder, "y", "s", argument=True)
        if change == "strides":
            builder.sdfg.arrays["s"].strides = (12, 1, 3)
        else:
            builder.sdfg.arrays["s"].dtype = dace.float32
        assert shared(builder)[0] == 0


def test_a_part_of_a_container_stays() -> None:
    builder = Builder()
    sdfg, state = builder.sdfg, builder.state
    for name, dims in (("h", "BSU"), ("m", "EU")):
        builder.container(name, dims)
    sdfg.add_array("y", [2, 3, 4], dace.float64)
    sdfg.add_transient("stack", [2, 2, 3, 4], dace.float64)
    node = Contraction("sum", "BSU,EU->BSE", accumulate=True)
    state.add_node(node)
    for connector, name in (("a", "h"), ("b", "m")):
        state.add_edge(state.add_read(name), None, node, connector, make_memlet(sdfg, name))
    state.add_edge(state.add_read("stack"), None, node, "c", dace.Memlet("stack[1, 0:2, 0:3, 0:4]"))
    state.add_edge(node, "d", state.add_write("y"), None, make_memlet(sdfg, "y"))
    assert shared(builder)[0] == 0


@pytest.mark.slow
def test_compiled_sums_in_place() -> None:
    """Two sums in a row, lowered and compiled: one container, the right numbers."""
    builder = Builder()
    builder.add(Gelu("gelu", "BSE"), {"x": "x"}, "s")
    accumulate(builder, "t", "s")
    accumulate(builder, "y", "t", argument=True)
    cpu.register()
    lowered = lower_operators(builder.sdfg, "cpu")
    assert not {"s", "t"} & set(lowered.arrays)
    values = {name: value.numpy().copy() for name, value in builder.values().items()}
    x, h, m = values["x"], values["h"], values["m"]
    lowered(**values)
    gelu = torch.nn.functional.gelu(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(values["y"], gelu + 2 * np.einsum("bsu,eu->bse", h, m), rtol=1e-12)
