"""Gradients that are zero by mathematics, and the size of what they are sums of.

The rounding error of such a gradient has no relation to its value. It has one to its summands.

* Key bias. The gradient by the scores, `ds = w * (dw - sum_t w dw)`, sums to zero over the keys, so the gradient by the
  key bias, `sum_{b,t} dk[b,h,t,p]` with `dk[b,h,t,p] = sum_s ds[b,h,s,t] q[b,h,s,p] / sqrt(P)`, is zero. Its summands
  are the `dk` of the positions.
* Queries with at most one key (S = 1, or all keys but one masked). Then `w = 1`, `ds` is `dw - dw`, and the gradients
  by query, key, and their weights and biases are zero if that holds for every query. The summands are those of `ds`:
  `a = w |dw| + w sum_t w |dw|`, carried on through the same products with absolute values.

Dimension legend: `B` batch, `S` query position, `T` key position, `H` head, `P` head size, `E` embedding.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from stepdown.models.definition import EncoderLayer
from stepdown.models.reference import ReferenceEncoderLayer, attention_pattern
from stepdown.pipeline.verification.draws import gradient_name


@dataclass
class AttentionProbe:
    """Records what a reference layer's attention saw in its last call: projections, and the gradients by them.

    ``inputs`` is what the projections read; ``values`` are their results by name and, as "context", what the output
    projection reads, all of them `[B, S, E]`. After a backward pass, ``gradients`` holds the gradients by ``values``.
    """

    inputs: Tensor | None = None
    values: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def attach(cls, layer: ReferenceEncoderLayer) -> "AttentionProbe":
        """A probe of ``layer``, from its next call on."""
        probe = cls()

        def record(name: str, tensor: Tensor) -> None:
            probe.values[name] = tensor.detach()
            tensor.register_hook(lambda gradient: probe.gradients.__setitem__(name, gradient.detach()))

        def projected(name: str, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            probe.inputs = inputs[0].detach()
            record(name, output)

        def projection_hook(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
            return lambda module, inputs, output: projected(name, inputs, output)

        for name in ("query", "key", "value"):
            getattr(layer.attention.self, name).register_forward_hook(projection_hook(name))
        layer.attention.output.dense.register_forward_pre_hook(lambda module, inputs: record("context", inputs[0]))
        return probe


def summand_norms(
    definition: EncoderLayer, probe: AttentionProbe, attention_mask: Tensor | None, keep: Tensor | None
) -> dict[str, float]:
    """The Frobenius norms of the summands' sizes, by the names of the gradients that are mathematically zero.

    :param probe: after a backward pass in float64.
    :param attention_mask: `[B, S]` or None.
    :param keep: which attention weights dropout kept, `[B, H, S, T]`, or None where there was no dropout.
    """
    assert probe.inputs is not None, "the probed layer has not been called."
    batch, seq, embed = probe.inputs.shape
    heads = (definition.heads, definition.head_size)

    def split(tensor: Tensor) -> Tensor:
        return tensor.unflatten(-1, heads).transpose(1, 2)

    def merge(tensor: Tensor) -> Tensor:
        return tensor.transpose(1, 2).reshape(batch * seq, embed)

    allowed = attention_pattern(definition, batch, seq, attention_mask, probe.inputs.device)
    keys = torch.full((1,), seq) if allowed is None else allowed.sum(-1)
    norms: dict[str, float] = {}
    if (keys > 1).any():
        if definition.bias:
            norms["attention.self.key.bias"] = _norm(probe.gradients["key"].abs().sum((0, 1)))
        return {gradient_name(name): norm for name, norm in norms.items()}

    query, key, value = (split(probe.values[name]) for name in ("query", "key", "value"))
    scale = definition.head_size**-0.5
    weights = torch.ones(batch, definition.heads, seq, seq, dtype=query.dtype, device=query.device)
    if allowed is not None:
        weights = weights * allowed
    size = (split(probe.gradients["context"]) @ value.transpose(2, 3)).abs()
    if keep is not None:
        size = size * keep / (1 - definition.attention_dropout)
    size = weights * size + weights * (weights * size).sum(-1, keepdim=True)
    for name, summands in (
        ("query", merge(size @ key.abs() * scale)),
        ("key", merge(size.transpose(2, 3) @ query.abs() * scale)),
    ):
        norms[f"attention.self.{name}.weight"] = _norm(summands.T @ probe.inputs.reshape(-1, embed).abs())
        if definition.bias:
            norms[f"attention.self.{name}.bias"] = _norm(summands.sum(0))
    return {gradient_name(name): norm for name, norm in norms.items()}


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor))
