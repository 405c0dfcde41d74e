"""The data types that layers are compiled for, by PyTorch's name or a short form.

| name       | short  | statistics and sums in |
|------------|--------|------------------------|
| `float64`  | `fp64` | `float64`              |
| `float32`  | `fp32` | `float32`              |
| `float16`  | `fp16` | `float32`              |
| `bfloat16` | `bf16` | `float32`              |
"""

from dataclasses import dataclass

import dace
import torch
from dace.dtypes import typeclass

from stepdown.models.errors import OptionError

TorchDtype = torch.dtype


@dataclass(frozen=True)
class DataType:
    """One floating-point type as every part of the project names it.

    ``name`` is PyTorch's, ``short`` the usual abbreviation, ``torch`` and ``dace`` the types of the two libraries and
    ``bytes`` the size of an element.
    """

    name: str
    short: str
    torch: TorchDtype
    dace: typeclass
    bytes: int

    @property
    def accumulate(self) -> "DataType":
        """The type of sums, means and statistics: float64 for float64 and float32 for everything else."""
        return DTYPES["float64"] if self.name == "float64" else DTYPES["float32"]

    @property
    def epsilon(self) -> float:
        """The distance from 1 to the next larger number."""
        return torch.finfo(self.torch).eps

    def __str__(self) -> str:
        return self.name


DTYPES: dict[str, DataType] = {
    dtype.name: dtype
    for dtype in (
        DataType("float64", "fp64", torch.float64, dace.float64, 8),
        DataType("float32", "fp32", torch.float32, dace.float32, 4),
        DataType("float16", "fp16", torch.float16, dace.float16, 2),
        DataType("bfloat16", "bf16", torch.bfloat16, dace.bfloat16, 2),
    )
}
"""Every supported type by its name."""

_ALIASES: dict[object, DataType] = {
    alias: dtype for dtype in DTYPES.values() for alias in (dtype, dtype.name, dtype.short, dtype.torch, dtype.dace)
}


def resolve_dtype(dtype: str | TorchDtype | typeclass | DataType) -> DataType:
    """The :class:`DataType` that ``dtype`` names.

    :param dtype: a name (``"bfloat16"``), a short form (``"bf16"``), or the type of PyTorch or DaCe.
    :raises OptionError: when it names none of the supported types.
    """
    key: object = dtype.removeprefix("torch.").lower() if isinstance(dtype, str) else dtype
    try:
        return _ALIASES[key]
    except (KeyError, TypeError):
        accepted = ", ".join(f'"{known.name}" ("{known.short}")' for known in DTYPES.values())
        raise OptionError(f'dtype "{dtype}" is unknown; accepted are {accepted}.') from None
