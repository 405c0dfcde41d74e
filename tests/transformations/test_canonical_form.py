"""The validator: every rule has a graph that breaks it, and a graph that keeps it passes."""

from __future__ import annotations

import copy
import json
import re
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import dace
import pytest
import torch
from dace.sdfg import SDFG, SDFGState, nodes

from stepdown.models.errors import CanonicalFormError
from stepdown.models.operators import Bias, Contraction, Gelu, KeyPaddingMask, LayerNorm, Scale, Softmax
from stepdown.models.operators.gradient import connect_operator
from stepdown.models.operators.operator import make_memlet, part_memlet
from stepdown.transformations.canonical_form import (
    container_dims,
    kept_containers,
    operators,
    the_state,
    topological_nodes,
    validate,
    validate_sdfg,
    written_containers,
)
from stepdown.transformations.differentiate import differentiate
from stepdown.transformations.reference_executor import execute
from stepdown.transformations.training_graph import TrainingGraph

ROOT = Path(__file__).parents[2]


def refused(message: str) -> AbstractContextManager[Any]:
    """Expects the block to be refused with exactly this sentence."""
    return pytest.raises(CanonicalFormError, match="^" + re.escape(message) + "$")


def chain() -> tuple[SDFG, SDFGState]:
    """y = gelu(x + b) over [S, E], the sum in a temporary."""
    sdfg = SDFG("chain")
    S = dace.symbol("S", dace.int32, positive=True)
    state = sdfg.add_state("state")
    for name, shape in (("x", (S, 4)), ("b", (4,)), ("y", (S, 4))):
        sdfg.add_array(name, shape, dace.float32)
    sdfg.add_transient("sum", (S, 4), dace.float32)
    connect_operator(sdfg, state, Bias("bias", "SE", "E"), {"x": "x", "bias": "b"}, {"y": "sum"})
    connect_operator(sdfg, state, Gelu("gelu", "SE"), {"x": "sum"}, {"y": "y"})
    return sdfg, state


def node_of(sdfg: SDFG, name: str) -> Any:
    """The operator called ``name``."""
    (found,) = (node for node in operators(sdfg) if node.name == name)
    return found


def test_a_graph_in_canonical_form_passes() -> None:
    validate_sdfg(chain()[0])
    validate(TrainingGraph(chain()[0]))
    validate(differentiate(chain()[0], "y", ["x", "b"]))


# ---- rule 1 ---------------------------------------------------------------------------------------------------------


def test_rule_1_refuses_an_operand_that_is_not_connected() -> None:
    sdfg, state = chain()
    state.remove_edge(next(e for e in state.in_edges(node_of(sdfg, "bias")) if e.dst_conn == "bias"))
    state.remove_node(next(n for n in state.data_nodes() if n.data == "b"))
    with refused('operand "bias" of operator "bias" is not connected (rule 1)'):
        validate_sdfg(sdfg)


def test_rule_1_refuses_an_operand_that_the_operator_does_not_have() -> None:
    sdfg, state = chain()
    node = node_of(sdfg, "gelu")
    node.add_in_connector("z")
    state.add_edge(state.add_read("x"), None, node, "z", make_memlet(sdfg, "x"))
    with refused('operator "gelu" has no operand "z" (rule 1)'):
        validate_sdfg(sdfg)


def test_rule_1_refuses_extents_that_disagree() -> None:
    sdfg, _ = chain()
    sdfg.arrays["b"].set_shape((5,), strides=(1,))
    for state in sdfg.states():
        for edge in state.edges():
            edge.data = make_memlet(sdfg, edge.data.data)
    with refused('dimension "E" of operator "bias" is 4 in one operand and 5 in operand "bias"'):
        validate_sdfg(sdfg)


def test_rule_1_refuses_a_result_of_another_type() -> None:
    sdfg, _ = chain()
    sdfg.arrays["y"].dtype = dace.bfloat16
    with refused('container "y" has type "bfloat16", output "y" of operator "gelu" has type "float32" (rule 1)'):
        validate_sdfg(sdfg)


