"""Where buffers lie inside one block of memory, so that those needed at different times share bytes."""

from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 64
"""Every buffer starts at a multiple of this many bytes: a cache line, and the widest vector register."""


@dataclass(frozen=True)
class Request:
    """A buffer to place: ``size`` in bytes, needed from kernel ``first`` to kernel ``last``, both included."""

    size: int
    first: int = 0
    last: int = 0

    def __post_init__(self) -> None:
        if self.size < 0 or self.first > self.last:
            raise ValueError(
                f"a buffer of {self.size} bytes, live from {self.first} to {self.last}, was given; accepted are sizes "
                f'of at least 0 and a "last" of at least "first".'
            )


@dataclass(frozen=True)
class Layout:
    """The byte offset of every request, in the order of the requests, and the ``size`` of the whole block."""

    offsets: tuple[int, ...]
    size: int


def aligned(size: int) -> int:
    """``size`` rounded up to a multiple of :data:`ALIGNMENT`."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def first_fit(requests: Sequence[Request]) -> Layout:
    """Place every buffer at the lowest offset where no buffer needed at the same time lies.

    Large buffers are placed first, equal ones in the order of their first use, which makes buffers of equal size take
    exactly as much as is live at the worst moment. An empty buffer takes no bytes.
    """
    order = sorted(range(len(requests)), key=lambda i: (-aligned(requests[i].size), requests[i].first, i))
    offsets = [0] * len(requests)
    placed: list[tuple[int, int, Request]] = []  # (offset, end, request), ascending by offset
    for index in order:
        request = requests[index]
        size = aligned(request.size)
        if not size:
            continue
        offset = 0
        for start, end, other in placed:
            if other.last < request.first or request.last < other.first:
                continue
            if offset + size <= start:
                break
            offset = max(offset, end)
        offsets[index] = offset
        placed.append((offset, offset + size, request))
        placed.sort(key=lambda entry: entry[0])
    return Layout(tuple(offsets), max((end for _, end, _ in placed), default=0))


def side_by_side(sizes: Sequence[int]) -> Layout:
    """Place every buffer in bytes of its own, one after the other."""
    return first_fit([Request(size) for size in sizes])
