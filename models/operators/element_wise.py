"""Element-wise operators: bias, residual addition, scale, masks, and the sum over rows that a bias' gradient is.

Dimension legend: B batch, S query position, T key position, H head, P head size, E embedding, U feed-forward size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import dace.library
import torch
from dace import properties

from stepdown.models.errors import CanonicalFormError
from stepdown.models.operators.gradient import GradientRule
from stepdown.models.operators.operator import Operator, OperatorClass, broadcast, check_number
from stepdown.models.operators.statements import Statement


@dace.library.node
class Bias(Operator):
    """``y = x + bias``, the bias broadcast over the dimensions it lacks. Gradients: ``dx = dy``, ``dbias = sum dy``."""

    operator_class = OperatorClass.ELEMENT_WISE
    inputs = ("x", "bias")
    outputs = ("y",)
    implementations: dict[str, Any] = {}

    bias_dims = properties.Property(dtype=str, default="", desc="Dimensions of the bias")

    def __init__(self, name: str = "bias", dims: str = "E", bias_dims: str = "E", **kwargs: Any) -> None:
        super().__init__(name, dims, **kwargs)
        check_subset(name, bias_dims, dims)
        self.bias_dims = bias_dims

    def operand_dims(self) -> dict[str, str]:
        return {"x": self.dims, "bias": self.bias_dims, "y": self.dims}

    def statements(self) -> tuple[Statement, ...]:
        return (Statement("y", self.dims, "x + bias"),)

    def reference(self, operands: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"y": operands["x"] + broadcast(operands["bias"], self.bias_dims, self.dims)}

    def differentiate(self, rule: GradientRule) -> None:
        given = rule.given("y")
        if "x" in rule.required:
            rule.forward(given, "x")
        if "bias" in rule.required:
            node = SumRows(f"{self.name}_gradient", self.dims, self.bias_dims)
            rule.add(node, {"x": given}, {"y": rule.gradient_of("bias")})


@dace.library.node
class SumRows(Operator):
    """``y[sum_dims] = sum of x`` over the other dimensions: the gradient of a broadcast operand."""

    operator_class = OperatorClass.ELEMENT_WISE
    inputs = ("x",)
    outputs = ("y",)
    implementations: dict[str, Any] = {}

    sum_dims = properties.Property(dtype=str, default="", desc="Dimensions that remain")

    def __init__(self, name: str = "sum_rows", dims: str = "E", sum_dims: str = "E", **kwargs: Any) -> None:
        super().__init__(name, dims, **kwargs)
        check_subset(name, sum_dims, dims)
        self.sum_dims = sum_dims

    def operand_dims(self) -> dict[str, str]:
        return {"x": self.dims, "y": self.sum_dims}

    def statements(self) -> tuple[Statement, ...]:
        if self.sum_dims == self.dims:
            return (Statement("y", self.dims, "x"),)
        return (Statement("total", self.sum_dims, "x", "sum"), Statement("y", self.sum_dims, "total"))

    def reference(self, operands: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        gone = [axis for axis, letter in enumerate(self.dims) if letter not in self.sum_dims]
        left = "".join(letter for letter in self.dims if letter in self.sum_dims)
        total = operands["x"].sum(gone) if gone else operands["x"].clone()
        return {"y": total.permute([left.index(letter) for letter in self.sum_dims])}

    def differentiate(self, rule: GradientRule) -> None:
        raise CanonicalFormError(f'operator "{self.name}" belongs to a backward graph and has no gradient rule')


@dace.library.node
class Add(Operator):
    """``y = a + b``: a residual connection, or two gradients of one container. Gradients: ``da = db = dy``."""

    operator_class = OperatorClass.ELEMENT_WISE
    inputs = ("a", "b")
    outputs = ("y",)
    implementations: dict[str, Any] = {}

    def __init__(self, name: str = "add", dims: str = "E", **kwargs: Any) -> None:
        super().__init__(name, dims, **kwargs)

    def operand_dims(self) -> dict[str, str]:
        return {"a": self.dims, "b": self.dims, "y": self.dims}

    def statements(self) -> tuple[Statement, ...]:
        return (Statement("y", self.dims, "a + b"),)

    def reference(self, operands: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"y": operands["a"] + operands["b"]}

    def differentiate(self, rule: GradientRule) -> None:
        for connector in rule.required:
            rule.forward(rule.given("y"), connector)


@dace.library.node
class Scale(Operator):
    """``y = factor * x``. Gradient: ``dx = factor * dy``."""

    operator_class = OperatorClass.ELEMENT_WISE
    inputs = ("x",)
    outputs = ("y",)
    implementations: dict[str, Any] = {}

    factor = properties.Property(dtype=float, default=1.0, desc="The factor")

    def __init__(self, name: str = "scale", dims: str = "E", factor: float = 1.0, **kwargs: Any) -> None:
        super().__init__(name, dims, **kwargs)
        self.factor = check_number(name, "factor", factor)

    def operand_dims(self) -> dict[str, str]:
        return {"x": self.dims, "y": self.dims}

    def statements(self) -> tuple[Statement, ...]:
        return (Statement("y", self.dims, f"x * {self.factor!r}"),)

    def reference(self, operands: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"y": operands["x"] * self.factor}

    def differentiate(self, rule: GradientRule) -> None:
        node = Scale(f"{self.name}_gradient", self.dims, self.factor)
        rule.add(node, {"x": rule.given("y")}, {"y": rule.gradient_of("x")})


@dace.library.node
class KeyPaddingMask(Operator):
    """``y = x where mask[b, t], fill elsewhere``: minus infinity for scores, zero for their gradient.

    ``mask`` is boolean over (B, T), true for keys to attend to. Gradient: ``dx = dy where mask, 0 elsewhere``.
    """

    operator_class = OperatorClass.ELEMENT_WISE
    inputs = ("x", "mask")
    outputs = ("y",)
    implementations: dict[str, Any] = {}

    gradient = properties.Property(dtype=bool, default=False, desc="Fill with zero instead of minus infinity")

    def __init__(
        self, name: str = "key_padding_mask", dims: str = "BHST", gradient: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(name, dims, **kwargs)
        check_subset(name, "BT", dims)
        self.gradient = gradient

    def operand_dims(self) -> dict[str, str]:
        return {"x": self.dims, "mask": "BT", "y": self.dims}

    def statements(self) -> tuple[Statement, ...]:
        fill = "0.0" if self.gradient else "NEGATIVE_INFINITY"
        return (Statement("y", self.dims, f"x if mask else {fill}"),)

    def reference(self, operands: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        mask = broadcast(operands["mask"].bool(), "BT", self.dims)
        return {"y": operands["x"].masked_fill(~mask, 0.0 if self.gradient else float("-inf"))}

    def differentiate(self, rule: GradientRule) -> None:
        node = KeyPaddingMask(f"{self.name}_gradient", self.dims, gradient=True)
        rule.add(node, {"x": rule.given("y"), "mask": rule.operand("mask")}, {"y": rule.gradient_of("x")})


@dace.library.node
class CausalMask(Operator):
    """``y = x where t <= s, fill elsewhere``. Gradient: ``dx = dy where t <= s, 0 elsewhere``."""

    operator_class = OperatorClass.ELEMENT_WISE
    inputs = ("x",)
    outputs = ("y",)
    implementations: dict[str, Any] = {}

    gradient = properties.Property(dtype=bool, default=False, desc="Fill with zero instead of minus infinity")

    def __init__(self, name: str = "causal_mask", dims: str = "BHST", gradient: bool = False, **kwargs: Any) -> None:
        super().__init__(name, dims, **kwargs)
        check_subset(name, "ST", dims)
        self.gradient = gradient

    def operand_dims(self) -> dict[str, str]:
        return {"x": self.dims, "y": self.dims}

    def statements(self) -> tuple[Statement, ...]:
        fill = "0.0" if self.gradient else "NEGATIVE_INFINITY"
        return (Statement("y", self.dims, f"x if position_T <= position_S else {fill}"),)

    def reference(self, operands: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        x = operands["x"]
        queries = torch.arange(x.shape[self.dims.index("S")])
        keys = torch.arange(x.shape[self.dims.index("T")])
        visible = broadcast(keys[None, :] <= queries[:, None], "ST", self.dims)
        return {"y": x.masked_fill(~visible, 0.0 if self.gradient else float("-inf"))}

    def differentiate(self, rule: GradientRule) -> None:
        node = CausalMask(f"{self.name}_gradient", self.dims, gradient=True)
        rule.add(node, {"x": rule.given("y")}, {"y": rule.gradient_of("x")})


def check_subset(name: str, part: str, dims: str) -> None:
    """Refuse an operand with a dimension that the operator does not iterate over."""
    for letter in part:
        if letter not in dims:
            raise CanonicalFormError(
                f'operand dimension "{letter}" of operator "{name}" is not one of its own, "{dims}"'
            )
