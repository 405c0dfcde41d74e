"""Data types: every spelling of each, what they accumulate in, and what is refused."""

import dace
import pytest
import torch

from stepdown.models.dtypes import DTYPES, DataType, resolve_dtype
from stepdown.models.errors import OptionError


@pytest.mark.parametrize(
    ("name", "short", "size", "accumulate"),
    [
        ("float64", "fp64", 8, "float64"),
        ("float32", "fp32", 4, "float32"),
        ("float16", "fp16", 2, "float32"),
        ("bfloat16", "bf16", 2, "float32"),
    ],
)
def test_every_spelling_names_the_same_type(name: str, short: str, size: int, accumulate: str) -> None:
    dtype = DTYPES[name]
    spellings = [name, short, f"torch.{name}", name.upper(), getattr(torch, name), getattr(dace, name), dtype]
    assert all(resolve_dtype(spelling) is dtype for spelling in spellings)
    assert (dtype.name, dtype.short, dtype.bytes) == (name, short, size)
    assert dtype.accumulate is DTYPES[accumulate]
    assert str(dtype) == name


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_the_libraries_agree_on_size_and_precision(dtype: DataType) -> None:
    assert dtype.torch.itemsize == dtype.bytes == dtype.dace.bytes
    assert dtype.epsilon == torch.finfo(dtype.torch).eps


@pytest.mark.parametrize("given", ["int8", "float", "", torch.int32, dace.int64, None, [], 32])
def test_others_are_refused_in_one_sentence(given: object) -> None:
    with pytest.raises(OptionError) as raised:
        resolve_dtype(given)  # type: ignore[arg-type]
    message = str(raised.value)
    assert f'"{given}"' in message
    assert all(f'"{dtype.name}"' in message and f'"{dtype.short}"' in message for dtype in DTYPES.values())
    assert message.count(". ") == 0
    assert message.endswith(".")
