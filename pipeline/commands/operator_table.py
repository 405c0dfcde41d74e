"""The operators of a stage as tables, and the difference between two stages."""

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from stepdown.pipeline.analysis.build_stages import OperatorChange, StageDifference
from stepdown.pipeline.analysis.expressions import Number
from stepdown.pipeline.analysis.operators import Analysis, Total, by_bytes, ratio
from stepdown.pipeline.report import duration, quantity

SHOWN = {"kernels": "", "operators": "", "flop": "flop", "words": "", "bytes_moved": "B", "kept_bytes": "B"}
HEADINGS = {"bytes_moved": "bytes moved", "kept_bytes": "bytes kept"}


def operator_table(analysis: Analysis, title: str) -> RenderableType:
    """Operators by bytes moved, the classes below them, and what the directions move at the least."""
    return Group(
        _operators(analysis, title), _classes(analysis), _groups(analysis), Text(_bounds(analysis), style="dim")
    )


def _operators(analysis: Analysis, title: str) -> Table:
    lowered = any(record.kernels for record in analysis.operators)
    timed = any(record.seconds is not None for record in analysis.operators)
    table = _table(f"{title}: {len(analysis.operators)} operators")
    table.add_column("operator", overflow="fold")
    table.add_column("", no_wrap=True)
    table.add_column("class", no_wrap=True)
    headings = ["flop", "words in", "words out", "bytes", "share", "flop/B"]
    headings += ["kernels", "least bytes"] if lowered else []
    headings += ["time", "MUE"] if timed else []
    _numeric(table, headings, analysis)
    whole = analysis.totals["both" if "both" in analysis.totals else "forward"].bytes_moved
    for record in by_bytes(analysis.operators):
        cells = [
            quantity(record.flop, ""),
            quantity(record.words_in, ""),
            quantity(record.words_out, ""),
            quantity(record.bytes_moved, "B"),
            _percent(ratio(record.bytes_moved, whole)),
            _plain(record.intensity),
        ]
        if lowered:
            cells += [str(len(record.kernels)), quantity(record.lower_bound, "B")]
        if timed:
            cells += [_time(record.seconds), _points(record.mue)]
        table.add_row(escape(record.name), record.direction, record.operator_class, *cells)
    return table


def _classes(analysis: Analysis) -> Table:
    timed = any(total.seconds is not None for total in analysis.totals.values())
    table = _table("by class")
    table.add_column("", no_wrap=True)
    table.add_column("class", no_wrap=True)
    headings = ["operators", "flop", "share", "words", "bytes", "share", "flop/B"]
    headings += ["time", "share", "MUE"] if timed else []
    _numeric(table, headings, analysis)
    for direction, total in analysis.totals.items():
        rows = [*analysis.classes[direction].items(), ("all", total)]
        for position, (name, one) in enumerate(rows):
            table.add_row(direction if not position else "", name, *_total(one, timed))
        table.add_section()
    return table


def _total(total: Total, timed: bool) -> list[str]:
    words = (total.words_in, total.words_out)
    added = None if any(isinstance(value, str) for value in words) else sum(float(value) for value in words)
    cells = [
        str(total.operators),
        quantity(total.flop, ""),
        _points(total.flop_share),
        quantity(added, "") if added is not None else f"{words[0]} + {words[1]}",
        quantity(total.bytes_moved, "B"),
        _points(total.bytes_share),
        _plain(total.intensity),
    ]
    return cells + ([_time(total.seconds), _points(total.seconds_share), _points(total.mue)] if timed else [])


def _groups(analysis: Analysis) -> Table | str:
    if not analysis.groups:
        return "No groups."
    table = _table(f"{len(analysis.groups)} groups")
    for heading in ("group", "kind", "members"):
        table.add_column(heading, overflow="fold")
    for record in analysis.groups:
        table.add_row(*map(escape, (record.name, record.kind, ", ".join(member.name for member in record.members))))
    return table


def _bounds(analysis: Analysis) -> str:
    parts = [f"{direction} {quantity(value, 'B')}" for direction, value in analysis.compulsory.items()]
    text = f"Arguments and kept containers, each moved once: {', '.join(parts)}."
    if analysis.machine is not None:
        bandwidth = quantity(analysis.machine.bandwidth, "B/s")
        text += f" MUE is relative to {bandwidth}, the peak of {analysis.machine.name}."
    return text


def difference_table(difference: StageDifference) -> RenderableType:
    """Totals before and after, then operators that are gone, new and changed."""
    totals = _table(f"{difference.before} → {difference.after}")
    totals.add_column("", no_wrap=True)
    for heading in ("", "before", "after", "change"):
        totals.add_column(heading, justify="left" if not heading else "right", overflow="fold")
    for direction, values in difference.totals.items():
        for position, (name, (before, after)) in enumerate(values.items()):
            unit = SHOWN[name]
            cells = (quantity(before, unit), quantity(after, unit), change(before, after))
            totals.add_row(direction if not position else "", HEADINGS.get(name, name), *cells)
        totals.add_section()
    parts: list[RenderableType] = [totals]
    for title, changes in (("gone", difference.gone), ("new", difference.new), ("changed", difference.changed)):
        parts.append(_changes(title, changes) if changes else f"No operator is {title}.")
    return Group(*parts)


def _changes(title: str, changes: Sequence[OperatorChange]) -> Table:
    table = _table(f"{len(changes)} {title}")
    table.add_column("operator", overflow="fold")
    table.add_column("", no_wrap=True)
    table.add_column("kind", no_wrap=True)
    for heading in ("flop", "words", "bytes"):
        table.add_column(heading, justify="right", overflow="fold")
    table.add_column("now in" if title == "gone" else "took in", overflow="fold")
    for one in changes:
        sides = [side for side in (one.before, one.after) if side is not None]
        kinds = list(dict.fromkeys(side.kind for side in sides))
        cells = [
            _sides([quantity(side.flop, "") for side in sides]),
            _sides([f"{quantity(side.words_in, '')} + {quantity(side.words_out, '')}" for side in sides]),
            _sides([quantity(side.bytes_moved, "B") for side in sides]),
        ]
        table.add_row(escape(one.name), one.direction, " → ".join(kinds), *cells, escape(", ".join(one.groups)))
    return table


def change(before: Number | None, after: Number | None) -> str:
    """From ``before`` to ``after`` in percent of ``before``; empty where that is not known."""
    share = ratio(after, before)
    if share is None:
        return ""
    return "±0 %" if abs(share - 1) < 5e-4 else f"{100 * share - 100:+.1f} %"


def _sides(texts: list[str]) -> str:
    return " → ".join(dict.fromkeys(texts))


def _table(title: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.padding = (0, 1, 0, 0)
    return table


def _numeric(table: Table, headings: Iterable[str], analysis: Analysis) -> None:
    known = not any(isinstance(record.bytes_moved, str) for record in analysis.operators)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=known, overflow="fold")


def _plain(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _percent(share: float | None) -> str:
    return _points(None if share is None else 100 * share)


def _points(value: float | None) -> str:
    return "" if value is None else f"{value:.2f} %" if value < 10 else f"{value:.1f} %"


def _time(seconds: float | None) -> str:
    return "" if seconds is None else duration(seconds)
