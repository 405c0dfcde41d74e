"""The contraction: which einsums it takes and what it computes."""

import pytest
import torch

from stepdown.models.operators import Contraction, split_einsum

from .cases import refused


def test_einsum_is_split() -> None:
    assert split_einsum("BSE,HPE->BSHP") == ("BSE", "HPE", "BSHP")
    assert split_einsum("S,S->") == ("S", "S", "")


def test_dimensions_are_those_of_the_result_then_the_summed_ones() -> None:
    assert Contraction(einsum="BSE,HPE->BSHP").dims == "BSHPE"
    assert Contraction(einsum="BHST,BTHP->BSHP").dims == "BSHPT"


@pytest.mark.parametrize("einsum", ["", "BSE", "BSE,EU", "BSE->BSE", "B,B,B->B", "B,B->B->B", "BSE,EU,BSU"])
def test_refuses_other_forms(einsum: str) -> None:
    with refused(f'einsum "{einsum}" is not of the form "A,B->D" with two operands'):
        Contraction("odd", einsum)


@pytest.mark.parametrize(
    ("einsum", "term"), [("BB,BE->E", "BB"), ("bse,eu->bsu", "bse"), ("BS ,SE->BE", "BS "), ("BE,EU->BUU", "BUU")]
)
def test_refuses_other_letters_and_diagonals(einsum: str, term: str) -> None:
    with refused(f'term "{term}" of einsum "{einsum}" must name each dimension of "BSTHPEUN" at most once'):
        Contraction("odd", einsum)


@pytest.mark.parametrize(("einsum", "letter"), [("BSE,EU->BU", "S"), ("BE,EU->B", "U"), ("BE,BE->BS", "S")])
def test_refuses_a_dimension_of_one_term(einsum: str, letter: str) -> None:
    """A sum over one operand is no product; a broadcast result would repeat values."""
    with refused(f'dimension "{letter}" of einsum "{einsum}" stands in one term only'):
        Contraction("odd", einsum)


@pytest.mark.parametrize("alpha", [float("inf"), float("-inf"), float("nan")])
def test_refuses_a_factor_that_is_no_number(alpha: float) -> None:
    with refused(f'alpha={alpha} of operator "odd" is not a finite number'):
        Contraction("odd", "E,E->", alpha)


def test_value() -> None:
    """By hand: alpha, then the addend, which alpha does not scale."""
    a = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    b = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    c = torch.tensor([[10.0, 20.0], [30.0, 40.0]])
    node = Contraction(einsum="SE,UE->SU", alpha=2.0, accumulate=True)
    assert node.reference({"a": a, "b": b, "c": c})["d"].tolist() == [[12.0, 26.0], [36.0, 54.0]]


def test_the_addend_is_an_operand_of_its_own() -> None:
    assert set(Contraction(einsum="E,E->").in_connectors) == {"a", "b"}
    node = Contraction(einsum="BSE,EU->BSU", accumulate=True)
    assert set(node.in_connectors) == {"a", "b", "c"}
    assert node.operand_dims()["c"] == "BSU"
