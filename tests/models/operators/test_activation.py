"""GELU and ReLU: published values, the ends of the axis, refusals."""

import math

import pytest
import torch
from torch.nn import functional

from stepdown.models.operators import Gelu, GeluGradient, Relu, ReluGradient

from .cases import evaluate, refused

X = torch.cat([torch.linspace(-40, 40, 2001, dtype=torch.float64), torch.tensor([0.0, -0.0, 1e-300, 1e4, -1e4])])
SIZES = {"E": X.numel()}


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_over_the_whole_axis(approximate: str) -> None:
    """The formulas that kernels use, far out too: no NaN from an overflowing exponential, zero on the left."""
    values = evaluate(Gelu(approximate=approximate), {"x": X}, SIZES)["y"]
    torch.testing.assert_close(values, functional.gelu(X, approximate=approximate), rtol=1e-13, atol=1e-15)
    assert values[X < -39].abs().max() == 0


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_gradient_over_the_whole_axis(approximate: str) -> None:
    x = X.clone().requires_grad_()
    functional.gelu(x, approximate=approximate).sum().backward()
    operands = {"dy": torch.ones_like(X), "x": X}
    values = evaluate(GeluGradient(approximate=approximate), operands, SIZES)["dx"]
    torch.testing.assert_close(values, x.grad, rtol=1e-12, atol=1e-14)


def test_gelu_by_hand() -> None:
    """x Phi(x) at 1: 0.841344746...; the tanh form is another function."""
    one = torch.ones(1, dtype=torch.float64)
    assert Gelu().reference({"x": one})["y"].item() == pytest.approx(0.8413447460685429, rel=1e-15)
    inner = math.sqrt(2 / math.pi) * 1.044715
    expected = 0.5 * (1 + math.tanh(inner))
    assert Gelu(approximate="tanh").reference({"x": one})["y"].item() == pytest.approx(expected, rel=1e-15)
    assert expected != pytest.approx(0.8413447460685429, rel=1e-5)


def test_relu_at_zero_and_nan() -> None:
    """PyTorch's choices: gradient zero at zero, NaN passes."""
    x = torch.tensor([-1.0, -0.0, 0.0, 2.0, math.nan, -math.inf, math.inf], dtype=torch.float64)
    sizes = {"E": x.numel()}
    dy = torch.full_like(x, 3.0)
    y = evaluate(Relu(), {"x": x}, sizes)["y"]
    assert y[:4].tolist() == [0.0, 0.0, 0.0, 2.0] and y[4].isnan() and y[5:].tolist() == [0.0, math.inf]
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(torch.relu(leaf), leaf, dy)
    dx = evaluate(ReluGradient(), {"dy": dy, "x": x}, sizes)["dx"]
    assert torch.equal(dx, expected)
    assert torch.equal(ReluGradient().reference({"dy": dy, "x": x})["dx"], expected)


@pytest.mark.parametrize("kind", [Gelu, GeluGradient])
def test_refuses_another_form(kind: type[Gelu] | type[GeluGradient]) -> None:
    with refused('approximate="erf" of operator "odd" is not "none" or "tanh"'):
        kind("odd", "E", "erf")


def test_the_gradient_has_the_form_of_its_operator() -> None:
    assert Gelu(approximate="tanh").statements() != Gelu().statements()
    assert GeluGradient(approximate="tanh").statements() != GeluGradient().statements()
