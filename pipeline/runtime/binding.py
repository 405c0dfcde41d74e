"""The compiled libraries of a build as functions on PyTorch tensors.

Dimension legend: `B` batch, `S` query position, `E` embedding.

A call costs a few microseconds: everything that depends on the build alone is prepared when it is loaded, everything
that depends on `B` and `S` when they are first seen, and what is left are pointers.
"""

import ctypes
import math
import shutil
import struct
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stepdown.models.definition import EncoderLayer
from stepdown.models.dtypes import resolve_dtype
from stepdown.models.errors import BuildError
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
from stepdown.pipeline.runtime.memory import POOL
from stepdown.pipeline.runtime.workspace import Request, first_fit, side_by_side

PLANS = 512
"""How many (batch, length) pairs a build remembers the sizes of."""

CPU = torch.device("cpu")
SET_THREADS = "stepdown_set_num_threads"

_FORMATS = {"float64": "d", "int32": "q", "int64": "q"}
"""How an argument that is passed by value lies in the block of arguments; pointers are integers too."""


@dataclass(frozen=True)
class ForwardPlan:
    """What a forward call at one `B` and `S` needs: offsets and sizes in bytes, and the mask of full sequences."""

    kept_bytes: int
    kept: tuple[int, ...]
    workspace_bytes: int
    workspace: tuple[int, ...]
    symbols: tuple[int, ...]
    full_mask: Tensor


@dataclass(frozen=True)
class BackwardPlan:
    """What a backward call at one `B` and `S` needs, when the gradients in ``needed`` are wanted."""

    kept: tuple[int, ...]
    workspace_bytes: int
    workspace: tuple[int, ...]
    symbols: tuple[int, ...]
    unwanted: tuple[int, ...]
    """Offsets in the workspace where gradients that nobody wants are written, in their order."""


class Library:
    """One loaded library: its program as a function of values in a fixed order.

    :param slots: the names of the values that :meth:`call` takes, in their order.
    :raises BuildError: when the library cannot be loaded, lacks a function, or needs a value that nobody has.
    """

    def __init__(self, interface: Interface, slots: Sequence[str]) -> None:
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
        self.handle = init(*[1] * len(interface.init_arguments))
        if not self.handle:
            raise BuildError(f'"{interface.library}" could not be initialised by "{interface.init}".')
        program.restype = None
        # A bytes object's contents are aligned to 8 bytes.
        program.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
        self._program: Callable[[int, bytes], None] = program
        self._pack = struct.Struct("".join(map(_format, interface.arguments))).pack
        set_threads = getattr(library, SET_THREADS, None)
        if set_threads is not None:
            set_threads.restype, set_threads.argtypes = None, [ctypes.c_int]
        self._set_threads: Callable[[int], None] | None = set_threads
        position = {name: index for index, name in enumerate(slots)}
        missing = [argument.name for argument in interface.arguments if slot(argument) not in position]
        if missing:
            raise BuildError(f'"{interface.library}" needs "{missing[0]}", which the runtime cannot provide.')
        self._pick = itemgetter(*(position[slot(argument)] for argument in interface.arguments))

    def call(self, values: list[float]) -> None:
        """Run the program in the calling thread, with as many OpenMP threads as PyTorch uses there; frees the GIL."""
        if self._set_threads is not None:
            self._set_threads(torch.get_num_threads())
        self._program(self.handle, self._pack(*self._pick(values)))


def slot(argument: Argument) -> str:
    """The name of the value that an argument takes: its role and, where the role has several, which."""
    match argument.role:
        case "parameter" | "gradient_parameter":
            return f"{argument.role} {argument.parameter}"
        case "probability":
            return f"probability {argument.field}"
        case "kept" | "workspace" | "symbol":
            return f"{argument.role} {argument.name}"
        case role:
            return role


