"""Operators in states of their own: the order of execution, what is copied, what is refused.

That values stay is shown by the tests of compiled lowerings.
"""

from __future__ import annotations

import copy

import dace
import pytest
from dace.sdfg import SDFG, SDFGState, nodes
from hypothesis import given, settings
from hypothesis import strategies as st

from stepdown.models.errors import CanonicalFormError
from stepdown.models.operators import Add, Contraction, Operator, Scale
from stepdown.models.operators.gradient import connect_operator
from stepdown.models.quiet import quiet_dace
from stepdown.transformations.canonical_form import validate_sdfg
from stepdown.transformations.lowering import cpu
from stepdown.transformations.lowering.lower_operators import is_memory, lower_operators
from stepdown.transformations.schedule.plan_workspace import state_chain


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    cpu.register()


def containers(state: SDFGState) -> tuple[list[str], list[str]]:
    """What a state reads from and writes to outside its kernel."""
    reads = sorted(node.data for node in state.data_nodes() if state.out_degree(node) > 0)
    return reads, sorted(node.data for node in state.data_nodes() if state.in_degree(node) > 0)


def graph(*steps: tuple[Operator, dict[str, str], str], shape: tuple[object, ...] = (3, 4)) -> SDFG:
    """Operators over "SE"; what no operator reads is an argument, and so is what none writes."""
    sdfg = SDFG("steps")
    state = sdfg.add_state()
    read = {name for _, inputs, _ in steps for name in inputs.values()}
    written = {output for _, _, output in steps}
    for name in sorted(read | written):
        sdfg.add_array(name, shape, dace.float32, transient=name in read & written)
    for operator, inputs, output in steps:
        connect_operator(sdfg, state, operator, inputs, {operator.outputs[0]: output})
    return sdfg


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_every_operator_is_one_kernel_after_those_it_reads_from(data: st.DataObject) -> None:
    steps: list[tuple[Operator, dict[str, str], str]] = []
    known = ["x"]
    for number in range(data.draw(st.integers(1, 6))):
        one, other = (data.draw(st.sampled_from(known)) for _ in "ab")
        if data.draw(st.booleans()):
            steps.append((Add(f"operator{number}", "SE"), {"a": one, "b": other}, f"v{number}"))
        else:
            steps.append((Scale(f"operator{number}", "SE", 2.0), {"x": one}, f"v{number}"))
        known.append(f"v{number}")
    sdfg = graph(*steps)
    validate_sdfg(sdfg)
    before = copy.deepcopy(sdfg)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SDFG, "expand_library_nodes", lambda self: None)  # to look at what is expanded, and for speed
        lowered = lower_operators(sdfg, "cpu")
    assert sdfg.hash_sdfg() == before.hash_sdfg(), "the given graph stays as it was"
    states = state_chain(lowered)
    names = [state.label.split("_", 2) for state in states]
    assert [(kernel, int(number)) for kernel, number, _ in names] == [("kernel", n) for n in range(len(steps))]
    assert sorted(name for _, _, name in names) == sorted(operator.name for operator, _, _ in steps)
    expected = {operator.name: (sorted(set(inputs.values())), [output]) for operator, inputs, output in steps}
    written = {"x"}
    for state, (_, _, name) in zip(states, names, strict=True):
        reads, writes = containers(state)
        assert [(n.name, n.implementation) for n in state.nodes() if isinstance(n, Operator)] == [(name, "cpu")]
        assert (reads, writes) == expected[name]
        assert set(reads) <= written, "a kernel runs before one that it reads from"
        written |= set(writes)


def test_containers_and_symbols_are_the_same() -> None:
    seq = dace.symbol("S", dace.int32)
    sdfg = graph((Scale("one", "SE", 2.0), {"x": "x"}, "t"), (Scale("two", "SE", 0.5), {"x": "t"}, "y"), shape=(seq, 4))
    sdfg.arrays["t"].set_shape((seq, 4), strides=(1, seq))
    lowered = lower_operators(sdfg, "cpu")
    with quiet_dace():
        lowered.validate()
    assert lowered.name == "steps"
    assert lowered.symbols["S"] == dace.int32
    assert not any(isinstance(node, nodes.LibraryNode) for node, _ in lowered.all_nodes_recursive())
    assert set(lowered.arrays) == {"x", "t", "y"}
    for name, descriptor in sdfg.arrays.items():
        other = lowered.arrays[name]
        assert other is not descriptor
        assert (other.dtype, other.shape, other.strides, other.transient) == (
            descriptor.dtype,
            descriptor.shape,
            descriptor.strides,
            descriptor.transient,
        )


def test_an_edge_keeps_the_part_that_it_names() -> None:
    """One of a stack of three."""
    sdfg = SDFG("stacked")
    state = sdfg.add_state()
    sdfg.add_array("stack", [3, 2, 4], dace.float32)
    sdfg.add_array("y", [2, 2], dace.float32)
    node = Contraction("scores", "SE,TE->ST")
    state.add_node(node)
    stack = state.add_read("stack")
    state.add_edge(stack, None, node, "a", dace.Memlet("stack[2, 0:2, 0:4]"))
    state.add_edge(stack, None, node, "b", dace.Memlet("stack[0, 0:2, 0:4]"))
    state.add_edge(node, "d", state.add_write("y"), None, dace.Memlet("y[0:2, 0:2]"))
    (kernel,) = lower_operators(sdfg, "cpu").states()
    (access,) = (node for node in kernel.data_nodes() if node.data == "stack")
    assert sorted(str(edge.data.subset) for edge in kernel.out_edges(access)) == ["0, 0:2, 0:4", "2, 0:2, 0:4"]


def test_an_operator_without_the_implementation_is_refused() -> None:
    sdfg = graph((Scale("halve", "SE", 0.5), {"x": "x"}, "y"))
    with pytest.raises(CanonicalFormError, match=r'^operator "halve" has no implementation "abacus"$'):
        lower_operators(sdfg, "abacus")


def test_memory_is_what_a_call_must_be_given() -> None:
    sdfg = SDFG("memory")
    sdfg.add_array("array", [4], dace.float32)
    sdfg.add_scalar("scalar", dace.float32)
    sdfg.add_view("view", [4], dace.float32)
    assert {name for name, descriptor in sdfg.arrays.items() if is_memory(descriptor)} == {"array"}
