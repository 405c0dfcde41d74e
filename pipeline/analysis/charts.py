"""Charts as SVG text, written without a plotting library: stacked bars, shares of the classes, and the roofline.

Colours are told apart by people who see no red or green (Okabe and Ito's palette).
"""

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stepdown.models.operators import OperatorClass
from stepdown.pipeline.analysis.machine import Machine
from stepdown.pipeline.analysis.operators import Analysis, OperatorRecord, Total
from stepdown.pipeline.report import quantity

CLASS_COLOURS = {
    OperatorClass.CONTRACTION.value: "#0072b2",
    OperatorClass.STATISTICAL_NORMALIZATION.value: "#e69f00",
    OperatorClass.ELEMENT_WISE.value: "#009e73",
}
PART_COLOURS = ("#0072b2", "#7fb8dd", "#e69f00", "#009e73")
"""Of the parts of a bar, in order."""

_FONT = 'font-family="system-ui, Liberation Sans, Arial, sans-serif"'
_WIDTH = 720
_CHARACTER = 6.6  # width of one in the font size of labels


@dataclass(frozen=True)
class Bar:
    """A bar: its label and the lengths of its parts."""

    label: str
    parts: tuple[float, ...]


def bar_chart(
    title: str, bars: Sequence[Bar], parts: Sequence[str], unit: str, *, note: str = "", baseline: bool = True
) -> str:
    """Horizontal bars, each of stacked parts, with the sum behind it.

    :param parts: names of the parts, for the legend.
    :param unit: of the lengths.
    :param baseline: whether to say each sum in percent of the first one, too.
    """
    left = 12 + _CHARACTER * max(len(bar.label) for bar in bars)
    right, row, top = 150.0, 24, 58
    first, longest = sum(bars[0].parts), max(sum(bar.parts) for bar in bars) or 1.0
    scale = (_WIDTH - left - right) / longest
    body = []
    for number, bar in enumerate(bars):
        y = top + number * row
        body.append(_text(left - 8, y + 12, bar.label, anchor="end"))
        x = left
        for name, length, colour in zip(parts, bar.parts, PART_COLOURS, strict=False):
            width = length * scale
            body.append(_rect(x, y, width, 16, colour, f"{bar.label}, {name}: {quantity(length, unit)}"))
            x += width
        total = sum(bar.parts)
        share = f", {100 * total / first:.0f} %" if baseline and first else ""
        body.append(_text(x + 6, y + 12, f"{quantity(total, unit)}{share}", colour="#444"))
    height = top + row * len(bars) + (26 if note else 8)
    if note:
        body.append(_text(12, height - 10, note, colour="#5c6670", size=11))
    return _svg(height, title, [*_legend(parts, PART_COLOURS, 34), *body])


def class_chart(title: str, analysis: Analysis, machine: Machine, *, note: str = "") -> str:
    """The classes' shares of flop, bytes moved, and time: measured, or the least that the machine's peaks allow."""
    direction = next(iter(analysis.totals))
    classes = analysis.classes[direction]
    rows = [("flop", _shares(classes, "flop_share")), ("bytes moved", _shares(classes, "bytes_share"))]
    if analysis.totals[direction].seconds is not None:
        rows.append(("time, measured", _shares(classes, "seconds_share")))
    else:
        rows.append(("time, at least", _least_time_shares(analysis, machine)))
    left, right, row, top = 118.0, 24.0, 34, 58
    scale = (_WIDTH - left - right) / 100
    body = []
    for number, (label, shares) in enumerate(rows):
        y = top + number * row
        body.append(_text(left - 8, y + 15, label, anchor="end"))
        x = left
        for name, share in shares.items():
            width = share * scale
            body.append(_rect(x, y, width, 22, CLASS_COLOURS[name], f"{name}: {share:.2f} % of {label}"))
            if width > 46:
                body.append(_text(x + width / 2, y + 15, f"{share:.1f} %", anchor="middle", colour="#fff"))
            x += width
    height = top + row * len(rows) + (20 if note else 4)
    if note:
        body.append(_text(12, height - 8, note, colour="#5c6670", size=11))
    return _svg(height, title, [*_legend(list(CLASS_COLOURS), list(CLASS_COLOURS.values()), 34), *body])


