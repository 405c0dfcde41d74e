"""The layers in plain PyTorch: the oracle of every test and the baseline of every comparison.

Dimension legend: `B` batch, `S` query position, `T` key position, `H` head, `P` head size, `E` embedding,
`U` feed-forward size.
"""

from collections.abc import Mapping
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from stepdown.models.definition import EncoderLayer
from stepdown.models.errors import InputError, OptionError

AttentionKind = Literal["eager", "sdpa"]
"""How attention is computed: written out, or by `scaled_dot_product_attention`."""

INITIAL_DEVIATION = 0.02
"""Standard deviation of freshly drawn weights, as in BERT."""


class ReferenceEncoderLayer(nn.Module):
    """An encoder layer in plain PyTorch, with the parameter names of Hugging Face's ``BertLayer``.

    Any floating-point dtype; gradients come from autograd. A query whose keys are all masked has an attention context
    of zero and passes no gradient back through attention.

    :param definition: the layer.
    :param attention: "eager" or "sdpa".
    :raises OptionError: when ``attention`` is neither.
    """

    def __init__(self, definition: EncoderLayer, attention: AttentionKind = "eager") -> None:
        super().__init__()
        if attention not in get_args(AttentionKind):
            raise OptionError(f'attention "{attention}" is unknown; accepted are "eager" and "sdpa".')
        self.definition = definition
        self.kind = attention
        self.attention = _Attention(definition)
        self.intermediate = _Intermediate(definition)
        self.output = _Output(definition.ffn, definition)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the weights as BERT does: N(0, 0.02) and zero biases; layer normalization starts at one and zero."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(0, INITIAL_DEVIATION)
                if module.bias is not None:
                    module.bias.zero_()
            elif isinstance(module, nn.LayerNorm):
                module.reset_parameters()

    def forward(
        self, x: Tensor, attention_mask: Tensor | None = None, keep: Mapping[int, Tensor] | None = None
    ) -> Tensor:
        """The layer's output `[B, S, E]`.

        :param x: `[B, S, E]`
        :param attention_mask: `[B, S]`, boolean or integer; a key is attended to where it is not zero.
        :param keep: in training mode, dropout masks by site number (see ``EncoderLayer.dropout_sites``), used instead
            of drawn ones. They are boolean, or numbers if a derivative by the mask is wanted.
        :raises InputError: when ``x`` or the mask has another shape or dtype, or when ``keep`` holds attention weights
            and attention is "sdpa", which draws its own.
        """
        definition = self.definition
        if x.dim() != 3 or x.shape[2] != definition.embed:
            raise InputError(f"x of shape {list(x.shape)} was given; accepted is [batch, seq, {definition.embed}].")
        allowed = attention_pattern(definition, x.shape[0], x.shape[1], attention_mask, x.device)
        keep = keep or {}
        if definition.norm == "post":
            hidden = self.attention.output.LayerNorm(x + self._attend(x, allowed, keep))
            return self.output.LayerNorm(hidden + self._feed_forward(hidden, keep))
        hidden = x + self._attend(self.attention.output.LayerNorm(x), allowed, keep)
        return hidden + self._feed_forward(self.output.LayerNorm(hidden), keep)

    def _attend(self, x: Tensor, allowed: Tensor | None, keep: Mapping[int, Tensor]) -> Tensor:
        """The attention's output after its dropout; ``allowed`` is a boolean `[B or 1, 1, S or 1, T]`."""
        projections, heads = self.attention.self, (self.definition.heads, self.definition.head_size)
        query, key, value = (
            linear(x).unflatten(-1, heads).transpose(1, 2)
            for linear in (projections.query, projections.key, projections.value)
        )
        empty = None if allowed is None else ~allowed.any(-1, keepdim=True)
        if self.kind == "eager":
            context = self._eager(query, key, value, allowed, empty, keep)
        else:
            if self.training and 0 in keep:
                raise InputError('a mask for attention weights was given; accepted is that with attention="eager".')
            context = functional.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=None if allowed is None or empty is None else allowed | empty,
                dropout_p=self.definition.attention_dropout if self.training else 0.0,
            )
            if empty is not None:
                context = context.masked_fill(empty, 0)
        dense = self.attention.output.dense(context.transpose(1, 2).flatten(2))
        return self._drop(dense, 1, keep)

    def _eager(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        allowed: Tensor | None,
        empty: Tensor | None,
        keep: Mapping[int, Tensor],
    ) -> Tensor:
        """softmax(Q K^T / sqrt(P)) V on `[B, H, S, P]`, weights of masked keys exactly zero."""
        scores = query @ key.transpose(2, 3) * self.definition.head_size**-0.5
        if allowed is not None:
            scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        weights = scores.softmax(-1)
        if empty is not None:
            weights = weights.masked_fill(empty, 0)
        return self._drop(weights, 0, keep) @ value

    def _feed_forward(self, x: Tensor, keep: Mapping[int, Tensor]) -> Tensor:
        hidden = self.intermediate.dense(x)
        if self.definition.activation == "relu":
            hidden = functional.relu(hidden)
        else:
            hidden = functional.gelu(
                hidden, approximate="tanh" if self.definition.activation == "gelu_tanh" else "none"
            )
        return self._drop(self.output.dense(self._drop(hidden, 2, keep)), 3, keep)

    def _drop(self, x: Tensor, site: int, keep: Mapping[int, Tensor]) -> Tensor:
        probability = self.definition.dropout_sites[site]
        if not self.training or probability == 0:
            return x
        if site not in keep:
            return functional.dropout(x, probability)
        if keep[site].shape != x.shape:
            given, accepted = list(keep[site].shape), list(x.shape)
            raise InputError(f"a dropout mask of shape {given} was given for site {site}; accepted is {accepted}.")
        return x * keep[site].to(x.dtype) * (1 / (1 - probability))


