"""Softmax and LayerNorm: rows without keys, large values, eps, statistics, gradients in closed form."""

import math

import pytest
import torch
from torch.nn import functional

from stepdown.models.operators import (
    LayerNorm,
    LayerNormGradient,
    LayerNormParameterGradient,
    Softmax,
    SoftmaxGradient,
)

from .cases import evaluate, refused

SIZES = {"B": 2, "S": 3, "E": 6}


@pytest.mark.parametrize("shift", [0.0, 700.0, -700.0, 1e30])
def test_softmax_does_not_overflow(shift: float) -> None:
    x = torch.randn(2, 3, 6, dtype=torch.float64) + shift
    y = evaluate(Softmax(dims="BSE"), {"x": x}, SIZES)["y"]
    torch.testing.assert_close(y, torch.softmax(x, -1))


def test_softmax_without_keys_is_zero_and_passes_no_gradient() -> None:
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    x[0, 1] = -math.inf
    x[1, :, 3:] = -math.inf
    node = Softmax(dims="BSE")
    for y in (node.reference({"x": x})["y"], evaluate(node, {"x": x}, SIZES)["y"]):
        assert torch.equal(y[0, 1], torch.zeros(6, dtype=torch.float64))
        assert torch.equal(y[1, :, 3:], torch.zeros(3, 3, dtype=torch.float64))
        torch.testing.assert_close(y.sum(-1), torch.tensor([[1.0, 0.0, 1.0], [1.0, 1.0, 1.0]], dtype=torch.float64))
        dx = SoftmaxGradient(dims="BSE").reference({"dy": torch.randn_like(y), "y": y})["dx"]
        assert torch.equal(dx[0, 1], torch.zeros(6, dtype=torch.float64))


def test_softmax_with_an_infinite_score_is_nan() -> None:
    x = torch.zeros(2, 3, 6, dtype=torch.float64)
    x[0, 0, 0] = math.inf
    node = Softmax(dims="BSE")
    assert node.reference({"x": x})["y"][0, 0].isnan().any()
    assert evaluate(node, {"x": x}, SIZES)["y"][0, 0].isnan().any()
    assert evaluate(node, {"x": x}, SIZES)["y"][0, 1].isfinite().all()


def test_layer_norm_by_hand() -> None:
    """Row (1, 3): mean 2, variance 1."""
    operands = {"x": torch.tensor([[1.0, 3.0]]), "weight": torch.tensor([2.0, 4.0]), "bias": torch.tensor([0.5, 0.25])}
    operands = {name: value.double() for name, value in operands.items()}
    for values in (
        LayerNorm(dims="SE", eps=0.0).reference(operands),
        evaluate(LayerNorm(dims="SE", eps=0.0), operands, {"S": 1, "E": 2}),
    ):
        assert values["y"].tolist() == [[-1.5, 4.25]]
        assert (values["mean"].tolist(), values["rstd"].tolist()) == ([2.0], [1.0])


@pytest.mark.parametrize("eps", [1e-12, 1e-5, 0.1])
def test_layer_norm_of_a_constant_row(eps: float) -> None:
    """Nothing but eps under the root: the bias comes out."""
    operands = {"x": torch.full((2, 3, 6), 3.0), "weight": torch.randn(6), "bias": torch.randn(6)}
    operands = {name: value.double() for name, value in operands.items()}
    values = evaluate(LayerNorm(dims="BSE", eps=eps), operands, SIZES)
    torch.testing.assert_close(values["y"], operands["bias"].expand(2, 3, 6))
    torch.testing.assert_close(values["rstd"], torch.full((2, 3), eps**-0.5, dtype=torch.float64))


def test_the_variance_is_that_of_two_passes() -> None:
    """A mean of 1e8 costs no digits of the variance, as it would in a mean of squares."""
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    operands = {"x": x + 1e8, "weight": torch.ones(6).double(), "bias": torch.zeros(6).double()}
    values = evaluate(LayerNorm(dims="BSE"), operands, SIZES)
    expected = functional.layer_norm(x, (6,), eps=1e-12)
    torch.testing.assert_close(values["y"], expected, rtol=1e-6, atol=1e-6)


def test_statistics_are_wide() -> None:
    operands = {"x": torch.randn(2, 3, 6), "weight": torch.randn(6), "bias": torch.randn(6)}
    narrow = LayerNorm(dims="BSE").reference({name: value.bfloat16() for name, value in operands.items()})
    assert {name: value.dtype for name, value in narrow.items()} == {
        "y": torch.bfloat16,
        "mean": torch.float32,
        "rstd": torch.float32,
    }


def test_gradients_against_autograd() -> None:
    """Both operators on drawn statistics' true values, by PyTorch's own layer."""
    x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    weight, bias = (torch.randn(6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    dy = torch.randn(2, 3, 6, dtype=torch.float64)
    functional.layer_norm(x, (6,), weight, bias, 1e-5).backward(dy)
    operands = {"x": x.detach(), "weight": weight.detach(), "bias": bias.detach()}
    statistics = LayerNorm(dims="BSE", eps=1e-5).reference(operands)
    operands |= {"dy": dy, "mean": statistics["mean"], "rstd": statistics["rstd"]}
    torch.testing.assert_close(evaluate(LayerNormGradient(dims="BSE"), operands, SIZES)["dx"], x.grad)
    parameters = evaluate(LayerNormParameterGradient(dims="BSE"), operands, SIZES)
    torch.testing.assert_close(parameters["dweight"], weight.grad)
    torch.testing.assert_close(parameters["dbias"], bias.grad)


@pytest.mark.parametrize("eps", [-1e-5, math.inf, math.nan])
def test_refuses_an_eps_that_is_no_small_number(eps: float) -> None:
    with refused(f'eps={eps} of operator "odd" is not a finite number of at least 0'):
        LayerNorm("odd", "BSE", eps)


@pytest.mark.parametrize("kind", [Softmax, SoftmaxGradient, LayerNorm, LayerNormGradient, LayerNormParameterGradient])
def test_refuses_to_have_no_dimension(kind: type[Softmax]) -> None:
    with refused('operator "odd" has no dimension to normalize over'):
        kind("odd", "")
