"""Gradient rules: every operator alone, differentiated and executed, against PyTorch's autograd of its reference."""

from __future__ import annotations

import itertools

import pytest
import torch
from dace.sdfg import SDFG
from hypothesis import given, settings
from hypothesis import strategies as st

from stepdown.models.dtypes import DTYPES
from stepdown.models.operators import Add, Contraction, LayerNorm, Operator, Relu, Scale, Softmax
from stepdown.models.operators.gradient import connect_operator, ensure_output
from stepdown.models.operators.operator import LEGEND, add_container
from stepdown.transformations.canonical_form import operators, the_state, validate, validate_sdfg
from stepdown.transformations.differentiate import differentiate
from stepdown.transformations.reference_executor import execute_training
from stepdown.transformations.training_graph import TrainingGraph

from .cases import CASES, SIZES, Case, draw_operands, each_forward_operator, refused, single_operator

NOT_DIFFERENTIATED = {"mask", "rng", "p"}


def subsets(node: Operator) -> list[tuple[str, ...]]:
    """Every choice of inputs whose gradient is wanted, the full one last."""
    candidates = [name for name in sorted(node.in_connectors) if name not in NOT_DIFFERENTIATED]
    return [c for count in range(1, len(candidates) + 1) for c in itertools.combinations(candidates, count)]


def backward_of(graph: TrainingGraph) -> SDFG:
    """The backward graph, which differentiation has made."""
    assert graph.backward is not None
    return graph.backward


def compare_with_autograd(
    graph: TrainingGraph, node: Operator, operands: dict[str, torch.Tensor], required: tuple[str, ...]
) -> None:
    """Forward value and every gradient of a graph of one operator."""
    leaves = {k: v.clone().requires_grad_(k in required) for k, v in operands.items()}
    expected = node.reference(leaves)[node.outputs[0]]
    upstream = torch.randn_like(expected)
    expected.backward(upstream)
    forward, backward = execute_training(graph, operands, {"gradient_y": upstream})
    torch.testing.assert_close(forward["y"], expected.detach())
    for name in required:
        torch.testing.assert_close(backward[f"gradient_{name}"], leaves[name].grad, rtol=1e-12, atol=1e-12)


@each_forward_operator
def test_equals_autograd(case: Case) -> None:
    for required in subsets(case.node):
        node = case.node
        graph = differentiate(single_operator(node, SIZES), "y", list(required))
        validate(graph)
        assert {n for n, d in backward_of(graph).arrays.items() if n.startswith("gradient_") and not d.transient} == {
            "gradient_y",
            *(f"gradient_{name}" for name in required),
        }
        compare_with_autograd(graph, node, draw_operands(node, SIZES), required)


@st.composite
def einsums(draw: st.DrawFn) -> str:
    """Any einsum of two operands: batch, free and summed dimensions in every order."""
    letters = draw(st.permutations("BSHPEU"))[: draw(st.integers(1, 6))]
    terms: list[list[str]] = [[], [], []]
    for letter in letters:
        for place in draw(st.sampled_from([(0, 1), (0, 2), (1, 2), (0, 1, 2)])):
            terms[place].append(letter)
    a, b, d = ("".join(draw(st.permutations(term))) for term in terms)
    return f"{a},{b}->{d}"


@settings(max_examples=25, deadline=None)
@given(einsum=einsums(), alpha=st.sampled_from([1.0, -0.375]), accumulate=st.booleans())
def test_any_contraction_equals_autograd(einsum: str, alpha: float, accumulate: bool) -> None:
    node = Contraction("any", einsum, alpha, accumulate)
    sizes = dict(zip(LEGEND, (2, 3, 3, 1, 4, 5, 2, 3), strict=True))
    graph = differentiate(single_operator(node, sizes), "y", sorted(node.in_connectors))
    validate(graph)
    assert {type(n) for n in operators(backward_of(graph))} <= {Contraction, Scale}
    compare_with_autograd(graph, node, draw_operands(node, sizes), tuple(sorted(node.in_connectors)))


def test_a_contraction_has_a_contraction_for_each_required_operand() -> None:
    graph = differentiate(single_operator(Contraction(einsum="BSE,UE->BSU", alpha=0.5), SIZES), "y", ["b"])
    (node,) = operators(backward_of(graph))
    assert (node.einsum, node.alpha, node.accumulate) == ("BSU,BSE->UE", 0.5, False)


