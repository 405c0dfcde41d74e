"""The dropout generator in NumPy: Philox 4x32-10, a counter-based generator whose words depend on their index alone.

Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. Every kernel that drops
elements must give the bits that this file gives.

The word of element `i` (its index in C order over the logical shape) of dropout number `operator` in the call with the
pair `(seed, offset)` is word `i & 3` of the block with

    counter = (lo32(i >> 2), hi32(i >> 2) << 8 | operator, lo32(offset), hi32(offset))
    key     = (lo32(seed), hi32(seed))

and the element is kept if that word is at least `min(round(p * 2^32), 2^32 - 1)`. Kept values are scaled by
`float32(1 / (1 - p))`, in a float64 layer by `1 / (1 - p)`.
"""

import math

import numpy as np
from numpy.typing import NDArray

from stepdown.models.errors import InputError

OPERATORS = 256
"""Dropout numbers are below this: they take eight bits of the counter."""

MAXIMUM_COUNT = 1 << 58
"""The number of elements that one dropout can number: blocks of four, 56 bits for the block's index."""

_ROUNDS = 10
_MULTIPLIER = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_BLOCKS_AT_ONCE = 1 << 18


def philox4x32(counter: NDArray[np.uint32], key: tuple[int, int], rounds: int = _ROUNDS) -> NDArray[np.uint32]:
    """Philox 4x32: a bijection of each counter.

    :param counter: `[..., 4]` words.
    :param key: two words.
    :param rounds: 10 is the published default.
    :returns: `[..., 4]` random words.
    """
    words = [counter[..., place].astype(np.uint64) for place in range(4)]
    for round_ in range(rounds):
        round_key = [np.uint64((key[half] + round_ * _WEYL[half]) & 0xFFFFFFFF) for half in range(2)]
        first, second = words[0] * _MULTIPLIER[0], words[2] * _MULTIPLIER[1]
        words = [
            (second >> _HALF) ^ words[1] ^ round_key[0],
            second & _LOW,
            (first >> _HALF) ^ words[3] ^ round_key[1],
            first & _LOW,
        ]
    return np.stack(words, axis=-1).astype(np.uint32)


def philox_words(seed: int, offset: int, operator: int, count: int) -> NDArray[np.uint32]:
    """The words of elements `0 .. count - 1` of dropout number ``operator``.

    :param seed: 64 bits, signed or not.
    :param offset: 64 bits, signed or not.
    :param operator: 0 to 255.
    :param count: the number of elements.
    :returns: `[count]`
    :raises InputError: when ``operator`` or ``count`` is out of range.
    """
    if not 0 <= operator < OPERATORS:
        raise InputError(f"operator={operator} was given; accepted is a dropout number from 0 to {OPERATORS - 1}.")
    if not 0 <= count <= MAXIMUM_COUNT:
        raise InputError(f"count={count} was given; accepted is a number of elements from 0 to {MAXIMUM_COUNT}.")
    key = (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF)
    blocks = -(-count // 4)
    words = np.empty((blocks, 4), np.uint32)
    for start in range(0, blocks, _BLOCKS_AT_ONCE):
        index = np.arange(start, min(start + _BLOCKS_AT_ONCE, blocks), dtype=np.uint64)
        counter = np.empty((index.size, 4), np.uint32)
        counter[:, 0] = index & _LOW
        counter[:, 1] = index >> _HALF << np.uint64(8) | np.uint64(operator)
        counter[:, 2] = offset & 0xFFFFFFFF
        counter[:, 3] = offset >> 32 & 0xFFFFFFFF
        words[start : start + index.size] = philox4x32(counter, key)
    return words.reshape(-1)[:count]


def dropout_threshold(probability: float) -> int:
    """The smallest word that keeps its element; 0, which keeps all, at probability 0."""
    return min(round(probability * 2**32), 2**32 - 1)


def keep_mask(seed: int, offset: int, operator: int, shape: tuple[int, ...], probability: float) -> NDArray[np.bool_]:
    """Which elements of a tensor dropout number ``operator`` keeps.

    :param shape: the tensor's logical shape.
    :param probability: of dropping an element, at least 0 and below 1.
    :returns: ``shape``, true where the element is kept.
    :raises InputError: when an argument is out of range.
    """
    if not 0 <= probability < 1:
        raise InputError(f"probability={probability} was given; accepted is at least 0 and below 1.")
    words = philox_words(seed, offset, operator, math.prod(shape))
    return (words >= np.uint32(dropout_threshold(probability))).reshape(shape)
