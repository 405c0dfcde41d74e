"""The compiled libraries of a build as functions on PyTorch tensors.

Dimension legend: `B` batch, `S` query position, `E` embedding.

Everything that depends on the build alone is prepared when it is loaded, everything that depends on `B` and `S` when
they are first seen. What is left are pointers, and calls run in C++; see ``extension.cpp``.
"""

import ctypes
import math
import shutil
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stepdown.models.definition import EncoderLayer
from stepdown.models.dtypes import resolve_dtype
from stepdown.models.errors import BuildError
from stepdown.pipeline.runtime.extension import load_extension
from stepdown.pipeline.runtime.manifest import (
    MANIFEST,
    TORCH_ROLES,
    Argument,
    Interface,
    Sizes,
    SizeTable,
    c_strides,
    read_interface,
    read_manifest,
)
from stepdown.pipeline.runtime.memory import pool
from stepdown.pipeline.runtime.workspace import Request, first_fit, side_by_side

SET_THREADS = "stepdown_set_num_threads"

# What an argument's value is an offset from, in the order of extension.cpp; parameters and probabilities follow.
_NOTHING, _KEPT, _WORKSPACE = "nothing", "kept", "workspace"
_FIRST_BASES = (_NOTHING, _KEPT, _WORKSPACE, "input", "output", "mask", "rng")

SAVED_ROLES = frozenset({"input", "output", "mask", "rng", "parameter"})
"""What the backward library may read again besides kept tensors."""

_BY_VALUE = {"probability": ("float64",), "symbol": ("int32", "int64")}


@dataclass(frozen=True)
class Plan:
    """What the calls at one `B` and `S` need: bytes, and what is added to the base of every argument."""

    kept_bytes: int
    forward_bytes: int
    forward: list[int]
    backward_bytes: int
    backward: list[int]


class Library:
    """One loaded library.

    ``bases`` holds the number of each argument's base, ``program`` the addresses of the function, its handle, and the
    function that sets the number of threads (0: none).

    :param bases: the numbers of the bases by their names.
    :raises BuildError: when the library cannot be loaded, lacks a function, or needs a value that nobody has.
    """

    def __init__(self, interface: Interface, bases: Mapping[str, int]) -> None:
        self.interface = interface
        library = _open(interface.library)
        try:
            init, program = library[interface.init], library[interface.call]
        except AttributeError as error:
            raise BuildError(f'"{interface.library}" lacks a function that its manifest names: {error}.') from error
        init.restype = ctypes.c_void_p
        init.argtypes = [ctypes.c_int64] * len(interface.init_arguments)  # as wide as any integer that DaCe declares
        # Nothing persists in the handle, so that any sizes do, and one handle serves all threads. It is never closed:
        # a thread may be inside the library until the process ends.
        handle = init(*[1] * len(interface.init_arguments))
        if not handle:
            raise BuildError(f'"{interface.library}" could not be initialised by "{interface.init}".')
        self.program = [_address(program), handle, _address(getattr(library, SET_THREADS, None))]
        for argument in interface.arguments:
            accepted = _BY_VALUE.get(argument.role, (argument.dtype,))
            if argument.dtype not in accepted:
                raise BuildError(
                    f'"{argument.name}" is a value of {argument.dtype}; accepted are {", ".join(accepted)}.'
                )
            if base(argument) not in bases:
                raise BuildError(f'"{interface.library}" needs "{argument.name}", which the runtime cannot provide.')
        self.bases = [bases[base(argument)] for argument in interface.arguments]


def _address(function: Any) -> int:
    """Where a function of a library lies; 0 for None."""
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def base(argument: Argument) -> str:
    """The name of what an argument's value is an offset from: its role and, where the role has several, which."""
    match argument.role:
        case "parameter" | "gradient_parameter":
            return f"{argument.role} {argument.parameters[0]}"
        case "probability":
            return f"probability {argument.field}"
        case "symbol":
            return _NOTHING
        case role:
            return role


