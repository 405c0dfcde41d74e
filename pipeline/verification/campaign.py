"""A verification campaign: many drawn layers at drawn shapes, one module for each layer and dtype, resumable."""

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from stepdown.models.definition import EncoderLayer
from stepdown.models.dtypes import DataType, resolve_dtype
from stepdown.models.errors import OptionError, StepdownError
from stepdown.pipeline.verification.cases import Case, draw_case, draw_layer, make_mask
from stepdown.pipeline.verification.report import Report
from stepdown.pipeline.verification.rule import DRAWS, verify_layer

FORMAT = 1

KINK = 5
"""How many times the usual draws a layer with a kink is judged over before it fails."""

Build = Callable[[EncoderLayer, DataType], nn.Module]
"""Makes the module under test."""

Row = dict[str, Any]
"""What is written about one case."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a campaign consists of; equal settings are the same cases.

    A layer's cases are dealt to ``dtypes_per_layer`` of ``dtypes``, which take turns from layer to layer.
    """

    layers: int = 24
    cases_per_layer: int = 10
    seed: int = 0
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16", "float64")
    dtypes_per_layer: int = 2

    def __post_init__(self) -> None:
        for name in ("layers", "cases_per_layer", "dtypes_per_layer"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name}={getattr(self, name)} was given; accepted is a positive integer.")
        if self.seed < 0:
            raise OptionError(f"seed={self.seed} was given; accepted is an integer of at least 0.")
        object.__setattr__(self, "dtypes", tuple(resolve_dtype(name).name for name in self.dtypes))
        if not self.dtypes:
            raise OptionError("no dtype was given; accepted is at least one.")


@dataclass(frozen=True)
class Task:
    """One layer at one dtype, and the cases that its module is verified at; ``numbers`` are theirs in the layer."""

    layer: int
    definition: EncoderLayer
    dtype: DataType
    cases: tuple[Case, ...]
    numbers: tuple[int, ...]


def plan(settings: Settings) -> list[Task]:
    """The tasks of a campaign, drawn from its seed alone."""
    tasks = []
    for layer in range(settings.layers):
        generator = np.random.default_rng([settings.seed, layer])
        definition = draw_layer(generator)
        cases = [draw_case(generator, definition) for _ in range(settings.cases_per_layer)]
        count = min(settings.dtypes_per_layer, len(settings.dtypes))
        for turn in range(count):
            name = settings.dtypes[(layer * count + turn) % len(settings.dtypes)]
            numbers = tuple(range(turn, len(cases), count))
            if numbers:
                chosen = tuple(cases[number] for number in numbers)
                tasks.append(Task(layer, definition, resolve_dtype(name), chosen, numbers))
    return tasks


def run_campaign(settings: Settings, build: Build, done: Sequence[Row] = (), run: int = 0) -> Iterator[Row]:
    """Verify every case that ``done`` does not hold a passed row of; yields a row for each, as soon as it is known.

    :param build: called once for each layer and dtype that has something left to do.
    :param done: rows of an earlier run with the same settings.
    :param run: written into the rows: which of the runs of the result file made them.
    """
    finished = finished_cases(done)
    for task in plan(settings):
        yield from run_task(task, build, finished, run)


def finished_cases(rows: Sequence[Row]) -> frozenset[tuple[int, int]]:
    """Layer and case of every row that need not run again."""
    return frozenset((row["layer"], row["case"]) for row in rows if row["passed"] or row["skipped"])


def run_task(
    task: Task, build: Build, finished: frozenset[tuple[int, int]] = frozenset(), run: int = 0
) -> Iterator[Row]:
    """Verify the cases of one task that are not ``finished``; yields a row for each, as soon as it is known."""
    module: nn.Module | None = None
    for number, case in zip(task.numbers, task.cases, strict=True):
        if (task.layer, number) in finished:
            continue
        start = time.perf_counter()
        row: Row = {
            "layer": task.layer,
            "case": number,
            "run": run,
            "definition": task.definition.to_dict(),
            "dtype": task.dtype.name,
            **asdict(case),
        }
        try:
            if module is None:
                module = build(task.definition, task.dtype)
                row["build_seconds"] = round(time.perf_counter() - start, 2)
                start = time.perf_counter()
            row.update(_summary(verify_case(module, task.definition, task.dtype, case)))
        except (StepdownError, RuntimeError) as error:
            row.update(passed=False, skipped=None, error=f"{type(error).__name__}: {error}")
        yield {**row, "seconds": round(time.perf_counter() - start, 2)}


