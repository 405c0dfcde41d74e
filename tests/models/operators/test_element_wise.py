"""Bias, residual addition, scale and masks: values by hand and refusals."""

import math

import pytest
import torch

from stepdown.models.operators import Add, Bias, CausalMask, KeyPaddingMask, Scale, SumRows

from .cases import refused

X = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])


def test_bias_is_broadcast_over_the_dimensions_it_lacks() -> None:
    over_rows = Bias(dims="SE", bias_dims="S").reference({"x": X, "bias": torch.tensor([10.0, 20.0])})
    assert over_rows["y"].tolist() == [[11.0, 12.0, 13.0], [24.0, 25.0, 26.0]]
    transposed = Bias(dims="SE", bias_dims="ES").reference({"x": X, "bias": X.T * 10})
    assert transposed["y"].tolist() == [[11.0, 22.0, 33.0], [44.0, 55.0, 66.0]]


def test_sum_keeps_the_dimensions_in_the_order_asked_for() -> None:
    assert SumRows(dims="SE", sum_dims="E").reference({"x": X})["y"].tolist() == [5.0, 7.0, 9.0]
    assert SumRows(dims="SE", sum_dims="").reference({"x": X})["y"].item() == 21.0
    assert SumRows(dims="SE", sum_dims="ES").reference({"x": X})["y"].tolist() == X.T.tolist()


def test_add_and_scale() -> None:
    assert Add(dims="SE").reference({"a": X, "b": X})["y"].tolist() == (2 * X).tolist()
    assert Scale(dims="SE", factor=-0.5).reference({"x": X})["y"].tolist() == (X / -2).tolist()


@pytest.mark.parametrize(("gradient", "fill"), [(False, -math.inf), (True, 0.0)])
def test_padding_hides_keys_of_their_batch_entry(gradient: bool, fill: float) -> None:
    x = torch.ones(2, 1, 1, 3)
    mask = torch.tensor([[True, False, True], [False, False, False]])
    y = KeyPaddingMask(gradient=gradient).reference({"x": x, "mask": mask})["y"]
    assert y.view(2, 3).tolist() == [[1.0, fill, 1.0], [fill, fill, fill]]


@pytest.mark.parametrize(("gradient", "fill"), [(False, -math.inf), (True, 0.0)])
def test_causal_hides_later_keys(gradient: bool, fill: float) -> None:
    y = CausalMask(dims="ST", gradient=gradient).reference({"x": torch.ones(2, 3)})["y"]
    assert y.tolist() == [[1.0, fill, fill], [1.0, 1.0, fill]]


def test_a_masked_nan_is_masked() -> None:
    """A mask selects: it does not multiply, so nothing of a hidden key comes through."""
    x = torch.tensor([[[[math.nan, 1.0]]]])
    y = KeyPaddingMask(gradient=True).reference({"x": x, "mask": torch.tensor([[False, True]])})["y"]
    assert y.flatten().tolist() == [0.0, 1.0]


def test_refuses_operand_dimensions_that_are_not_its_own() -> None:
    with refused('operand dimension "U" of operator "odd" is not one of its own, "BSE"'):
        Bias("odd", "BSE", "U")
    with refused('operand dimension "H" of operator "odd" is not one of its own, "BSE"'):
        SumRows("odd", "BSE", "EH")
    with refused('operand dimension "T" of operator "odd" is not one of its own, "BSE"'):
        KeyPaddingMask("odd", "BSE")
    with refused('operand dimension "T" of operator "odd" is not one of its own, "BSE"'):
        CausalMask("odd", "BSE")


@pytest.mark.parametrize("factor", [math.inf, -math.inf, math.nan])
def test_refuses_a_factor_that_is_no_number(factor: float) -> None:
    """Its text would be read as the name of an operand."""
    with refused(f'factor={factor} of operator "odd" is not a finite number'):
        Scale("odd", "BSE", factor)
