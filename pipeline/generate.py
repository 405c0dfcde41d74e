"""``generate``: DaCe's code generation and the compiler, for both directions at once."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import dace
from dace import data
from dace.codegen import codegen, compiler, exceptions
from dace.sdfg import SDFG

from stepdown.models.errors import BuildError
from stepdown.models.quiet import quiet_dace
from stepdown.pipeline.toolchain import Optimize, configure_dace, dace_configuration
from stepdown.transformations.lowering.cpu import simd
from stepdown.transformations.training_graph import TrainingGraph

_ERROR_LINE = re.compile(r"^.*(?:error:|undefined reference|fatal:).*$", re.MULTILINE)

# DaCe precompiles its header into a file named after the process: two threads would write it at once.
_HEADER = threading.Lock()

__all__ = ["generate", "simd"]


def generate(graph: TrainingGraph, folder: Path, optimize: Optimize) -> dict[str, Path]:
    """Generate and compile the libraries of a lowered and scheduled graph.

    :param folder: gets ``src/<direction>/`` with the generated code and ``lib/<direction>.so``.
    :returns: each direction's library.
    :raises BuildError: when there is no compiler or it fails, with the first error it printed.
    """
    libraries: dict[str, Path] = {}
    with (
        tempfile.TemporaryDirectory(prefix="stepdown-generate-") as scratch,
        dace_configuration(optimize, build_folder=Path(scratch)),
        ThreadPoolExecutor(max_workers=2) as pool,
    ):
        work: dict[str, Path] = {}
        for direction, sdfg in graph.graphs():
            work[direction] = Path(scratch) / direction
            objects = codegen.generate_code(sdfg)
            frame = next(code for code in objects if code.title == "Frame")
            frame.code += packed_call(sdfg)
            compiler.generate_program_folder(sdfg, objects, str(work[direction]))
        with _HEADER:
            compiler.prepare_precompiled_header(["cpu"])
        jobs = {
            direction: pool.submit(_compile, work[direction], sdfg.name, optimize, Path(scratch))
            for direction, sdfg in graph.graphs()
        }
        for direction, job in jobs.items():
            built = job.result()
            libraries[direction] = folder / "lib" / f"{direction}.so"
            libraries[direction].parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(built, libraries[direction])
            shutil.copytree(work[direction] / "src", folder / "src" / direction)
    return libraries


def _compile(folder: Path, name: str, optimize: Optimize, scratch: Path) -> Path:
    """Run CMake and the compiler on a generated folder; its own thread, so DaCe's settings are made again."""
    configure_dace(optimize, build_folder=scratch)
    try:
        with quiet_dace():
            return Path(compiler.configure_and_compile(str(folder), name))
    except (exceptions.CompilerConfigurationError, exceptions.CompilationError, subprocess.CalledProcessError) as error:
        text = str(error)
        found = _ERROR_LINE.search(text)
        line = found.group(0).strip() if found else (text.strip().splitlines() or ["no message"])[-1]
        raise BuildError(f'The generated code of "{name}" did not compile: {line}.') from error


def packed_call(sdfg: SDFG) -> str:
    """C++ that calls the program with the state handle and one array of 8-byte values: pointers, integers, doubles.

    A caller in Python hands over one block of memory instead of converting some fifty arguments one by one.
    """
    names = program_names(sdfg)
    values = ["state"]
    for place, (name, descriptor) in enumerate(sdfg.arglist().items()):
        kind = descriptor.dtype.ctype
        if not isinstance(descriptor, data.Scalar):
            values.append(f"reinterpret_cast<{kind}*>(values[{place}])")
        elif descriptor.dtype == dace.float64:
            values.append(f"reinterpret_cast<const double*>(values)[{place}]")
        elif descriptor.dtype in (dace.int32, dace.int64):
            values.append(f"static_cast<{kind}>(values[{place}])")
        else:
            raise BuildError(
                f'argument "{name}" of "{sdfg.name}" is a value of {kind}; accepted are "double", "int" and "int64_t".'
            )
    arguments = ",\n        ".join(values)
    return (
        f"\nDACE_EXPORTED void {names['call']}({sdfg.name}_state_t* state, const int64_t* values)\n{{\n"
        f"    {names['program']}({arguments});\n}}\n"
    )


def program_names(sdfg: SDFG) -> dict[str, str]:
    """The functions of a library, by what they do."""
    return {
        "call": f"__call_{sdfg.name}",
        "program": f"__program_{sdfg.name}",
        "init": f"__dace_init_{sdfg.name}",
        "exit": f"__dace_exit_{sdfg.name}",
    }


def init_arguments(sdfg: SDFG) -> list[str]:
    """Names of the symbols that a library's initialisation takes, in order."""
    signature = sdfg.init_signature()
    return [part.split()[-1] for part in signature.split(",") if part.strip()]


def scalar_name(dtype: dace.typeclass) -> str:
    """A DaCe scalar type by NumPy's name."""
    name = dtype.to_string()
    return "bool" if name in ("bool_", "bool") else name
