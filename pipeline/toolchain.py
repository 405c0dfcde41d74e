"""The C++ toolchain: which compiler, which flags, which CMake, and how DaCe is told.

Every flag that generated code is compiled with is set here, and :func:`toolchain_identity` puts all of it into the key
of the build cache. DaCe's own defaults are replaced, not extended: they hold ``-march=native`` (a library carried to an
older processor dies there) and ``-freciprocal-math``.
"""

import contextlib
import copy
import io
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

import cmake
import dace
import ninja
from dace.config import Config

from stepdown.models.errors import BuildError, OptionError
from stepdown.models.quiet import quiet_dace
from stepdown.pipeline.cache import default_root

Optimize = Literal["release", "light"]
"""``release`` is for speed; ``light`` compiles quickly and is for tests."""

Isa = Literal["generic", "x86-64-v2", "x86-64-v3", "x86-64-v4"]
"""An instruction set: a level of the x86-64 psABI, or what the compiler assumes when it is told nothing."""

CANDIDATES = ("g++", "c++", "clang++")
OLDEST = {"gnu": 11, "clang": 13}
"""The first major versions that know C++20 as DaCe writes it and ``-march=x86-64-v3``."""

CPP_STANDARD = "20"

# CMake knows no flags for a build type of this name, so that those below are the only ones.
BUILD_TYPE = "None"

