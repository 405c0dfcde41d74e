"""A compiled layer as a differentiable function of PyTorch's autograd."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from stepdown.pipeline.runtime.binding import Binding, ForwardPlan

Call = tuple[Binding, ForwardPlan, Tensor, Tensor, tuple[float, ...]]
"""What a call has besides input and parameters, as one argument: libraries, plan, mask, rng and probabilities."""


class LayerFunction(torch.autograd.Function):
    """`differentiable(call, x, *parameters)` -> the output `[B, S, E]`.

    Tensors are contiguous and of the right type. What the backward library reads is saved the way autograd knows:
    changes in place are noticed, hooks on saved tensors see everything, and it is freed with the graph. When no
    input needs a gradient nothing is saved.
    """

    @staticmethod
    def forward(ctx: Any, call: Call, x: Tensor, *parameters: Tensor) -> Tensor:
        binding, plan, mask, rng, probabilities = call
        output, kept = binding.forward(plan, x, mask, rng, probabilities, parameters)
        if any(ctx.needs_input_grad):
            ctx.binding = binding
            ctx.probabilities = probabilities
            ctx.save_for_backward(
                kept,
                x if binding.saves_input else None,
                output if binding.saves_output else None,
                mask if binding.saves_mask else None,
                rng if binding.saves_rng else None,
                *[parameters[index] for index in binding.saved_parameters],
            )
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        kept, x, output, mask, rng, *parameters = ctx.saved_tensors
        if gradient.is_neg():
            gradient = gradient.resolve_neg()
        gradients = ctx.binding.backward(
            gradient.contiguous(),
            kept,
            x,
            output,
            mask,
            rng,
            ctx.probabilities,
            parameters,
            ctx.needs_input_grad[1:],
        )
        if torch.is_grad_enabled():  # create_graph=True: these gradients must not pass for constants
            gradients = _refusing_derivatives(gradients)
        return None, *gradients


def _refusing_derivatives(gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The gradients, so that their own derivatives raise an error (PyTorch's ``once_differentiable`` does so only where
    the incoming gradient requires one)."""
    message = b"A compiled layer has no second derivatives (once_differentiable); first derivatives are accepted."
    present = [gradient.detach().requires_grad_() for gradient in gradients if gradient is not None]
    refused = iter(torch._C._functions.DelayedError(message, len(present))(*present))
    return [None if gradient is None else next(refused) for gradient in gradients]


# "LayerFunction.apply" without its first step, the search for torch.func's tensors in all arguments: the module refuses
# to be called there.
differentiable: Callable[..., Tensor] = super(torch.autograd.Function, LayerFunction).apply