def _format(argument: Argument) -> str:
    if argument.role not in ("probability", "symbol"):
        return "q"
    if argument.dtype not in _FORMATS:
        raise BuildError(f'"{argument.name}" is a value of {argument.dtype}; accepted are {", ".join(_FORMATS)}.')
    return _FORMATS[argument.dtype]


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
        self._kept = forward.of_role("kept")
        self._index = {argument.name: index for index, argument in enumerate(self._kept)}
        self._sizes = {"forward": SizeTable(forward.arguments), "backward": SizeTable(backward.arguments)}
        self._forward = Library(forward, self._forward_slots(forward))
        self._backward = Library(backward, self._backward_slots(backward))
        roles = {argument.role for argument in backward.arguments}
        self.saves_input, self.saves_output = "input" in roles, "output" in roles
        self.saves_mask, self.saves_rng = "mask" in roles, "rng" in roles
        read = {argument.parameter for argument in backward.of_role("parameter")}
        self.saved_parameters = tuple(index for index, name in enumerate(self.parameters) if name in read)
        # One element each; "empty_like" takes a third of the time of "empty".
        with torch.inference_mode(False):
            element = torch.empty(1, dtype=self.dtype, device=CPU)
            self._templates = tuple(element.expand(shape) for shape in self.shapes)
        # Thread-safe, written in C, and bounded.
        self.forward_plan = lru_cache(maxsize=PLANS)(self._forward_plan)
        self._backward_plan_of = lru_cache(maxsize=PLANS)(self._backward_plan)

    def _check(self, forward: Interface, backward: Interface) -> None:
        """Refuse interfaces with which a gradient or a kept tensor would be missing."""
        known = set(self.parameters)
        for argument in (*forward.arguments, *backward.arguments):
            if argument.role in ("parameter", "gradient_parameter") and argument.parameter not in known:
                raise BuildError(f'"{argument.name}" of "{self.path}" belongs to no parameter of the layer.')
            if argument.role == "symbol" and argument.name not in ("B", "S"):
                raise BuildError(f'"{self.path}" needs a symbol "{argument.name}"; accepted are "B" and "S".')
        given = {slot(argument) for argument in backward.arguments}
        wanted = ["gradient_output", "gradient_input", *(f"gradient_parameter {name}" for name in self.parameters)]
        missing = [name for name in wanted if name not in given]
        missing += [name for name in ("input", "output") if name not in {slot(a) for a in forward.arguments}]
        if missing:
            raise BuildError(f'The libraries of "{self.path}" have no argument for "{missing[0]}".')
        kept = {argument.name: argument for argument in forward.of_role("kept")}
        for argument in backward.of_role("kept"):
            if argument.name not in kept or kept[argument.name].strides != argument.strides:
                raise BuildError(
                    f'The backward library of "{self.path}" reads "{argument.name}", which the forward library does '
                    f"not keep in the same layout."
                )

    def _forward_slots(self, interface: Interface) -> list[str]:
        """The names of the values in the order in which :meth:`forward` lists them."""
        return [
            *("input", "output", "mask", "rng"),
            *(f"probability {field}" for field in self.probabilities),
            *(f"parameter {name}" for name in self.parameters),
            *map(slot, interface.of_role("symbol")),
            *map(slot, self._kept),
            *map(slot, interface.of_role("workspace")),
        ]

    def _backward_slots(self, interface: Interface) -> list[str]:
        """The names of the values in the order in which :meth:`backward` lists them."""
        return [
            *("input", "output", "mask", "rng", "gradient_output"),
            *(f"probability {field}" for field in self.probabilities),
            *(f"parameter {name}" for name in self.parameters),
            "gradient_input",
            *(f"gradient_parameter {name}" for name in self.parameters),
            *map(slot, interface.of_role("symbol")),
            *map(slot, interface.of_role("kept")),
            *map(slot, interface.of_role("workspace")),
        ]

    def _forward_plan(self, batch: int, seq: int) -> ForwardPlan:
        interface = self._forward.interface
        sizes = self._sizes_at("forward", batch, seq)
        kept = side_by_side([sizes[argument.name].bytes for argument in self._kept])
        workspace = first_fit(_requests(interface, sizes))
        # A tensor made in inference mode could not be saved for a backward pass later.
        with torch.inference_mode(False):
            full_mask = torch.ones(batch, seq, dtype=torch.bool, device=CPU)
        return ForwardPlan(
            kept_bytes=kept.size,
            kept=kept.offsets,
            workspace_bytes=workspace.size,
            workspace=workspace.offsets,
            symbols=_symbols(interface, batch, seq),
            full_mask=full_mask,
        )

    def _backward_plan(self, batch: int, seq: int, needed: tuple[bool, ...]) -> BackwardPlan:
        interface = self._backward.interface
        sizes = self._sizes_at("backward", batch, seq)
        kept = self.forward_plan(batch, seq).kept
        requests = _requests(interface, sizes)
        end = max((request.last for request in requests), default=0)
        begin = min((request.first for request in requests), default=0)
        by_slot = {slot(argument): sizes[argument.name] for argument in interface.arguments}
        names = ["gradient_input", *(f"gradient_parameter {name}" for name in self.parameters)]
        unwanted = [by_slot[name].bytes for name, wanted in zip(names, needed, strict=True) if not wanted]
        layout = first_fit([*requests, *(Request(size, begin, end) for size in unwanted)])
        return BackwardPlan(
            kept=tuple(kept[self._index[argument.name]] for argument in interface.of_role("kept")),
            workspace_bytes=layout.size,
            workspace=layout.offsets[: len(requests)],
            symbols=_symbols(interface, batch, seq),
            unwanted=layout.offsets[len(requests) :],
        )

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
            if argument.parameter is not None:
                fits = math.prod(shape) == elements[argument.parameter]
            else:
                fits = shape == {"mask": (batch, seq), "rng": (2,)}.get(argument.role, activation)
            regular = [(n, s) for n, s, c in zip(shape, strides, c_strides(shape), strict=True) if n != 1 and s != c]
            if not fits or regular:
                raise BuildError(
                    f'"{argument.name}" of "{library.interface.library}" has shape {list(shape)} and strides '
                    f"{list(strides)}; accepted is the shape of PyTorch's tensor, in C order."
                )
        return sizes

    def forward(
        self,
        plan: ForwardPlan,
        x: Tensor,
        mask: Tensor,
        rng: Tensor,
        probabilities: tuple[float, ...],
        parameters: Sequence[Tensor],
    ) -> tuple[Tensor, Tensor]:
        """The output `[B, S, E]` and the block of kept tensors. Every tensor is contiguous and of the right type."""
        output = torch.empty_like(x)
        kept = POOL.take(plan.kept_bytes)
        workspace = POOL.scratch(plan.workspace_bytes)
        kept_at, workspace_at = kept.data_ptr(), workspace.data_ptr()
        self._forward.call(
            [
                x.data_ptr(),
                output.data_ptr(),
                mask.data_ptr(),
                rng.data_ptr(),
                *probabilities,
                *[parameter.data_ptr() for parameter in parameters],
                *plan.symbols,
                *[kept_at + offset for offset in plan.kept],
                *[workspace_at + offset for offset in plan.workspace],
            ]
        )
        return output, kept

    def backward(
        self,
        gradient: Tensor,
        kept: Tensor,
        x: Tensor | None,
        output: Tensor | None,
        mask: Tensor | None,
        rng: Tensor | None,
        probabilities: tuple[float, ...],
        parameters: Sequence[Tensor],
        needed: tuple[bool, ...],
    ) -> list[Tensor | None]:
        """The gradients of the input and of every parameter, None where they are not ``needed``.

        ``parameters`` are those that :attr:`saved_parameters` lists; ``x``, ``output``, ``mask`` and ``rng`` may be
        None where the backward library does not read them.
        """
        batch, seq, _ = gradient.shape
        plan = self._backward_plan_of(batch, seq, needed)
        gradients = [
            torch.empty_like(like) if wanted else None
            for like, wanted in zip((gradient, *self._templates), needed, strict=True)
        ]
        workspace = POOL.scratch(plan.workspace_bytes)
        kept_at, workspace_at = kept.data_ptr(), workspace.data_ptr()
        unwanted = iter(plan.unwanted)
        pointers = [0] * len(self.parameters)
        for index, parameter in zip(self.saved_parameters, parameters, strict=True):
            pointers[index] = parameter.data_ptr()
        self._backward.call(
            [
                0 if x is None else x.data_ptr(),
                0 if output is None else output.data_ptr(),
                0 if mask is None else mask.data_ptr(),
                0 if rng is None else rng.data_ptr(),
                gradient.data_ptr(),
                *probabilities,
                *pointers,
                *[workspace_at + next(unwanted) if tensor is None else tensor.data_ptr() for tensor in gradients],
                *plan.symbols,
                *[kept_at + offset for offset in plan.kept],
                *[workspace_at + offset for offset in plan.workspace],
            ]
        )
        return gradients


def _requests(interface: Interface, sizes: dict[str, Sizes]) -> list[Request]:
    arguments = interface.of_role("workspace")
    last = max((argument.live[1] for argument in arguments if argument.live), default=0)
    return [Request(sizes[argument.name].bytes, *(argument.live or (0, last))) for argument in arguments]


def _symbols(interface: Interface, batch: int, seq: int) -> tuple[int, ...]:
    return tuple(batch if argument.name == "B" else seq for argument in interface.of_role("symbol"))


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
