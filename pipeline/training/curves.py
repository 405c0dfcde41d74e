"""The loss curve: in memory, as tensors in a checkpoint, as CSV, as PNG."""

import csv
import os
from collections.abc import Mapping, Sequence
from dataclasses import astuple, fields
from pathlib import Path
from typing import TextIO

import torch
from matplotlib.figure import Figure
from torch import Tensor

from stepdown.pipeline.training.options import StepRecord

_COLUMNS = tuple(field.name for field in fields(StepRecord))
_WHOLE = frozenset({"step", "tokens"})
_HEADER = (*_COLUMNS, "tokens_per_second")


def _row(record: StepRecord) -> tuple[str, ...]:
    return (*(repr(value) for value in astuple(record)), f"{record.tokens_per_second:.1f}")


class LossCurve:
    """The records of a run, in step order."""

    def __init__(self, records: Sequence[StepRecord] = ()) -> None:
        self.records = list(records)

    @property
    def losses(self) -> tuple[float, ...]:
        """The loss of every step."""
        return tuple(record.loss for record in self.records)

    def to_tensors(self) -> dict[str, Tensor]:
        """One tensor for each column, [steps]; floats as float64, so that nothing is rounded."""
        return {
            name: torch.tensor(
                [getattr(record, name) for record in self.records],
                dtype=torch.int64 if name in _WHOLE else torch.float64,
            )
            for name in _COLUMNS
        }

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> "LossCurve":
        """The inverse of :meth:`to_tensors`."""
        return cls([StepRecord(*values) for values in zip(*(tensors[name].tolist() for name in _COLUMNS), strict=True)])


class CurveFile:
    """The CSV of a run, one row a step, written as the run goes; a run that is killed leaves whole rows.

    :param curve: the steps already done: the file begins with these and nothing else.
    """

    def __init__(self, path: Path, curve: LossCurve) -> None:
        partial = path.with_name(path.name + ".partial")
        with partial.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(_HEADER)
            writer.writerows(_row(record) for record in curve.records)
        os.replace(partial, path)
        self._file: TextIO = path.open("a", newline="", buffering=1, encoding="utf-8")
        self._writer = csv.writer(self._file)

    def append(self, record: StepRecord) -> None:
        """Adds one step."""
        self._writer.writerow(_row(record))

    def __enter__(self) -> "CurveFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def plot_losses(path: Path, curves: Mapping[str, Sequence[float]], title: str, accepted: float | None = None) -> None:
    """Draws loss over steps as PNG, one line for each of ``curves``.

    Of two curves, the second is dashed and the relative difference of the two is drawn beneath, where it is not zero.

    :param accepted: the largest accepted relative difference, drawn as a line.
    """
    figure = Figure(figsize=(8, 6 if len(curves) == 2 else 4.5), layout="constrained")
    if len(curves) == 2:
        losses, difference = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    else:
        losses, difference = figure.subplots(), None
    for (label, values), style in zip(curves.items(), ("-", "--", ":", "-."), strict=False):
        losses.plot(range(1, len(values) + 1), values, style, label=label, linewidth=1.8)
    losses.set_ylabel("masked-language-model loss (nats)")
    losses.set_title(title)
    losses.grid(alpha=0.3)
    losses.legend()
    if difference is not None:
        first, second = curves.values()
        points = [(step, value) for step, value in enumerate(relative_differences(first, second), 1) if value > 0]
        difference.semilogy([step for step, _ in points], [value for _, value in points], ".", color="tab:red")
        if accepted is not None:
            difference.axhline(accepted, color="tab:gray", linestyle="--", linewidth=1.2, label="accepted")
            difference.legend()
        difference.set_ylabel("relative difference")
        difference.grid(alpha=0.3)
    (difference or losses).set_xlabel("step")
    partial = path.with_name(path.name + ".partial")
    figure.savefig(partial, format="png", dpi=130)
    os.replace(partial, path)


def relative_differences(first: Sequence[float], second: Sequence[float]) -> list[float]:
    """|first - second| / |second| of every step that both have."""
    return [abs(a - b) / abs(b) for a, b in zip(first, second, strict=False)]
