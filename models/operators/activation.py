"""Activations: ReLU and GELU (erf or tanh form), with their gradients.

Dimension legend: B batch, S query position, T key position, H head, P head size, E embedding, U feed-forward size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import dace.library
import torch
from dace import properties

from stepdown.models.errors import CanonicalFormError
from stepdown.models.operators.gradient import GradientRule
from stepdown.models.operators.operator import Operator, OperatorClass
from stepdown.models.operators.statements import Statement

SQRT_HALF = repr(math.sqrt(0.5))
DENSITY = repr(1.0 / math.sqrt(2.0 * math.pi))
SLOPE = math.sqrt(2.0 / math.pi)
CUBIC = 0.044715


@dace.library.node
class Relu(Operator):
    """``y = x where x > 0, 0 elsewhere`` (NaN stays NaN). Gradient: ``dx = dy where x > 0, 0 elsewhere``."""

    operator_class = OperatorClass.ELEMENT_WISE
    inputs = ("x",)
    outputs = ("y",)
    implementations: dict[str, Any] = {}

    def __init__(self, name: str = "relu", dims: str = "E", **kwargs: Any) -> None:
        super().__init__(name, dims, **kwargs)

    def operand_dims(self) -> dict[str, str]:
        return {"x": self.dims, "y": self.dims}

    def statements(self) -> tuple[Statement, ...]:
        return (Statement("y", self.dims, "0.0 if x <= 0.0 else x"),)

    def reference(self, operands: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"y": torch.relu(operands["x"])}

    def differentiate(self, rule: GradientRule) -> None:
        node = ReluGradient(f"{self.name}_gradient", self.dims)
        rule.add(node, {"dy": rule.given("y"), "x": rule.operand("x")}, {"dx": rule.gradient_of("x")})


@dace.library.node
class ReluGradient(Operator):
    """``dx = dy where x > 0, 0 elsewhere`` (PyTorch's choice of 0 at x = 0; dy where x is NaN)."""

    operator_class = OperatorClass.ELEMENT_WISE
    inputs = ("dy", "x")
    outputs = ("dx",)
    implementations: dict[str, Any] = {}

    def __init__(self, name: str = "relu_gradient", dims: str = "E", **kwargs: Any) -> None:
        super().__init__(name, dims, **kwargs)

    def operand_dims(self) -> dict[str, str]:
        return {"dy": self.dims, "x": self.dims, "dx": self.dims}

    def statements(self) -> tuple[Statement, ...]:
        return (Statement("dx", self.dims, "0.0 if x <= 0.0 else dy"),)

    def reference(self, operands: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"dx": torch.ops.aten.threshold_backward(operands["dy"], operands["x"], 0)}

    def differentiate(self, rule: GradientRule) -> None:
        raise CanonicalFormError(f'operator "{self.name}" belongs to a backward graph and has no gradient rule')


def check_approximation(name: str, approximate: str) -> None:
    """Refuse a form of GELU that PyTorch does not have."""
    if approximate not in ("none", "tanh"):
        raise CanonicalFormError(f'approximate="{approximate}" of operator "{name}" is not "none" or "tanh"')


@dace.library.node
class Gelu(Operator):
    """``y = x Phi(x)``, Phi the normal distribution's (``approximate="none"``), or its tanh form.

    The tanh form ``x/2 (1 + tanh u)`` with ``u = sqrt(2/pi) (x + 0.044715 x^3)`` is evaluated as
    ``x / (1 + exp(-2u))``, which is the same and loses no digits for negative x.

    Source: Hendrycks and Gimpel, arXiv 1606.08415.
    """

    operator_class = OperatorClass.ELEMENT_WISE
    inputs = ("x",)
    outputs = ("y",)
    implementations: dict[str, Any] = {}

    approximate = properties.Property(dtype=str, default="none", desc='"none" (erf) or "tanh"')

    def __init__(self, name: str = "gelu", dims: str = "E", approximate: str = "none", **kwargs: Any) -> None:
        super().__init__(name, dims, **kwargs)
        check_approximation(name, approximate)
        self.approximate = approximate

    def operand_dims(self) -> dict[str, str]:
        return {"x": self.dims, "y": self.dims}

    def statements(self) -> tuple[Statement, ...]:
        if self.approximate == "none":
            return (Statement("y", self.dims, f"x * (0.5 + 0.5 * erf(x * {SQRT_HALF}))"),)
        return (
            Statement("slope", self.dims, logistic_argument()),
            Statement("y", self.dims, "x / (1.0 + exp(slope))"),
        )

    def reference(self, operands: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"y": torch.nn.functional.gelu(operands["x"], approximate=self.approximate)}

    def differentiate(self, rule: GradientRule) -> None:
        node = GeluGradient(f"{self.name}_gradient", self.dims, self.approximate)
        rule.add(node, {"dy": rule.given("y"), "x": rule.operand("x")}, {"dx": rule.gradient_of("x")})


def logistic_argument() -> str:
    """``-2 sqrt(2/pi) (x + 0.044715 x^3)``, the exponent of the tanh form."""
    return f"x * ({-2.0 * SLOPE!r} - {2.0 * SLOPE * CUBIC!r} * x * x)"


@dace.library.node
class GeluGradient(Operator):
    """``dx = dy (Phi(x) + x phi(x))``, or the derivative of the tanh form."""

    operator_class = OperatorClass.ELEMENT_WISE
    inputs = ("dy", "x")
    outputs = ("dx",)
    implementations: dict[str, Any] = {}

    approximate = properties.Property(dtype=str, default="none", desc='"none" (erf) or "tanh"')

    def __init__(self, name: str = "gelu_gradient", dims: str = "E", approximate: str = "none", **kwargs: Any) -> None:
        super().__init__(name, dims, **kwargs)
        check_approximation(name, approximate)
        self.approximate = approximate

    def operand_dims(self) -> dict[str, str]:
        return {"dy": self.dims, "x": self.dims, "dx": self.dims}

    def statements(self) -> tuple[Statement, ...]:
        if self.approximate == "none":
            return (
                Statement("distribution", self.dims, f"0.5 + 0.5 * erf(x * {SQRT_HALF})"),
                Statement("density", self.dims, f"{DENSITY} * exp(-0.5 * x * x)"),
                Statement("dx", self.dims, "dy * (distribution + x * density)"),
            )
        steepness = f"{2.0 * SLOPE!r} + {6.0 * SLOPE * CUBIC!r} * x * x"
        return (
            Statement("logistic", self.dims, f"1.0 / (1.0 + exp({logistic_argument()}))"),
            Statement("dx", self.dims, f"dy * (logistic + x * logistic * (1.0 - logistic) * ({steepness}))"),
        )

    def reference(self, operands: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"dx": torch.ops.aten.gelu_backward(operands["dy"], operands["x"], approximate=self.approximate)}

    def differentiate(self, rule: GradientRule) -> None:
        raise CanonicalFormError(f'operator "{self.name}" belongs to a backward graph and has no gradient rule')
