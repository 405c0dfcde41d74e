"""Libraries of a graph: both directions compiled and called through one block of values; errors of the compiler."""

from __future__ import annotations

import ctypes
import re
import struct
from pathlib import Path
from typing import Any

import dace
import numpy as np
import pytest
from dace.sdfg import SDFG

from stepdown.models.errors import BuildError
from stepdown.pipeline.generate import generate, init_arguments, packed_call, program_names, scalar_name
from stepdown.transformations.training_graph import TrainingGraph


def elements(name: str, formula: str, *, scalars: dict[str, dace.typeclass] | None = None) -> SDFG:
    """``y[i] = formula`` over N elements; the formula is C++ of ``x`` and the scalars."""
    sdfg = SDFG(name)
    size = dace.symbol("N", dace.int32)
    for container in ("x", "y"):
        sdfg.add_array(container, [size], dace.float32)
    inputs = {"in_x": dace.Memlet("x[i]")}
    for scalar, dtype in (scalars or {}).items():
        sdfg.add_scalar(scalar, dtype)
        inputs[f"in_{scalar}"] = dace.Memlet(f"{scalar}[0]")
    sdfg.add_state().add_mapped_tasklet(
        "elements",
        {"i": "0:N"},
        inputs,
        f"out = {formula};",
        {"out": dace.Memlet("y[i]")},
        language=dace.Language.CPP,
        external_edges=True,
    )
    return sdfg


SCALARS = {"p": dace.float64, "count": dace.int64, "small": dace.int32}


@pytest.fixture(scope="module")
def graph() -> TrainingGraph:
    forward = elements("both_forward", "in_x * float(in_p) + float(in_count) - in_small", scalars=SCALARS)
    return TrainingGraph(forward, elements("both_backward", "-in_x"))


@pytest.fixture(scope="module")
def libraries(
    graph: TrainingGraph, strict_dace_session: None, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    return generate(graph, tmp_path_factory.mktemp("generated"), "light")


def call(sdfg: SDFG, path: Path, values: dict[str, Any]) -> None:
    """One call through the packed function: pointers, integers and doubles as 8 bytes each."""
    library, names = ctypes.CDLL(str(path)), program_names(sdfg)
    init = getattr(library, names["init"])
    init.restype = ctypes.c_void_p
    packed = b""
    for name, descriptor in sdfg.arglist().items():
        value = values[name]
        if isinstance(value, np.ndarray):
            packed += struct.pack("q", value.ctypes.data)
        else:
            packed += struct.pack("d" if descriptor.dtype == dace.float64 else "q", value)
    handle = ctypes.c_void_p(init(*(ctypes.c_int64(values[name]) for name in init_arguments(sdfg))))
    getattr(library, names["call"])(handle, packed)
    getattr(library, names["exit"])(handle)


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_libraries_compute_what_the_graphs_say(graph: TrainingGraph, libraries: dict[str, Path], size: int) -> None:
    """Values of every kind arrive: a double that is no integer, negative and large integers, any size."""
    x = np.random.default_rng(size).standard_normal(size).astype(np.float32)
    y, dx = np.full_like(x, np.nan), np.full_like(x, np.nan)
    values = {"x": x, "y": y, "N": size, "p": 0.375, "count": 2**33, "small": -3}
    call(graph.forward, libraries["forward"], values)
    np.testing.assert_allclose(y, (x * np.float32(0.375) + np.float32(2.0**33)) + np.float32(3), rtol=1e-6)
    values |= {"count": -5, "p": -1.5}
    call(graph.forward, libraries["forward"], values)
    np.testing.assert_allclose(y, x * np.float32(-1.5) - 2, rtol=1e-5, atol=1e-5)
    assert graph.backward is not None
    call(graph.backward, libraries["backward"], {"x": x, "y": dx, "N": size})
    np.testing.assert_array_equal(dx, -x)


def test_sources_and_libraries_lie_by_direction(graph: TrainingGraph, libraries: dict[str, Path]) -> None:
    assert list(libraries) == ["forward", "backward"]
    folder = libraries["forward"].parent.parent
    assert sorted(str(path.relative_to(folder)) for path in folder.glob("lib/*")) == [
        "lib/backward.so",
        "lib/forward.so",
    ]
    for direction, sdfg in graph.graphs():
        assert libraries[direction] == folder / "lib" / f"{direction}.so"
        sources = [path.read_text() for path in (folder / "src" / direction).rglob("*.cpp")]
        assert sum(f"{program_names(sdfg)['call']}(" in text for text in sources) == 1


def test_a_graph_without_a_backward_pass_is_one_library(tmp_path: Path) -> None:
    assert set(generate(TrainingGraph(elements("alone", "in_x")), tmp_path, "light")) == {"forward"}
    assert not (tmp_path / "src" / "backward").exists()


@pytest.mark.parametrize("broken", ["forward", "backward"])
def test_code_that_does_not_compile_is_one_sentence_with_the_first_error(broken: str, tmp_path: Path) -> None:
    formulas = {direction: "nonsense(in_x)" if direction == broken else "in_x" for direction in ("forward", "backward")}
    graph = TrainingGraph(*(elements(f"broken_{direction}", formula) for direction, formula in formulas.items()))
    with pytest.raises(BuildError) as raised:
        generate(graph, tmp_path, "light")
    message = str(raised.value)
    assert re.fullmatch(rf'The generated code of "broken_{broken}" did not compile: .*error: .*nonsense.*\.', message)
    assert "\n" not in message


def test_without_a_compiler_nothing_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildError, match=r'^The C\+\+ compiler "no-such-compiler" [^\n]*\.$'):
        generate(TrainingGraph(elements("nothing", "in_x")), tmp_path, "light")
    assert list(tmp_path.iterdir()) == []


# ---- interface ----


@pytest.mark.parametrize("dtype", [dace.float32, dace.bool_, dace.uint32, dace.float16])
def test_values_of_other_types_are_refused(dtype: dace.typeclass) -> None:
    sdfg = elements("typed", "in_x", scalars={"flag": dtype})
    kind = re.escape(dtype.ctype)
    with pytest.raises(BuildError, match=rf'^argument "flag" of "typed" is a value of {kind}; accepted are .*\.$'):
        packed_call(sdfg)


def test_symbols_of_the_initialisation_are_named_in_its_order() -> None:
    sdfg = SDFG("symbols")
    sizes = [dace.symbol(name, dtype) for name, dtype in (("S", dace.int32), ("B", dace.int64))]
    for name, shape in (("x", sizes), ("y", sizes[:1])):
        sdfg.add_array(name, shape, dace.float32)
    state = sdfg.add_state()
    state.add_nedge(state.add_read("x"), state.add_write("y"), dace.Memlet("x[0:S, 0] -> [0:S]"))
    declared = re.findall(r"(\w+)(?:,|$)", sdfg.init_signature())
    assert sorted(init_arguments(sdfg)) == ["B", "S"]
    assert init_arguments(sdfg) == declared
    assert init_arguments(SDFG("none")) == []


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (dace.float32, "float32"),
        (dace.bfloat16, "bfloat16"),
        (dace.bool_, "bool"),
        (dace.bool, "bool"),
        (dace.int64, "int64"),
        (dace.uint32, "uint32"),
    ],
)
def test_scalar_types_have_numpys_names(dtype: dace.typeclass, name: str) -> None:
    assert scalar_name(dtype) == name
