# mypy: disable-error-code="operator,attr-defined"
"""Loading builds: what is refused, what is shared, and what a call costs."""

import ctypes
import json
import math
import shutil
import threading
import time
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stepdown.models.errors import BuildError, InputError
from stepdown.pipeline.overhead import measure
from stepdown.pipeline.runtime import StepdownLayer, load_build
from stepdown.pipeline.runtime.manifest import Argument, SizeTable, c_strides

from .conftest import BuildFactory, FakeBuild

MOST_MICROSECONDS = 75
"""A guard against a slow path creeping in, with room for a machine that other work shares; the goal is 25."""


@pytest.fixture
def copied(build32: FakeBuild, tmp_path: Path) -> Path:
    """A copy of a build, to be damaged."""
    return shutil.copytree(build32.path, tmp_path / "build")


def change(build: Path, **entries: Any) -> None:
    manifest = json.loads((build / "manifest.json").read_text())
    (build / "manifest.json").write_text(json.dumps({**manifest, **entries}))


def argument(name: str = "t", role: str = "workspace", shape: tuple[str, ...] = ("B", "S"), **more: Any) -> Argument:
    strides = tuple(("*".join(shape[i + 1 :])) or "1" for i in range(len(shape)))
    return Argument(name, role, "float32", shape, strides, (), None, more.get("bytes"), None)


def test_a_build_is_loaded_once(build32: FakeBuild) -> None:
    assert load_build(build32.path) is load_build(str(build32.path / ".." / build32.path.name))


def test_a_build_is_loaded_once_by_many_threads(copied: Path) -> None:
    found = []
    threads = [threading.Thread(target=lambda: found.append(load_build(copied))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6
    assert len(set(map(id, found))) == 1


def test_a_folder_that_was_built_again_is_loaded_again(make_build: BuildFactory, tmp_path: Path) -> None:
    folder = tmp_path / "build"
    shutil.copytree(make_build("float64", seq=3).path, folder)
    before = StepdownLayer(folder)
    y = before(torch.ones(2, 3, 8, dtype=torch.float64))
    shutil.rmtree(folder)
    shutil.copytree(make_build().path, folder)
    after = StepdownLayer(folder)
    x = torch.randn(2, 5, 8)
    torch.testing.assert_close(after.eval()(x), make_build().expected(after, x))
    assert y.dtype is torch.float64
    assert before.eval()(torch.ones(2, 3, 8, dtype=torch.float64)).shape == (2, 3, 8)


def test_no_build(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r'its "manifest.json" cannot be read \(No such file'):
        load_build(tmp_path)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"format": 2}, "has format 2; accepted is 1"),
        ({"abi": None}, "holds no compiled libraries"),
        ({"abi": {"forward": {}, "backward": {}}}, "interface .* is incomplete"),
        ({"options": {}}, "is incomplete"),
        ({"layer": {"type": "decoder"}}, "is incomplete"),
    ],
)
def test_manifests_that_cannot_be_used(copied: Path, entries: dict[str, Any], message: str) -> None:
    change(copied, **entries)
    with pytest.raises(BuildError, match=message):
        load_build(copied)


def test_a_damaged_manifest(copied: Path) -> None:
    (copied / "manifest.json").write_text('{"format": 1')
    with pytest.raises(BuildError, match="is damaged"):
        load_build(copied)


def test_another_target(copied: Path) -> None:
    options = json.loads((copied / "manifest.json").read_text())["options"]
    change(copied, options={**options, "target": "cuda"})
    with pytest.raises(BuildError, match='was built for target "cuda"; accepted is "cpu"'):
        load_build(copied)


def test_missing_and_damaged_libraries(copied: Path) -> None:
    (copied / "lib" / "backward.so").unlink()
    with pytest.raises(BuildError, match="cannot be read"):
        load_build(copied)
    (copied / "lib" / "backward.so").write_bytes(b"no library")
    with pytest.raises(BuildError, match="cannot be loaded"):
        load_build(copied)


def edit(copied: Path, direction: str, name: str, /, **entries: Any) -> None:
    """Change one argument in the manifest, or remove it when there is no entry."""
    abi = json.loads((copied / "manifest.json").read_text())["abi"]
    index = next(i for i, entry in enumerate(abi[direction]["arguments"]) if entry["name"] == name)
    if entries:
        abi[direction]["arguments"][index].update(entries)
    else:
        del abi[direction]["arguments"][index]
    change(copied, abi=abi)


@pytest.mark.parametrize(
    ("direction", "name", "entries", "message"),
    [
        ("backward", "d_gamma", {}, 'no argument for "gradient_parameter attention.output.LayerNorm.weight"'),
        ("backward", "dx", {}, 'no argument for "gradient_input"'),
        ("forward", "t", {}, 'reads "t", which the forward library does not keep'),
        ("forward", "t", {"strides": ["1", "B", "B*S"]}, 'reads "t", which the forward library does not keep'),
        ("forward", "t", {"role": "thing"}, 'has role "thing"'),
        ("forward", "gamma", {"parameter": "gamma"}, "belongs to no parameter"),
        ("backward", "B", {"name": "N"}, 'needs a symbol "N"'),
        ("forward", "square", {"shape": ["B", "N", "8"]}, r"holds {N}; accepted are"),
        ("forward", "square", {"shape": ["B", "S +", "8"]}, "cannot be read"),
        ("forward", "dropout", {"dtype": "bool"}, 'is a value of bool; accepted are "?float64'),
    ],
)
def test_interfaces_that_do_not_fit(
    copied: Path, direction: str, name: str, entries: dict[str, Any], message: str
) -> None:
    edit(copied, direction, name, **entries)
    with pytest.raises(BuildError, match=message):
        load_build(copied)


