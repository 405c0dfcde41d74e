"""Dropout with a counter-based generator: its mask is regenerated, never stored.

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
from stepdown.models.operators.operator import PAIR, Operator, OperatorClass
from stepdown.models.operators.philox import keep_mask
from stepdown.models.operators.statements import Statement


@dace.library.node
class Dropout(Operator):
    """``y = x / (1 - p) where word >= threshold(p), 0 x elsewhere``.

    ``rng`` holds (seed, offset) as two int64, ``p`` the probability as a float64 scalar read at run time (zero keeps
    everything). ``word`` is the Philox 4x32-10 word of the element's row-major index (Salmon et al., SC 2011) in the
    stream of dropout site ``site``. Gradient: the same operator on ``dy``.
    """

    operator_class = OperatorClass.ELEMENT_WISE
    inputs = ("x", "rng", "p")
    outputs = ("y",)
    implementations: dict[str, Any] = {}

    site = properties.Property(
        dtype=int, default=0, desc="Number of the dropout site: the operator's own random stream"
    )

    def __init__(self, name: str = "dropout", dims: str = "BSE", site: int = 0, **kwargs: Any) -> None:
        super().__init__(name, dims, **kwargs)
        if not 0 <= site < 256:
            raise CanonicalFormError(f'site {site} of operator "{name}" is not between 0 and 255')
        self.site = site

    def operand_dims(self) -> dict[str, str]:
        return {"x": self.dims, "rng": PAIR, "p": "", "y": self.dims}

    def statements(self) -> tuple[Statement, ...]:
        return (
            Statement("threshold", "", "dropout_threshold(p)", kind="word"),
            Statement("kept_scale", "", "dropout_scale(p)"),
            Statement("word", self.dims, "", kind="word", random=self.site, guard="threshold"),
            Statement("y", self.dims, "x * (kept_scale if word >= threshold else 0.0)"),
        )

    def reference(self, operands: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        x, probability = operands["x"], float(operands["p"])
        seed, offset = (int(value) for value in operands["rng"])
        keep = torch.from_numpy(keep_mask(seed, offset, self.site, tuple(x.shape), probability))
        return {"y": x * keep.to(x.dtype) * (1.0 / (1.0 - probability))}

    def differentiate(self, rule: GradientRule) -> None:
        node = Dropout(f"{self.name}_gradient", self.dims, self.site)
        operands = {"x": rule.given("y"), "rng": rule.operand("rng"), "p": rule.operand("p")}
        rule.add(node, operands, {"y": rule.gradient_of("x")})