def test_rule_1_wants_statistics_in_the_accumulation_type() -> None:
    sdfg = SDFG("norm")
    state = sdfg.add_state()
    for name, shape in (("x", (3, 4)), ("w", (4,)), ("b", (4,)), ("y", (3, 4)), ("m", (3,))):
        sdfg.add_array(name, shape, dace.bfloat16)
    inputs = {"x": "x", "weight": "w", "bias": "b"}
    connect_operator(sdfg, state, LayerNorm("norm", "SE"), inputs, {"y": "y", "mean": "m"})
    with refused('container "m" has type "bfloat16", output "mean" of operator "norm" has type "float32" (rule 1)'):
        validate_sdfg(sdfg)
    sdfg.arrays["m"].dtype = dace.float32
    validate_sdfg(sdfg)


@pytest.mark.parametrize("rule", ["map", "tasklet", "nested"])
def test_rules_1_and_5_refuse_what_is_no_operator(rule: str) -> None:
    sdfg, state = chain()
    if rule == "map":
        state.add_mapped_tasklet(
            "double", {"i": "0:4"}, {"a": dace.Memlet("b[i]")}, "o = a", {"o": dace.Memlet("b[i]")}, external_edges=True
        )
        kind = "MapEntry"
    elif rule == "tasklet":
        state.add_tasklet("double", {}, {}, "")
        kind = "Tasklet"
    else:
        inner = SDFG("inner")
        inner.add_state()
        state.add_nested_sdfg(inner, {}, {})
        kind = "NestedSDFG"
    with pytest.raises(CanonicalFormError, match=rf'of graph "chain" is a {kind}, not an operator \(rules 1 and 5\)$'):
        validate_sdfg(sdfg)


# ---- rule 2 ---------------------------------------------------------------------------------------------------------


def test_rule_2_refuses_one_container_with_two_meanings() -> None:
    sdfg = SDFG("square")
    state = sdfg.add_state()
    for name in ("x", "y", "z"):
        sdfg.add_array(name, (4, 4), dace.float32, transient=name == "y")
    connect_operator(sdfg, state, Scale("first", "SE", 2.0), {"x": "x"}, {"y": "y"})
    connect_operator(sdfg, state, Scale("second", "EU", 2.0), {"x": "y"}, {"y": "z"})
    with refused('container "y" has dimensions "SE" for one operator and "EU" for "second" (rule 2)'):
        validate_sdfg(sdfg)


def test_rule_2_takes_queries_for_keys() -> None:
    """The keys' positions are the queries': one container is read as [S, E] and as [T, E]."""
    sdfg = SDFG("self_attention")
    state = sdfg.add_state()
    sdfg.add_array("x", (3, 4), dace.float32)
    sdfg.add_array("y", (3, 3), dace.float32)
    connect_operator(sdfg, state, Contraction("scores", "SE,TE->ST"), {"a": "x", "b": "x"}, {"d": "y"})
    validate_sdfg(sdfg)
    assert container_dims(sdfg) == {"x": "SE", "y": "ST"}


def test_rule_2_leaves_the_layout_free() -> None:
    sdfg, _ = chain()
    sdfg.arrays["sum"].strides = (1, sdfg.arrays["sum"].shape[0])
    validate_sdfg(sdfg)


# ---- rule 3 ---------------------------------------------------------------------------------------------------------


def test_rule_3_refuses_a_second_state() -> None:
    sdfg, state = chain()
    sdfg.add_state_after(state, "after")
    with refused('graph "chain" has 2 states, the canonical form takes one (rule 3)'):
        validate_sdfg(sdfg)
    with refused('graph "empty" has 0 states, the canonical form takes one (rule 3)'):
        validate_sdfg(SDFG("empty"))


def test_rule_3_refuses_control_flow() -> None:
    sdfg = SDFG("loop")
    sdfg.add_node(dace.sdfg.state.LoopRegion("loop"))
    with refused('graph "loop" has 1 states, the canonical form takes one (rule 3)'):
        the_state(sdfg)


def test_rule_3_refuses_a_container_that_is_written_twice() -> None:
    sdfg, state = chain()
    connect_operator(sdfg, state, Scale("again", "SE", 2.0), {"x": "x"}, {"y": "y"})
    with refused('container "y" of graph "chain" is written more than once (rule 3)'):
        validate_sdfg(sdfg)


