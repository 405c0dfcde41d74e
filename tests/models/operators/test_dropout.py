"""Dropout: the mask is the generator's, the scale the probability's, and a call draws nothing by itself."""

import pytest
import torch

from stepdown.models.operators import Dropout
from stepdown.models.operators.philox import keep_mask

from .cases import evaluate, refused

SHAPE = (2, 3, 50)
SIZES = dict(zip("BSE", SHAPE, strict=True))


def operands(probability: float, seed: int = 7, offset: int = 9) -> dict[str, torch.Tensor]:
    x = torch.randn(SHAPE, dtype=torch.float64)
    return {"x": x, "rng": torch.tensor([seed, offset]), "p": torch.tensor(probability, dtype=torch.float64)}


@pytest.mark.parametrize("site", [0, 3, 255])
@pytest.mark.parametrize("probability", [0.0, 0.1, 0.9])
def test_value(site: int, probability: float) -> None:
    given = operands(probability)
    keep = torch.from_numpy(keep_mask(7, 9, site, SHAPE, probability))
    expected = torch.where(keep, given["x"] / (1 - probability), 0.0)
    node = Dropout(site=site)
    for y in (node.reference(given)["y"], evaluate(node, given, SIZES)["y"]):
        torch.testing.assert_close(y, expected, rtol=1e-15, atol=0)


def test_zero_probability_is_the_identity() -> None:
    given = operands(0.0)
    assert torch.equal(Dropout().reference(given)["y"], given["x"])


def test_sites_and_pairs_have_masks_of_their_own() -> None:
    def mask(site: int, seed: int, offset: int) -> torch.Tensor:
        return Dropout(site=site).reference(operands(0.5, seed, offset))["y"] != 0

    masks = [mask(*which) for which in ((0, 7, 9), (1, 7, 9), (0, 8, 9), (0, 7, 10))]
    assert all(not torch.equal(a, b) for i, a in enumerate(masks) for b in masks[:i])
    assert torch.equal(masks[0], mask(0, 7, 9))


def test_gradient_and_value_have_one_mask() -> None:
    """The operator is linear: its gradient is itself on the upstream gradient."""
    given = operands(0.4)
    ones = given | {"x": torch.ones_like(given["x"])}
    assert torch.equal(Dropout().reference(given)["y"], given["x"] * Dropout().reference(ones)["y"])


@pytest.mark.parametrize("site", [-1, 256])
def test_refuses_a_site_without_a_stream(site: int) -> None:
    with refused(f'site {site} of operator "odd" is not between 0 and 255'):
        Dropout("odd", site=site)
