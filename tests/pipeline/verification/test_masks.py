"""Dropout masks read out of a layer: nearly all bits are visible, at every dtype, and a single wrong one is found."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from stepdown.models import EncoderLayer
from stepdown.pipeline.verification import verify_layer

MakeStandIn = Callable[..., Any]
LAYER = EncoderLayer(embed=48, heads=2, ffn=57, activation_dropout=0.2)


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_masks_of_a_right_layer(make_stand_in: MakeStandIn, dtype: str, norm: str) -> None:
    layer = EncoderLayer(embed=48, heads=2, ffn=57, activation_dropout=0.2, norm=norm, activation="gelu_tanh")
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
    report = verify_layer(make_stand_in(layer, dtype), layer, dtype, 2, 5, mask=mask, draws=1, masks=True)
    assert [row.different for row in report.masks] == [0, 0, 0, 0]
    assert [row.elements for row in report.masks] == [100, 480, 570, 480]
    reachable = [2 * (25 + 10), 480, 570, 480]
    share = 0.5 if dtype == "bfloat16" else 0.9
    for row, count in zip(report.masks, reachable, strict=True):
        assert share * count <= row.observable <= count, row


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize(("kind", "site"), [("OneBitFlipped", 3), ("OneAttentionBitFlipped", 0)])
def test_one_wrong_bit_is_found(make_stand_in: MakeStandIn, dtype: str, kind: str, site: int) -> None:
    report = verify_layer(make_stand_in(LAYER, dtype, kind), LAYER, dtype, 2, 5, draws=1, masks=True)
    rows = {row.site: row for row in report.masks}
    assert rows[site].different == 1
    assert not rows[site].passed


def test_other_masks_are_found(make_stand_in: MakeStandIn) -> None:
    layer = EncoderLayer(embed=48, heads=2, ffn=57, dropout=0, attention_dropout=0.5)
    module = make_stand_in(layer, "bfloat16", "OtherAttentionMask")
    report = verify_layer(module, layer, "bfloat16", 2, 5, draws=1, masks=True)
    (row,) = report.masks
    assert row.different > row.observable / 4
