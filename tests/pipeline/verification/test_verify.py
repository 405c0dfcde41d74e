"""Compiled layers by the 1.1 rule: odd sizes at every dtype, as `stepdown verify` and `make fuzz` do it."""

import pytest
import torch
from torch import nn

from stepdown.models import EncoderLayer
from stepdown.models.dtypes import resolve_dtype
from stepdown.models.errors import OptionError
from stepdown.pipeline.verification import verify_layer
from stepdown.pipeline.verification.cases import make_mask
from stepdown.pipeline.verification.fuzz import build
from stepdown.pipeline.verification.verify import verify_definition

LAYER = EncoderLayer(embed=80, heads=2, ffn=57, activation_dropout=0.2)
DTYPES = ("float32", "bfloat16", "float16", "float64")


@pytest.fixture(scope="module", params=DTYPES)
def compiled(request: pytest.FixtureRequest) -> tuple[str, nn.Module]:
    """A compiled layer at each dtype."""
    return request.param, build(LAYER, resolve_dtype(request.param))


@pytest.mark.parametrize(("batch", "seq", "mask"), [(3, 7, "mixed"), (2, 16, "rows"), (1, 1, "none"), (1, 5, "left")])
def test_compiled_layer(compiled: tuple[str, nn.Module], batch: int, seq: int, mask: str) -> None:
    dtype, module = compiled
    key_mask = make_mask(mask, batch, seq, 0)
    report = verify_layer(module, LAYER, dtype, batch, seq, mask=key_mask, draws=64, masks=True)
    assert report.passed, report.to_json()
    assert len(report.rows) == 18 and len(report.masks) == 4
    assert all(row.observable > 0 for row in report.masks)


def test_compiled_layer_in_evaluation_mode(compiled: tuple[str, nn.Module]) -> None:
    dtype, module = compiled
    report = verify_layer(module, LAYER, dtype, 2, 9, draws=32, dropout=False)
    assert report.passed, report.to_json()


def test_verify_definition() -> None:
    done: list[int] = []
    report = verify_definition(LAYER, torch.float32, 2, 7, draws=4, optimize="light", on_draw=done.append)
    assert report.passed, report.to_json()
    assert done == [1, 2, 3, 4]
    assert report.mask == "right" and len(report.masks) == 4


def test_options_are_checked_before_anything_is_compiled() -> None:
    with pytest.raises(OptionError, match='mask "diagonal" is unknown'):
        verify_definition(LAYER, "fp32", 2, 7, mask="diagonal")
    with pytest.raises(OptionError, match='dtype "int8" is unknown'):
        verify_definition(LAYER, "int8", 2, 7)
