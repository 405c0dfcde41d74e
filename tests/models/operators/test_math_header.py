"""``stepdown/math.h`` and ``stepdown/philox.h``: accuracy, special values, random words, and vectorisation by g++."""

import ctypes
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from stepdown.models.operators import philox

ROOT = Path(__file__).resolve().parents[3]
INCLUDE = ROOT / "models" / "operators" / "include"
COMPILER = os.environ.get("CXX", "g++")
X86 = platform.machine() in ("x86_64", "AMD64")
WARNINGS = ("-Wall", "-Wextra", "-Wpedantic", "-Werror")
VECTOR_FLAGS = ("-O3", "-fno-math-errno", "-fno-trapping-math", "-fopenmp-simd", "-fopt-info-vec")
FUNCTIONS = ("exp", "erf", "tanh")

FMA = (*VECTOR_FLAGS, "-march=x86-64-v3") if X86 else VECTOR_FLAGS
NO_FMA = (*VECTOR_FLAGS, "-march=x86-64-v2") if X86 else (*VECTOR_FLAGS, "-ffp-contract=off")
BUILDS = {"fma": FMA, "no-fma": NO_FMA, "light": ("-O1",)}

# Largest errors in units in the last place, as the header promises them.
BOUNDS = {
    ("exp", "float"): 1.0,
    ("erf", "float"): 1.2,
    ("tanh", "float"): 1.2,
    ("exp", "double"): 1.0,
    ("erf", "double"): 1.2,
    ("tanh", "double"): 1.0,
}

# Of `a`, the element, read before the formula: a load inside a selection needs masked loads to be vectorised.
ELEMENT_WISE = {
    "exp": "stepdown::exp(a)",
    "erf": "stepdown::erf(a)",
    "tanh": "stepdown::tanh(a)",
    "sqrt": "stepdown::sqrt(a)",
    "relu": "stepdown::maximum(a, T(0))",
    "gelu": "T(0.5) * a * (T(1) + stepdown::erf(a * T(0.70710678118654752)))",
    "masked_exp": "stepdown::exp(a < T(0) ? stepdown::negative_infinity<T>() : a)",
    "dropout": "stepdown::philox_word(7, 9, 1, static_cast<std::uint64_t>(i)) >= stepdown::dropout_threshold(T(0.25))"
    " ? a * stepdown::dropout_scale<T>(T(0.25)) : T(0)",
}


def sources() -> tuple[str, dict[str, int]]:
    """A library of loops over the headers' functions, and the line of each loop."""
    lines = ["#include <stepdown/math.h>", "#include <stepdown/philox.h>"]
    loops: dict[str, int] = {}

    def add(name: str, head: str, loop: str, tail: str = "", pragma: str = "#pragma omp simd") -> None:
        lines.extend([f'extern "C" void {name}({head}', pragma])
        lines.append(f"for (std::int64_t i = 0; i < n; ++i) {{ {loop} }}")
        loops[name] = len(lines)
        lines.append(f"{tail} }}")

    for kind in ("float", "double"):
        pointers = f"const {kind}* x, {kind}* y, std::int64_t n) {{"
        for name, formula in ELEMENT_WISE.items():
            add(f"{name}_{kind}", pointers, re.sub(r"\bT\b", kind, f"const T a = x[i]; y[i] = {formula};"))
        start = f"{pointers} {kind} m = stepdown::negative_infinity<{kind}>();"
        add(
            f"row_maximum_{kind}",
            start,
            "m = stepdown::maximum(m, x[i]);",
            "*y = m;",
            "#pragma omp simd reduction(max : m)",
        )
    head = "std::int64_t s, std::int64_t o, std::uint32_t p, std::uint64_t first, std::uint32_t* w, std::int64_t n) {"
    index = "first + static_cast<std::uint64_t>(i)"
    add("word", head, f"w[i] = stepdown::philox_word(s, o, p, {index});")
    add("block", head, f"stepdown::philox_block(s, o, p, {index}, w + 4 * i);")
    lines += [
        f'extern "C" void blocks({head} stepdown::philox_blocks(s, o, p, first, n, w); }}',
        'extern "C" std::uint32_t threshold(double p) { return stepdown::dropout_threshold(p); }',
        'extern "C" float scale_float(double p) { return stepdown::dropout_scale<float>(p); }',
        'extern "C" double scale_double(double p) { return stepdown::dropout_scale<double>(p); }',
    ]
    return "\n".join(lines) + "\n", loops


