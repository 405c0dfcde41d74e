"""Statistical normalizations: softmax and LayerNorm over the last dimension, with their gradients.

Dimension legend: B batch, S query position, T key position, H head, P head size, E embedding, U feed-forward size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import dace.library
import torch
from dace import properties

from stepdown.models.dtypes import DataType
from stepdown.models.errors import CanonicalFormError
from stepdown.models.operators.gradient import GradientRule
from stepdown.models.operators.operator import Operator, OperatorClass, check_number
from stepdown.models.operators.statements import Statement


def check_row(name: str, dims: str) -> None:
    """Refuse to normalize over nothing."""
    if not dims:
        raise CanonicalFormError(f'operator "{name}" has no dimension to normalize over')


@dace.library.node
class Softmax(Operator):
    """``y_i = exp(x_i - max x) / sum_j exp(x_j - max x)`` over the last dimension.

    A row of minus infinities (every key masked) gives zeros. Gradient: :class:`SoftmaxGradient`.
    """

    operator_class = OperatorClass.STATISTICAL_NORMALIZATION
    inputs = ("x",)
    outputs = ("y",)
    implementations: dict[str, Any] = {}

    def __init__(self, name: str = "softmax", dims: str = "BHST", **kwargs: Any) -> None:
        super().__init__(name, dims, **kwargs)
        check_row(name, dims)

    def operand_dims(self) -> dict[str, str]:
        return {"x": self.dims, "y": self.dims}

    def statements(self) -> tuple[Statement, ...]:
        row = self.dims[:-1]
        return (
            Statement("peak", row, "x", "max"),
            Statement("shift", row, "0.0 if peak == NEGATIVE_INFINITY else peak"),
            Statement("exponential", self.dims, "exp(x - shift)"),
            Statement("total", row, "exponential", "sum"),
            Statement("inverse", row, "0.0 if total == 0.0 else 1.0 / total"),
            Statement("y", self.dims, "exponential * inverse"),
        )

    def reference(self, operands: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        x = operands["x"]
        masked = (x == float("-inf")).all(-1, keepdim=True)
        return {"y": torch.softmax(x.masked_fill(masked, 0.0), -1).masked_fill(masked, 0.0)}

    def differentiate(self, rule: GradientRule) -> None:
        node = SoftmaxGradient(f"{self.name}_gradient", self.dims)
        rule.add(node, {"dy": rule.given("y"), "y": rule.output("y")}, {"dx": rule.gradient_of("x")})


@dace.library.node
class SoftmaxGradient(Operator):
    """``dx_i = y_i (dy_i - sum_j dy_j y_j)`` over the last dimension."""

    operator_class = OperatorClass.STATISTICAL_NORMALIZATION
    inputs = ("dy", "y")
    outputs = ("dx",)
    implementations: dict[str, Any] = {}

    def __init__(self, name: str = "softmax_gradient", dims: str = "BHST", **kwargs: Any) -> None:
        super().__init__(name, dims, **kwargs)
        check_row(name, dims)

    def operand_dims(self) -> dict[str, str]:
        return {"dy": self.dims, "y": self.dims, "dx": self.dims}

    def statements(self) -> tuple[Statement, ...]:
        return (
            Statement("product", self.dims[:-1], "dy * y", "sum"),
            Statement("dx", self.dims, "y * (dy - product)"),
        )

    def reference(self, operands: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        dy, y = operands["dy"], operands["y"]
        return {"dx": torch.ops.aten._softmax_backward_data(dy, y, -1, y.dtype)}

    def differentiate(self, rule: GradientRule) -> None:
        raise CanonicalFormError(f'operator "{self.name}" belongs to a backward graph and has no gradient rule')


@dace.library.node
class LayerNorm(Operator):
    """``y_i = (x_i - mean) rstd weight_i + bias_i`` with ``rstd = 1 / sqrt(var + eps)`` over the last dimension.

    Extra outputs ``mean`` and ``rstd``, one word a row in the accumulation type, exist where the gradient reads them.
    The variance is the mean of squared distances (two passes). Source: Ba et al., arXiv 1607.06450.
    """

    operator_class = OperatorClass.STATISTICAL_NORMALIZATION
    inputs = ("x", "weight", "bias")
    outputs = ("y",)
    extra_outputs = ("mean", "rstd")
    implementations: dict[str, Any] = {}

    eps = properties.Property(dtype=float, default=1e-12, desc="Added to the variance")

    def __init__(self, name: str = "layer_norm", dims: str = "BSE", eps: float = 1e-12, **kwargs: Any) -> None:
        super().__init__(name, dims, **kwargs)
        check_row(name, dims)
        self.eps = check_number(name, "eps", eps, least=0.0)

    def operand_dims(self) -> dict[str, str]:
        row, last = self.dims[:-1], self.dims[-1]
        return {"x": self.dims, "weight": last, "bias": last, "y": self.dims, "mean": row, "rstd": row}

    def statements(self) -> tuple[Statement, ...]:
        row, extent = self.dims[:-1], f"size_{self.dims[-1]}"
        return (
            Statement("total", row, "x", "sum"),
            Statement("mean", row, f"total / {extent}"),
            Statement("squares", row, "(x - mean) * (x - mean)", "sum"),
            Statement("rstd", row, f"1.0 / sqrt(squares / {extent} + {self.eps!r})"),
            Statement("y", self.dims, "(x - mean) * rstd * weight + bias"),
        )

    def reference(self, operands: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        x = operands["x"]
        y = torch.nn.functional.layer_norm(x, x.shape[-1:], operands["weight"], operands["bias"], self.eps)
        wide = x if x.dtype == torch.float64 else x.float()
        variance, mean = torch.var_mean(wide, -1, correction=0)
        return {"y": y, "mean": mean, "rstd": torch.rsqrt(variance + self.eps)}

    def differentiate(self, rule: GradientRule) -> None:
        dy, x = rule.given("y"), rule.operand("x")
        mean, rstd = rule.output("mean"), rule.output("rstd")
        if "x" in rule.required:
            node = LayerNormGradient(f"{self.name}_gradient", self.dims)
            operands = {"dy": dy, "x": x, "weight": rule.operand("weight"), "mean": mean, "rstd": rstd}
            rule.add(node, operands, {"dx": rule.gradient_of("x")})
        if "weight" in rule.required or "bias" in rule.required:
            parameters = LayerNormParameterGradient(f"{self.name}_parameter_gradient", self.dims)
            operands = {"dy": dy, "x": x, "mean": mean, "rstd": rstd}
            results = {"dweight": rule.gradient_of("weight"), "dbias": rule.gradient_of("bias")}
            rule.add(parameters, operands, results)


@dace.library.node
class LayerNormGradient(Operator):
    """``dx = rstd (g - (sum g + h sum(g h)) / N)`` with ``g = dy weight`` and ``h = (x - mean) rstd``."""

    operator_class = OperatorClass.STATISTICAL_NORMALIZATION
    inputs = ("dy", "x", "weight", "mean", "rstd")
    outputs = ("dx",)
    implementations: dict[str, Any] = {}

    def __init__(self, name: str = "layer_norm_gradient", dims: str = "BSE", **kwargs: Any) -> None:
        super().__init__(name, dims, **kwargs)
        check_row(name, dims)

    def operand_dims(self) -> dict[str, str]:
        row = self.dims[:-1]
        return {"dy": self.dims, "x": self.dims, "weight": self.dims[-1], "mean": row, "rstd": row, "dx": self.dims}

    def statements(self) -> tuple[Statement, ...]:
        row, extent = self.dims[:-1], f"size_{self.dims[-1]}"
        return (
            Statement("sum_g", row, "dy * weight", "sum"),
            Statement("sum_gh", row, "dy * weight * ((x - mean) * rstd)", "sum"),
            Statement("offset", row, f"sum_g / {extent}"),
            Statement("slope", row, f"sum_gh / {extent}"),
            Statement("dx", self.dims, "rstd * (dy * weight - offset - (x - mean) * rstd * slope)"),
        )

    def reference(self, operands: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        dy, x, weight = operands["dy"], operands["x"], operands["weight"]
        normalized = (x - operands["mean"][..., None]) * operands["rstd"][..., None]
        weighted = dy * weight
        inner = weighted - weighted.mean(-1, keepdim=True) - normalized * (weighted * normalized).mean(-1, keepdim=True)
        return {"dx": (inner * operands["rstd"][..., None]).to(x.dtype)}

    def differentiate(self, rule: GradientRule) -> None:
        raise CanonicalFormError(f'operator "{self.name}" belongs to a backward graph and has no gradient rule')


@dace.library.node
class LayerNormParameterGradient(Operator):
    """``dweight = sum over rows of dy h`` with ``h = (x - mean) rstd``, and ``dbias = sum over rows of dy``."""

    operator_class = OperatorClass.STATISTICAL_NORMALIZATION
    inputs = ("dy", "x", "mean", "rstd")
    outputs = ("dweight", "dbias")
    implementations: dict[str, Any] = {}

    def __init__(self, name: str = "layer_norm_parameter_gradient", dims: str = "BSE", **kwargs: Any) -> None:
        super().__init__(name, dims, **kwargs)
        check_row(name, dims)

    def operand_dims(self) -> dict[str, str]:
        row, last = self.dims[:-1], self.dims[-1]
        return {"dy": self.dims, "x": self.dims, "mean": row, "rstd": row, "dweight": last, "dbias": last}

    def result_types(self, operand: DataType) -> dict[str, DataType]:
        return {"dweight": operand, "dbias": operand}

    def statements(self) -> tuple[Statement, ...]:
        last = self.dims[-1]
        return (
            Statement("total_weight", last, "dy * ((x - mean) * rstd)", "sum"),
            Statement("total_bias", last, "dy", "sum"),
            Statement("dweight", last, "total_weight"),
            Statement("dbias", last, "total_bias"),
        )

    def reference(self, operands: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        dy = operands["dy"]
        normalized = (operands["x"] - operands["mean"][..., None]) * operands["rstd"][..., None]
        rows = tuple(range(dy.dim() - 1))
        return {"dweight": (dy * normalized).sum(rows).to(dy.dtype), "dbias": dy.sum(rows)}

    def differentiate(self, rule: GradientRule) -> None:
        raise CanonicalFormError(f'operator "{self.name}" belongs to a backward graph and has no gradient rule')
