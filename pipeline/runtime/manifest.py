"""What a build says about its two libraries, and the sizes that its expressions take at given `B` and `S`.

Dimension legend: `B` batch, `S` query position.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sympy

from stepdown.models.errors import BuildError, InputError

MANIFEST = "manifest.json"
FORMAT = 1
"""The version of the manifest that this runtime reads."""

ITEM_BYTES = {
    "bool": 1,
    "int8": 1,
    "uint8": 1,
    "int16": 2,
    "uint16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "uint32": 4,
    "float32": 4,
    "int64": 8,
    "uint64": 8,
    "float64": 8,
}

FORWARD_ROLES = ("input", "parameter", "mask", "rng", "probability", "output", "kept", "workspace", "symbol")
BACKWARD_ROLES = (*FORWARD_ROLES, "gradient_output", "gradient_input", "gradient_parameter")

# Roles of tensors that PyTorch owns: their elements lie in C order, because PyTorch cannot be told otherwise.
TORCH_ROLES = frozenset(BACKWARD_ROLES) - {"kept", "workspace", "symbol", "probability"}

# Indices in generated code are 32-bit.
MOST_ELEMENTS = 2**31 - 1


@dataclass(frozen=True)
class Argument:
    """One argument of a library's function; shapes, strides and bytes are expressions in `B` and `S`.

    ``parameters`` are those that it holds, or holds the gradients of, one after the other.
    """

    name: str
    role: str
    dtype: str
    shape: tuple[str, ...]
    strides: tuple[str, ...]
    parameters: tuple[str, ...]
    field: str | None
    bytes: str | None
    live: tuple[int, int] | None


@dataclass(frozen=True)
class Interface:
    """The functions of one library and the arguments of its program, in C order after the handle.

    ``call`` is the function that takes them as an array of 8-byte values.
    """

    library: Path
    call: str
    init: str
    arguments: tuple[Argument, ...]
    init_arguments: tuple[str, ...]

    def of_role(self, role: str) -> tuple[Argument, ...]:
        """The arguments with this role, in C order."""
        return tuple(argument for argument in self.arguments if argument.role == role)


@dataclass(frozen=True)
class Sizes:
    """What an argument measures at one batch and length; ``bytes`` is what it spans in memory."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    bytes: int


def read_manifest(build: Path) -> dict[str, Any]:
    """The manifest of a build folder.

    :raises BuildError: when there is none, or it is of another format.
    """
    path = build / MANIFEST
    try:
        manifest = json.loads(path.read_text())
    except OSError as error:
        raise BuildError(
            f'"{build}" was given as a build, but its "{MANIFEST}" cannot be read ({error.strerror}); accepted is a '
            f'folder that "compile_layer" wrote.'
        ) from error
    except ValueError as error:
        raise BuildError(f'"{path}" is damaged ({error}); accepted is what "compile_layer" wrote.') from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        given = manifest.get("format") if isinstance(manifest, dict) else None
        raise BuildError(f'"{path}" has format {given!r}; accepted is {FORMAT}.')
    if not isinstance(manifest.get("abi"), dict) or not {"forward", "backward"} <= set(manifest["abi"]):
        raise BuildError(f'"{build}" holds no compiled libraries; accepted is a build made without "--no-build".')
    return manifest


def read_interface(build: Path, manifest: Mapping[str, Any], direction: str) -> Interface:
    """The interface of the ``forward`` or ``backward`` library of a build.

    :raises BuildError: when it is incomplete or names a role that the runtime does not know.
    """
    roles = FORWARD_ROLES if direction == "forward" else BACKWARD_ROLES
    try:
        abi = manifest["abi"][direction]
        arguments = tuple(_argument(entry) for entry in abi["arguments"])
        interface = Interface(
            build / abi["library"], abi["call"], abi["init"], arguments, tuple(abi.get("init_arguments", ()))
        )
    except (KeyError, TypeError, ValueError) as error:
        raise BuildError(f'The {direction} interface of "{build}" is incomplete: {error!r}.') from error
    for argument in arguments:
        if argument.role not in roles or argument.dtype not in ITEM_BYTES:
            raise BuildError(
                f'Argument "{argument.name}" of "{interface.library}" has role "{argument.role}" and dtype '
                f'"{argument.dtype}"; accepted roles are {", ".join(roles)}.'
            )
    return interface