def roofline(title: str, analysis: Analysis, machine: Machine) -> str:
    """Operators by flop for each byte and flop a second: measured, or on the roof where no time is known.

    The roof is the lower of ``intensity * bandwidth`` and the peak flop rate. Areas are in proportion to bytes moved.
    """
    points = [(record, _rate(record, machine)) for record in analysis.operators if _known(record)]
    left, right, top, bottom = 62.0, 16.0, 58.0, 348.0
    intensities = [record.intensity or 1.0 for record, _ in points] + [machine.balance]
    low, high = min(intensities) / 2, max(intensities) * 3
    rates = [rate for _, rate in points] + [machine.flop_rate]
    floor, ceiling = min(rates) / 3, max(rates) * 2.5

    def x_of(intensity: float) -> float:
        return left + (_WIDTH - left - right) * math.log(intensity / low) / math.log(high / low)

    def y_of(rate: float) -> float:
        return bottom - (bottom - top) * math.log(rate / floor) / math.log(ceiling / floor)

    body = [_line(left, bottom, _WIDTH - right, bottom, "#888"), _line(left, top, left, bottom, "#888")]
    for power in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1):
        x = x_of(10.0**power)
        body += [_line(x, top, x, bottom, "#e8ecef"), _text(x, bottom + 15, f"{10.0**power:g}", anchor="middle")]
    for power in range(math.ceil(math.log10(floor)), math.floor(math.log10(ceiling)) + 1):
        y = y_of(10.0**power)
        body += [_line(left, y, _WIDTH - right, y, "#e8ecef"), _text(left - 6, y + 4, quantity(10.0**power, ""), "end")]
    start = max(low, floor / machine.bandwidth)
    corner = (x_of(machine.balance), y_of(machine.flop_rate))
    roof = f"{x_of(start):.1f},{y_of(start * machine.bandwidth):.1f} {corner[0]:.1f},{corner[1]:.1f} "
    roof += f"{_WIDTH - right:.1f},{corner[1]:.1f}"
    body.append(f'<polyline points="{roof}" fill="none" stroke="#333" stroke-width="1.5"/>')
    body.append(_text(_WIDTH - right, corner[1] - 16, f"{quantity(machine.flop_rate, 'flop/s')}", "end", size=11))
    middle = math.sqrt(start * machine.balance)
    label = f"{quantity(machine.bandwidth, 'B/s')}"
    body.append(_text(x_of(middle) - 8, y_of(middle * machine.bandwidth) - 8, label, "end", size=11))
    largest = max((float(record.bytes_moved) for record, _ in points), default=1.0)
    for record, rate in sorted(points, key=lambda point: -float(point[0].bytes_moved)):
        radius = 3 + 11 * math.sqrt(float(record.bytes_moved) / largest)
        tip = f"{record.name} ({record.direction}): {record.intensity:.3g} flop/B, {quantity(record.bytes_moved, 'B')}"
        body.append(
            f'<circle cx="{x_of(record.intensity or low):.1f}" cy="{y_of(rate):.1f}" r="{radius:.1f}" '
            f'fill="{CLASS_COLOURS[record.operator_class]}" fill-opacity="0.45" '
            f'stroke="{CLASS_COLOURS[record.operator_class]}"><title>{html.escape(tip)}</title></circle>'
        )
    labelled = [(x_of(r.intensity or low), y_of(rate), r) for r, rate in points]
    peaks = [
        (_WIDTH - right - 80, corner[1] - 28, _WIDTH - right, corner[1] - 12),
        (x_of(middle) - 76, y_of(middle * machine.bandwidth) - 20, x_of(middle), y_of(middle * machine.bandwidth)),
    ]
    body += _point_labels(labelled, peaks, _WIDTH - right)
    body.append(_text((left + _WIDTH - right) / 2, bottom + 34, "flop for each byte moved", "middle"))
    measured = any(record.seconds is not None for record, _ in points)
    kind = "measured" if measured else "on the roof: no times are known"
    body.append(_text(12, bottom + 54, f"flop/s, {kind}; area: bytes moved. Peaks: {machine.name}.", size=11))
    legend = _legend(list(CLASS_COLOURS), list(CLASS_COLOURS.values()), 34)
    return _svg(bottom + 64, title, [*legend, *body])


