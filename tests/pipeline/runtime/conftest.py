# mypy: disable-error-code="var-annotated"
"""A build that is not compiled by the project: two small C++ libraries with the same interface, and their manifest.

They compute, with gamma, beta, delta and epsilon for the parameters of the two layer normalizations and c = 1/64,

    t = x * gamma + beta
    y = t^2 * delta * keep * mask + epsilon + c * (sum of all other parameters)

where keep is dropout on operator number 3 with a hash of (seed, offset, index). `t` is kept; `t^2` is in the workspace.
"""

import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stepdown.models.definition import EncoderLayer
from stepdown.models.dtypes import resolve_dtype
from stepdown.pipeline.runtime import StepdownLayer
from stepdown.pipeline.toolchain import find_compiler

COMMON = """
#include <atomic>
#include <cstdint>
#include <omp.h>
static std::atomic<int> team{0}, calls{0};
static char state;
extern "C" void stepdown_set_num_threads(int count) { omp_set_num_threads(count); }
extern "C" int fake_team() { return team; }
extern "C" int fake_calls() { return calls; }
extern "C" void fake_nothing() {}
extern "C" void* __dace_init_fake(int32_t B, int32_t S) { return &state; }
extern "C" int __dace_exit_fake(void* handle) { return 0; }
static void note() {
    #pragma omp parallel
    #pragma omp single
    team = omp_get_num_threads();
    calls++;
}
static double keep(const int64_t* rng, int64_t index, double probability) {
    if (probability == 0) return 1;
    uint64_t h = (uint64_t)rng[0] * 0x9E3779B97F4A7C15ull ^ (uint64_t)rng[1] * 0xC2B2AE3D27D4EB4Full ^ (uint64_t)index;
    h ^= h >> 33; h *= 0xff51afd7ed558ccdull; h ^= h >> 33; h *= 0xc4ceb9fe1a85ec53ull; h ^= h >> 33;
    return (h >> 32) < probability * 4294967296.0 ? 0 : 1 / (1 - probability);
}
"""

FORWARD = """
    note();
    REAL constant = 0;
    for (int p = 0; p < PARAMETERS; p++) for (int i = 0; i < count[p]; i++) constant += other[p][i];
    constant /= 64;
    for (int64_t i = 0; i < (int64_t)B * S * E; i++) {
        t[i] = x[i] * gamma[i % E] + beta[i % E];
        square[i] = t[i] * t[i];
    }
    for (int64_t i = 0; i < (int64_t)B * S * E; i++)
        y[i] = square[i] * delta[i % E] * (REAL)(mask[i / E] ? keep(rng, i, dropout) : 0) + epsilon[i % E] + constant;
"""

BACKWARD = """
    note();
    REAL total = 0;
    for (int e = 0; e < E; e++) d_gamma[e] = d_beta[e] = d_delta[e] = d_epsilon[e] = 0;
    for (int64_t i = 0; i < (int64_t)B * S * E; i++) {
        const int e = i % E;
        const REAL factor = mask[i / E] ? keep(rng, i, dropout) : 0;
        total += dy[i];
        d_epsilon[e] += dy[i];
        d_delta[e] += dy[i] * t[i] * t[i] * factor;
        scratch[i] = dy[i] * delta[e] * factor * 2 * t[i];
        d_beta[e] += scratch[i];
        d_gamma[e] += scratch[i] * x[i];
        dx[i] = scratch[i] * gamma[e];
    }
    for (int p = 0; p < PARAMETERS; p++) for (int i = 0; i < count[p]; i++) d_other[p][i] = total / 64;
"""

LETTERS = {
    "attention.output.LayerNorm.weight": "gamma",
    "attention.output.LayerNorm.bias": "beta",
    "output.LayerNorm.weight": "delta",
    "output.LayerNorm.bias": "epsilon",
}

SMALL = EncoderLayer(embed=8, heads=2, ffn=12, dropout=0.25, attention_dropout=0.0)


@dataclass(frozen=True)
class FakeBuild:
    """A build folder and what it computes, in PyTorch."""

    path: Path
    definition: EncoderLayer

    def layer(self, **options: Any) -> StepdownLayer:
        """A new module with parameters that are not near any special value."""
        layer = StepdownLayer(self.path, **options)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.normal_()
        return layer

    def expected(
        self, layer: StepdownLayer, x: Tensor, mask: Tensor | None = None, keep: Tensor | None = None
    ) -> Tensor:
        """The output, without dropout, from PyTorch's own operations."""
        parameters = dict(layer.named_parameters())
        gamma, beta, delta, epsilon = (parameters[name] for name in LETTERS)
        constant = sum(value.sum() for name, value in parameters.items() if name not in LETTERS) / 64
        squares = (x * gamma + beta) ** 2 * delta
        if mask is not None:
            squares = squares * (mask != 0)[..., None]
        if keep is not None:
            squares = squares * keep
        return squares + epsilon + constant


BuildFactory = Callable[..., FakeBuild]


@pytest.fixture(scope="session")
def make_build(tmp_path_factory: pytest.TempPathFactory) -> BuildFactory:
    """Compiles fake builds: `make_build(dtype="float32", batch=None, seq=None, definition=SMALL)`, each once."""
    made: dict[tuple[Any, ...], FakeBuild] = {}

    def make(
        dtype: str = "float32",
        batch: int | None = None,
        seq: int | None = None,
        definition: EncoderLayer = SMALL,
        fresh: bool = False,
    ) -> FakeBuild:
        options = (dtype, batch, seq, definition)
        if fresh or options not in made:
            folder = tmp_path_factory.mktemp("build")
            write_build(folder, definition, dtype, batch, seq)
            build = FakeBuild(folder, definition)
            if fresh:
                return build
            made[options] = build
        return made[options]

    return make


