"""Comparisons and the rows they leave: what is measured, what is refused, what a results file keeps."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stepdown.models.definition import EncoderLayer
from stepdown.models.errors import BuildError, OptionError
from stepdown.models.reference import ReferenceEncoderLayer
from stepdown.pipeline import compare
from stepdown.pipeline.compare import BASELINES, CASES, OURS, check_baselines, compare_layer, step_count
from stepdown.pipeline.results import Row, describe_device, read_rows, rounded, save_rows, spread_of

LAYER = EncoderLayer(embed=8, heads=2, ffn=16)
SIZES: dict[str, Any] = {"batch": 2, "seq": 5, "repeats": 3}


class Compiled:
    """Stands for a compiled layer: PyTorch's own, a little wrong when asked for."""

    def __init__(self, layer: EncoderLayer, options: dict[str, Any], factor: float) -> None:
        self.layer, self.options, self.factor = layer, options, factor

    def to_torch(self) -> nn.Module:
        module = ReferenceEncoderLayer(self.layer)

        def scale(module: nn.Module, arguments: object, output: Tensor) -> Tensor:
            return output * self.factor

        if self.factor != 1:
            module.register_forward_hook(scale)
        return module


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Compiled]]:
    """Replaces the compiler; returns what it was asked for."""

    def install(factor: float = 1.0) -> list[Compiled]:
        made: list[Compiled] = []

        def compile_layer(layer: EncoderLayer, **options: Any) -> Compiled:
            made.append(Compiled(layer, options, factor))
            return made[-1]

        monkeypatch.setattr(compare, "compile_layer", compile_layer)
        return made

    return install


def test_every_implementation_is_measured_in_every_case(compiled: Callable[..., list[Compiled]]) -> None:
    made = compiled()
    steps: list[str] = []
    found = compare_layer("mine", LAYER, **SIZES, against=("eager", "sdpa"), report=steps.append)
    assert [one.implementation for one in found.measured] == [OURS, "eager", "sdpa"]
    assert len(steps) == step_count(("eager", "sdpa"), 3)
    for one in found.measured:
        assert {case: len(samples) for case, samples in one.seconds.items()} == dict.fromkeys(CASES, 3)
        assert all(both > forward > 0 for forward, both in zip(*one.seconds.values(), strict=True))
        assert one.output_error < 1e-6
        assert one.gradient_error < 1e-6
    assert made[0].options["batch"] == 2
    assert made[0].options["seq"] == 5
    rows = found.rows()
    assert [(row.implementation, row.case) for row in rows][:3] == [
        (OURS, CASES[0]),
        (OURS, CASES[1]),
        ("eager", CASES[0]),
    ]
    assert rows[0].shape == {"B": 2, "S": 5, "E": 8, "H": 2, "U": 16}
    assert rows[0].unit == "ms"


def test_symbolic_means_any_size(compiled: Callable[..., list[Compiled]]) -> None:
    made = compiled()
    compare_layer("mine", LAYER, **SIZES, against=("eager",), symbolic=True)
    assert made[0].options["batch"] is None
    assert made[0].options["seq"] is None


def test_an_error_is_seen_and_is_relative(compiled: Callable[..., list[Compiled]]) -> None:
    compiled(factor=1.01)
    ours, eager = compare_layer("mine", LAYER, **SIZES, against=("eager",)).measured
    assert ours.output_error == pytest.approx(0.01, rel=1e-3)
    assert ours.gradient_error == pytest.approx(0.01, rel=1e-3)
    assert eager.output_error == 0


def test_kept_bytes_are_distinct_storages_without_parameters() -> None:
    class Square(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(6))

        def forward(self, x: Tensor) -> Tensor:
            y = x * self.weight  # keeps x and, not counted, the weight
            return y * y  # keeps y, once

    assert compare.kept_bytes_of(Square(), torch.ones(6)) == 2 * 6 * 4