def test_dropout_draws_its_mask_again() -> None:
    """The gradient reads the generator's state, not a stored mask, and has its forward operator's stream."""
    case = next(case for case in CASES if case.name == "dropout")
    graph = differentiate(single_operator(case.node, SIZES), "y", ["x"])
    (node,) = operators(backward_of(graph))
    assert type(node) is type(case.node) and node.site == case.node.site
    assert graph.kept == ()
    assert set(backward_of(graph).arrays) == {"gradient_y", "rng", "p", "gradient_x"}


def test_a_gradient_that_passes_through_shares_its_container() -> None:
    """``b`` of an addition in the middle gets the very container that the operator behind it reads."""
    sdfg = SDFG("through")
    state = sdfg.add_state()
    for name in ("a", "b", "y"):
        sdfg.add_array(name, (3,), DTYPES["float64"].dace)
    for name in ("sum", "left"):
        add_container(sdfg, name, (3,), DTYPES["float64"])
    connect_operator(sdfg, state, Scale("left", "E", 2.0), {"x": "a"}, {"y": "left"})
    connect_operator(sdfg, state, Add("sum", "E"), {"a": "left", "b": "b"}, {"y": "sum"})
    connect_operator(sdfg, state, Relu("y", "E"), {"x": "sum"}, {"y": "y"})
    graph = differentiate(sdfg, "y", ["a", "b"])
    validate(graph)
    assert [type(node).__name__ for node in operators(backward_of(graph))] == ["ReluGradient", "Scale", "Scale"]
    assert set(backward_of(graph).arrays) == {"gradient_y", "sum", "gradient_sum", "gradient_a", "gradient_b"}


def test_statistics_are_added_where_the_gradient_reads_them() -> None:
    """LayerNorm writes mean and rstd in the differentiated forward graph alone; the given graph is left as it was."""
    sdfg = single_operator(LayerNorm(dims="BSE"), SIZES, DTYPES["bfloat16"])
    graph = differentiate(sdfg, "y", ["x"])
    (before,), (after,) = operators(sdfg), operators(graph.forward)
    assert set(before.out_connectors) == {"y"}
    assert set(after.out_connectors) == {"y", "mean", "rstd"}
    assert graph.kept == ("layer_norm_mean", "layer_norm_rstd")
    for name in graph.kept:
        assert graph.forward.arrays[name].dtype == DTYPES["float32"].dace
        assert graph.forward.arrays[name].shape == (SIZES["B"], SIZES["S"])


def test_an_output_is_added_once() -> None:
    node = LayerNorm(dims="BSE")
    sdfg = single_operator(node, SIZES)
    for _ in range(2):
        ensure_output(node, sdfg, the_state(sdfg), "rstd")
        validate_sdfg(sdfg)
        assert set(node.out_connectors) == {"y", "rstd"}
        assert set(sdfg.arrays) == {"x", "weight", "bias", "y", "layer_norm_rstd"}


def test_softmax_keeps_its_output_and_layer_norm_its_input() -> None:
    for node, expected in ((Softmax(dims="SE"), {"y", "gradient_y"}), (LayerNorm(dims="SE"), {"x", "gradient_y"})):
        graph = differentiate(single_operator(node, SIZES), "y", ["x"])
        arguments = {name for name, d in backward_of(graph).arrays.items() if not d.transient}
        assert expected <= arguments
        assert not ({"x", "y"} - expected) & arguments


def test_refuses_the_gradient_of_statistics() -> None:
    node = LayerNorm("norm", "BSE")
    node.add_out_connector("mean")
    sdfg = single_operator(node, SIZES)
    with refused('operator "norm" has no gradient of its output "y"'):
        differentiate(sdfg, "mean", ["x"])


@pytest.mark.parametrize("case", [c for c in CASES if not c.differentiable], ids=lambda case: case.name)
def test_backward_operators_have_no_gradient(case: Case) -> None:
    node = case.node
    with refused(f'operator "{node.name}" belongs to a backward graph and has no gradient rule'):
        differentiate(single_operator(node, SIZES), "y", [node.inputs[0] if node.inputs[0] != "y" else node.inputs[1]])
