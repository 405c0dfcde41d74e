"""Layouts as strides: dense and padded, at fixed and at symbolic sizes.

Dimension legend: B batch, S query position, T key position, H head, E embedding.
"""

import dace
import numpy as np
import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from stepdown.transformations.layout.layouts import Layout, is_dense, padding, physical_order, round_up

B, S = (dace.symbol(name, dace.int64, positive=True) for name in "BS")


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """A layout of some of the dimensions."""
    order = "".join(draw(st.lists(st.sampled_from("BSTHPEU"), min_size=1, max_size=5, unique=True)))
    pads = {letter: draw(st.sampled_from([1, 1, 2, 3, 8])) for letter in order[:-1]}
    return Layout(order, tuple(pads.items()))


@settings(max_examples=150, deadline=None)
@given(layout=layouts(), data=st.data())
def test_every_element_has_a_place_of_its_own_inside_the_span(layout: Layout, data: st.DataObject) -> None:
    dims = "".join(data.draw(st.permutations(layout.order)))
    shape = [data.draw(st.integers(1, 4)) for _ in dims]
    strides, total = layout.strides(dims, shape)
    places = sum(index * stride for index, stride in zip(np.indices(shape), strides, strict=True))
    assert np.unique(places).size == np.prod(shape)
    assert np.max(places) < total
    for letter, multiple in layout.pad:
        assert strides[dims.index(letter)] % multiple == 0
    assert strides[dims.index(layout.order[-1])] == 1


@settings(max_examples=60, deadline=None)
@given(layout=layouts(), data=st.data())
def test_symbolic_strides_have_the_values_of_fixed_ones(layout: Layout, data: st.DataObject) -> None:
    dims = "".join(data.draw(st.permutations(layout.order)))
    symbols = {"B": B, "S": S, "T": S}
    values = {"B": data.draw(st.integers(1, 20)), "S": data.draw(st.integers(1, 20))}
    fixed = {"H": 3, "P": 4, "E": 5, "U": 6, **values, "T": values["S"]}
    symbolic, total = layout.strides(dims, [symbols.get(letter, fixed[letter]) for letter in dims])
    numeric, span = layout.strides(dims, [fixed[letter] for letter in dims])
    found = [sympy.sympify(e).subs({B: values["B"], S: values["S"]}) for e in (*symbolic, total)]
    assert found == [*numeric, span]


def test_strides_by_hand() -> None:
    assert Layout("BHTS").strides("BHST", (2, 3, 5, 7)) == ((105, 35, 1, 5), 210)
    assert Layout("USB", (("S", 16),)).strides("BSU", (3, 5, 4)) == ((1, 16, 80), 320)
    assert Layout("USB", (("U", 16), ("S", 2))).strides("BSU", (3, 5, 4)) == ((1, 4, 32), 128)
    strides, total = Layout("BSE", (("S", 16),)).strides("BSE", (B, S, 8))
    assert (strides, total) == ((16 * S, 16, 1), 16 * B * S)


def test_padding_of_a_multiple_adds_nothing() -> None:
    assert round_up(48, 16) == 48
    assert round_up(16 * S, 16) == 16 * S
    assert str(round_up(S, 16)) == "16*int_ceil(S, 16)"


@pytest.mark.parametrize(
    ("layout", "order", "extra"),
    [
        (Layout("BSE"), "BSE", {}),
        (Layout("ESB"), "ESB", {}),
        (Layout("ESB", (("S", 16),)), "ESB", {"S": "-B + 16*int_ceil(B, 16)"}),
        (Layout("BSE", (("S", 16),)), "BSE", {"S": "8"}),
    ],
)
def test_a_layout_is_read_off_the_strides(layout: Layout, order: str, extra: dict[str, str]) -> None:
    shape = (B, S, 8)
    strides, _ = layout.strides("BSE", shape)
    assert physical_order("BSE", strides) == order
    assert {letter: str(elements) for letter, elements in padding("BSE", shape, strides).items()} == extra
    assert is_dense("BSE", shape, strides, order) is (not extra)
    assert is_dense("BSE", shape, strides, "BSE") is (order == "BSE" and not extra)


def test_strides_of_one_element_do_not_matter() -> None:
    assert is_dense("BSE", (1, 5, 8), (99, 8, 1), "BSE")
    assert padding("BSE", (1, 5, 8), (99, 8, 1)) == {}