@dataclass(frozen=True)
class Library:
    """A compiled library of loops, and what the compiler said about vectorising them."""

    functions: ctypes.CDLL
    report: str

    def map(self, name: str, x: NDArray[Any]) -> NDArray[Any]:
        """One element-wise function over an array of float32 or float64."""
        y = np.empty_like(x)
        kind = "float" if x.dtype == np.float32 else "double"
        getattr(self.functions, f"{name}_{kind}")(
            ctypes.c_void_p(x.ctypes.data), ctypes.c_void_p(y.ctypes.data), ctypes.c_int64(x.size)
        )
        return y

    def words(self, name: str, seed: int, offset: int, operator: int, first: int, count: int) -> NDArray[np.uint32]:
        """``count`` elements of ``word``, or blocks of ``block`` or ``blocks``; the word behind them must stay."""
        size = count if name == "word" else 4 * count
        words = np.full(size + 1, 0xA5A5A5A5, np.uint32)
        getattr(self.functions, name)(
            ctypes.c_int64(seed),
            ctypes.c_int64(offset),
            ctypes.c_uint32(operator),
            ctypes.c_uint64(first),
            ctypes.c_void_p(words.ctypes.data),
            ctypes.c_int64(count),
        )
        assert words[size] == 0xA5A5A5A5
        return words[:size]


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Library]:
    folder = tmp_path_factory.mktemp("math_header")
    source = folder / "loops.cpp"
    source.write_text(sources()[0])
    built: dict[str, Library] = {}
    for name, flags in BUILDS.items():
        target = folder / f"{name}.so"
        # -Wno-unknown-pragmas: the light build is made without OpenMP.
        command = [COMPILER, "-std=c++17", "-shared", "-fPIC", *WARNINGS, "-Wno-unknown-pragmas", *flags]
        result = subprocess.run(
            [*command, f"-I{INCLUDE}", str(source), "-o", str(target)], capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, result.stderr
        functions = ctypes.CDLL(str(target))
        functions.threshold.restype = ctypes.c_uint32
        functions.scale_float.restype = ctypes.c_float
        functions.scale_double.restype = ctypes.c_double
        for scalar in (functions.threshold, functions.scale_float, functions.scale_double):
            scalar.argtypes = [ctypes.c_double]
        built[name] = Library(functions, result.stderr)
    return built


@pytest.fixture(params=BUILDS)
def library(request: pytest.FixtureRequest, libraries: dict[str, Library]) -> Library:
    return libraries[request.param]


def float64_erf(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return torch.special.erf(torch.from_numpy(x)).numpy()


FLOAT64: dict[str, Callable[[NDArray[np.float64]], NDArray[np.float64]]] = {
    "exp": np.exp,
    "erf": float64_erf,
    "tanh": np.tanh,
}


@pytest.fixture(scope="module")
def floats() -> NDArray[np.float32]:
    """Every 4001st finite float32 from the least denormal on, of both signs, and dense sweeps where things happen."""
    positive = np.arange(0, 0x7F800000, 4001, dtype=np.uint32).view(np.float32)
    sweeps = [np.linspace(-reach, reach, 300001, dtype=np.float32) for reach in (1.5, 10.0, 105.0)]
    return np.concatenate([positive, -positive, *sweeps])


@pytest.fixture(scope="module")
def doubles() -> tuple[NDArray[np.float64], dict[str, list[Any]]]:
    """Values and their exact exp, erf and tanh."""
    rng = np.random.default_rng(0)
    x = np.concatenate(
        [
            rng.uniform(-7, 7, 3000),
            rng.uniform(-745, 709.7, 1500),
            rng.uniform(-1.2, 1.2, 2000),
            rng.uniform(0.95, 1.6, 1500),
            10.0 ** rng.uniform(-322, 2, 1000) * rng.choice([-1, 1], 1000),
        ]
    )
    with mpmath.workprec(120):
        return x, {name: [getattr(mpmath, name)(mpmath.mpf(float(v))) for v in x] for name in FUNCTIONS}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_float_accuracy(
    library: Library, name: str, floats: NDArray[np.float32], record_property: Callable[[str, object], None]
) -> None:
    found = library.map(name, floats)
    with np.errstate(over="ignore"):
        exact = FLOAT64[name](floats.astype(np.float64))
        nearest = exact.astype(np.float32)
    finite = np.isfinite(nearest)
    assert np.array_equal(found[~finite], nearest[~finite])
    # The float64 difference of two neighbours of 2^128 is not finite in float32: those are compared above.
    units = np.spacing(np.abs(nearest[finite])).astype(np.float64)
    errors = np.abs(found[finite].astype(np.float64) - exact[finite]) / units
    record_property("largest_ulp", float(errors.max()))
    assert errors.max() <= BOUNDS[name, "float"], f"at {floats[finite][errors.argmax()]!r}"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_double_accuracy(
    library: Library,
    name: str,
    doubles: tuple[NDArray[np.float64], dict[str, list[Any]]],
    record_property: Callable[[str, object], None],
) -> None:
    x, exact = doubles
    found = library.map(name, x)
    with mpmath.workprec(120):
        errors = [
            float(abs(mpmath.mpf(float(y)) - e) / mpmath.mpf(float(np.spacing(abs(float(e))))))
            for y, e in zip(found, exact[name], strict=True)
        ]
    record_property("largest_ulp", max(errors))
    assert max(errors) <= BOUNDS[name, "double"], f"at {x[int(np.argmax(errors))]!r}"


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("exp", [0.0, -0.0, -np.inf, np.inf, np.nan], [1.0, 1.0, 0.0, np.inf, np.nan]),
        ("exp", [-1e4, -1e30, 1e4, 1e30], [0.0, 0.0, np.inf, np.inf]),
        ("erf", [0.0, -0.0, -np.inf, np.inf, np.nan], [0.0, -0.0, -1.0, 1.0, np.nan]),
        ("erf", [7.0, -7.0, 1e30, -1e30], [1.0, -1.0, 1.0, -1.0]),
        ("tanh", [0.0, -0.0, -np.inf, np.inf, np.nan], [0.0, -0.0, -1.0, 1.0, np.nan]),
        ("tanh", [25.0, -25.0, 1e30, -1e30], [1.0, -1.0, 1.0, -1.0]),
        ("sqrt", [0.0, 4.0, 2.25, np.inf, np.nan, -1.0], [0.0, 2.0, 1.5, np.inf, np.nan, np.nan]),
        ("relu", [-1.0, 0.0, 2.5, -np.inf, np.inf, np.nan], [0.0, 0.0, 2.5, 0.0, np.inf, np.nan]),
        ("masked_exp", [-1.0, 0.0, -np.inf, np.nan], [0.0, 1.0, 0.0, np.nan]),
    ],
)
def test_special_values(library: Library, dtype: type, name: str, given: list[float], expected: list[float]) -> None:
    # Eight times over: full vectors and a remainder.
    found = library.map(name, np.array(given * 8 + given[:1], dtype))
    wanted: NDArray[Any] = np.array(expected * 8 + expected[:1], dtype)
    assert np.array_equal(found, wanted, equal_nan=True)
    numbers = ~np.isnan(wanted)
    assert np.array_equal(np.signbit(found[numbers]), np.signbit(wanted[numbers]))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", ["erf", "tanh"])
