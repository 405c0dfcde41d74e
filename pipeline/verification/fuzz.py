"""`python -m stepdown.pipeline.verification.fuzz`: drawn layers and inputs against float64, by the 1.1 rule.

Each layer is compiled once for a dtype, with symbolic batch and length, and verified at many shapes, dropout included.
The layers are small, so several processes, each on one thread, share them.
"""

import csv
import functools
import importlib.metadata
import multiprocessing
import os
import platform
import shlex
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from torch import nn

from stepdown.models.definition import EncoderLayer
from stepdown.models.dtypes import DataType
from stepdown.models.errors import StepdownError
from stepdown.pipeline.compiler import compile_layer
from stepdown.pipeline.verification.campaign import (
    ResultFile,
    Row,
    Settings,
    Task,
    finished_cases,
    plan,
    run_campaign,
    run_task,
    summarize,
)

PACKAGES = ("stepdown", "dace", "torch", "numpy", "scipy-openblas32")
"""What a result's versions are given of, besides Python."""

app = typer.Typer(add_completion=False)


def build(definition: EncoderLayer, dtype: DataType) -> nn.Module:
    """The compiled layer, for any batch and length."""
    return compile_layer(definition, batch=None, seq=None, dtype=dtype, optimize="light").to_torch()


def run_whole_task(task: Task, finished: frozenset[tuple[int, int]], run: int) -> list[Row]:
    """One layer at one dtype, in a process of its own."""
    torch.set_num_threads(1)
    return list(run_task(task, build, finished, run))


def run_tasks(settings: Settings, done: list[Row], run: int, jobs: int) -> Iterator[Row]:
    """The rows of a campaign as they become known, from ``jobs`` processes; one job is this process."""
    if jobs == 1:
        yield from run_campaign(settings, build, done, run)
        return
    work = functools.partial(run_whole_task, finished=finished_cases(done), run=run)
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        # The oracle of a wider type takes longest: what is begun first is not waited for last.
        tasks = sorted(plan(settings), key=lambda task: -task.dtype.bytes)
        for finished in as_completed([pool.submit(work, task) for task in tasks]):
            yield from finished.result()


def describe_run(command: str, threads: int) -> dict[str, Any]:
    """Date, command, machine and versions, for a result file; ``threads`` is how many each process computes on."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "machine": {
            "processor": _processor(),
            "cores": os.cpu_count(),
            "threads": threads,
            "system": f"{platform.system()} {platform.machine()}",
        },
        "versions": {
            "python": platform.python_version(),
            **{package: importlib.metadata.version(package) for package in PACKAGES},
        },
    }


def _processor() -> str:
    """The processor's name, where the system gives one."""
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def table(rows: list[Row]) -> Table:
    """The summary of a campaign for the terminal."""
    result = Table(title="Drawn layers and inputs against float64")
    result.add_column("dtype")
    headings = ("layers", "cases", "passed", "failed", "skipped", "largest share of a limit", "mask bits seen", "wrong")
    for heading in headings:
        result.add_column(heading, justify="right")
    for name, counts in summarize(rows).items():
        share = counts["largest_share"]
        result.add_row(
            name,
            *(str(counts[key]) for key in ("layers", "cases", "passed", "failed", "skipped")),
            "-" if share is None else f"{share:.2f}",
            f"{counts['mask_bits_observable']:,} of {counts['mask_bits']:,}",
            str(counts["mask_bits_different"]),
        )
    return result


def write_summary(rows: list[Row], path: Path) -> None:
    """The summary as a CSV file, a line for each dtype and one for all."""
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        columns = ["layers", "cases", "passed", "failed", "skipped", "largest_share"]
        columns += ["mask_bits", "mask_bits_observable", "mask_bits_different"]
        writer.writerow(["dtype", *columns])
        for name, counts in summarize(rows).items():
            writer.writerow([name, *(counts[column] for column in columns)])


@app.command()
def fuzz(
    layers: Annotated[int, typer.Option(help="Number of drawn layers.")] = 24,
    cases_per_layer: Annotated[int, typer.Option(help="Shapes a layer is verified at.")] = 10,
    seed: Annotated[int, typer.Option(help="Everything is drawn from it.")] = 0,
    dtype: Annotated[list[str] | None, typer.Option(help="One or more dtypes; all of them by default.")] = None,
    dtypes_per_layer: Annotated[int, typer.Option(help="How many dtypes a layer is compiled for.")] = 2,
    out: Annotated[Path, typer.Option(help="Result file.")] = Path("results/fuzz.json"),
    jobs: Annotated[int, typer.Option(min=1, help="Processes, each on one thread if there are several.")] = min(
        8, os.cpu_count() or 1
    ),
    resume: Annotated[bool, typer.Option("--resume", help="Continue the result file: skip what passed.")] = False,
) -> None:
    """Compile drawn layers and verify them at drawn shapes, masks and dropout; exit code 1 if any case fails."""
    console = Console()
    try:
        chosen = tuple(dtype) if dtype else Settings.dtypes
        settings = Settings(
            layers=layers, cases_per_layer=cases_per_layer, seed=seed, dtypes=chosen, dtypes_per_layer=dtypes_per_layer
        )
        threads = torch.get_num_threads() if jobs == 1 else 1
        command = shlex.join(["python", "-m", "stepdown.pipeline.verification.fuzz", *sys.argv[1:]])
        file = ResultFile.start(out, settings, describe_run(command, threads), resume)
    except StepdownError as error:
        Console(stderr=True).print(f"[bold red]error[/]: {error}")
        raise typer.Exit(2) from None
    count, times = MofNCompleteColumn(), (TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(TextColumn("{task.description}"), BarColumn(), count, *times, console=console) as progress:
        total = layers * cases_per_layer
        bar = progress.add_task("verify", total=total, completed=sum(row["passed"] for row in file.rows))
        for row in run_tasks(settings, list(file.rows), len(file.runs) - 1, jobs):
            file.add(row)
            progress.update(bar, advance=1, description=f"layer {row['layer'] + 1}, {row['dtype']}")
            if not row["passed"] and row["skipped"] is None:
                what = row.get("error") or f"furthest beyond its limit: {row['worst']}"
                progress.console.print(f"[bold red]failed[/]: layer {row['layer']}, case {row['case']}: {what}")
    console.print(table(file.rows))
    write_summary(file.rows, out.with_suffix(".csv"))
    console.print(f'written: "{out}" and "{out.with_suffix(".csv")}"')
    if summarize(file.rows)["all"]["failed"]:
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