# Names of /proc/cpuinfo, by level: x86-64 psABI, section 3.1.1 (Linux says "abm" for LZCNT, "pni" for SSE3).
_LEVELS: tuple[tuple[Isa, frozenset[str]], ...] = (
    ("x86-64-v2", frozenset({"cx16", "lahf_lm", "popcnt", "pni", "sse4_1", "sse4_2", "ssse3"})),
    ("x86-64-v3", frozenset({"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"})),
    ("x86-64-v4", frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"})),
)

# -fno-math-errno and -fno-trapping-math let loops with square roots and comparisons be vectorised and change no value,
# infinities and NaN included. -ffp-contract=fast allows fused multiply-add.
_FLAGS = ("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-fopenmp-simd")
_LEVEL_FLAGS: dict[str, tuple[str, ...]] = {"release": ("-O3", "-DNDEBUG"), "light": ("-O1", "-DNDEBUG")}

# One thread at a time: DaCe's code generation is not thread-safe, and PATH belongs to the process.
_LOCK = threading.RLock()


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler: absolute ``path``, ``family`` (``gnu`` or ``clang``) and ``version`` such as ``12.2.0``."""

    path: Path
    family: Literal["gnu", "clang"]
    version: str

    def __str__(self) -> str:
        return f"{self.path.name} {self.version} ({self.family})"


def find_compiler() -> Compiler:
    """The compiler that ``CXX`` names or, without it, the first of ``g++``, ``c++``, ``clang++`` on ``PATH``.

    :raises BuildError: when there is none, or it is too old.
    """
    wanted = os.environ.get("CXX", "").strip()
    if wanted:
        found = shutil.which(wanted)
        if found is None:
            raise BuildError(
                f'The C++ compiler "{wanted}" that the variable "CXX" names was not found; it accepts the name or path '
                f"of one executable."
            )
        return _identify(found, os.stat(found).st_mtime_ns)
    for candidate in CANDIDATES:
        found = shutil.which(candidate)
        if found is not None:
            return _identify(found, os.stat(found).st_mtime_ns)
    names = ", ".join(f'"{name}"' for name in CANDIDATES)
    raise BuildError(
        f'No C++ compiler was found: looked for {names} on "PATH"; install one (Debian: "apt install g++") or set '
        f'"CXX".'
    )


@lru_cache(maxsize=8)
def _identify(path: str, modified: int) -> Compiler:
    """Asks a compiler for the macros it predefines; its file name says little. ``modified`` only keys the memory."""
    try:
        probe = subprocess.run(
            [path, "-dM", "-E", "-x", "c++", os.devnull], capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f'"{path}" does not work as a C++ compiler: {error}.') from error
    macros: dict[str, str] = {}
    for line in probe.stdout.splitlines():
        _, name, *value = line.split(maxsplit=2)
        macros[name] = value[0] if value else ""
    family: Literal["gnu", "clang"]
    if "__clang__" in macros:
        family, parts = "clang", ("__clang_major__", "__clang_minor__", "__clang_patchlevel__")
    elif "__GNUC__" in macros:
        family, parts = "gnu", ("__GNUC__", "__GNUC_MINOR__", "__GNUC_PATCHLEVEL__")
    else:
        raise BuildError(f'The C++ compiler "{path}" is neither GCC nor Clang; those two are accepted.')
    version = ".".join(macros[part] for part in parts)
    if int(macros[parts[0]]) < OLDEST[family]:
        raise BuildError(
            f'The C++ compiler "{path}" has version {version}; accepted are GCC {OLDEST["gnu"]} and Clang '
            f"{OLDEST['clang']}, or newer."
        )
    return Compiler(Path(path), family, version)


def isa_of(flags: frozenset[str]) -> Isa:
    """The highest level of x86-64 that a processor with these ``/proc/cpuinfo`` flags has, or ``generic``."""
    best: Isa = "generic"
    for level, required in _LEVELS:
        if not required <= flags:
            break
        best = level
    return best


def host_isa(cpuinfo: Path = Path("/proc/cpuinfo")) -> Isa:
    """The instruction set of this machine; ``generic`` where it is not an x86-64 Linux or cannot be read."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return "generic"
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return "generic"
    flags = next((line.partition(":")[2] for line in lines if line.startswith("flags")), "")
    return isa_of(frozenset(flags.split()))


def default_isa() -> Isa:
    """What generated code is compiled for: AVX2 (``x86-64-v3``) where this machine has it, else what it has.

    Level 4 is never chosen by itself: the libraries are meant to travel, and row kernels are bound by memory.
    """
    isa = host_isa()
    return "x86-64-v3" if isa == "x86-64-v4" else isa


def compile_flags(optimize: Optimize = "release", isa: Isa | None = None) -> tuple[str, ...]:
    """Every flag for generated C++ besides the language standard, ``-fPIC`` and ``-fopenmp``, which CMake adds.

    :param optimize: ``release`` (-O3) or ``light`` (-O1).
    :param isa: the instruction set; ``None`` takes :func:`default_isa`.
    :raises OptionError: for other values.
    """
    if optimize not in get_args(Optimize):
        raise OptionError(f'optimize "{optimize}" is unknown; accepted are "release" and "light".')
    isa = default_isa() if isa is None else isa
    if isa not in get_args(Isa):
        accepted = ", ".join(f'"{name}"' for name in get_args(Isa))
        raise OptionError(f'isa "{isa}" is unknown; accepted are {accepted}.')
    march = () if isa == "generic" else (f"-march={isa}",)
    return (*_LEVEL_FLAGS[optimize], *march, *_FLAGS)


def extension_flags(cxx11_abi: bool) -> tuple[str, ...]:
    """Every flag for the runtime's extension of PyTorch, besides the places of PyTorch's headers and libraries.

    :param cxx11_abi: which of libstdc++'s two binary interfaces PyTorch was compiled with.
    """
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(cxx11_abi)}"
    return (f"-std=c++{CPP_STANDARD}", "-O1", "-DNDEBUG", "-fPIC", "-shared", abi)


def cmake_executable() -> Path:
    """CMake as the pip package ships it: Debian's is too old for CUDA with C++20.

    :raises BuildError: when the package holds none and there is none on ``PATH``.
    """
    return _packaged_tool(Path(cmake.CMAKE_BIN_DIR), "cmake")


def ninja_executable() -> Path:
    """Ninja as the pip package ships it.

    :raises BuildError: when the package holds none and there is none on ``PATH``.
    """
    return _packaged_tool(Path(ninja.BIN_DIR), "ninja")


def _packaged_tool(folder: Path, name: str) -> Path:
    found = shutil.which(name, path=str(folder)) or shutil.which(name)
    if found is None:
        raise BuildError(
            f'"{name}" was not found, neither in "{folder}" nor on "PATH"; "pip install {name}" brings it.'
        )
    return Path(found)


def toolchain_identity(optimize: Optimize = "release", isa: Isa | None = None) -> dict[str, str]:
    """What a library depends on besides its source, as text: a part of the build cache's key, kept in the manifest.

    :raises BuildError: without a usable compiler.
    """
    compiler = find_compiler()
    return {
        "compiler": f"{compiler.family} {compiler.version}",
        "flags": " ".join(compile_flags(optimize, isa)),
        "cpp_standard": CPP_STANDARD,
        "machine": platform.machine(),
        "dace": dace.__version__,
    }