class Binding:
    """The forward and the backward function of one build. Load it with :func:`load_build`.

    ``definition`` is the layer, ``dtype`` its PyTorch type, ``batch`` and ``seq`` the promised sizes (None: any),
    ``parameters`` Hugging Face's names in their order, ``shapes`` their shapes, ``probabilities`` the fields of the
    definition that the libraries read at run time.
    """

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path = path
        self.manifest = manifest
        try:
            options = manifest["options"]
            self.key: str = manifest["key"]
            self.definition = EncoderLayer.from_dict(manifest["layer"])
            self.dtype: torch.dtype = resolve_dtype(options["dtype"]).torch
            self.batch: int | None = options["batch"]
            self.seq: int | None = options["seq"]
            self.target: str = options["target"]
        except (KeyError, TypeError, ValueError) as error:
            raise BuildError(f'"{path / MANIFEST}" is incomplete: {error!r}.') from error
        if self.target != "cpu":
            raise BuildError(f'"{path}" was built for target "{self.target}"; accepted is "cpu".')
        described = self.definition.parameters()
        self.parameters = tuple(described)
        self.shapes = tuple(torch.Size(parameter.shape) for parameter in described.values())
        forward = read_interface(path, manifest, "forward")
        backward = read_interface(path, manifest, "backward")
        self._check(forward, backward)
        both = (*forward.arguments, *backward.arguments)
        self.probabilities = tuple(dict.fromkeys(a.field for a in both if a.role == "probability" and a.field))
        self.takes_mask = any(argument.role == "mask" for argument in forward.arguments)
        self._sizes = {"forward": SizeTable(forward.arguments), "backward": SizeTable(backward.arguments)}
        shared = [
            *_FIRST_BASES,
            *(f"parameter {name}" for name in self.parameters),
            *(f"probability {field}" for field in self.probabilities),
        ]
        gradients = [
            *("gradient_output", "gradient_input"),
            *(f"gradient_parameter {name}" for name in self.parameters),
        ]
        bases = {name: number for number, name in enumerate([*shared, *gradients])}
        self._forward, self._backward = Library(forward, bases), Library(backward, bases)
        read = {base(argument) for argument in backward.arguments if argument.role in SAVED_ROLES}
        read |= {f"parameter {name}" for argument in backward.of_role("parameter") for name in argument.parameters}
        self._packs = self._packs_of("parameter", *both)
        self.layer = load_extension().Layer(
            pool(),
            self.dtype,
            self.batch or 0,
            self.seq or 0,
            self.definition.embed,
            list(map(list, self.shapes)),
            len(self.probabilities),
            self.takes_mask,
            self._forward.program,
            self._forward.bases,
            self._backward.program,
            self._backward.bases,
            sorted(bases[name] for name in read),
            self._packs,
            self._packs_of("gradient_parameter", *backward.arguments),
        )
        """The calls, in C++."""

    def _check(self, forward: Interface, backward: Interface) -> None:
        """Refuse interfaces with which a gradient or a kept tensor would be missing."""
        known = set(self.parameters)
        for argument in (*forward.arguments, *backward.arguments):
            if argument.role in ("parameter", "gradient_parameter") and not (
                argument.parameters and known.issuperset(argument.parameters)
            ):
                raise BuildError(f'"{argument.name}" of "{self.path}" belongs to no parameter of the layer.')
            if argument.role == "symbol" and argument.name not in ("B", "S"):
                raise BuildError(f'"{self.path}" needs a symbol "{argument.name}"; accepted are "B" and "S".')
        given = {base(argument) for argument in backward.arguments}
        given |= {f"{a.role} {name}" for a in backward.of_role("gradient_parameter") for name in a.parameters}
        wanted = ["gradient_output", "gradient_input", *(f"gradient_parameter {name}" for name in self.parameters)]
        missing = [name for name in wanted if name not in given]
        missing += [name for name in ("input", "output") if name not in {base(a) for a in forward.arguments}]
        if missing:
            raise BuildError(f'The libraries of "{self.path}" have no argument for "{missing[0]}".')
        kept = {argument.name: argument for argument in forward.of_role("kept")}
        for argument in backward.of_role("kept"):
            if argument.name not in kept or kept[argument.name].strides != argument.strides:
                raise BuildError(
                    f'The backward library of "{self.path}" reads "{argument.name}", which the forward library does '
                    f"not keep in the same layout."
                )

    def _packs_of(self, role: str, *arguments: Argument) -> list[list[int]]:
        """The numbers of the parameters that an argument holds several of."""
        packs = dict.fromkeys(a.parameters for a in arguments if a.role == role and len(a.parameters) > 1)
        return [[self.parameters.index(name) for name in names] for names in packs]

    def pack(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Let scattered parameters be views of one block of memory, where an argument holds several of them.

        They keep their identity, values and gradients; their memory is new. Only parameters with memory of their own
        move: what is a view of other memory is somebody else's to arrange, and is copied in every call.

        :param parameters: in the order of the libraries.
        :returns: whether any were scattered.
        """
        with _LOCK, torch.inference_mode(False), torch.no_grad():
            scattered = self.layer.scattered(list(parameters))
            for number in scattered:
                members = [parameters[index] for index in self._packs[number]]
                if not all(type(member) is torch.nn.Parameter for member in members):
                    continue
                block = torch.cat([member.detach().reshape(-1) for member in members])
                for member, part in zip(members, block.split([m.numel() for m in members]), strict=True):
                    member.data = part.view(member.shape)
        return bool(scattered)

    def prepare(self, batch: int, seq: int) -> None:
        """Make calls of this batch and length possible.

        :raises InputError: when a tensor would have more elements than generated code can count.
        """
        plan = self.plan(batch, seq)
        self.layer.add_plan(
            batch, seq, plan.kept_bytes, plan.forward_bytes, plan.forward, plan.backward_bytes, plan.backward
        )

    def plan(self, batch: int, seq: int) -> Plan:
        """Where everything lies at one batch and length.

        :raises InputError: when a tensor would have more elements than generated code can count.
        """
        forward, backward = self._sizes_at("forward", batch, seq), self._sizes_at("backward", batch, seq)
        kept = self._forward.interface.of_role("kept")
        layout = side_by_side([forward[argument.name].bytes for argument in kept])
        offsets = {argument.name: offset for argument, offset in zip(kept, layout.offsets, strict=True)}
        offsets |= {"B": batch, "S": seq}
        forward_bytes, forward_offsets = _offsets(self._forward.interface, forward, offsets)
        backward_bytes, backward_offsets = _offsets(self._backward.interface, backward, offsets)
        return Plan(layout.size, forward_bytes, forward_offsets, backward_bytes, backward_offsets)

    def _sizes_at(self, direction: str, batch: int, seq: int) -> dict[str, Sizes]:
        """The sizes of a library's arguments, checked against what PyTorch's tensors will be."""
        library = self._forward if direction == "forward" else self._backward
        sizes = self._sizes[direction].at(batch, seq)
        activation = (batch, seq, self.definition.embed)
        elements = dict(zip(self.parameters, map(math.prod, self.shapes), strict=True))
        for argument in library.interface.arguments:
            if argument.role not in TORCH_ROLES:
                continue
            shape, strides = sizes[argument.name].shape, sizes[argument.name].strides
            if argument.parameters:
                fits = math.prod(shape) == sum(elements[name] for name in argument.parameters)
            else:
                fits = shape == {"mask": (batch, seq), "rng": (2,)}.get(argument.role, activation)
            regular = [(n, s) for n, s, c in zip(shape, strides, c_strides(shape), strict=True) if n != 1 and s != c]
            if not fits or regular:
                raise BuildError(
                    f'"{argument.name}" of "{library.interface.library}" has shape {list(shape)} and strides '
                    f"{list(strides)}; accepted is the shape of PyTorch's tensor, in C order."
                )
        return sizes


def _offsets(interface: Interface, sizes: dict[str, Sizes], known: dict[str, int]) -> tuple[int, list[int]]:
    """The bytes of a library's temporaries, and what is added to the base of every argument.

    :param known: the offsets of kept tensors, and the values of symbols, by their names.
    """
    arguments = interface.of_role("workspace")
    last = max((argument.live[1] for argument in arguments if argument.live), default=0)
    layout = first_fit([Request(sizes[argument.name].bytes, *(argument.live or (0, last))) for argument in arguments])
    placed = {argument.name: offset for argument, offset in zip(arguments, layout.offsets, strict=True)}
    by_role = {"workspace": placed, "kept": known, "symbol": known}
    offsets = [by_role[a.role][a.name] if a.role in by_role else 0 for a in interface.arguments]
    return layout.size, offsets


_Identity = tuple[int, int, int, int]
_LOCK = threading.RLock()
_OPENED: dict[str, _Identity] = {}
_LOADED: dict[tuple[Path, _Identity, _Identity], Binding] = {}


def load_build(build: str | Path) -> Binding:
    """The libraries of a build folder, loaded once in a process and kept.

    A folder that was built again since is loaded again.

    :raises BuildError: when the folder holds no complete build for this machine.
    """
    path = Path(build).resolve()
    manifest = read_manifest(path)
    libraries = [read_interface(path, manifest, direction).library for direction in ("forward", "backward")]
    with _LOCK:
        key = (path, _identity(libraries[0]), _identity(libraries[1]))
        if key not in _LOADED:
            _LOADED[key] = Binding(path, manifest)
        return _LOADED[key]


def _identity(library: Path) -> _Identity:
    try:
        stat = library.stat()
    except OSError as error:
        raise BuildError(f'The library "{library}" cannot be read ({error.strerror}).') from error
    return stat.st_dev, stat.st_ino, stat.st_mtime_ns, stat.st_size


def _open(library: Path) -> ctypes.CDLL:
    """Load a library; called under the lock, through :func:`load_build`."""
    identity = _identity(library)
    known = _OPENED.setdefault(str(library), identity)
    try:
        if known == identity:
            return ctypes.CDLL(str(library), mode=ctypes.RTLD_LOCAL)
        # The loader would return what it loaded from this path before; a copy has a path of its own.
        with tempfile.TemporaryDirectory(prefix="stepdown-") as folder:
            copy = shutil.copy(library, folder)
            return ctypes.CDLL(str(copy), mode=ctypes.RTLD_LOCAL)
    except OSError as error:
        raise BuildError(f'The library "{library}" cannot be loaded: {error}.') from error
