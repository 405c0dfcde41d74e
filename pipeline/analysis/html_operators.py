"""What the pages say about the operators of a stage: charts, a table by bytes, and the groups."""

from stepdown.pipeline.analysis.charts import class_chart, roofline
from stepdown.pipeline.analysis.machine import Machine
from stepdown.pipeline.analysis.markup import Cell, escaped, number_cell, table, text_cell
from stepdown.pipeline.analysis.operators import Analysis, OperatorRecord, by_bytes, ratio
from stepdown.pipeline.report import duration, quantity


def operators_section(stage: str, analysis: Analysis, machine: Machine) -> str:
    """The section of one stage; the page shows one of them at a time (``index.js``)."""
    return (
        f'<div class="analysis" data-stage="{escaped(stage)}" hidden>{_charts(stage, analysis, machine)}'
        f"<h3>{len(analysis.operators)} operators after {escaped(stage)}, by bytes moved</h3>{_operators(analysis)}"
        f"{_groups(analysis)}</div>"
    )


def is_known(analysis: Analysis) -> bool:
    """Whether the sizes determine every number."""
    return not any(
        isinstance(value, str) for record in analysis.operators for value in (record.flop, record.bytes_moved)
    )


def _charts(stage: str, analysis: Analysis, machine: Machine) -> str:
    if not is_known(analysis):
        return '<p class="note">Charts need numbers: --batch and --seq turn the counts into some.</p>'
    note = f"time, at least: every kernel at the peaks of {machine.name}" if analysis.machine is None else ""
    shares = class_chart(f"Classes after {stage}", analysis, machine, note=note)
    return f'<div class="charts">{shares}{roofline(f"Roofline after {stage}", analysis, machine)}</div>'


def _operators(analysis: Analysis) -> str:
    lowered = any(record.kernels for record in analysis.operators)
    timed = any(record.seconds is not None for record in analysis.operators)
    headings = [("operator", ""), ("direction", ""), ("class", ""), ("flop", "number"), ("words in", "number")]
    headings += [("words out", "number"), ("bytes", "number descending"), ("share", "number"), ("flop/B", "number")]
    headings += [("kernels", "number"), ("least bytes", "number")] if lowered else []
    headings += [("time", "number"), ("MUE", "number")] if timed else []
    headings += [("by type", ""), ("members", "")]
    whole = analysis.totals[next(iter(analysis.totals))].bytes_moved
    rows = [
        _operator(record, ratio(record.bytes_moved, whole), lowered, timed) for record in by_bytes(analysis.operators)
    ]
    return table(headings, rows, "sortable operators")


def _operator(record: OperatorRecord, share: float | None, lowered: bool, timed: bool) -> list[Cell]:
    cells = [
        text_cell(record.name, "name"),
        text_cell(record.direction),
        text_cell(record.operator_class, f"class {record.operator_class.split()[0]}"),
        number_cell(quantity(record.flop, ""), record.flop),
        number_cell(quantity(record.words_in, ""), record.words_in),
        number_cell(quantity(record.words_out, ""), record.words_out),
        number_cell(quantity(record.bytes_moved, "B"), record.bytes_moved),
        number_cell("" if share is None else f"{100 * share:.2f} %", share),
        number_cell("" if record.intensity is None else f"{record.intensity:.3g}", record.intensity),
    ]
    if lowered:
        cells.append(number_cell(str(len(record.kernels)), len(record.kernels)))
        cells.append(number_cell(quantity(record.lower_bound, "B"), record.lower_bound))
    if timed:
        cells.append(number_cell("" if record.seconds is None else duration(record.seconds), record.seconds))
        cells.append(number_cell("" if record.mue is None else f"{record.mue:.1f} %", record.mue))
    by_type = ", ".join(f"{name} {quantity(value, 'B')}" for name, value in record.bytes_by_dtype.items())
    members = ", ".join(member.name for member in record.members)
    return [*cells, text_cell(by_type, "detail"), text_cell(members, "detail")]


def _groups(analysis: Analysis) -> str:
    if not analysis.groups:
        return "<h3>No groups</h3>"
    rows = []
    for record in analysis.groups:
        members = "".join(
            f'<li><span class="class {member.operator_class.split()[0]}">{escaped(member.kind)}</span> '
            f"{escaped(member.name)} <small>{escaped(quantity(member.flop, 'flop'))}</small></li>"
            for member in record.members
        )
        saved = text_cell(f"{', '.join(record.reads)} → {', '.join(record.writes)}", "detail")
        rows.append(
            [
                text_cell(record.name, "name"),
                text_cell(record.direction),
                text_cell(record.kind),
                text_cell(record.dims),
                Cell(f"<ol>{members}</ol>"),
                saved,
            ]
        )
    headings = [("group", ""), ("direction", ""), ("kind", ""), ("over", ""), ("operators in it", "")]
    headings += [("reads → writes", "")]
    return f"<h3>{len(analysis.groups)} groups</h3>{table(headings, rows, 'groups')}"
