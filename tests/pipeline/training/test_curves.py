"""The loss curve as tensors, CSV and picture."""

import csv
from pathlib import Path

import pytest
import torch

from stepdown.pipeline.training.curves import CurveFile, LossCurve, plot_losses, relative_differences
from stepdown.pipeline.training.options import StepRecord


def record(step: int) -> StepRecord:
    return StepRecord(step, 1 / (3 * step), 1e-3 * step, 0.1 + step, 0.25, 64)


def test_tensors_hold_every_bit() -> None:
    curve = LossCurve([record(step) for step in range(1, 6)])
    tensors = curve.to_tensors()
    assert tensors["loss"].dtype == torch.float64 and tensors["step"].dtype == torch.int64
    assert LossCurve.from_tensors(tensors).records == curve.records
    assert LossCurve.from_tensors(LossCurve().to_tensors()).records == []


def test_the_csv_begins_with_what_is_done_and_grows(tmp_path: Path) -> None:
    path = tmp_path / "loss.csv"
    path.write_text("rows of a run that was killed later", encoding="utf-8")
    with CurveFile(path, LossCurve([record(1), record(2)])) as file:
        file.append(record(3))
        # Readable while the run goes on.
        assert len(path.read_text(encoding="utf-8").splitlines()) == 4
    with path.open(encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    assert [int(row["step"]) for row in rows] == [1, 2, 3]
    assert [float(row["loss"]) for row in rows] == [record(step).loss for step in (1, 2, 3)]
    assert {row["tokens_per_second"] for row in rows} == {"256.0"}
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("curves", [1, 2, 3])
def test_a_picture_is_drawn(tmp_path: Path, curves: int) -> None:
    path = tmp_path / "loss.png"
    plot_losses(path, {f"run {number}": [3.0, 2.0 + number, 1.0] for number in range(curves)}, "title")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.iterdir()) == [path]


def test_relative_differences() -> None:
    assert relative_differences([1.0, 3.0, 9.0], [2.0, 3.0]) == [0.5, 0.0]