def verify_case(module: nn.Module, definition: EncoderLayer, dtype: DataType, case: Case) -> Report:
    """Verify one case, dropout masks included.

    Errors are pooled over the rule's 16 draws. Where something is beyond its limit then and the layer's smallest result
    holds too few numbers for 16 draws to decide, they are pooled over the case's own number of draws, and that result
    counts. With ReLU it takes ``KINK`` times as many: where rounding turns a sign before the kink, a whole gradient
    comes or goes, and a few such draws outweigh all others.
    """
    report = None
    most = case.draws * (KINK if definition.activation == "relu" else 1)
    for draws in sorted({min(DRAWS, case.draws), case.draws, most}):
        report = verify_layer(
            module,
            definition,
            dtype,
            case.batch,
            case.seq,
            mask=make_mask(case.mask, case.batch, case.seq, case.seed),
            draws=draws,
            seed=case.seed,
            dropout=case.dropout,
            masks=True,
            mask_name=case.mask,
        )
        if report.passed or report.skipped is not None:
            break
    assert report is not None
    return report


def _summary(report: Report) -> Row:
    worst = report.worst
    return {
        "dropout": report.dropout,
        "draws": report.draws,
        "passed": report.passed,
        "skipped": report.skipped,
        "worst": None if worst is None else {"name": worst.name, "share": _rounded(worst.share)},
        "results": {row.name: [_rounded(row.error), _rounded(row.torch_error), row.passed] for row in report.rows},
        "masks": [vars(row) for row in report.masks],
    }


def _rounded(value: float) -> float | None:
    """Three significant digits; null where there is no finite number."""
    return float(f"{value:.2e}") if math.isfinite(value) else None


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    """Counts over all rows and for each dtype, with the largest share of the limit and the dropout bits compared."""

    def count(some: Sequence[Row]) -> dict[str, Any]:
        masks = [mask for row in some for mask in row.get("masks", ())]
        shares = [row["worst"]["share"] for row in some if row.get("worst")]
        return {
            "cases": len(some),
            "layers": len({row["layer"] for row in some}),
            "passed": sum(row["passed"] for row in some),
            "skipped": sum(row["skipped"] is not None for row in some),
            "failed": sum(not row["passed"] and row["skipped"] is None for row in some),
            "dropout_on": sum(row["dropout"] for row in some),
            "largest_share": None if None in shares else max(shares, default=None),
            "mask_bits": sum(mask["elements"] for mask in masks),
            "mask_bits_observable": sum(mask["observable"] for mask in masks),
            "mask_bits_different": sum(mask["different"] for mask in masks),
        }

    dtypes = sorted({row["dtype"] for row in rows})
    return {"all": count(rows), **{name: count([row for row in rows if row["dtype"] == name]) for name in dtypes}}


@dataclass
class ResultFile:
    """The JSON file of a campaign: settings, runs (machine, versions, date, command), summary, and a row a line."""

    path: Path
    settings: Settings
    runs: list[dict[str, Any]]
    rows: list[Row]

    @classmethod
    def start(cls, path: Path, settings: Settings, run: Mapping[str, Any], resume: bool) -> "ResultFile":
        """A new file, or with ``resume`` the one at ``path`` continued, if there is one.

        :raises OptionError: when the file to resume is not of a campaign with the same settings.
        """
        file = cls(path, settings, [], [])
        if resume and path.exists():
            try:
                stored = json.loads(path.read_text())
                same = stored["format"] == FORMAT and stored["settings"] == file._settings()
            except (ValueError, KeyError, TypeError) as error:
                raise OptionError(f'"{path}" was given to resume; accepted is the result of a campaign.') from error
            if not same:
                raise OptionError(f'"{path}" was given to resume; accepted is a result of the same settings.')
            file.runs, file.rows = stored["runs"], stored["rows"]
        file.runs.append(dict(run))
        return file

    def add(self, row: Row) -> None:
        """Put a row in the place of an earlier one of the same case, and write the file."""
        key = (row["layer"], row["case"])
        self.rows = sorted(
            [other for other in self.rows if (other["layer"], other["case"]) != key] + [row],
            key=lambda other: (other["layer"], other["case"]),
        )
        self.write()

    def write(self) -> None:
        """Write the file in one step, so that an interruption leaves the last state."""
        head = {
            "format": FORMAT,
            "settings": self._settings(),
            "runs": self.runs,
            "summary": summarize(self.rows),
        }
        lines = ",\n".join(json.dumps(row, allow_nan=False) for row in self.rows)
        text = json.dumps(head, indent=1)[:-2] + f',\n "rows": [\n{lines}\n ]\n}}\n'
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        temporary.write_text(text)
        temporary.replace(self.path)

    def _settings(self) -> dict[str, Any]:
        return json.loads(json.dumps(asdict(self.settings)))