@contextlib.contextmanager
def preserved_dace_configuration() -> Iterator[None]:
    """Puts DaCe's configuration (of this thread: DaCe keeps one for each) back on exit."""
    before = copy.deepcopy(Config._data._config)
    try:
        yield
    finally:
        Config._data._config = before


@contextlib.contextmanager
def dace_configuration(
    optimize: Optimize = "release", *, isa: Isa | None = None, build_folder: Path | None = None, compiles: bool = True
) -> Iterator[None]:
    """DaCe as the project wants it, for everything from parsing a program to compiling its code.

    Starts from DaCe's defaults, so that neither a user's ``.dace.conf`` nor ``DACE_*`` variables (``DACE_debugprint``
    excepted) change what is generated. DaCe's warnings are ignored in this thread. One thread at a time may be inside;
    it may enter again. Code that also waits for an entry of the build cache takes the two in one order everywhere, or
    two threads wait for each other.

    :param build_folder: where SDFGs without a folder of their own are compiled; ``None`` takes a temporary one that is
        removed on exit.
    :param compiles: False where graphs are made and transformed only: that needs neither compiler nor CMake.
    :raises BuildError: without a usable compiler.
    """
    with contextlib.ExitStack() as stack:
        if build_folder is None:
            build_folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="stepdown-build-")))
        stack.enter_context(_LOCK)
        stack.enter_context(quiet_dace())
        stack.enter_context(preserved_dace_configuration())
        stack.enter_context(_environment(build_environment() if compiles else {}))
        configure_dace(optimize, isa=isa, build_folder=build_folder, compiles=compiles)
        yield


def configure_dace(optimize: Optimize, *, isa: Isa | None = None, build_folder: Path, compiles: bool = True) -> None:
    """Sets DaCe's configuration of this thread for good; :func:`dace_configuration` does it for a while.

    :raises BuildError: without a usable compiler.
    """
    settings = {
        "cache": "unique",
        "compiler.use_cache": False,
        "compiler.build_folder_mode": "development",
        "compiler.build_jobs": min(4, os.cpu_count() or 1),
        "compiler.build_type": BUILD_TYPE,
        "compiler.cpp_standard": CPP_STANDARD,
        "compiler.cpu.args": shlex.join(compile_flags(optimize, isa)),
        # Line information is the absolute path of a source file: it would make equal programs differ.
        "compiler.lineinfo": "none",
        "default_build_folder": str(build_folder),
        "optimizer.match_exception": True,
        "progress": False,
        "store_history": False,
    }
    if compiles:
        settings["compiler.cpu.executable"] = str(find_compiler().path)
    _load_defaults()
    for path, value in settings.items():
        Config.set(*path.split("."), value=value)


def _load_defaults() -> None:
    """Sets DaCe's configuration to the defaults of its schema; ``debugprint`` alone stays as it is."""
    debugprint = Config.get("debugprint")
    Config.load(file=io.StringIO("{}"))

    def reset(changed: dict[str, Any], path: tuple[str, ...]) -> None:
        for name, value in changed.items():
            if isinstance(value, dict):
                reset(value, (*path, name))
            else:
                Config.set(*path, name, value=Config.get_default(*path, name))

    reset(Config._data.nondefaults(), ())
    Config.set("debugprint", value=debugprint)


def build_environment() -> dict[str, str]:
    """Variables for DaCe's builds: pip's CMake and Ninja first on ``PATH``, and a folder for its helper files.

    Unless told otherwise, DaCe keeps precompiled headers (80 MB each) in ``/dev/shm``, which is small in containers.

    :raises BuildError: when CMake or Ninja is missing.
    """
    folders = dict.fromkeys(str(tool.parent) for tool in (cmake_executable(), ninja_executable()))
    return {
        "PATH": os.pathsep.join([*folders, os.environ.get("PATH", os.defpath)]),
        "DACE_BUILD_CACHE_DIR": os.environ.get("DACE_BUILD_CACHE_DIR") or str(default_root() / "dace"),
    }


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
