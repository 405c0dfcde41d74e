"""Large blocks of memory that are used again instead of being handed back to the operating system.

The C library returns every block of more than 32 MiB to the operating system when it is freed, and the next one of the
same size costs a page fault for each of its pages: on a layer of BERT-base as much as the arithmetic. Blocks come from
PyTorch's allocator once and go round after that. What is lent out is tied to the life of a tensor's storage, not of a
tensor, so that no view, saved tensor or hook can outlive its block.
"""

from functools import lru_cache
from typing import Any

from stepdown.pipeline.runtime.extension import load_extension

POOLED = 1 << 20
"""Requests below this many bytes go to PyTorch's allocator directly: the C library keeps such memory."""


def new_pool() -> Any:
    """A pool of blocks, safe to use from several threads; see ``BlockPool`` in ``extension.cpp``.

    It never holds more bytes than were lent at once at the worst moment: idle blocks that are too small for a new
    request are freed before the total would grow beyond that.
    """
    return load_extension().BlockPool(POOLED)


@lru_cache(maxsize=1)
def pool() -> Any:
    """The pool of this process."""
    return new_pool()


def release_memory() -> None:
    """Hand the memory that compiled layers keep for their next calls back to the system."""
    if pool.cache_info().currsize:
        pool().release()