def test_rule_3_refuses_accumulation() -> None:
    sdfg, state = chain()
    (edge,) = state.out_edges(node_of(sdfg, "gelu"))
    edge.data.wcr = "lambda a, b: a + b"
    with refused('container "y" is not written by an operator alone (rule 3)'):
        validate_sdfg(sdfg)


def test_rule_3_refuses_a_copy() -> None:
    sdfg, state = chain()
    sdfg.add_array("z", sdfg.arrays["y"].shape, dace.float32)
    (written,) = (n for n in state.data_nodes() if n.data == "y")
    state.add_nedge(written, state.add_write("z"), make_memlet(sdfg, "y"))
    with refused('container "z" is not written by an operator alone (rule 3)'):
        validate_sdfg(sdfg)


def test_rule_3_refuses_a_view() -> None:
    sdfg, _ = chain()
    sdfg.add_view("v", (4,), dace.float32)
    with refused('container "v" is a ArrayView, not an array or scalar (rule 3)'):
        validate_sdfg(sdfg)


def test_rule_3_refuses_a_temporary_that_nobody_uses_or_writes() -> None:
    sdfg, _ = chain()
    sdfg.add_transient("left", (4,), dace.float32)
    with refused('temporary "left" of graph "chain" is never used (rule 3)'):
        validate_sdfg(sdfg)
    sdfg, _ = chain()
    sdfg.arrays["b"].transient = True
    with refused('temporary "b" of graph "chain" is read but never written (rule 3)'):
        validate_sdfg(sdfg)


def packed(subset: str, *, extent: int = 4) -> SDFG:
    """y = 2 * stack[subset], stack [3, 5, 4]."""
    sdfg = SDFG("packed")
    state = sdfg.add_state()
    sdfg.add_array("stack", (3, 5, 4), dace.float32)
    sdfg.add_array("y", (5, extent), dace.float32)
    node = Scale("scale", "SE", 2.0)
    state.add_node(node)
    state.add_edge(state.add_read("stack"), None, node, "x", dace.Memlet(f"stack[{subset}]"))
    state.add_edge(node, "y", state.add_write("y"), None, make_memlet(sdfg, "y"))
    return sdfg


@pytest.mark.parametrize("index", [0, 1, 2])
def test_rule_3_takes_one_of_a_stack(index: int) -> None:
    sdfg = packed(f"{index}, 0:5, 0:4")
    validate_sdfg(sdfg)
    assert container_dims(sdfg) == {"stack": "NSE", "y": "SE"}


@pytest.mark.parametrize(
    ("subset", "extent"), [("1, 0:5, 0:2", 2), ("1, 0:5, 2:4", 2), ("1, 0:5, 0:4:2", 2), ("i, 0:5, 0:4", 4)]
)
def test_rule_3_refuses_any_other_part(subset: str, extent: int) -> None:
    sdfg = packed(subset, extent=extent)
    if "i" in subset:
        sdfg.add_symbol("i", dace.int32)
    with pytest.raises(CanonicalFormError) as caught:
        validate_sdfg(sdfg)
    assert re.fullmatch(
        r'operator "scale" reads or writes "stack\[.*\]", an edge takes whole dimensions and constant '
        r"indices \(rule 3\)",
        str(caught.value),
    )


def test_rule_3_refuses_several_of_a_stack_at_once() -> None:
    with refused(
        'operator "scale" reads or writes "stack[0:2, 0:5, 0:4]", an edge takes whole dimensions and constant '
        "indices (rule 3)"
    ):
        validate_sdfg(packed("0:2, 0:5, 0:4"))


def parts(indices: list[int]) -> SDFG:
    """stack[i] = 2 * x for each index, stack [3, 5, 4]; y reads all of it."""
    sdfg = SDFG("parts")
    state = sdfg.add_state()
    sdfg.add_array("x", (5, 4), dace.float32)
    sdfg.add_array("stack", (3, 5, 4), dace.float32, transient=True)
    sdfg.add_array("y", (3, 5, 4), dace.float32)
    source, target = state.add_read("x"), state.add_access("stack")
    for index in indices:
        node = Scale(f"scale_{index}", "SE", index + 1.0)
        state.add_node(node)
        state.add_edge(source, None, node, "x", make_memlet(sdfg, "x"))
        state.add_edge(node, "y", target, None, part_memlet(sdfg, "stack", 0, index))
    node = Scale("all", "NSE", 1.0)
    state.add_node(node)
    state.add_edge(target, None, node, "x", make_memlet(sdfg, "stack"))
    state.add_edge(node, "y", state.add_write("y"), None, make_memlet(sdfg, "y"))
    return sdfg