def test_odd(library: Library, dtype: type, name: str) -> None:
    x: NDArray[Any] = np.concatenate([np.linspace(0, 12, 5001), 10.0 ** np.linspace(-44, 0, 999)]).astype(dtype)
    assert np.array_equal(library.map(name, -x), -library.map(name, x))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", [1, 7, 8, 33, 1000])
def test_row_maximum(library: Library, dtype: type, size: int) -> None:
    x = np.random.default_rng(size).normal(size=size).astype(dtype) - dtype(10)
    x[::3] = -np.inf
    assert library.map("row_maximum", x)[0] == x.max()


def vectorised_lines(report: str) -> dict[int, set[int]]:
    """Widths in bytes of the vectors, by source line."""
    found: dict[int, set[int]] = {}
    for line, width in re.findall(r"loops\.cpp:(\d+):\d+: optimized: loop vectorized using (\d+) byte", report):
        found.setdefault(int(line), set()).add(int(width))
    return found


@pytest.mark.parametrize("name", sources()[1])
@pytest.mark.parametrize(("build", "width"), [("fma", 32 if X86 else 16), ("no-fma", 16)])
def test_loops_are_vectorised(libraries: dict[str, Library], build: str, width: int, name: str) -> None:
    # g++ names the loop's own line, that of the pragma above it, or that of the function.
    line = sources()[1][name]
    found = vectorised_lines(libraries[build].report)
    assert any(width in found.get(near, set()) for near in range(line - 2, line + 1)), libraries[build].report


