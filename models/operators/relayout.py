"""Relayout: a copy of a container whose only purpose is another layout.

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
from stepdown.models.operators.operator import Operator, OperatorClass
from stepdown.models.operators.statements import Statement


@dace.library.node
class Relayout(Operator):
    """``y = x``, element by element, where ``y`` lies differently in memory than ``x``. Gradient: ``dx = dy``.

    Made by ``AssignLayouts`` alone. No row group holds it and no pass removes it: what a layout costs where PyTorch
    decides how a container lies stays visible, and is counted.

    ``dims`` is the order in which elements are visited, the order of ``y`` in memory, so that writes are sequential;
    ``container_dims`` are the logical dimensions of both containers.
    """

    operator_class = OperatorClass.ELEMENT_WISE
    inputs = ("x",)
    outputs = ("y",)
    implementations: dict[str, Any] = {}

    container_dims = properties.Property(dtype=str, default="", desc="Logical dimensions of both containers")

    def __init__(self, name: str = "relayout", dims: str = "E", container_dims: str = "E", **kwargs: Any) -> None:
        super().__init__(name, dims, **kwargs)
        if sorted(dims) != sorted(container_dims):
            raise CanonicalFormError(
                f'operator "{name}" visits "{dims}", which are not the dimensions "{container_dims}" of its containers'
            )
        self.container_dims = container_dims

    def operand_dims(self) -> dict[str, str]:
        return {"x": self.container_dims, "y": self.container_dims}

    def statements(self) -> tuple[Statement, ...]:
        return (Statement("y", self.container_dims, "x"),)

    def reference(self, operands: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"y": operands["x"].clone()}

    def differentiate(self, rule: GradientRule) -> None:
        rule.forward(rule.given("y"), "x")
