"""What the commands share: consoles, progress on the standard error stream, JSON on the standard output."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

WIDTH = 130
"""Columns of a table that goes into a file or another program."""


def output() -> Console:
    """The standard output; made anew, because the stream may have been replaced since."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=WIDTH)


def print_json(value: Any) -> None:
    """``value`` as JSON on the standard output, nothing else."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


@contextmanager
def working(description: str) -> Iterator[Callable[[str], None]]:
    """Shows ``description`` and the time that has passed while the block runs; nothing where nobody watches.

    Gives the block a function that replaces the description.
    """
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(description, total=None)
        yield lambda text: progress.update(task, description=text)


@contextmanager
def counting(description: str, total: int | None) -> Iterator[Progress]:
    """A progress bar with one task of ``total`` steps (``None``: not known yet)."""
    console = Console(stderr=True)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        progress.add_task(description, total=total)
        yield progress
