"""One draw of everything that a layer is verified with, and a layer's output and gradients on it.

Dimension legend: `B` batch, `S` position, `E` embedding.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stepdown.models.definition import EncoderLayer
from stepdown.models.dtypes import DataType
from stepdown.models.errors import InputError

OUTPUT = "y"
"""The name of a layer's output among its results."""

BIAS_DEVIATION = 0.1
"""Standard deviation of drawn biases, and of layer normalization's factors around one."""


def gradient_name(name: str) -> str:
    """The name that the gradient of "x" or of a parameter has among a layer's results."""
    return f"{name}.grad"


@dataclass(frozen=True)
class Draw:
    """Inputs, all in the dtype under test.

    ``x`` and ``upstream`` are `[B, S, E]`; the loss is `sum(y * upstream)`. ``parameters`` has Hugging Face's names.
    """

    x: Tensor
    upstream: Tensor
    parameters: dict[str, Tensor]

    def to(self, dtype: torch.dtype) -> "Draw":
        """The same numbers in another dtype."""
        parameters = {name: value.to(dtype) for name, value in self.parameters.items()}
        return Draw(self.x.to(dtype), self.upstream.to(dtype), parameters)


def draw_inputs(
    definition: EncoderLayer, dtype: DataType, batch: int, seq: int, seed: int, device: torch.device | str = "cpu"
) -> Draw:
    """Standard normal inputs and weights at fan-in scale: N(0, 1 / inputs).

    Numbers are drawn in float64 and rounded, so that every dtype sees the same ones.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(shape: tuple[int, ...], mean: float = 0.0, deviation: float = 1.0) -> Tensor:
        values = torch.randn(shape, generator=generator, dtype=torch.float64) * deviation + mean
        return values.to(device, dtype.torch)

    parameters = {}
    for name, parameter in definition.parameters().items():
        if len(parameter.shape) == 2:
            parameters[name] = normal(parameter.shape, deviation=parameter.shape[1] ** -0.5)
        else:
            parameters[name] = normal(parameter.shape, float(name.endswith("LayerNorm.weight")), BIAS_DEVIATION)
    shape = (batch, seq, definition.embed)
    return Draw(normal(shape), normal(shape), parameters)


@torch.no_grad()
def load_parameters(module: nn.Module, parameters: Mapping[str, Tensor]) -> None:
    """Write values into a module's parameters, in place.

    :raises InputError: when the module has other parameters.
    """
    own = dict(module.named_parameters())
    if own.keys() != parameters.keys():
        missing, unknown = parameters.keys() - own.keys(), own.keys() - parameters.keys()
        raise InputError(f"a module without parameters {sorted(missing)} and with {sorted(unknown)} was given.")
    for name, value in parameters.items():
        own[name].copy_(value)


def run_layer(module: nn.Module, draw: Draw, forward: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """A layer's output and the gradients of `sum(y * upstream)` by `x` and every parameter, by name.

    :param forward: calls ``module`` with what else it needs.
    """
    x = draw.x.detach().requires_grad_()
    parameters = dict(module.named_parameters())
    y = forward(x)
    if y.shape != x.shape or y.dtype != x.dtype:
        raise InputError(
            f"the layer returned {list(y.shape)} of {y.dtype}; accepted is the input's {list(x.shape)} of {x.dtype}."
        )
    gradients = torch.autograd.grad(y, [x, *parameters.values()], draw.upstream, allow_unused=True)
    results = {OUTPUT: y.detach()}
    for name, source, gradient in zip(["x", *parameters], [x, *parameters.values()], gradients, strict=True):
        # A parameter that is not part of the graph has a gradient of zero; the rule decides whether that is right.
        results[gradient_name(name)] = torch.zeros_like(source) if gradient is None else gradient
    return results
