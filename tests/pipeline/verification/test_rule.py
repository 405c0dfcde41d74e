"""The rule passes a right layer and fails wrong ones at every dtype; vanishing gradients; numbers not finite."""

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from stepdown.models import EncoderLayer
from stepdown.models.errors import InputError, OptionError
from stepdown.pipeline.verification import Report, verify_layer
from stepdown.pipeline.verification.rule import ALLOWANCE, FACTORS, squared_error

MakeStandIn = Callable[..., Any]
DTYPES = ("float32", "bfloat16", "float16", "float64")
LAYER = EncoderLayer(embed=48, heads=2, ffn=57, activation_dropout=0.2)
MASK = torch.tensor([[1] * 6, [0] * 6, [1, 1, 0, 1, 0, 0]]).bool()


def failures(report: Report) -> set[str]:
    return {row.name for row in report.rows if not row.passed}


def verify(module: nn.Module, dtype: str, **options: Any) -> Report:
    return verify_layer(module, LAYER, dtype, 3, 6, **{"mask": MASK, "draws": 8, **options})


@pytest.mark.parametrize("dtype", DTYPES)
def test_right_layer_passes(make_stand_in: MakeStandIn, dtype: str) -> None:
    report = verify(make_stand_in(LAYER, dtype), dtype, masks=True)
    assert report.passed
    assert [row.name for row in report.rows] == ["y", "x.grad", *(f"{name}.grad" for name in LAYER.parameters())]
    assert [row.name for row in report.rows if row.vanishing] == ["attention.self.key.bias.grad"]
    eps = torch.finfo(getattr(torch, dtype)).eps
    for row in report.rows:
        # The stand-in is PyTorch's layer, so its error is PyTorch's: not zero, and of the dtype's size.
        assert eps / 100 < row.error == row.torch_error < 4 * eps, row
        assert row.limit == FACTORS[dtype] * row.torch_error + ALLOWANCE * eps
    assert [mask.site for mask in report.masks] == [0, 1, 2, 3]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("kind", "wrong", "right"),
    [
        ("ScaleMissingInBackward", ["x.grad", "attention.self.query.weight.grad"], ["y", "output.dense.weight.grad"]),
        ("OtherAttentionMask", ["y", "x.grad", "attention.self.value.weight.grad"], []),
        ("OneBitFlipped", ["y"], []),
        ("ResidualGradientDropped", ["x.grad"], ["y", "attention.self.query.weight.grad"]),
        ("KeyMaskShifted", ["y", "x.grad"], []),
        ("KeyBiasGradientWrong", ["attention.self.key.bias.grad"], ["y", "x.grad"]),
        ("DropoutTwiceInBackward", ["output.dense.bias.grad", "x.grad"], ["y", "output.LayerNorm.weight.grad"]),
        ("CoarseStatistics", ["y"], []),
        ("OneNaN", ["y"], []),
    ],
)
def test_wrong_layer_fails_where_it_is_wrong(
    make_stand_in: MakeStandIn, kind: str, wrong: list[str], right: list[str], dtype: str
) -> None:
    report = verify(make_stand_in(LAYER, dtype, kind), dtype)
    assert not report.passed
    assert failures(report).issuperset(wrong)
    assert failures(report).isdisjoint(right)


