"""``compile_layer``: options, keys, the cache, output folders, builds without a compiler, processes, variants.

What the cache itself promises is tested in `test_cache.py`; here a stand-in for the compiler shows what it is given.
"""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stepdown.models.definition import EncoderLayer
from stepdown.models.errors import BuildError, OptionError, StepdownError
from stepdown.models.presets import bert_tiny
from stepdown.models.reference import ReferenceEncoderLayer
from stepdown.pipeline import CompiledLayer, compile_layer
from stepdown.pipeline import compiler as compiler_module
from stepdown.pipeline import stages as stages_module
from stepdown.pipeline.analysis.listing import load_graph
from stepdown.pipeline.cache import BuildCache
from stepdown.pipeline.stages import STAGES
from stepdown.transformations.canonical_form import validate

SMALL = EncoderLayer(embed=24, heads=2, ffn=40, activation_dropout=0.1)


def empty_path(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """No compiler anywhere."""
    patch.setenv("PATH", str(folder))
    patch.delenv("CXX", raising=False)


@pytest.fixture(scope="session")
def graphs_only(session_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> CompiledLayer:
    """A build that stops before the compiler, made where there is none and where every warning is an error."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        empty_path(patch, tmp_path_factory.mktemp("empty"))
        warnings.simplefilter("error")
        return compile_layer(SMALL, build=False)


class CountedCompiler:
    """Stands for the stages and the compiler: writes a manifest and counts how often."""

    def __init__(self) -> None:
        self.calls = 0
        self.fails = False

    def __call__(self, options: Any, key: str, folder: Path, progress: Any) -> None:
        self.calls += 1
        time.sleep(0.05)
        (folder / "lib").mkdir()
        (folder / "lib" / "forward.so").write_bytes(b"code")
        if self.fails:
            raise BuildError("The generated code did not compile.")
        content = {"format": 1, "key": key, "layer": {}, "options": options.to_dict(), "stages": [], "call": self.calls}
        (folder / "manifest.json").write_text(json.dumps(content))


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[CountedCompiler]:
    """The stand-in, and an empty cache of its own."""
    found = CountedCompiler()
    monkeypatch.setattr(compiler_module, "_build", found)
    monkeypatch.setattr(compiler_module, "build_extension", lambda **options: None)  # half a minute in an empty cache
    monkeypatch.setenv("STEPDOWN_CACHE", str(tmp_path / "cache"))
    yield found


# ---- the cache ----


def test_a_layer_is_compiled_once(counted: CountedCompiler) -> None:
    first, second = compile_layer(SMALL), compile_layer(SMALL)
    assert counted.calls == 1
    assert (first.cached, second.cached) == (False, True)
    assert first.path == second.path == BuildCache().list()[0].path
    assert first.path.name == first.manifest["key"]
    assert (first.definition, first.dtype.name, first.batch, first.seq, first.target) == (
        SMALL,
        "float32",
        None,
        None,
        "cpu",
    )


def test_another_cache_is_another_place(counted: CountedCompiler, tmp_path: Path) -> None:
    ours = compile_layer(SMALL, cache=BuildCache(tmp_path / "other"))
    assert ours.path.is_relative_to(tmp_path / "other")
    assert compile_layer(SMALL).path.name == ours.path.name
    assert counted.calls == 2


def test_equal_options_in_other_words_are_one_build(counted: CountedCompiler) -> None:
    same: list[dict[str, Any]] = [
        {"dtype": "bfloat16", "disable": ["fuse-row-operators"]},
        {"dtype": "BF16", "disable": "fuse-row-operators"},
        {"dtype": torch.bfloat16, "disable": iter(["fuse-row-operators"] * 2)},
    ]
    paths = {compile_layer(bert_tiny, **options).path for options in same}
    paths |= {compile_layer(bert_tiny.layer, **same[0]).path}
    assert len(paths) == counted.calls == 1


def test_whatever_changes_the_code_changes_the_key(
    counted: CountedCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: list[dict[str, Any]] = [
        {},
        {"batch": 1},
        {"seq": 1},
        {"batch": 1, "seq": 1},
        {"dtype": "float64"},
        {"dtype": "bfloat16"},
        {"disable": ["fuse-row-operators"]},
        {"build": False},
        {"optimize": "light"},
    ]
    changes: list[dict[str, Any]] = [
        {"embed": 48},
        {"heads": 3},
        {"ffn": 41},
        {"activation": "relu"},
        {"activation": "gelu_tanh"},
        {"norm": "pre"},
        {"eps": 1e-5},
        {"bias": False},
        {"causal": True},
        {"dropout": 0.2},
        {"attention_dropout": 0.2},
        {"activation_dropout": 0.0},
    ]
    paths = {compile_layer(SMALL, **given).path for given in options}
    paths |= {compile_layer(dataclasses.replace(SMALL, **change)).path for change in changes}
    compiler = tmp_path / "other-compiler"
    macros = "#define __GNUC__ 99\n#define __GNUC_MINOR__ 0\n#define __GNUC_PATCHLEVEL__ 1"
    compiler.write_text(f"#!/bin/sh\necho '{macros}'\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    paths.add(compile_layer(SMALL).path)
    assert len(paths) == counted.calls == len(options) + len(changes) + 1
    assert {field.name for field in dataclasses.fields(SMALL)} == {name for change in changes for name in change}


def test_a_damaged_build_is_compiled_again(counted: CountedCompiler) -> None:
    path = compile_layer(SMALL).path
    (path / "lib" / "forward.so").write_bytes(b"cod")
    again = compile_layer(SMALL)
    assert (again.path, again.cached, counted.calls) == (path, False, 2)
    assert (path / "lib" / "forward.so").read_bytes() == b"code"
    assert compile_layer(SMALL).cached


def test_a_failed_compilation_leaves_nothing(counted: CountedCompiler, tmp_path: Path) -> None:
    counted.fails = True
    for options in ({}, {"output": tmp_path / "out"}):
        with pytest.raises(BuildError):
            compile_layer(SMALL, **options)  # type: ignore[arg-type]
    assert BuildCache().list() == ()
    assert list((BuildCache().root / "building").iterdir()) == []
    assert list((tmp_path / "out").iterdir()) == []
    counted.fails = False
    assert not compile_layer(SMALL).cached
    assert compile_layer(SMALL, output=tmp_path / "out").manifest["call"] == 4


def test_threads_share_one_compilation(counted: CountedCompiler) -> None:
    found: list[CompiledLayer] = []
    threads = [threading.Thread(target=lambda: found.append(compile_layer(SMALL))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counted.calls == 1
    assert len(found) == 4
    assert len({layer.path for layer in found}) == 1
    assert sorted(layer.cached for layer in found) == [False, True, True, True]


PROCESS = """
import os, pathlib, sys, time
from stepdown.models.definition import EncoderLayer
from stepdown.pipeline import stages
from stepdown.pipeline.compiler import compile_layer
log = pathlib.Path(sys.argv[1])
stages.STAGES = stages.STAGES[:2]
def progress(stage):
    if stage == "differentiate":
        with log.open("a") as stream:
            stream.write(f"{os.getpid()} ")
        if len(log.read_text().split()) == 1:
            time.sleep(600)
layer = EncoderLayer(embed=24, heads=2, ffn=40)
print(compile_layer(layer, build=False, progress=progress).path)
"""


def test_processes_compile_once_and_one_that_is_killed_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two and this one ask for a layer, with hashes of their own; the first to compile it is killed midway."""
    log = tmp_path / "log"
    log.touch()
    cache = BuildCache(tmp_path / "cache")
    environment = os.environ | {"STEPDOWN_CACHE": str(cache.root), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", "-c", PROCESS, str(log)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    seeds = ({"PYTHONHASHSEED": seed} for seed in "12")
    processes = [subprocess.Popen(command, env=environment | seed, **pipes) for seed in seeds]

    def progress(stage: str) -> None:
        if stage == "differentiate":
            with log.open("a") as stream:
                stream.write(f"{os.getpid()} ")

    try:
        deadline = time.monotonic() + 120
        while not (started := log.read_text().split()) and time.monotonic() < deadline:
            assert all(process.poll() is None for process in processes), [p.communicate() for p in processes]
            time.sleep(0.05)
        (victim,) = (process for process in processes if process.pid == int(started[0]))
        (other,) = (process for process in processes if process is not victim)
        assert cache.list() == ()
        victim.send_signal(signal.SIGKILL)
        monkeypatch.setattr(stages_module, "STAGES", STAGES[:2])
        layer = EncoderLayer(embed=24, heads=2, ffn=40)
        ours = compile_layer(layer, build=False, cache=cache, progress=progress)
        theirs, errors = other.communicate(timeout=120)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert errors == "", "with every warning an error"
    assert theirs.strip() == str(ours.path)
    assert len(log.read_text().split()) == 2, "the one that was killed, and one of the others"
    assert [entry.path for entry in cache.list()] == [ours.path]
    cache.verify(ours.path)
    assert list((cache.root / "building").iterdir()) == []


# ---- output folders ----


def test_output_takes_the_place_of_the_cache(counted: CountedCompiler, tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    first = compile_layer(SMALL, output=out)
    assert (first.path, first.cached) == (out, False)
    assert sorted(path.name for path in out.iterdir()) == ["lib", "manifest.json"]
    assert not BuildCache().root.exists()
    (out / "lib" / "of the older build").touch()
    second = compile_layer(SMALL, output=str(out), batch=2)
    assert second.manifest["options"]["batch"] == 2
    assert counted.calls == 2
    assert [path.name for path in (out / "lib").iterdir()] == ["forward.so"]


def test_a_build_stays_until_the_next_one_is_complete(counted: CountedCompiler, tmp_path: Path) -> None:
    compile_layer(SMALL, output=tmp_path / "out")
    before = (tmp_path / "out" / "manifest.json").read_text()
    counted.fails = True
    with pytest.raises(BuildError):
        compile_layer(SMALL, output=tmp_path / "out", batch=2)
    assert (tmp_path / "out" / "manifest.json").read_text() == before


def test_output_refuses_what_is_not_a_build_before_it_compiles(counted: CountedCompiler, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    with pytest.raises(OptionError, match=r'^output ".*full" holds other files; accepted is a new or empty folder'):
        compile_layer(SMALL, output=tmp_path / "full")
    assert (tmp_path / "full" / "thesis.tex").exists()
    for impossible in (tmp_path / "full" / "thesis.tex", tmp_path / "full" / "thesis.tex" / "out"):
        with pytest.raises(OptionError, match=r'^output ".*" cannot be written \(.*\)\.$'):
            compile_layer(SMALL, output=impossible)
    assert counted.calls == 0


# ---- options ----


@pytest.mark.parametrize(
    ("options", "given", "accepted"),
    [
        ({"dtype": "int8"}, 'dtype "int8"', '"float64" ("fp64"), "float32"'),
        ({"dtype": torch.int8}, 'dtype "torch.int8"', '"bfloat16"'),
        ({"dtype": np.float32}, "float32", '"bfloat16"'),
        ({"dtype": None}, 'dtype "None"', '"bfloat16"'),
        ({"dtype": ["float32"]}, "float32", '"bfloat16"'),
        ({"target": "tpu"}, 'target "tpu"', '"cpu"'),
        ({"target": None}, 'target "None"', '"cpu"'),
        ({"target": ["cpu"]}, "cpu", '"cpu"'),
        ({"disable": ["fuse-everything"]}, 'pass "fuse-everything"', '"fuse-row-operators"'),
        ({"disable": "lower-operators"}, 'pass "lower-operators"', '"fuse-row-operators"'),
        ({"disable": ["fuse-row-operators", 3]}, 'pass "3"', '"fuse-row-operators"'),
        ({"disable": [["fuse-row-operators"]]}, "pass", '"fuse-row-operators"'),
        ({"disable": None}, '"disable" is None', '"fuse-row-operators"'),
        ({"optimize": "fast"}, 'optimize "fast"', '"release" and "light"'),
        ({"optimize": None}, 'optimize "None"', '"release" and "light"'),
        ({"optimize": ["light"]}, "light", '"release" and "light"'),
        *(
            ({name: value}, f'"{name}" is {value!r}', "a positive integer, or None")
            for name in ("batch", "seq")
            for value in (0, -1, True, False, 2.0, "2", float("nan"))
        ),
        ({"batch": 2**70}, f'"batch" {2**70}', "at most 2147483647"),
        ({"batch": 2**20, "seq": 2**20}, f'"batch" {2**20} and "seq" {2**20}', "at most 2147483647"),
    ],
)
def test_impossible_options_are_refused_in_one_sentence(
    options: dict[str, Any], given: str, accepted: str, counted: CountedCompiler
) -> None:
    with pytest.raises(OptionError) as raised:
        compile_layer(SMALL, **options)
    message = str(raised.value)
    assert given in message
    assert accepted in message.split(given, 1)[1]
    assert message.endswith(".")
    assert "\n" not in message
    assert counted.calls == 0


@pytest.mark.parametrize("layer", ["bert-tiny", None, torch.nn.Linear(2, 2), EncoderLayer])
def test_other_things_than_layers_are_refused(layer: Any, counted: CountedCompiler) -> None:
    with pytest.raises(OptionError, match=r'was given; accepted are an "EncoderLayer" or a "Preset"\.$'):
        compile_layer(layer)
    assert counted.calls == 0


def test_without_a_compiler_it_is_one_sentence(
    counted: CountedCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty_path(monkeypatch, tmp_path)
    with pytest.raises(BuildError, match=r'^No C\+\+ compiler was found: [^\n]*"CXX"\.$'):
        compile_layer(SMALL)
    assert counted.calls == 0
    assert not compile_layer(SMALL, build=False).cached


# ---- without the compiler ----


def test_a_build_without_libraries_holds_every_stage(graphs_only: CompiledLayer) -> None:
    manifest = graphs_only.manifest
    assert [stage["name"] for stage in manifest["stages"]] == [stage.name for stage in STAGES]
    assert manifest["layer"] == SMALL.to_dict()
    assert manifest["options"]["build"] is False
    assert "compiler" not in manifest["versions"]
    assert "abi" not in manifest
    assert not (graphs_only.path / "lib").exists()
    for number, stage in enumerate(STAGES):
        files = sorted(path.name for path in (graphs_only.path / "stages").glob(f"{number:02d}-*"))
        directions = ["forward"] if number == 0 else ["backward", "forward"]
        assert files == [f"{number:02d}-{stage.name}.{direction}.sdfgz" for direction in directions]
        if stage.canonical:
            graph = graphs_only.stage(stage.name)
            assert graph.kept == tuple(manifest["stages"][number]["kept"])
            validate(graph)


def test_saved_graphs_are_what_dace_would_save(graphs_only: CompiledLayer, tmp_path: Path) -> None:
    file = graphs_only.path / "stages" / "00-parse.forward.sdfgz"
    graph = load_graph(file)
    graph.save(str(tmp_path / "saved.sdfgz"), compress=True)
    assert load_graph(tmp_path / "saved.sdfgz").hash_sdfg() == graph.hash_sdfg()
    assert file.stat().st_size < 1.2 * (tmp_path / "saved.sdfgz").stat().st_size, "compressed"


def test_what_a_build_without_libraries_cannot_do_is_refused(graphs_only: CompiledLayer) -> None:
    with pytest.raises(StepdownError, match=r"^[^\n]*\.$"):
        graphs_only.to_torch()
    with pytest.raises(OptionError, match=r'^stage "link" is unknown in the build .*; accepted are "parse", '):
        graphs_only.stage("link")


# ---- variants ----


def test_a_layer_with_relu_and_without_biases_agrees(built_layer: CompiledLayer) -> None:
    """The activation and the combination that no other test compiles; the others are in `runtime/test_layer.py`."""
    layer = built_layer.to_torch().eval()
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.normal_(1 if "LayerNorm.weight" in name else 0, 0.2)
    reference = ReferenceEncoderLayer(layer.definition).double().eval()
    reference.load_state_dict(layer.state_dict())
    x = torch.randn(3, 7, layer.definition.embed, requires_grad=True)
    mask = torch.ones(3, 7, dtype=torch.bool)
    mask[1, 4:] = False
    wide = x.detach().double().requires_grad_()
    weights = torch.linspace(-1, 1, x.numel()).sin().view(x.shape)
    y, expected = layer(x, mask), reference(wide, mask)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    found = torch.autograd.grad(y, [x, *layer.parameters()], weights)
    wanted = torch.autograd.grad(expected, [wide, *reference.parameters()], weights.double())
    for value, other in zip(found, wanted, strict=True):
        assert (value - other).norm() <= 1e-5 * other.norm() + 1e-6
    changed = x.detach().clone()
    changed[:, 5:] += 1
    assert torch.equal(layer(changed, mask)[:, :5], y[:, :5]), "no query looks ahead"