def test_torch_compile_that_fails_is_one_sentence(
    compiled: Callable[..., list[Compiled]], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled()

    def fail(self: nn.Module, *args: object, **kwargs: object) -> None:
        def call(*args: object, **kwargs: object) -> None:
            raise RuntimeError("no compiler\nat line 1")

        self._compiled_call_impl = call

    monkeypatch.setattr(nn.Module, "compile", fail)
    with pytest.raises(BuildError, match=r'could not compile "compile" \(no compiler\)'):
        compare_layer("mine", LAYER, **SIZES, against=("compile",))


@pytest.mark.parametrize(("against", "named"), [(("eager", "jax"), '"jax"'), ((), "Nothing"), (("",), "Nothing")])
def test_unknown_names_are_refused(against: tuple[str, ...], named: str) -> None:
    with pytest.raises(OptionError, match=named) as refusal:
        check_baselines(against)
    assert all(f'"{name}"' in str(refusal.value) for name in BASELINES)


@pytest.mark.parametrize("wrong", [{"batch": 0}, {"seq": -1}, {"repeats": 0}, {"dtype": "int8"}])
def test_impossible_numbers_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        compare_layer("mine", LAYER, **{**SIZES, **wrong}, against=("eager",))


ROW = Row(
    name="bert-tiny",
    case="forward",
    implementation="stepdown",
    device="A processor, 2 threads",
    versions={"python": "3.11.7", "torch": "2.13.0+cpu"},
    shape={"B": 8, "S": 128},
    dtype="float32",
    median=1.25,
    spread=0.5,
    repeats=20,
    date="2026-01-02T03:04:05+00:00",
    command='stepdown compare bert-tiny --out "a, b.csv"',
    values={"kept_bytes": 1024, "output_error": 2.5e-7},
)


@pytest.mark.parametrize("name", ["rows.json", "rows.csv"])
def test_rows_come_back_as_they_were(tmp_path: Path, name: str) -> None:
    other = replace(ROW, implementation="eager", values={"kept_bytes": 5})
    save_rows(tmp_path / "results" / name, [ROW, other])
    assert read_rows(tmp_path / "results" / name) == [ROW, other]
    assert [path.name for path in (tmp_path / "results").iterdir()] == [name]


@pytest.mark.parametrize("name", ["rows.json", "rows.csv"])
def test_a_new_row_replaces_the_same_measurement_only(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    other = replace(ROW, shape={"B": 8, "S": 512})
    save_rows(file, [ROW, other])
    newer = replace(ROW, median=1.0, date="2026-02-02T00:00:00+00:00")
    save_rows(file, [newer])
    assert read_rows(file) == [newer, other]


def test_json_rows_are_objects_and_csv_rows_are_flat(tmp_path: Path) -> None:
    save_rows(tmp_path / "rows.json", [ROW])
    save_rows(tmp_path / "rows.csv", [ROW])
    assert json.loads((tmp_path / "rows.json").read_text())[0]["shape"] == {"B": 8, "S": 128}
    header, line = (tmp_path / "rows.csv").read_text().splitlines()
    assert header.startswith("name,case,implementation,shape,dtype,median,spread,repeats,unit,kept_bytes,output_error")
    assert "B=8 S=128" in line


def test_other_files_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "notes.json").write_text('{"mine": 1}')
    with pytest.raises(OptionError, match="cannot be read as measured rows"):
        save_rows(tmp_path / "notes.json", [ROW])
    assert (tmp_path / "notes.json").read_text() == '{"mine": 1}'
    with pytest.raises(OptionError, match="neither JSON nor CSV"):
        save_rows(tmp_path / "rows.txt", [ROW])


def test_median_and_quartiles() -> None:
    assert spread_of([5, 1, 2, 3, 4]) == (3, 2)
    assert spread_of([7.0]) == (7.0, 0.0)
    assert rounded(0.00123456) == 0.001235
    assert describe_device(1).endswith(", 1 thread")