def _argument(entry: Mapping[str, Any]) -> Argument:
    live = entry.get("live")
    return Argument(
        name=entry["name"],
        role=entry["role"],
        dtype=entry["dtype"],
        shape=tuple(str(size) for size in entry.get("shape", ())),
        strides=tuple(str(stride) for stride in entry.get("strides", ())),
        parameters=tuple(entry["parameters"] if "parameters" in entry else filter(None, [entry.get("parameter")])),
        field=entry.get("field"),
        bytes=None if entry.get("bytes") is None else str(entry["bytes"]),
        live=None if live is None else (int(live[0]), int(live[1])),
    )


class SizeTable:
    """Evaluates the sizes of a library's arguments at any batch and length.

    :raises BuildError: when an expression holds anything but `B`, `S`, numbers and integer functions.
    """

    def __init__(self, arguments: Sequence[Argument]) -> None:
        self._arguments = arguments
        flat = [
            _expression(argument, text)
            for argument in arguments
            for text in (*argument.shape, *argument.strides, argument.bytes)
            if text is not None
        ]
        self._evaluate = sympy.lambdify(list(_SYMBOLS.values()), flat, modules="math")

    def at(self, batch: int, seq: int) -> dict[str, Sizes]:
        """The sizes of every argument, by its name.

        :raises InputError: when a tensor would have more elements than generated code can count.
        """
        values = iter(self._evaluate(batch, seq))
        sizes = {}
        for argument in self._arguments:
            shape = tuple(_integer(argument, next(values)) for _ in argument.shape)
            strides = tuple(_integer(argument, next(values)) for _ in argument.strides)
            span = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
            if max(span, math.prod(shape)) > MOST_ELEMENTS:
                raise InputError(
                    f'batch {batch} and length {seq} were given, for which "{argument.name}" has {math.prod(shape)} '
                    f"elements; accepted are at most {MOST_ELEMENTS}."
                )
            stated = 0 if argument.bytes is None else _integer(argument, next(values))
            sizes[argument.name] = Sizes(shape, strides, max(stated, span * ITEM_BYTES[argument.dtype]))
        return sizes


_SYMBOLS = {name: sympy.Symbol(name, integer=True, positive=True) for name in ("B", "S")}
_FUNCTIONS: dict[str, Any] = {
    **_SYMBOLS,
    "int_ceil": lambda a, b: sympy.ceiling(a / b),
    "int_floor": lambda a, b: sympy.floor(a / b),
}


def _expression(argument: Argument, text: str) -> sympy.Expr:
    try:
        expression = sympy.sympify(text, locals=_FUNCTIONS)
    except (sympy.SympifyError, TypeError, SyntaxError, AttributeError) as error:
        raise BuildError(
            f'The size "{text}" of "{argument.name}" cannot be read; accepted are expressions in "B" and "S".'
        ) from error
    if not isinstance(expression, sympy.Basic):  # SymPy takes the names of its own functions for them
        raise BuildError(f'The size "{text}" of "{argument.name}" holds {{{text}}}; accepted are "B" and "S".')
    unknown = expression.free_symbols - set(_SYMBOLS.values())
    if unknown:
        raise BuildError(f'The size "{text}" of "{argument.name}" holds {unknown}; accepted are "B" and "S".')
    return expression


def _integer(argument: Argument, value: float) -> int:
    if value != int(value):
        raise BuildError(f'A size of "{argument.name}" is {value}; accepted are integers.')
    return int(value)


def c_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides, in elements, of a tensor of this shape whose elements lie in C order."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))