def _known(record: OperatorRecord) -> bool:
    return bool(record.intensity) and not isinstance(record.flop, str)


def _rate(record: OperatorRecord, machine: Machine) -> float:
    flop, moved = float(record.flop), float(record.bytes_moved)
    return flop / (record.seconds or machine.least_seconds(flop, moved))


def _shares(classes: Mapping[str, Total], name: str) -> dict[str, float]:
    return {kind: getattr(total, name) or 0.0 for kind, total in classes.items()}


def _least_time_shares(analysis: Analysis, machine: Machine) -> dict[str, float]:
    """Each kernel by its own class, at the machine's peaks."""
    times = dict.fromkeys(CLASS_COLOURS, 0.0)
    for record in analysis.operators:
        times[record.operator_class] += machine.least_seconds(float(record.flop), float(record.bytes_moved))
    whole = sum(times.values()) or 1.0
    return {name: 100 * seconds / whole for name, seconds in times.items()}


_Box = tuple[float, float, float, float]


def _point_labels(points: list[tuple[float, float, OperatorRecord]], boxes: list[_Box], limit: float) -> list[str]:
    """Names of the points that move most, where there is room; of points in one place the first name and how many.

    :param boxes: places that are taken: left, top, right, bottom.
    :param limit: where the chart ends on the right.
    """
    places: dict[tuple[int, int], list[OperatorRecord]] = {}
    for x, y, record in sorted(points, key=lambda point: -float(point[2].bytes_moved)):
        places.setdefault((round(x / 3), round(y / 3)), []).append(record)
    taken = boxes + [(3.0 * x - 7, 3.0 * y - 7, 3.0 * x + 7, 3.0 * y + 7) for x, y in places]
    found = []
    for (column, row), records in places.items():
        x, y, name = 3.0 * column, 3.0 * row, records[0].name
        name = name if len(name) <= 34 else f"{name[:33]}…"
        name += f" +{len(records) - 1}" if len(records) > 1 else ""
        width = _CHARACTER * len(name) * 0.9
        for left, top in ((x + 16, y + 4), (x - 16 - width, y + 4), (x - width / 2, y + 30), (x - width / 2, y - 20)):
            box = (left, top - 11, left + width, top + 3)
            free = all(box[2] < o[0] or box[0] > o[2] or box[3] < o[1] or box[1] > o[3] for o in taken)
            if free and box[0] > 64 and box[2] < limit and box[1] > 50 and box[3] < 346:
                taken.append(box)
                found.append(_text(left, top, name, size=10, colour="#333"))
                break
        if len(found) == 8:
            break
    return found


def _legend(names: Sequence[str], colours: Sequence[str], y: float) -> list[str]:
    body, x = [], 12.0
    for name, colour in zip(names, colours, strict=False):
        body += [_rect(x, y, 11, 11, colour, name), _text(x + 16, y + 10, name)]
        x += 34 + _CHARACTER * len(name)
    return body


def _svg(height: float, title: str, body: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:.0f}" role="img" '
        f'aria-label="{html.escape(title, quote=True)}" {_FONT}>'
    )
    background = f'<rect width="{_WIDTH}" height="{height:.0f}" fill="#fff"/>'
    return "".join([head, background, _text(12, 20, title, size=14, weight="600"), *body, "</svg>"])


def _text(
    x: float,
    y: float,
    text: str,
    anchor: str = "start",
    *,
    colour: str = "#1b2126",
    size: int = 12,
    weight: str = "400",
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" font-weight="{weight}" '
        f'fill="{colour}">{html.escape(text)}</text>'
    )


def _rect(x: float, y: float, width: float, height: float, colour: str, tip: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.0):.1f}" height="{height:.1f}" fill="{colour}">'
        f"<title>{html.escape(tip)}</title></rect>"
    )


def _line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'
