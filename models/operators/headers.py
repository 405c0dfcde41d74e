"""The C++ headers of the statement language, as a DaCe environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dace.library

INCLUDE = Path(__file__).parent / "include"


@dace.library.environment
class OperatorHeaders:
    """``stepdown/math.h`` and ``stepdown/philox.h``: what formulas call, on the CPU and on the GPU."""

    cmake_minimum_version = "3.15"
    cmake_packages: list[str] = []
    cmake_variables: dict[str, str] = {}
    cmake_includes: list[str] = [str(INCLUDE)]
    cmake_libraries: list[str] = []
    cmake_compile_flags: list[str] = []
    cmake_link_flags: list[str] = []
    cmake_files: list[str] = []
    headers: list[str] = ["stepdown/math.h", "stepdown/philox.h"]
    state_fields: list[str] = []
    init_code = ""
    finalize_code = ""
    dependencies: list[Any] = []
