"""Large blocks of memory that are used again instead of being handed back to the operating system.

The C library returns every block of more than 32 MiB to the operating system when it is freed, and the next one of the
same size costs a page fault for each of its pages: on a layer of BERT-base as much as the arithmetic. Blocks come from
PyTorch's allocator once and go round after that. What is lent out is tied to the life of a tensor's storage, not of a
tensor, so that no view, saved tensor or hook can outlive its block.
"""

import threading
import weakref
from bisect import bisect_left, insort
from collections import deque

import numpy as np
import torch
from torch import Tensor

POOLED = 1 << 20
"""Requests below this many bytes go to PyTorch's allocator directly: the C library keeps such memory."""

SCRATCH = 1 << 18
"""Bytes of scratch memory that every thread keeps."""

_CPU = torch.device("cpu")
_BYTE = torch.uint8
_ONE_BYTE = torch.empty(1, dtype=_BYTE, device=_CPU)


class BlockPool:
    """Lends blocks of memory as one-dimensional uint8 tensors. Safe to use from several threads.

    It never holds more bytes than were lent at once at the worst moment: idle blocks that are too small for a new
    request are freed before the total would grow beyond that.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._local = threading.local()
        self._idle: list[tuple[int, int, np.ndarray]] = []  # (bytes, number, block), ascending
        # Blocks come home in a destructor, which may run anywhere, even inside "take": there is no lock to wait for.
        self._returned: deque[np.ndarray] = deque()
        self._number = 0
        self._lent = 0
        self._idle_bytes = 0
        self._peak = 0

    def take(self, size: int) -> Tensor:
        """A tensor of ``size`` bytes of any content, 64-byte aligned, whose memory is lent again when it is freed."""
        if size < POOLED:
            return _ONE_BYTE.new_empty(size)  # a third of the time of "torch.empty"
        block = self._block(rounded(size))
        loan = block[:size]
        weakref.finalize(loan, self._returned.append, block).atexit = False
        return torch.from_numpy(loan)

    def scratch(self, size: int) -> Tensor:
        """Like :meth:`take`, for contents that nobody reads once the thread has called one library.

        Small ones are the same memory for every call of a thread.
        """
        if size > SCRATCH:
            return self.take(size)
        try:
            return self._local.scratch
        except AttributeError:
            with torch.inference_mode(False):
                self._local.scratch = torch.empty(SCRATCH, dtype=_BYTE, device=_CPU)
            return self._local.scratch

    def _block(self, size: int) -> np.ndarray:
        with self._lock:
            self._collect()
            position = bisect_left(self._idle, size, key=lambda entry: entry[0])
            if position < len(self._idle) and self._idle[position][0] <= 2 * size:
                held, _, block = self._idle.pop(position)
                self._idle_bytes -= held
                self._lend(held)
                return block
            peak = max(self._peak, self._lent + size)
            while self._idle and self._lent + size + self._idle_bytes > peak:
                held, _, _ = self._idle.pop(0)
                self._idle_bytes -= held
            block = torch.empty(size, dtype=_BYTE, device=_CPU).numpy()
            self._lend(size)
            return block

    def _lend(self, size: int) -> None:
        self._lent += size
        self._peak = max(self._peak, self._lent)

    def _collect(self) -> None:
        while self._returned:
            block = self._returned.popleft()
            self._number += 1
            insort(self._idle, (block.nbytes, self._number, block), key=lambda entry: entry[:2])
            self._lent -= block.nbytes
            self._idle_bytes += block.nbytes

    @property
    def idle_bytes(self) -> int:
        """How much memory is held and not lent."""
        with self._lock:
            self._collect()
            return self._idle_bytes

    def release(self) -> None:
        """Free all blocks that are not lent."""
        with self._lock:
            self._collect()
            self._idle.clear()
            self._idle_bytes = 0
            self._peak = self._lent


def rounded(size: int) -> int:
    """``size`` rounded up to a quarter of a power of two, so that calls of similar shapes share blocks."""
    step = max(1 << max(size.bit_length() - 3, 0), 1)
    return -(-size // step) * step


POOL = BlockPool()
"""The pool of this process."""


def release_memory() -> None:
    """Hand the memory that compiled layers keep for their next calls back to the system."""
    POOL.release()
