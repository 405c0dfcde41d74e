"""What the stages did to a layer, as records for machines and as a table for people.

Dimension legend: `B` batch, `S` sequence length. Counting rules: ``docs/counting.md``.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from stepdown.pipeline.analysis.expressions import Number, evaluate
from stepdown.pipeline.build_folder import known_sizes

COUNTS = ("kernels", "containers", "flop", "words_in", "words_out", "bytes_moved", "kept_bytes")
"""What is counted of a stage or pass, and of its forward and backward part."""

_PREFIXES = ("", "k", "M", "G", "T", "P", "E")


def quantity(value: Number | None, unit: str) -> str:
    """``value`` in three digits with a decimal prefix (1 MB is 10^6 bytes); symbolic values stay as they are."""
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    scaled, power = float(value), 0
    while abs(scaled) >= 999.5 and power < len(_PREFIXES) - 1:
        scaled /= 1000
        power += 1
    digits = f"{scaled:.0f}" if power == 0 or abs(scaled) >= 99.95 else f"{scaled:#.3g}"
    return f"{digits} {_PREFIXES[power]}{unit}".rstrip()


def duration(seconds: float) -> str:
    """``seconds`` in the unit that suits them."""
    if seconds >= 60:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest} s"
    if seconds >= 0.9995:
        return f"{seconds:.3g} s"
    if seconds >= 0.9995e-3:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds * 1e6:.3g} µs"


def stage_records(
    manifest: Mapping[str, Any], batch: int | None = None, seq: int | None = None
) -> list[dict[str, Any]]:
    """The manifest's stages with every count that the sizes determine as a number, the others as text in B and S.

    :raises OptionError: when ``batch`` or ``seq`` is not what the build promises.
    """
    sizes = known_sizes(manifest, batch, seq)
    return [_evaluated(stage, sizes) for stage in manifest["stages"]]


def _evaluated(record: Mapping[str, Any], sizes: Mapping[str, int | None]) -> dict[str, Any]:
    result = dict(record)
    for name in COUNTS:
        if result.get(name) is not None:
            result[name] = evaluate(result[name], sizes)
    for direction in ("forward", "backward"):
        if isinstance(result.get(direction), Mapping):
            result[direction] = _evaluated(result[direction], sizes)
    if "passes" in result:
        result["passes"] = [_evaluated(one, sizes) for one in result["passes"]]
    return result


def counted_passes(
    records: Sequence[Mapping[str, Any]],
) -> list[tuple[str, Mapping[str, Any], Mapping[str, Any] | None]]:
    """The passes whose graph was counted: stage, pass, and the pass before it, which is the graph before it.

    :param records: of :func:`stage_records`.
    """
    found: list[tuple[str, Mapping[str, Any], Mapping[str, Any] | None]] = []
    for record in records:
        for one in record.get("passes") or []:
            if "bytes_moved" in one:
                found.append((record["name"], one, found[-1][1] if found else None))
    return found


def moved_change(before: Mapping[str, Any] | None, after: Mapping[str, Any]) -> str:
    """How many more or fewer bytes a stage moves than the stage before it, in percent of that stage.

    Empty for the first stage, and between a stage with a backward pass and one without, which are not comparable.
    """
    if before is None or (before.get("backward") is None) != (after.get("backward") is None):
        return ""
    old, new = before.get("bytes_moved"), after.get("bytes_moved")
    if isinstance(old, str) or isinstance(new, str) or not old or new is None:
        return ""
    change = 100 * (new - old) / old
    return "±0 %" if abs(change) < 0.05 else f"{change:+.1f} %"


def title_of(manifest: Mapping[str, Any]) -> str:
    """The layer and the options of a build in one line."""
    layer, options = manifest["layer"], manifest["options"]
    parts = [str(layer.get("type", "layer")).replace("_", " ")]
    parts += [f"{name} {layer[name]}" for name in ("embed", "heads", "ffn") if name in layer]
    parts += [str(options[name]) for name in ("dtype", "target") if options.get(name)]
    return ", ".join(parts)


def sizes_line(sizes: Mapping[str, int | None]) -> str:
    """Which sizes the counts are for."""
    if all(size is None for size in sizes.values()):
        return "Counts are in the batch B and the sequence length S; --batch and --seq turn them into numbers."
    known = ", ".join(f"{letter}={size}" for letter, size in sizes.items() if size is not None)
    missing = [letter for letter, size in sizes.items() if size is None]
    if missing:
        option = "--batch" if missing == ["B"] else "--seq"
        return f"Counts are for {known} and in {missing[0]}; {option} turns them into numbers."
    return f"Counts are for {known}."


def stage_table(manifest: Mapping[str, Any], batch: int | None = None, seq: int | None = None) -> RenderableType:
    """The stages of a build as a table: kernels, containers, flop, bytes moved and kept, and below it what changed.

    A second table has the same after every pass. "change" is that of the bytes moved against the stage or pass before.

    :param manifest: the build's ``manifest.json``.
    :param batch: evaluates symbolic counts at this batch size; likewise ``seq``.
    :raises OptionError: when ``batch`` or ``seq`` is not what the build promises.
    """
    records = stage_records(manifest, batch, seq)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("stage", no_wrap=True)
    table.add_column("", no_wrap=True)
    numeric = not any(
        isinstance(counts.get(name), str) for record in records for _, counts in _parts(record) for name in COUNTS
    )
    for heading in ("kernels", "containers", "flop", "moved", "change", "kept"):
        table.add_column(heading, justify="right", overflow="fold", no_wrap=numeric)
    passes = _pass_table(records, numeric)
    notes = Table.grid(padding=(0, 2, 0, 0))
    before: dict[str, Any] | None = None
    for record in records:
        for position, (part, counts) in enumerate(_parts(record)):
            first = position == 0
            table.add_row(
                Text(record["name"], style="bold") if first else "",
                part,
                _count(counts.get("kernels")),
                _count(counts.get("containers")),
                quantity(counts.get("flop"), ""),
                quantity(counts.get("bytes_moved"), "B"),
                moved_change(before, record) if first else "",
                quantity(counts.get("kept_bytes"), "B"),
                style="" if first else "dim",
            )
        table.add_section()
        notes.add_row(
            Text(record["name"], style="bold"),
            Text(duration(record.get("seconds") or 0.0), justify="right"),
            Text(str(record.get("what") or "")),
        )
        before = record
    title = Text(title_of(manifest), style="bold")
    tables = (table, passes) if passes.row_count else (table,)
    return Group(title, *tables, notes, Text(sizes_line(known_sizes(manifest, batch, seq)), style="dim"))


def _pass_table(records: Sequence[Mapping[str, Any]], numeric: bool) -> Table:
    """The graph after every pass; the row above is the graph before it."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("after pass", no_wrap=True)
    for heading in ("kernels", "flop", "moved", "change", "kept"):
        table.add_column(heading, justify="right", overflow="fold", no_wrap=numeric)
    for _, one, before in counted_passes(records):
        table.add_row(
            Text(one["name"]),
            _count(one.get("kernels")),
            quantity(one.get("flop"), ""),
            quantity(one.get("bytes_moved"), "B"),
            moved_change(before, one),
            quantity(one.get("kept_bytes"), "B"),
        )
    return table


def _parts(record: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """A stage's counts, and those of its two directions where it has both."""
    if record.get("backward") is None:
        return [("forward", record.get("forward") or record)]
    return [("both", record), ("forward", record["forward"]), ("backward", record["backward"])]


def _count(value: Number | None) -> str:
    return "–" if value is None else str(value)