class _Attention(nn.Module):
    def __init__(self, definition: EncoderLayer) -> None:
        super().__init__()
        self.self = _Projections(definition)
        self.output = _Output(definition.embed, definition)


class _Projections(nn.Module):
    def __init__(self, definition: EncoderLayer) -> None:
        super().__init__()
        self.query = nn.Linear(definition.embed, definition.embed, bias=definition.bias)
        self.key = nn.Linear(definition.embed, definition.embed, bias=definition.bias)
        self.value = nn.Linear(definition.embed, definition.embed, bias=definition.bias)


class _Intermediate(nn.Module):
    def __init__(self, definition: EncoderLayer) -> None:
        super().__init__()
        self.dense = nn.Linear(definition.embed, definition.ffn, bias=definition.bias)


class _Output(nn.Module):
    def __init__(self, inputs: int, definition: EncoderLayer) -> None:
        super().__init__()
        self.dense = nn.Linear(inputs, definition.embed, bias=definition.bias)
        self.LayerNorm = nn.LayerNorm(definition.embed, eps=definition.eps)


def attention_pattern(
    definition: EncoderLayer,
    batch: int,
    seq: int,
    attention_mask: Tensor | None,
    device: torch.device | str = "cpu",
) -> Tensor | None:
    """Which query may attend to which key, or None where every one may.

    :param attention_mask: `[B, S]`, boolean or integer.
    :returns: boolean, `[B or 1, 1, S or 1, T]`.
    :raises InputError: when the mask has another shape or a floating-point dtype.
    """
    allowed = None
    if attention_mask is not None:
        if attention_mask.is_floating_point() or attention_mask.is_complex():
            raise InputError(
                f"attention_mask of {attention_mask.dtype} was given; accepted is a boolean or integer one."
            )
        if attention_mask.shape != (batch, seq):
            given = list(attention_mask.shape)
            raise InputError(f"attention_mask of shape {given} was given; accepted is [{batch}, {seq}].")
        allowed = (attention_mask != 0)[:, None, None, :]
    if definition.causal:
        causal = torch.ones(seq, seq, dtype=torch.bool, device=device).tril()[None, None]
        allowed = causal if allowed is None else allowed & causal
    return allowed