@pytest.fixture(scope="session")
def build32(make_build: BuildFactory) -> FakeBuild:
    """A float32 build for any batch and length."""
    return make_build()


@pytest.fixture(scope="session")
def build64(make_build: BuildFactory) -> FakeBuild:
    """A float64 build for any batch and length."""
    return make_build("float64")


def write_build(folder: Path, definition: EncoderLayer, dtype: str, batch: int | None, seq: int | None) -> None:
    """Write the manifest, generate both sources and compile them."""
    item = resolve_dtype(dtype).bytes
    rows, cols = str(batch or "B"), str(seq or "S")
    embed = str(definition.embed)

    def argument(name: str, role: str, kind: str, shape: tuple[str, ...], **more: Any) -> dict[str, Any]:
        strides = ["*".join(shape[i + 1 :]) or "1" for i in range(len(shape))]
        return {"name": name, "role": role, "dtype": kind, "shape": list(shape), "strides": strides, **more}

    def activation(name: str, role: str, **more: Any) -> dict[str, Any]:
        return argument(name, role, dtype, (rows, cols, embed), bytes=f"{item}*{rows}*{cols}*{embed}", **more)

    def parameters(prefix: str, role: str) -> list[dict[str, Any]]:
        return [
            argument(
                prefix + LETTERS.get(name, parameter.container),
                role,
                dtype,
                tuple(map(str, parameter.logical_shape)),
                parameter=name,
            )
            for name, parameter in definition.parameters().items()
        ]

    # DaCe passes arrays in alphabetical order and then scalars, in alphabetical order too.
    def ordered(arrays: list[dict[str, Any]]) -> list[dict[str, Any]]:
        scalars = [argument("dropout", "probability", "float64", (), field="dropout")]
        scalars += [argument("B", "symbol", "int32", ())] if batch is None else []
        scalars += [argument("S", "symbol", "int32", ())] if seq is None else []
        arrays += [argument("mask", "mask", "bool", (rows, cols)), argument("rng", "rng", "int64", ("2",))]
        return [*sorted(arrays, key=lambda a: a["name"]), *sorted(scalars, key=lambda a: a["name"])]

    forward = ordered(
        [
            *(activation("x", "input"), activation("y", "output"), activation("t", "kept")),
            activation("square", "workspace", live=[0, 2]),
            *parameters("", "parameter"),
        ]
    )
    read = [entry for entry in parameters("", "parameter") if entry["name"] in ("gamma", "delta")]
    backward = ordered(
        [
            *(activation("x", "input"), activation("dy", "gradient_output"), activation("t", "kept")),
            *(activation("dx", "gradient_input"), activation("scratch", "workspace", live=[0, 1])),
            *read,
            *parameters("d_", "gradient_parameter"),
        ]
    )
    (folder / "lib").mkdir()
    abi = {}
    for direction, arguments, body in (("forward", forward, FORWARD), ("backward", backward, BACKWARD)):
        source = COMMON + function_source(definition, dtype, batch, seq, arguments, direction, body)
        (folder / f"{direction}.cpp").write_text(source)
        target = folder / "lib" / f"{direction}.so"
        flags = ["-O1", "-shared", "-fPIC", "-fopenmp", "-ffp-contract=off"]
        subprocess.run(
            [str(find_compiler().path), *flags, str(folder / f"{direction}.cpp"), "-o", str(target)], check=True
        )
        abi[direction] = {
            "library": f"lib/{direction}.so",
            "call": "__call_fake",
            "init": "__dace_init_fake",
            "exit": "__dace_exit_fake",
            "arguments": arguments,
            "init_arguments": ["B", "S"],
        }
    options = {"batch": batch, "seq": seq, "dtype": dtype, "target": "cpu", "disable": [], "optimize": "light"}
    manifest = {"format": 1, "layer": definition.to_dict(), "options": options, "key": folder.name, "abi": abi}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def function_source(
    definition: EncoderLayer,
    dtype: str,
    batch: int | None,
    seq: int | None,
    arguments: list[dict[str, Any]],
    direction: str,
    body: str,
) -> str:
    """The C++ function with these arguments around ``body``."""
    kinds = {"float32": "float", "float64": "double", "bool": "bool", "int64": "int64_t", "int32": "int32_t"}
    declared = ", ".join(
        f"{kinds[a['dtype']]}{' ' if a['role'] in ('probability', 'symbol') else '* '}{a['name']}" for a in arguments
    )
    others = [value for name, value in definition.parameters().items() if name not in LETTERS]
    prefix = "" if direction == "forward" else "d_"
    lines = [f"#define REAL {kinds[dtype]}", f"#define PARAMETERS {len(others)}"]
    lines += [f'extern "C" void __program_fake(void* handle, {declared}) {{', f"    const int E = {definition.embed};"]
    lines += [f"    const int {name} = {size};" for name, size in (("B", batch), ("S", seq)) if size is not None]
    lines.append(f"    const int count[] = {{{', '.join(str(other.elements) for other in others)}}};")
    lines.append(f"    REAL* {prefix}other[] = {{{', '.join(prefix + other.container for other in others)}}};")
    passed = [
        f"*(const double*)(values + {place})"
        if a["role"] == "probability"
        else f"({kinds[a['dtype']]}{'' if a['role'] == 'symbol' else '*'})values[{place}]"
        for place, a in enumerate(arguments)
    ]
    call = 'extern "C" void __call_fake(void* handle, const int64_t* values)'
    call += f"{{ __program_fake(handle, {', '.join(passed)}); }}"
    return "\n".join(lines) + body + "}\n" + call + "\n"