def test_rule_3_takes_parts_that_different_operators_write() -> None:
    sdfg = parts([2, 0, 1])
    validate_sdfg(sdfg)
    x = torch.randn(5, 4, dtype=torch.float64)
    assert torch.equal(execute(sdfg, {"x": x})["y"], torch.stack([x, 2 * x, 3 * x]))


@pytest.mark.parametrize("indices", [[0, 1, 1], [0, 2], [0, 1, 2, 1], [1]])
def test_rule_3_refuses_parts_that_overlap_or_leave_some_out(indices: list[int]) -> None:
    with refused('parts of container "stack" of graph "parts" are written more than once or never (rule 3)'):
        validate_sdfg(parts(indices))


def test_rule_3_refuses_an_edge_without_data() -> None:
    sdfg, state = chain()
    state.add_nedge(state.add_read("x"), node_of(sdfg, "gelu"), dace.Memlet())
    with refused('operator "gelu" has an edge to "x" that carries no container (rule 3)'):
        validate_sdfg(sdfg)


def test_rule_3_refuses_what_dace_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A memlet beyond its container is found by DaCe's own validation, which leaves a file where it runs."""
    monkeypatch.chdir(tmp_path)
    with refused('graph "packed" is refused by DaCe: Memlet subset out-of-bounds (rule 3)'):
        validate_sdfg(packed("7, 0:5, 0:4"))


# ---- rule 4 ---------------------------------------------------------------------------------------------------------


def norms() -> TrainingGraph:
    """Softmax of a LayerNorm, differentiated: keeps the norm's statistics and ... nothing of the softmax but y."""
    sdfg = SDFG("norms")
    state = sdfg.add_state()
    for name, shape in (("x", (3, 4)), ("w", (4,)), ("b", (4,)), ("y", (3, 4))):
        sdfg.add_array(name, shape, dace.float64)
    sdfg.add_transient("middle", (3, 4), dace.float64)
    sdfg.add_transient("last", (3, 4), dace.float64)
    connect_operator(sdfg, state, LayerNorm("norm", "SE"), {"x": "x", "weight": "w", "bias": "b"}, {"y": "middle"})
    connect_operator(sdfg, state, Softmax("softmax", "SE"), {"x": "middle"}, {"y": "last"})
    connect_operator(sdfg, state, Gelu("gelu", "SE"), {"x": "last"}, {"y": "y"})
    return differentiate(sdfg, "y", ["x", "w", "b"])


def test_rule_4_derives_what_is_kept() -> None:
    graph = norms()
    assert graph.backward is not None
    assert graph.kept == ("last", "norm_mean", "norm_rstd")
    assert kept_containers(graph.forward, graph.backward) == graph.kept
    assert written_containers(graph.forward) == {"middle", "last", "norm_mean", "norm_rstd", "y"}
    validate(graph)


def test_rule_4_refuses_too_much_or_too_little() -> None:
    graph = norms()
    for name in graph.kept:
        fewer = tuple(other for other in graph.kept if other != name)
        with refused(
            f'graph "norms" says it keeps {", ".join(fewer)}, its backward pass reads {", ".join(graph.kept)} (rule 4)'
        ):
            validate(TrainingGraph(graph.forward, graph.backward, fewer))
    more = (*graph.kept, "middle")
    with refused(
        f'graph "norms" says it keeps {", ".join(more)}, its backward pass reads {", ".join(graph.kept)} (rule 4)'
    ):
        validate(TrainingGraph(graph.forward, graph.backward, more))


def test_rule_4_refuses_a_kept_temporary() -> None:
    graph = norms().copy()
    graph.forward.arrays["last"].transient = True
    with refused('kept container "last" is a temporary of the forward graph (rule 4)'):
        validate(graph)


def test_rule_4_refuses_to_keep_without_a_backward_pass() -> None:
    with refused("a graph without a backward pass keeps sum (rule 4)"):
        validate(TrainingGraph(chain()[0], None, ("sum",)))


