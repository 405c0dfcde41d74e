"""Stand-ins for compiled layers: the PyTorch reference with the dropout generator, once right and often wrong."""

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn

from stepdown.models import EncoderLayer, ReferenceEncoderLayer
from stepdown.models.dtypes import resolve_dtype
from stepdown.models.operators.philox import keep_mask

MakeStandIn = Callable[[EncoderLayer, str, str], "StandIn"]


class StandIn(ReferenceEncoderLayer):
    """A layer with the interface of a compiled one."""

    last_rng: Tensor | None = None

    def forward(
        self, x: Tensor, attention_mask: Tensor | None = None, keep: Mapping[int, Tensor] | None = None
    ) -> Tensor:
        self.last_rng = torch.randint(2**62, (2,)) if self.training else None
        return super().forward(x, attention_mask, self.masks(x.shape[0], x.shape[1]) if self.training else None)

    def masks(self, batch: int, seq: int) -> dict[int, Tensor]:
        assert self.last_rng is not None
        seed, offset = self.last_rng.tolist()
        return {
            site: torch.from_numpy(
                keep_mask(seed, offset, site, self.definition.dropout_shape(site, batch, seq), probability)
            )
            for site, probability in enumerate(self.definition.dropout_sites)
        }


def with_gradient_of(value: Tensor, other: Tensor) -> Tensor:
    """The first tensor's value with the second one's gradient."""
    return value.detach() + (other - other.detach())


class ScaleMissingInBackward(StandIn):
    """The gradient by the scores is not divided by the root of the head size."""

    def _eager(self, query: Tensor, key: Tensor, *others: object) -> Tensor:  # type: ignore[override]
        scale = self.definition.head_size**0.5
        return super()._eager(with_gradient_of(query, query * scale), key, *others)  # type: ignore[arg-type]


class OtherAttentionMask(StandIn):
    """The dropout of attention weights is numbered like another one."""

    def masks(self, batch: int, seq: int) -> dict[int, Tensor]:
        assert self.last_rng is not None
        seed, offset = self.last_rng.tolist()
        shape = self.definition.dropout_shape(0, batch, seq)
        other = keep_mask(seed, offset, 5, shape, self.definition.attention_dropout)
        return {**super().masks(batch, seq), 0: torch.from_numpy(other)}


class OneBitFlipped(StandIn):
    """One element of the last dropout is not what the generator says."""

    site = 3

    def masks(self, batch: int, seq: int) -> dict[int, Tensor]:
        masks = super().masks(batch, seq)
        flat = masks[self.site].view(-1)
        flat[flat.numel() // 2] ^= True
        return masks


class OneAttentionBitFlipped(OneBitFlipped):
    """One attention weight is not dropped, or kept, as the generator says."""

    site = 0


class ResidualGradientDropped(StandIn):
    """The gradient does not pass along the first residual connection."""

    def _attend(self, x: Tensor, allowed: Tensor | None, keep: Mapping[int, Tensor]) -> Tensor:
        return super()._attend(x, allowed, keep) - with_gradient_of(torch.zeros_like(x), x)


class CoarseNorm(nn.LayerNorm):
    """Mean and variance rounded to bfloat16."""

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True).bfloat16()
        centred = x - mean.to(x.dtype)
        rstd = (centred.square().mean(-1, keepdim=True).bfloat16().to(x.dtype) + self.eps).rsqrt()
        return (centred * rstd) * self.weight + self.bias


class CoarseStatistics(StandIn):
    """Layer normalization with statistics in bfloat16."""

    def __init__(self, definition: EncoderLayer) -> None:
        super().__init__(definition)
        self.attention.output.LayerNorm = CoarseNorm(definition.embed, definition.eps)
        self.output.LayerNorm = CoarseNorm(definition.embed, definition.eps)


class KeyMaskShifted(StandIn):
    """Masked keys are one position off."""

    def forward(
        self, x: Tensor, attention_mask: Tensor | None = None, keep: Mapping[int, Tensor] | None = None
    ) -> Tensor:
        return super().forward(x, None if attention_mask is None else attention_mask.roll(1, -1))


class KeyBiasGradientWrong(StandIn):
    """The gradient by the key bias, which is zero by mathematics, misses some positions."""

    def _attend(self, x: Tensor, allowed: Tensor | None, keep: Mapping[int, Tensor]) -> Tensor:
        def forget(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            bias = self.attention.self.key.bias
            halved = torch.zeros_like(output)
            halved[:, ::2] = 1
            return with_gradient_of(output, output - bias * halved)

        handle = self.attention.self.key.register_forward_hook(forget)
        try:
            return super()._attend(x, allowed, keep)
        finally:
            handle.remove()


class DropoutTwiceInBackward(StandIn):
    """The gradient at the feed-forward output's dropout is scaled a second time."""

    def _drop(self, x: Tensor, site: int, keep: Mapping[int, Tensor]) -> Tensor:
        y = super()._drop(x, site, keep)
        return with_gradient_of(y, y / (1 - self.definition.dropout)) if site == 3 and self.training else y


class OneNaN(StandIn):
    """A single NaN in the output."""

    def forward(
        self, x: Tensor, attention_mask: Tensor | None = None, keep: Mapping[int, Tensor] | None = None
    ) -> Tensor:
        poison = torch.zeros_like(x)
        poison[-1, -1, -1] = torch.nan
        return super().forward(x, attention_mask) + poison


STAND_INS = {
    kind.__name__: kind
    for kind in (
        StandIn,
        ScaleMissingInBackward,
        OtherAttentionMask,
        OneBitFlipped,
        OneAttentionBitFlipped,
        ResidualGradientDropped,
        CoarseStatistics,
        KeyMaskShifted,
        KeyBiasGradientWrong,
        DropoutTwiceInBackward,
        OneNaN,
    )
}


@pytest.fixture(scope="session")
def make_stand_in() -> MakeStandIn:
    """Builds a stand-in: `make_stand_in(definition, dtype, kind)`, where "StandIn" is the right one."""

    def make(definition: EncoderLayer, dtype: str, kind: str = "StandIn") -> StandIn:
        return STAND_INS[kind](definition).to(resolve_dtype(dtype).torch)

    return make