# Random123's kat_vectors for Philox 4x32-10, the counter taken apart into block, operator number and offset.
@pytest.mark.parametrize(
    ("seed", "offset", "operator", "block", "expected"),
    [
        (0, 0, 0, 0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (-1, -1, 0xFF, 0x00FFFFFF_FFFFFFFF, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (0x299F31D0_A4093822, 0x03707344_13198A2E, 0xD3, 0x0085A308_243F6A88, "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_published_vectors(library: Library, seed: int, offset: int, operator: int, block: int, expected: str) -> None:
    wanted = [int(word, 16) for word in expected.split()]
    assert library.words("block", seed, offset, operator, block, 1).tolist() == wanted
    assert library.words("word", seed, offset, operator, 4 * block, 4).tolist() == wanted
    # Among others, so that it goes through the vectors too.
    if block > 20:
        assert library.words("blocks", seed, offset, operator, block - 20, 21)[-4:].tolist() == wanted
        assert library.words("blocks", seed, offset, operator, block - 2, 16)[8:12].tolist() == wanted
    else:
        assert library.words("blocks", seed, offset, operator, block, 16)[:4].tolist() == wanted


@pytest.mark.parametrize("seed", [0, 1234567890123456789, -5])
@pytest.mark.parametrize(("offset", "operator"), [(0, 0), (77, 3), (-(1 << 62), 255)])
def test_words_are_those_of_the_reference(library: Library, seed: int, offset: int, operator: int) -> None:
    for blocks in (1, 2, 3, 4, 7, 8, 9, 17, 257):
        wanted = philox.philox_words(seed, offset, operator, 4 * blocks)
        assert np.array_equal(library.words("word", seed, offset, operator, 0, 4 * blocks), wanted)
        assert np.array_equal(library.words("block", seed, offset, operator, 0, blocks), wanted)
        assert np.array_equal(library.words("blocks", seed, offset, operator, 0, blocks), wanted)


@pytest.mark.parametrize("start", [(1 << 32) - 5, (1 << 40) + 3, (1 << 56) - 21])
def test_blocks_beyond_32_bits(library: Library, start: int) -> None:
    count, seed, offset, operator = 21, 11, 13, 2
    counters = np.array(
        [[b & 0xFFFFFFFF, (b >> 32) << 8 & 0xFFFFFFFF | operator, offset, 0] for b in range(start, start + count)],
        np.uint32,
    )
    wanted = philox.philox4x32(counters, (seed, 0)).reshape(-1)
    assert np.array_equal(library.words("block", seed, offset, operator, start, count), wanted)
    assert np.array_equal(library.words("blocks", seed, offset, operator, start, count), wanted)
    assert np.array_equal(library.words("word", seed, offset, operator, 4 * start + 3, 9), wanted[3:12])


def test_dropout_threshold_and_scale(library: Library) -> None:
    unit = 2.0**-32
    chosen = [0.0, 0.1, 0.25, 0.5, 0.9, 0.999999999, 1.0, unit, 0.4 * unit, 0.5 * unit, 1.5 * unit, 1 - unit]
    for probability in [*chosen, *np.random.default_rng(1).uniform(size=200).tolist()]:
        assert library.functions.threshold(probability) == philox.dropout_threshold(probability), probability
        if probability < 1:
            assert library.functions.scale_double(probability) == 1 / (1 - probability)
            assert library.functions.scale_float(probability) == np.float32(1 / (1 - probability))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_dropout_loop(library: Library, dtype: type) -> None:
    x: NDArray[Any] = np.random.default_rng(2).normal(size=1003).astype(dtype)
    keep = philox.philox_words(7, 9, 1, x.size) >= 1 << 30
    assert 0.7 < keep.mean() < 0.8
    assert np.array_equal(library.map("dropout", x), np.where(keep, x * dtype(1 / 0.75), dtype(0)))


def test_fast_math_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "fast.cpp"
    source.write_text("#include <stepdown/math.h>\n")
    result = subprocess.run(
        [COMPILER, "-std=c++17", "-ffast-math", f"-I{INCLUDE}", "-c", str(source), "-o", str(tmp_path / "fast.o")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode != 0
    assert "-ffast-math" in result.stderr


@pytest.mark.slow
def test_coefficients_can_be_made_again() -> None:
    script = ROOT / "tools" / "fit_polynomials.py"
    result = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


CUDA_SOURCE = """
#include <stepdown/math.h>
#include <stepdown/philox.h>

template <typename T>
__global__ void every_function(const T* x, T* y, const std::int64_t* rng, double p) {
    const T scale = stepdown::dropout_scale<T>(p);
    const std::uint32_t threshold = stepdown::dropout_threshold(p);
    const std::uint64_t base = (blockIdx.x * std::uint64_t{blockDim.x} + threadIdx.x) * 8;
#pragma unroll
    for (int v = 0; v < 8; ++v) {
        const std::uint64_t i = base | v;
        const T a = stepdown::maximum(x[i], stepdown::negative_infinity<T>());
        const T b = stepdown::exp(a) + stepdown::erf(a) + stepdown::tanh(a) + stepdown::sqrt(a);
        y[i] = stepdown::philox_word(rng[0], rng[1], 1, i) >= threshold ? b * scale : T(0);
    }
}
template __global__ void every_function<float>(const float*, float*, const std::int64_t*, double);
template __global__ void every_function<double>(const double*, double*, const std::int64_t*, double);

__global__ void every_word(std::uint32_t* words, const std::int64_t* rng) {
    stepdown::philox_block(rng[0], rng[1], 0, threadIdx.x, words + 8 * threadIdx.x);
    stepdown::philox_blocks(rng[0], rng[1], 0, threadIdx.x, 1, words + 8 * threadIdx.x + 4);
}

float on_the_host(float x, std::uint32_t* words) {
    stepdown::philox_blocks(1, 2, 3, 4, 16, words);
    return stepdown::exp(x) + stepdown::erf(x) + stepdown::tanh(x) + stepdown::sqrt(x);
}
"""


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on the PATH")
@pytest.mark.parametrize("standard", ["c++17", "c++20"])
def test_nvcc_compiles_both_headers(tmp_path: Path, standard: str) -> None:
    source = tmp_path / "headers.cu"
    source.write_text(CUDA_SOURCE)
    command = ["nvcc", "-arch=sm_90", f"-std={standard}", "-Werror", "all-warnings", "-Xcompiler=-Wall,-Wextra"]
    result = subprocess.run(
        [*command, f"-I{INCLUDE}", "-c", str(source), "-o", str(tmp_path / "headers.o")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
