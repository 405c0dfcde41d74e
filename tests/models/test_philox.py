"""The dropout generator against the published vectors, and the numbering of its elements."""

import numpy as np
import pytest

from stepdown.models.errors import InputError
from stepdown.models.operators import philox
from stepdown.models.operators.philox import dropout_threshold, keep_mask, philox4x32, philox_words


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # Random123's kat_vectors, "philox4x32 10"
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_published_vectors(counter: str, key: str, expected: str) -> None:
    words = np.array([int(word, 16) for word in counter.split()], np.uint32)
    first, second = (int(word, 16) for word in key.split())
    assert philox4x32(words, (first, second)).tolist() == [int(word, 16) for word in expected.split()]


def test_published_vector_of_seven_rounds() -> None:
    assert philox4x32(np.zeros(4, np.uint32), (0, 0), rounds=7).tolist() == [
        int(word, 16) for word in ["5f6fb709", "0d893f64", "4f121f81", "4f730a48"]
    ]


def scalar_word(seed: int, offset: int, operator: int, index: int) -> int:
    """One word in Python's integers: the definition written a second time."""
    block = index >> 2
    words = [block & 0xFFFFFFFF, (block >> 32) << 8 | operator, offset & 0xFFFFFFFF, offset >> 32 & 0xFFFFFFFF]
    key = [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF]
    for _ in range(10):
        first, second = words[0] * 0xD2511F53, words[2] * 0xCD9E8D57
        words = [
            second >> 32 ^ words[1] ^ key[0],
            second & 0xFFFFFFFF,
            first >> 32 ^ words[3] ^ key[1],
            first & 0xFFFFFFFF,
        ]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return words[index & 3]


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 0x0123456789ABCDEF])
@pytest.mark.parametrize("offset", [0, 5, -1, 2**40 + 3])
@pytest.mark.parametrize("operator", [0, 3, 255])
def test_words_follow_the_definition(seed: int, offset: int, operator: int) -> None:
    words = philox_words(seed, offset, operator, 11)
    assert words.dtype == np.uint32
    assert words.tolist() == [scalar_word(seed, offset, operator, index) for index in range(11)]


def test_words_do_not_depend_on_the_count_or_the_portion(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = philox_words(7, 9, 2, 1003)
    monkeypatch.setattr(philox, "_BLOCKS_AT_ONCE", 13)
    assert np.array_equal(philox_words(7, 9, 2, 1003), whole)
    assert np.array_equal(philox_words(7, 9, 2, 14), whole[:14])
    assert philox_words(7, 9, 2, 0).shape == (0,)


def test_threshold() -> None:
    assert dropout_threshold(0.0) == 0
    assert dropout_threshold(0.5) == 2**31
    assert dropout_threshold(0.1) == 429496730
    assert dropout_threshold(np.nextafter(1, 0)) == 2**32 - 1


def test_mask_is_numbered_in_c_order() -> None:
    mask = keep_mask(3, 4, 1, (2, 3, 5), 0.3)
    words = philox_words(3, 4, 1, 30)
    assert mask.dtype == np.bool_
    assert np.array_equal(mask, (words >= dropout_threshold(0.3)).reshape(2, 3, 5))
    assert keep_mask(3, 4, 1, (100,), 0.0).all()


@pytest.mark.parametrize("probability", [0.01, 0.1, 0.5, 0.9])
def test_share_of_dropped_elements(probability: float) -> None:
    count = 200_000
    dropped = count - int(keep_mask(11, 2, 0, (count,), probability).sum())
    assert abs(dropped / count - probability) < 5 * (probability * (1 - probability) / count) ** 0.5


def test_sites_calls_and_seeds_are_independent() -> None:
    masks = [keep_mask(*arguments, (4096,), 0.5) for arguments in ((0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0))]
    for place, first in enumerate(masks):
        for second in masks[place + 1 :]:
            assert abs(float((first == second).mean()) - 0.5) < 5 * 0.5 / 64


def test_arguments_out_of_range_are_refused() -> None:
    with pytest.raises(InputError, match="operator=256 was given; accepted is a dropout number from 0 to 255"):
        philox_words(0, 0, 256, 1)
    with pytest.raises(InputError, match="count=-1 was given"):
        philox_words(0, 0, 0, -1)
    with pytest.raises(InputError, match=r"probability=1\.0 was given; accepted is at least 0 and below 1"):
        keep_mask(0, 0, 0, (1,), 1.0)
