"""Measured rows and the files under ``results/`` that hold them, as JSON or CSV by the file's ending.

A row says what was measured, on what, with which versions, when, and by which command. Median and spread are in the
row's unit; the spread is the distance between the quartiles. In CSV a row is flat, so that a table can be made of its
columns: shape and versions are text (``B=8 S=128``, ``torch 2.13.0; dace 2.0``), and every further value is a column.
"""

import csv
import io
import json
import os
import platform
import shlex
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from stepdown.models.errors import OptionError

SUFFIXES = (".json", ".csv")
_PACKAGES = ("stepdown", "torch", "dace")
_NUMBERS = {"median": float, "spread": float, "repeats": int}
_DIGITS = 4  # significant ones


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measured number.

    :param name: what was measured, such as ``"bert-base"``.
    :param case: which part of it, such as ``"forward+backward"``.
    :param implementation: whose, such as ``"stepdown"`` or ``"eager"``.
    :param device: the machine, in words, with the number of threads.
    :param versions: package to version.
    :param shape: dimension to size, letters of the legend.
    :param dtype: PyTorch's name.
    :param median: of all repetitions, in ``unit``.
    :param spread: the distance between the quartiles, in ``unit``.
    :param values: what else is known, such as errors and bytes.
    """

    name: str
    case: str
    implementation: str
    device: str
    versions: dict[str, str]
    shape: dict[str, int]
    dtype: str
    median: float
    spread: float
    repeats: int
    date: str
    command: str
    unit: str = "ms"
    values: dict[str, float] = field(default_factory=dict)

    @property
    def identity(self) -> tuple[object, ...]:
        """Rows with the same identity measure the same: the later one replaces the earlier one in a file."""
        shape = tuple(sorted(self.shape.items()))
        return self.name, self.case, self.implementation, self.device, shape, self.dtype, self.unit


def spread_of(samples: Sequence[float]) -> tuple[float, float]:
    """Median of ``samples`` and the distance between their quartiles."""
    if len(samples) < 2:
        return samples[0], 0.0
    low, _, high = quantiles(samples, n=4, method="inclusive")
    return median(samples), high - low


def rounded(value: float) -> float:
    """``value`` to the digits that a measurement is worth."""
    return float(f"{value:.{_DIGITS}g}")


def describe_device(threads: int) -> str:
    """The processor's name and the number of threads in use."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else name}, {threads} {'thread' if threads == 1 else 'threads'}"


def installed_versions() -> dict[str, str]:
    """The versions that decide a measurement."""
    return {"python": platform.python_version(), **{name: metadata.version(name) for name in _PACKAGES}}


def this_command() -> str:
    """The command line of this process, as it can be typed again."""
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])


def today() -> str:
    """The time in UTC, ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def check_suffix(path: Path) -> None:
    """Refuses a file that is neither JSON nor CSV, before anything is measured for it.

    :raises OptionError: naming the accepted endings.
    """
    if path.suffix not in SUFFIXES:
        raise OptionError(f'"{path}" is neither JSON nor CSV; accepted are the endings ".json" and ".csv".')


def read_rows(path: Path) -> list[Row]:
    """The rows in ``path``.

    :raises OptionError: when it cannot be read as rows.
    """
    check_suffix(path)
    try:
        text = path.read_text(encoding="utf-8")
        entries = json.loads(text) if path.suffix == ".json" else _parse_csv(text)
        return [Row(**entry) for entry in entries]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise OptionError(f'"{path}" cannot be read as measured rows: {error}.') from error


def save_rows(path: Path, rows: Iterable[Row]) -> None:
    """Puts ``rows`` into ``path``, in place of those with the same identity; what else is there stays.

    :raises OptionError: when the file is there and holds something else, or has another ending.
    """
    check_suffix(path)
    merged = {row.identity: row for row in (read_rows(path) if path.exists() else [])}
    merged |= {row.identity: row for row in rows}
    entries = [asdict(row) for row in merged.values()]
    text = json.dumps(entries, indent=1, ensure_ascii=False) + "\n" if path.suffix == ".json" else _format_csv(entries)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, text)


def replace_file(path: Path, text: str) -> None:
    """Put ``text`` into ``path`` at once, so that an interrupt never leaves half of it."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as stream:
            stream.write(text)
        temporary.chmod(0o644)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _format_csv(entries: list[dict[str, Any]]) -> str:
    further = list(dict.fromkeys(name for entry in entries for name in entry["values"]))
    own = [known.name for known in fields(Row) if known.name not in ("values", "device", "versions", "date", "command")]
    stream = io.StringIO()
    writer = csv.DictWriter(stream, [*own, *further, "device", "versions", "date", "command"], lineterminator="\n")
    writer.writeheader()
    for entry in entries:
        flat = {name: value for name, value in entry.items() if name != "values"} | entry["values"]
        flat["shape"] = " ".join(f"{dimension}={size}" for dimension, size in entry["shape"].items())
        flat["versions"] = "; ".join(f"{package} {version}" for package, version in entry["versions"].items())
        writer.writerow(flat)
    return stream.getvalue()


def _parse_csv(text: str) -> list[dict[str, Any]]:
    own = {known.name for known in fields(Row)}
    entries = []
    for flat in csv.DictReader(io.StringIO(text)):
        entry: dict[str, Any] = {name: _NUMBERS.get(name, str)(flat[name]) for name in flat if name in own}
        entry["shape"] = {name: int(size) for name, _, size in (pair.partition("=") for pair in flat["shape"].split())}
        pairs = (pair.rpartition(" ") for pair in flat["versions"].split("; "))
        entry["versions"] = {package: version for package, _, version in pairs}
        further = {name: float(value) for name, value in flat.items() if name not in own and value}
        entry["values"] = {name: int(value) if value.is_integer() else value for name, value in further.items()}
        entries.append(entry)
    return entries
