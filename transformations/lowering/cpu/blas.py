"""The BLAS that CPU code calls: OpenBLAS from the pip package ``scipy-openblas32``, as a DaCe environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dace.library

from stepdown.models.errors import BuildError

try:
    import scipy_openblas32
except ImportError:
    scipy_openblas32 = None

INCLUDE = Path(__file__).parent / "include"


def _package() -> Any:
    if scipy_openblas32 is None:
        raise BuildError(
            'Matrix products on the CPU need the package "scipy-openblas32", which is not installed; '
            '"pip install scipy-openblas32" brings it.'
        )
    return scipy_openblas32


def blas_library() -> Path:
    """The shared library that generated code is linked to.

    :raises BuildError: when the package is missing or holds no library.
    """
    folder = Path(_package().get_lib_dir())
    for name in (f"lib{_package().get_library()}.so", f"lib{_package().get_library()}.dylib"):
        if (folder / name).is_file():
            return folder / name
    raise BuildError(f'The package "scipy-openblas32" holds no shared library in "{folder}"; reinstall it.')


def blas_version() -> str:
    """Version of the package, for the key of the build cache.

    :raises BuildError: when the package is missing.
    """
    return str(_package().__version__)


@dace.library.environment
class OpenBLAS:
    """Headers, library and start-up of OpenBLAS.

    Its own threads stay unused: every call computes on the thread that makes it, and the OpenMP loops around the calls
    are the only parallelism. CMake adds the library's folder to the run path because the library is given by its path.
    """

    cmake_minimum_version = "3.15"
    cmake_packages: list[str] = []
    cmake_variables: dict[str, str] = {}
    cmake_compile_flags: list[str] = []
    cmake_link_flags: list[str] = []
    cmake_files: list[str] = []
    headers = ["stepdown/gemm.h"]
    state_fields: list[str] = []
    init_code = "stepdown::start_blas();"
    finalize_code = ""
    dependencies: list[Any] = []

    @staticmethod
    def cmake_includes() -> list[str]:
        """Folders of ``cblas.h`` and of ``stepdown/gemm.h``.

        :raises BuildError: when the package is missing.
        """
        return [str(_package().get_include_dir()), str(INCLUDE)]

    @staticmethod
    def cmake_libraries() -> list[str]:
        """The library by its path.

        :raises BuildError: when the package is missing.
        """
        return [str(blas_library())]