@pytest.mark.parametrize(
    ("name", "entries"),
    [
        ("x", {"strides": ["8", "8*B", "1"]}),
        ("x", {"shape": ["B", "S", "9"], "strides": ["9*S", "9", "1"]}),
        ("gamma", {"shape": ["9"]}),
        ("mask", {"shape": ["S", "B"], "strides": ["B", "1"]}),
    ],
)
def test_tensors_that_pytorch_does_not_have(copied: Path, name: str, entries: dict[str, Any]) -> None:
    edit(copied, "forward", name, **entries)
    with pytest.raises(BuildError, match="accepted is the shape of PyTorch's tensor, in C order"):
        load_build(copied).plan(2, 3)


def test_sizes() -> None:
    table = SizeTable([argument("a", shape=("B", "S/2", "int_ceil(S, 16)")), argument("b", bytes="Max(B, S)*100")])
    sizes = table.at(3, 32)
    assert sizes["a"].shape == (3, 16, 2)
    assert sizes["a"].bytes == 3 * 16 * 2 * 4
    assert sizes["b"].bytes == 3200
    with pytest.raises(BuildError, match=r'A size of "a" is 16\.5'):
        table.at(3, 33)


def test_bytes_cover_the_strides() -> None:
    padded = Argument("a", "kept", "float64", ("B", "3"), ("16", "1"), (), None, "8*3*B", None)
    assert SizeTable([padded]).at(4, 1)["a"].bytes == (3 * 16 + 3) * 8


def test_more_elements_than_generated_code_can_count(build32: FakeBuild) -> None:
    table = SizeTable([argument("weights", shape=("B", "16", "S", "S"))])
    assert math.prod(table.at(31, 2048)["weights"].shape) < 2**31
    with pytest.raises(InputError, match='"weights" has 2147483648 elements; accepted are at most 2147483647'):
        table.at(32, 2048)
    with pytest.raises(InputError, match="accepted are at most 2147483647"):
        build32.layer()(torch.zeros(1, 1, 8).expand(2**14, 2**14, 8))


def test_c_strides() -> None:
    assert c_strides((2, 3, 4)) == torch.empty(2, 3, 4).stride()
    assert c_strides(()) == ()


def test_plans_are_bounded(build32: FakeBuild) -> None:
    layer = load_build(build32.path).layer
    module, x = build32.layer(), torch.zeros(1, 600, 8)
    for seq in range(1, 600):
        module(x[:, :seq])
    assert layer.plans() == 512
    module(x[:, :1])  # forgotten, and made again
    assert layer.plans() == 512


def test_threads_of_the_generated_code_are_those_of_pytorch(build32: FakeBuild) -> None:
    layer = build32.layer()
    # The loader returns what is loaded already.
    team = {name: ctypes.CDLL(str(build32.path / "lib" / f"{name}.so")).fake_team for name in ("forward", "backward")}
    found = []

    def work(threads: int) -> None:
        torch.set_num_threads(threads)
        y = layer(torch.randn(2, 3, 8))
        found.append(team["forward"]())
        y.sum().backward()
        found.append(team["backward"]())

    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            work(threads)
            worker = threading.Thread(target=work, args=(threads,))
            worker.start()
            worker.join()
    finally:
        torch.set_num_threads(before)
    assert found == [1] * 4 + [2] * 4


def slowdown() -> float:
    """How much slower plain Python runs now than on an idle core of the machine that the limits were set on."""
    rounds = timeit.repeat(lambda: sum(range(1000)), timer=time.thread_time, number=100, repeat=20)
    return max(1.0, min(rounds) / 100 * 1e6 / 11)


@pytest.mark.parametrize("training", [False, True])
def test_a_call_costs_little_over_the_kernels(
    build32: FakeBuild, training: bool, record_property: Callable[[str, object], None]
) -> None:
    """Everything but the kernels, which are replaced by a C++ function that takes the same arguments and returns."""
    samples = measure(build32.layer().train(training), 2, 3, number=100, rounds=20)
    best = {f"{case} {implementation}": min(values) for (case, implementation), values in samples.items()}
    slower = slowdown()
    record_property("microseconds", best)
    assert best["inference stepdown"] < MOST_MICROSECONDS * slower, (best, slower)
    assert best["forward stepdown"] < MOST_MICROSECONDS * slower, (best, slower)
    # PyTorch itself takes tens of microseconds to hand seventeen gradients on; what the layer adds is the question.
    added = best["backward stepdown"] - best["backward torch.autograd.Function"]
    assert added < MOST_MICROSECONDS * slower, (best, slower)
