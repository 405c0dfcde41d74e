"""How a row of elements lies on the threads of a GPU, and the header of what they do together."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import dace.library

from stepdown.models.operators.headers import OperatorHeaders

ACCESS_BYTES = 16
"""The widest access of a lane."""

HELD = 32
"""Elements of a row that one lane holds: more lanes take a longer row."""

THREADS = 128
"""Threads of a block, unless one row needs more."""

INCLUDE = Path(__file__).parent / "include"


@dace.library.environment
class LaneHeaders(OperatorHeaders):
    """``stepdown/lanes.cuh``, vector accesses and reductions over lanes, and what formulas call, for CUDA code."""

    cmake_includes = [*OperatorHeaders.cmake_includes, str(INCLUDE)]
    headers = {"frame": [], "cuda": [*OperatorHeaders.headers, "stepdown/lanes.cuh"]}  # type: ignore[assignment]


@dataclass(frozen=True)
class LanePlan:
    """How a row lies on lanes.

    :ivar vector: elements of one access.
    :ivar lanes: threads that share a row, a power of two.
    :ivar chunks: vectors that each lane holds.
    :ivar rows: rows that a block works on at a time.
    :ivar tail: whether the last chunk is not full on all lanes.
    """

    vector: int
    lanes: int
    chunks: int
    rows: int
    tail: bool

    @property
    def held(self) -> int:
        """Elements that each lane holds."""
        return self.chunks * self.vector


def plan_lanes(extent: int, item_bytes: int, *, columns: bool) -> LanePlan:
    """Lanes for rows of ``extent`` elements of up to ``item_bytes`` bytes.

    :param columns: whether the kernel sums over rows: then more lanes share a row, and hold fewer sums each.
    """
    vector = 1
    while extent % (2 * vector) == 0 and 2 * vector * item_bytes <= ACCESS_BYTES:
        vector *= 2
    held = HELD // 2 if columns else HELD
    lanes = 1
    while lanes < 1024 and lanes * max(held, vector) < extent and (lanes < 32 or lanes * held < extent):
        lanes *= 2
    # A short row is spread as far as its vectors go.
    while lanes < 32 and 2 * lanes * vector <= extent:
        lanes *= 2
    chunks = -(-extent // (lanes * vector))
    return LanePlan(vector, lanes, chunks, max(1, THREADS // lanes), extent % (lanes * vector) != 0)
