"""Buffers of one block: those needed at the same time share no byte, the others share as much as they can."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepdown.pipeline.runtime.workspace import ALIGNMENT, Layout, Request, aligned, first_fit, side_by_side


@st.composite
def requests(draw: st.DrawFn, most: int = 5000, least: int = 0) -> list[Request]:
    found = []
    for _ in range(draw(st.integers(0, 25))):
        first = draw(st.integers(0, 30))
        found.append(Request(draw(st.integers(least, most)), first, first + draw(st.integers(0, 12))))
    return found


def peak(wanted: list[Request]) -> int:
    """The bytes that are needed at the worst moment: no layout is smaller."""
    return max((sum(aligned(r.size) for r in wanted if r.first <= t <= r.last) for t in range(50)), default=0)


def check(wanted: list[Request], layout: Layout) -> None:
    placed = [(offset, offset + request.size, request) for offset, request in zip(layout.offsets, wanted, strict=True)]
    for i, (start, end, request) in enumerate(placed):
        assert start % ALIGNMENT == 0
        assert 0 <= start <= end <= layout.size or request.size == 0
        for other_start, other_end, other in placed[:i]:
            together = request.first <= other.last and other.first <= request.last
            assert not together or end <= other_start or other_end <= start or not request.size or not other.size


@given(requests())
def test_live_buffers_share_no_byte(wanted: list[Request]) -> None:
    layout = first_fit(wanted)
    check(wanted, layout)
    assert peak(wanted) <= layout.size <= sum(aligned(request.size) for request in wanted)


@given(requests(least=640, most=640))
def test_equal_buffers_take_what_is_live_at_the_worst_moment(wanted: list[Request]) -> None:
    assert first_fit(wanted).size == peak(wanted)


@given(st.lists(st.integers(0, 5000), max_size=20))
def test_side_by_side(sizes: list[int]) -> None:
    layout = side_by_side(sizes)
    check([Request(size) for size in sizes], layout)
    assert layout.size == sum(map(aligned, sizes))


def test_one_after_the_other_share_everything() -> None:
    layout = first_fit([Request(1000, 0, 1), Request(600, 2, 3), Request(1, 4, 4)])
    assert layout == Layout((0, 0, 0), aligned(1000))


def test_a_gap_is_filled() -> None:
    # A small one fits where the large one was, beside the one that is still live.
    wanted = [Request(1024, 0, 1), Request(512, 0, 5), Request(256, 2, 3), Request(768, 2, 4)]
    layout = first_fit(wanted)
    check(wanted, layout)
    assert layout.size == 1536


def test_order_of_the_answer_is_that_of_the_question() -> None:
    assert first_fit([Request(64), Request(128), Request(0)]).offsets == (128, 0, 0)


@pytest.mark.parametrize("arguments", [(-1, 0, 0), (8, 2, 1)])
def test_impossible_requests(arguments: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="accepted are sizes of at least 0"):
        Request(*arguments)
