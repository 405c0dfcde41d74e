"""The part of the runtime that is written in C++: compiled once on a machine, loaded once in a process.

``extension.cpp`` is a library of classes that PyTorch registers (``torch.classes.stepdown``). It is compiled against
PyTorch's headers, not Python's, and kept in the build cache under a key of its source, PyTorch's version and the
compiler.
"""

import json
import platform
import re
import subprocess
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from stepdown.models.errors import BuildError
from stepdown.pipeline.cache import BuildCache, content_key
from stepdown.pipeline.toolchain import extension_flags, find_compiler

SOURCE = Path(__file__).with_name("extension.cpp")
LIBRARY = "extension.so"
TORCH = Path(torch.__file__).parent

_ERROR_LINE = re.compile(r"^.*(?:error:|undefined reference|fatal:).*$", re.MULTILINE)
_LOCK = Lock()


def extension_key() -> str:
    """The key of the compiled extension in the build cache.

    :raises BuildError: without a usable compiler.
    """
    compiler = find_compiler()
    return content_key(
        source=SOURCE.read_text(encoding="utf-8"),
        torch=torch.__version__,
        compiler=f"{compiler.family} {compiler.version}",
        flags=extension_flags(torch.compiled_with_cxx11_abi()),
        machine=platform.machine(),
    )


def build_extension(cache: BuildCache | None = None, progress: Callable[[str], None] = lambda what: None) -> Path:
    """The compiled extension's file, compiled now (which takes half a minute) if the cache does not hold it.

    :param cache: the user's own by default.
    :param progress: called with what is being done, when it is compiled.
    :raises BuildError: when there is no compiler or it fails, with the first error it printed.
    :raises CacheError: when the cache's folder cannot be written.
    """

    def compile_into(folder: Path) -> None:
        progress("extension")
        places = [f"-isystem{TORCH / 'include'}", f"-L{TORCH / 'lib'}"]
        result = subprocess.run(
            [
                str(find_compiler().path),
                *extension_flags(torch.compiled_with_cxx11_abi()),
                *places,
                *("-o", str(folder / LIBRARY), str(SOURCE), "-lc10", "-ltorch_cpu"),
            ],
            capture_output=True,
            text=True,
        )
        if result.returncode:
            found = _ERROR_LINE.search(result.stderr)
            line = found.group(0).strip() if found else (result.stderr.strip().splitlines() or ["no message"])[-1]
            raise BuildError(f"The PyTorch extension did not compile for PyTorch {torch.__version__}: {line}.")
        described = {"description": f"PyTorch extension for PyTorch {torch.__version__}"}
        (folder / "manifest.json").write_text(json.dumps(described), encoding="utf-8")

    with _LOCK:  # threads of one process; processes are kept apart by the cache
        return (cache or BuildCache()).entry(extension_key(), compile_into) / LIBRARY


@lru_cache(maxsize=1)
def load_extension() -> Any:
    """The classes of the extension, ``BlockPool`` and ``Layer``.

    :raises BuildError: when it cannot be compiled or loaded.
    :raises CacheError: when the cache's folder cannot be written.
    """
    library = build_extension()
    try:
        torch.classes.load_library(str(library))
    except OSError as error:
        reason = error.__cause__ or error  # PyTorch's own sentence names the file alone
        raise BuildError(f'The PyTorch extension "{library}" cannot be loaded: {reason}.') from error
    return torch.classes.stepdown
