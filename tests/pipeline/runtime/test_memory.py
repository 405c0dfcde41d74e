"""Blocks of memory go round, and never while somebody can see them."""

import gc
import threading
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stepdown.pipeline.runtime.memory import POOLED, new_pool

SIZE = 4 * POOLED


@pytest.fixture
def pool() -> Any:
    return new_pool()


def test_a_freed_block_is_lent_again(pool: Any) -> None:
    first = pool.take(SIZE)
    address = first.data_ptr()
    assert first.shape == (SIZE,)
    assert first.dtype is torch.uint8
    assert address % 64 == 0
    second = pool.take(SIZE)
    assert second.data_ptr() != address
    del first
    assert pool.idle_bytes() == SIZE
    assert pool.take(SIZE - 5).data_ptr() == address


def test_a_view_keeps_its_block(pool: Any) -> None:
    block = pool.take(SIZE)
    view = block[100:].detach()
    address = block.data_ptr()
    del block
    gc.collect()
    assert pool.idle_bytes() == 0
    other = pool.take(SIZE)
    assert other.data_ptr() != address
    del view
    assert pool.idle_bytes() == SIZE
    assert pool.take(SIZE).data_ptr() == address


def test_a_saved_tensor_keeps_its_block(pool: Any) -> None:
    class Save(torch.autograd.Function):
        @staticmethod
        def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
            ctx.save_for_backward(pool.take(SIZE).fill_(7))
            return x * 1

        @staticmethod
        def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> Tensor:
            (block,) = ctx.saved_tensors  # type: ignore[attr-defined]
            return gradient * block[-1]

    x = torch.ones(2, requires_grad=True)
    y = Save.apply(x)
    gc.collect()
    pool.take(SIZE).fill_(1)
    y.sum().backward(retain_graph=True)
    assert x.grad is not None
    assert x.grad.tolist() == [7, 7]
    assert pool.idle_bytes() == SIZE
    del y
    assert pool.idle_bytes() == 2 * SIZE


def test_small_requests_are_not_pooled(pool: Any) -> None:
    assert pool.take(100).shape == (100,)
    assert pool.take(0).shape == (0,)
    assert pool.idle_bytes() == 0


def test_no_more_is_held_than_was_lent_at_once(pool: Any) -> None:
    for size in range(2, 40):
        pool.take(size * POOLED)
        assert pool.idle_bytes() <= pool.rounded(size * POOLED)
    both = [pool.take(2 * POOLED), pool.take(2 * POOLED)]
    del both
    assert pool.idle_bytes() <= pool.rounded(39 * POOLED)


def test_a_much_larger_block_is_not_lent_for_a_small_request(pool: Any) -> None:
    address = pool.take(64 * POOLED).data_ptr()
    assert pool.take(POOLED).data_ptr() != address


def test_release(pool: Any) -> None:
    lent = pool.take(SIZE)
    pool.take(SIZE)
    pool.release()
    assert pool.idle_bytes() == 0
    del lent
    assert pool.idle_bytes() == SIZE


def test_a_failed_allocation_leaves_the_pool_as_it_was(pool: Any) -> None:
    with pytest.raises(RuntimeError):
        pool.take(1 << 60)
    pool.take(SIZE)
    pool.take(2 * SIZE)
    assert pool.idle_bytes() <= 2 * SIZE


def test_threads_never_share_a_block(pool: Any) -> None:
    wrong = []

    def work(number: int) -> None:
        for _ in range(60):
            block = pool.take(POOLED).fill_(number)
            if not bool((block == number).all()):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@given(st.integers(1, 1 << 40))
def test_rounding(size: int) -> None:
    rounded = new_pool().rounded
    assert size <= rounded(size) <= size * 1.25 + 1
    assert rounded(rounded(size)) == rounded(size)


def test_blocks_made_in_inference_mode_can_be_saved_later(pool: Any) -> None:
    with torch.inference_mode():
        pool.take(SIZE)
    assert not pool.take(SIZE).is_inference()
