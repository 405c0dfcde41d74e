"""Layers, shapes and masks that nobody picked: drawn from a seed, small enough for a CPU.

Dimension legend: `B` batch, `S` position, `H` head, `P` head size, `E` embedding, `U` feed-forward size.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stepdown.models.definition import ACTIVATIONS, NORMS, EncoderLayer
from stepdown.models.errors import OptionError
from stepdown.pipeline.verification.rule import DRAWS

MASK_KINDS = ("none", "right", "left", "holes", "rows", "mixed")
"""Which keys are masked: none; padding on the right or on the left; anywhere; whole rows; each row in another way."""

LARGEST_EMBED = 640
LARGEST_FFN = 1024
_POOLED_NUMBERS = 8192
_LARGEST_DRAWS = 256


@dataclass(frozen=True)
class Case:
    """A shape and a mode that a layer is verified at. ``mask`` is one of :data:`MASK_KINDS`."""

    batch: int
    seq: int
    mask: str
    dropout: bool
    draws: int
    seed: int


def draw_layer(generator: np.random.Generator) -> EncoderLayer:
    """A layer: 1 to 16 heads of size 24 to 128, odd sizes among them, and every option."""
    heads = int(generator.integers(1, 17))
    largest = min(128, LARGEST_EMBED // heads)
    head_size = int(generator.integers(24, largest + 1))
    if generator.random() < 0.7:
        head_size -= head_size % 8
    ffn = int(generator.integers(17, LARGEST_FFN + 1))
    if generator.random() < 0.6:
        ffn |= 1
    return EncoderLayer(
        embed=heads * head_size,
        heads=heads,
        ffn=ffn,
        activation=str(generator.choice(ACTIVATIONS)),
        norm=str(generator.choice(NORMS)),
        eps=float(generator.choice([1e-12, 1e-6, 1e-5])),
        bias=bool(generator.random() < 0.7),
        causal=bool(generator.random() < 0.4),
        dropout=_draw_probability(generator),
        attention_dropout=_draw_probability(generator),
        activation_dropout=_draw_probability(generator),
    )


def draw_case(generator: np.random.Generator, layer: EncoderLayer) -> Case:
    """A shape for ``layer``, with dropout in five of six cases; a batch or a length of one is frequent."""
    batch = 1 if generator.random() < 0.25 else int(generator.integers(2, 6))
    seq = 1 if generator.random() < 0.12 else int(generator.integers(2, 41))
    return Case(
        batch=batch,
        seq=seq,
        mask=str(generator.choice(MASK_KINDS)),
        dropout=bool(generator.random() < 5 / 6),
        draws=sufficient_draws(layer),
        seed=int(generator.integers(2**31)),
    )


def sufficient_draws(layer: EncoderLayer) -> int:
    """How many draws errors have to be pooled over so that chance does not decide.

    At least the rule's 16, and more where the smallest result (a bias gradient) holds few numbers: the relative
    spread of a pooled error is about `1 / sqrt(2 * numbers)`.
    """
    smallest = min(layer.embed, layer.ffn)
    return max(DRAWS, min(_LARGEST_DRAWS, -(-_POOLED_NUMBERS // smallest)))


def make_mask(kind: str, batch: int, seq: int, seed: int) -> Tensor | None:
    """A key mask, boolean `[B, S]`, true where a key is attended to; None for "none".

    :param kind: one of :data:`MASK_KINDS`; "rows" masks at least one row wholly, if it is the only one, too.
    :raises OptionError: when there is no such kind.
    """
    if kind not in MASK_KINDS:
        accepted = ", ".join(f'"{known}"' for known in MASK_KINDS)
        raise OptionError(f'mask "{kind}" is unknown; accepted are {accepted}.')
    generator = np.random.default_rng(seed)
    if kind == "none":
        return None
    if kind == "mixed":
        rows = [make_mask(str(generator.choice(MASK_KINDS[1:])), 1, seq, seed + 1 + row) for row in range(batch)]
        return torch.cat([row for row in rows if row is not None])
    lengths = generator.integers(1, seq + 1, size=(batch, 1))
    if kind == "holes":
        mask = generator.random((batch, seq)) < generator.uniform(0.3, 0.95, size=(batch, 1))
    else:
        mask = np.arange(seq) < lengths
    if kind == "left":
        mask = mask[:, ::-1].copy()
    if kind == "rows":
        mask[generator.permutation(batch)[: max(1, batch // 2)]] = False
    return torch.from_numpy(mask)


def _draw_probability(generator: np.random.Generator) -> float:
    """Zero in a quarter of the cases, else 0.01 to 0.5 with two decimals."""
    return 0.0 if generator.random() < 0.25 else round(float(generator.uniform(0.01, 0.5)), 2)
