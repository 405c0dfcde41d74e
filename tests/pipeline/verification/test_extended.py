"""The oracle in extended precision: more exact than float64, and in agreement with PyTorch's autograd."""

import math
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from stepdown.models import EncoderLayer, ReferenceEncoderLayer
from stepdown.models.dtypes import resolve_dtype
from stepdown.models.errors import OptionError
from stepdown.models.reference import attention_pattern
from stepdown.pipeline.verification import extended
from stepdown.pipeline.verification.draws import draw_inputs, load_parameters, run_layer
from stepdown.pipeline.verification.extended import ExtendedEncoderLayer, erf, matmul


def test_products_are_more_exact_than_float64() -> None:
    generator = np.random.default_rng(0)
    a = generator.normal(size=(3, 4, 70)) * 10.0 ** generator.integers(-3, 4, size=(3, 4, 1))
    b = generator.normal(size=(3, 70, 2))
    product = matmul(a.astype(np.longdouble), b.astype(np.longdouble))
    for stack, row, column in np.ndindex(3, 4, 2):
        terms = [Fraction(a[stack, row, k]) * Fraction(b[stack, k, column]) for k in range(70)]
        found = product[stack, row, column]
        high = float(found)
        error = abs(Fraction(high) + Fraction(float(found - np.longdouble(high))) - sum(terms))
        assert error < Fraction(2) ** -56 * max(abs(term) for term in terms)
    zero = np.zeros((2, 3), np.longdouble)
    assert not matmul(zero, zero.T).any()


def test_erf() -> None:
    x = np.linspace(-8, 8, 1601)
    expected = np.array([math.erf(value) for value in x])
    found = erf(x.astype(np.longdouble))
    assert np.abs((found - expected).astype(float)).max() <= 2.0**-53
    assert np.array_equal(found[x > 6.6], np.ones((x > 6.6).sum()))
    # Digits after those of float64: erf(1) = 0.842700792949714869341220635...
    one = erf(np.array([1], np.longdouble))[0]
    assert abs(float((one - np.longdouble("0.8427007929497148693412206350826")) * 2**60)) < 2


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu"])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"bias": False}])
def test_agrees_with_autograd(norm: str, activation: str, options: dict[str, Any]) -> None:
    definition = EncoderLayer(
        embed=24, heads=3, ffn=35, norm=norm, activation=activation, activation_dropout=0.3, **options
    )
    draw = draw_inputs(definition, resolve_dtype("float64"), 3, 5, 0)
    layer = ReferenceEncoderLayer(definition).double()
    load_parameters(layer, draw.parameters)
    keep = {
        site: torch.rand(definition.dropout_shape(site, 3, 5)) > probability
        for site, probability in enumerate(definition.dropout_sites)
    }
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 0, 0, 0], [0, 1, 0, 1, 1]])
    found = run_layer(layer, draw, lambda x: layer(x, mask, keep))
    allowed = attention_pattern(definition, 3, 5, mask)
    assert allowed is not None
    oracle = ExtendedEncoderLayer(definition, {name: value.numpy() for name, value in draw.parameters.items()})
    expected = oracle.run(
        draw.x.numpy(), draw.upstream.numpy(), allowed.numpy(), {site: value.numpy() for site, value in keep.items()}
    )
    assert list(expected) == list(found)
    for name, value in expected.items():
        assert np.abs((found[name].numpy() - value).astype(float)).max() < 2e-14, name
    without = oracle.run(draw.x.numpy(), draw.upstream.numpy(), None, {})
    unmasked = ReferenceEncoderLayer(definition).double().eval()
    load_parameters(unmasked, draw.parameters)
    if not definition.causal:
        assert np.abs((without["y"] - unmasked(draw.x).detach().numpy()).astype(float)).max() < 2e-14


def test_short_long_double_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extended.np, "finfo", lambda dtype: SimpleNamespace(nmant=52))
    with pytest.raises(OptionError, match="a float64 layer was given on a machine whose long double has 52 bits"):
        ExtendedEncoderLayer(EncoderLayer(embed=24, heads=3, ffn=35), {})