def test_rule_4_refuses_what_forward_does_not_have() -> None:
    graph = norms().copy()
    assert graph.backward is not None
    graph.backward.replace("x", "other")
    name = graph.backward.name
    with refused(f'graph "{name}" reads "other", which is no argument of graph "norms" (rule 4)'):
        validate(graph)


@pytest.mark.parametrize("change", ["layout", "type"])
def test_rule_4_refuses_two_layouts_of_a_shared_container(change: str) -> None:
    graph = norms().copy()
    assert graph.backward is not None
    if change == "layout":
        graph.forward.arrays["last"].strides = (1, 3)
    else:
        graph.backward.arrays["w"].dtype = dace.float32
    with refused(
        f'container "{"last" if change == "layout" else "w"}" has another type, shape or layout in graph '
        f'"{graph.backward.name}" than in graph "norms" (rule 4)'
    ):
        validate(graph)


# ---- rule 5 ---------------------------------------------------------------------------------------------------------


def test_rule_5_refuses_a_node_that_a_file_names_and_nobody_knows(tmp_path: Path) -> None:
    """DaCe turns it into a placeholder without a word."""
    sdfg, _ = chain()
    file = tmp_path / "graph.sdfg"
    sdfg.save(str(file))
    text = json.dumps(json.loads(file.read_text())).replace("activation.Gelu", "activation.Nonsense")
    file.write_text(text)
    loaded = SDFG.from_file(str(file))
    assert any(isinstance(node, nodes.UnregisteredLibraryNode) for node in the_state(loaded).nodes())
    with pytest.raises(CanonicalFormError, match=r"is a UnregisteredLibraryNode, not an operator \(rules 1 and 5\)$"):
        validate_sdfg(loaded)


def test_rule_5_refuses_library_nodes_of_others() -> None:
    sdfg, state = chain()
    state.add_node(dace.libraries.standard.Reduce("sum", "lambda a, b: a + b"))
    with pytest.raises(CanonicalFormError, match=r"is a Reduce, not an operator \(rules 1 and 5\)$"):
        validate_sdfg(sdfg)


# ---- helpers --------------------------------------------------------------------------------------------------------


def test_topological_order_is_that_of_the_dataflow_and_always_the_same() -> None:
    sdfg, state = chain()
    connect_operator(
        sdfg, state, Scale("early", "E", 2.0), {"x": "b"}, {"y": sdfg.add_transient("c", (4,), dace.float32)[0]}
    )
    order = topological_nodes(state)
    assert len(order) == len(state.nodes())
    for edge in state.edges():
        assert order.index(edge.src) < order.index(edge.dst)
    assert topological_nodes(state) == order
    again = topological_nodes(the_state(copy.deepcopy(sdfg)))
    assert [str(node) for node in again] == [str(node) for node in order]


def test_dimensions_of_single_elements_and_masks() -> None:
    sdfg = SDFG("mask")
    state = sdfg.add_state()
    for name, shape, dtype in (
        ("x", (2, 3, 4, 4), dace.float32),
        ("m", (2, 4), dace.bool_),
        ("y", (2, 3, 4, 4), dace.float32),
    ):
        sdfg.add_array(name, shape, dtype)
    sdfg.add_array("total", (1,), dace.float32)
    connect_operator(sdfg, state, KeyPaddingMask("mask"), {"x": "x", "mask": "m"}, {"y": "y"})
    connect_operator(sdfg, state, Contraction("total", "BHST,BHST->"), {"a": "y", "b": "x"}, {"d": "total"})
    validate_sdfg(sdfg)
    assert container_dims(sdfg) == {"x": "BHST", "m": "BT", "y": "BHST", "total": ""}


def test_the_document_has_the_rules_that_messages_name() -> None:
    document = (ROOT / "docs" / "canonical_form.md").read_text()
    source = (ROOT / "transformations" / "canonical_form.py").read_text()
    named = {
        int(number) for found in re.findall(r"\(rules? (\d)(?: and (\d))?\)", source) for number in found if number
    }
    headings = {int(number) for number in re.findall(r"^## (\d)\. ", document, re.MULTILINE)}
    assert named == headings == {1, 2, 3, 4, 5}