def test_wrong_layer_fails_at_float64(make_stand_in: MakeStandIn) -> None:
    """A layer that is as good as float32 is not good enough."""

    class Single(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = make_stand_in(LAYER, "float64")

        def named_parameters(self, *arguments: Any, **options: Any) -> Any:
            return self.inner.named_parameters(*arguments, **options)

        def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            return self.inner(x, attention_mask) * (1 + 1e-9)

    report = verify(Single(), "float64", dropout=False, draws=2)
    # A gradient that vanishes stays so.
    assert failures(report) == {row.name for row in report.rows} - {"attention.self.key.bias.grad"}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_single_position(make_stand_in: MakeStandIn, dtype: str, norm: str) -> None:
    layer = EncoderLayer(embed=48, heads=2, ffn=57, norm=norm, causal=True)
    report = verify_layer(make_stand_in(layer, dtype), layer, dtype, 2, 1, draws=4)
    assert report.passed
    vanishing = [row.name for row in report.rows if row.vanishing]
    assert vanishing == [
        f"attention.self.{name}.{kind}.grad" for name in ("query", "key") for kind in ("weight", "bias")
    ]


def test_rounding_of_a_vanishing_gradient_is_measured_by_its_summands(make_stand_in: MakeStandIn) -> None:
    """`dw - dw` computed in two ways leaves a rounding error: small beside its summands, infinite beside zero."""

    class Rounded(type(make_stand_in(LAYER, "float32"))):  # type: ignore[misc]
        error = 2.0**-30

        def _eager(self, query: Tensor, key: Tensor, value: Tensor, *others: Any) -> Tensor:
            context = super()._eager(query, key, value, *others)
            leak = context * (query.sum() * 0 + (query * key).sum(-1, keepdim=True)) * self.error
            return context.detach() + (context - context.detach()) + (leak - leak.detach())

    layer = EncoderLayer(embed=48, heads=2, ffn=57)
    small, large = Rounded(layer), Rounded(layer)
    large.error = 2.0**-20
    names = {f"attention.self.{name}.{kind}.grad" for name in ("query", "key") for kind in ("weight", "bias")}
    good = verify_layer(small, layer, "float32", 2, 1, draws=4)
    assert good.passed
    assert all(0 < row.error < 1e-8 and row.torch_error == 0 for row in good.rows if row.name in names)
    assert failures(verify_layer(large, layer, "float32", 2, 1, draws=4)) >= names


def test_everything_masked(make_stand_in: MakeStandIn) -> None:
    """No key at all: query, key, value and attention's output weights have gradients of exactly zero."""
    mask = torch.zeros(2, 3, dtype=torch.bool)
    report = verify_layer(make_stand_in(LAYER, "float32"), LAYER, "float32", 2, 3, mask=mask, draws=2, masks=True)
    assert report.passed
    assert report.masks[0].observable == 0
    zero = [row for row in report.rows if row.name.startswith("attention.self.")]
    assert len(zero) == 6
    assert all(row.error == row.torch_error == 0 for row in zero)


def test_without_biases_and_dropout(make_stand_in: MakeStandIn) -> None:
    layer = EncoderLayer(embed=48, heads=2, ffn=57, bias=False, dropout=0, attention_dropout=0)
    module = make_stand_in(layer, "bfloat16")
    module.last_rng = None
    report = verify_layer(module, layer, "bf16", 1, 5, draws=4, masks=True)
    assert report.passed and not report.dropout and report.masks == ()
    assert not any(row.vanishing for row in report.rows)


def test_module_comes_back_as_it_was(make_stand_in: MakeStandIn) -> None:
    module = make_stand_in(LAYER, "float32").eval()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    state = torch.get_rng_state()
    verify(module, "float32", draws=1)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert not module.training
    assert torch.equal(torch.get_rng_state(), state)


def test_verification_is_repeatable(make_stand_in: MakeStandIn) -> None:
    module = make_stand_in(LAYER, "bfloat16")
    first, again, other = (verify(module, "bfloat16", seed=seed, draws=2).to_dict() for seed in (3, 3, 4))
    assert first == again
    assert first["rows"] != other["rows"]


def test_bad_calls_are_refused(make_stand_in: MakeStandIn) -> None:
    module = make_stand_in(LAYER, "float32")
    with pytest.raises(OptionError, match="draws=0 was given; accepted is a positive integer"):
        verify(module, "float32", draws=0)
    with pytest.raises(OptionError, match='dtype "int8" is unknown'):
        verify(module, "int8")
    other = EncoderLayer(embed=48, heads=2, ffn=57, bias=False)
    with pytest.raises(InputError, match="a module without parameters"):
        verify(make_stand_in(other, "float32"), "float32")

    class Silent(type(module)):  # type: ignore[misc]
        last_rng = property(lambda self: None, lambda self, value: None)

        def masks(self, batch: int, seq: int) -> dict[int, Tensor]:
            return {}

    with pytest.raises(InputError, match='a module without "last_rng" after a call in training mode'):
        verify(Silent(LAYER), "float32")


def test_report_as_json_and_table(make_stand_in: MakeStandIn) -> None:
    report = verify(make_stand_in(LAYER, "float32", "OneNaN"), "float32", masks=True, draws=2)
    found = json.loads(report.to_json())
    assert found["passed"] is False and found["layer"]["embed"] == 48
    assert found["rows"][0] == {
        "name": "y",
        "error": None,
        "torch_error": found["rows"][0]["torch_error"],
        "limit": found["rows"][0]["limit"],
        "passed": False,
        "vanishing": False,
    }
    assert report.worst is not None and report.worst.name == "y"
    console = Console(record=True, width=100)
    console.print(report)
    text = console.export_text()
    assert "attention.self.key.bias.grad *" in text and "FAILED" in text and "21 of 22" not in text


def test_numbers_that_are_not_finite() -> None:
    oracle = np.array([1.0, np.nan, np.inf, 2.0])
    assert squared_error(torch.tensor([1.0, torch.nan, torch.inf, 4.0]), oracle) == 4
    for wrong in ([torch.nan, torch.nan, torch.inf, 2.0], [1.0, 1.0, torch.inf, 2.0], [1.0, torch.nan, 3.0, 2.0]):
        assert squared_error(torch.tensor(wrong), oracle) == math.inf
