"""A build as a folder of web pages: the stages, what every operator costs, and DaCe's own SDFG viewer on every graph.

The pages open from disk, without a server or a network: the viewer comes with the installed DaCe and is copied.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache, partial
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

import dace
from dace.sdfg import SDFG

from stepdown.models.errors import CanonicalFormError, OptionError
from stepdown.pipeline.analysis.build_stages import analyze_stage, canonical_stages, load_stage, saved_stages
from stepdown.pipeline.analysis.charts import Bar, bar_chart
from stepdown.pipeline.analysis.html_operators import operators_section
from stepdown.pipeline.analysis.listing import EdgeRecord, NodeRecord, list_edges, list_nodes, read_graph
from stepdown.pipeline.analysis.machine import DEFAULT_MACHINE, Machine, MeasuredTimes, find_machine
from stepdown.pipeline.analysis.markup import Cell, escaped, number_cell, table, text_cell
from stepdown.pipeline.analysis.operators import Analysis
from stepdown.pipeline.build_folder import DIRECTIONS, BuildFolder, Direction, known_sizes
from stepdown.pipeline.report import (
    counted_passes,
    duration,
    moved_change,
    quantity,
    sizes_line,
    stage_records,
    title_of,
)

INDEX = "index.html"
VIEWER_FILES = ("LICENSE", "dist", "external_lib")
"""What is copied of the ``viewer/webclient`` folder of DaCe."""

_ASSETS = resources.files("stepdown.pipeline.analysis") / "assets"
_COPIED = ("page.css", "index.js", "stage.js", "heat.js", "tables.js", "icons.js")
_LONG_SYMBOL = re.compile(r"symbol\(\$(\w+), dtype=[^()]*\)")
_NOT_NEEDED = ("sdfv_jupyter.js",)
_COLUMNS = (("kernels", None), ("containers", None), ("flop", "flop"), ("bytes_moved", "B"), ("kept_bytes", "B"))


def write_html(
    build: BuildFolder,
    folder: Path,
    *,
    batch: int | None = None,
    seq: int | None = None,
    times: MeasuredTimes | None = None,
    report: Callable[[str], None] = lambda page: None,
) -> Path:
    """Writes the pages of ``build`` into ``folder`` and returns the one to open.

    :param folder: made if it is missing; an earlier result in it is replaced.
    :param batch: evaluates symbolic counts at this batch size; likewise ``seq``.
    :param times: measured times, and the machine whose roofline is drawn.
    :param report: called with the name of each page before it is written.
    :raises OptionError: when ``folder`` holds something else, or when ``batch`` or ``seq`` breaks the build's promise.
    :raises CanonicalFormError: when a saved graph cannot be read, or DaCe comes without its viewer.
    """
    sizes = known_sizes(build.manifest, batch, seq)
    _prepare(folder)
    pages: dict[tuple[str, Direction], str] = {}
    for name in build.stage_names:
        for direction in DIRECTIONS:
            file = build.graph_file(name, direction)
            if file is not None:
                pages[name, direction] = f"stages/{file.name.removesuffix('.sdfgz')}.html"
    load = lru_cache(maxsize=None)(partial(load_stage, build))
    for (name, direction), page in pages.items():
        report(page)
        file = build.graph_file(name, direction)
        assert file is not None
        sdfg = dict(load(name).graphs())[direction]
        text = _stage_page(file, sdfg, name, direction, pages, sizes)
        (folder / page).write_text(text, encoding="utf-8")
    report(INDEX)
    index = folder / INDEX
    shown = times or MeasuredTimes(find_machine(DEFAULT_MACHINE))
    analyses = {name: analyze_stage(build, name, sizes, times, load)[1] for name in saved_stages(build)}
    text = _index_page(build, pages, stage_records(build.manifest, batch, seq), sizes, analyses, shown.machine)
    index.write_text(text, encoding="utf-8")
    return index


def _prepare(folder: Path) -> None:
    """An empty folder with the viewer and the fixed files in it."""
    if folder.exists() and not folder.is_dir():
        raise OptionError(f'"{folder}" is a file; accepted is a folder to write the pages into.')
    if folder.is_dir() and any(folder.iterdir()) and not (folder / "viewer" / "dist" / "sdfv.js").is_file():
        raise OptionError(f'"{folder}" holds other files; accepted are a new or empty folder and one with such pages.')
    source = Path(dace.__file__).parent / "viewer" / "webclient"
    if not (source / "dist" / "sdfv.js").is_file():
        raise CanonicalFormError(f'The installed DaCe has no SDFG viewer in "{source}"; its pip package brings one.')
    for name in ("viewer", "stages"):
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir(parents=True)
    for name in VIEWER_FILES:
        if (source / name).is_dir():
            shutil.copytree(source / name, folder / "viewer" / name, ignore=shutil.ignore_patterns(*_NOT_NEEDED))
        else:
            shutil.copy(source / name, folder / "viewer" / name)
    for name in _COPIED:
        (folder / name).write_text((_ASSETS / name).read_text(encoding="utf-8"), encoding="utf-8")


def _template(name: str) -> Template:
    return Template((_ASSETS / name).read_text(encoding="utf-8"))


def _stage_page(
    file: Path,
    sdfg: SDFG,
    name: str,
    direction: Direction,
    pages: Mapping[tuple[str, Direction], str],
    sizes: Mapping[str, int | None],
) -> str:
    records, edges = list_nodes(sdfg, sizes), list_edges(sdfg, sizes)
    others = [
        f'<a href="{escaped(Path(page).name)}">{escaped(other)}</a>'
        for (stage, other), page in pages.items()
        if stage == name and other != direction
    ]
    return _template("stage.html").substitute(
        title=escaped(f"{name}, {direction}"),
        others=" ".join([*others, f'<a href="../{INDEX}" target="_top">all stages</a>']),
        count=f"{len(records)} nodes in the order in which they may run",
        nodes=_node_table(records),
        graph=_as_script(_annotated(file, records, edges)),
    )


def _annotated(file: Path, records: Iterable[NodeRecord], edges: Iterable[EdgeRecord]) -> str:
    """The saved graph's JSON, with flop and bytes in the labels that the viewer draws, and bytes at the edges."""
    graph = read_graph(file)
    states = [block for block in graph["nodes"] if block.get("type") == "SDFGState"]
    for record in records:
        costs = [quantity(record.bytes_moved, "B")] if not isinstance(record.bytes_moved, str) else []
        if record.flop is not None and not isinstance(record.flop, str):
            costs.insert(0, quantity(record.flop, "flop"))
        if record.kind != "Map" and costs and record.state < len(states):
            node = states[record.state]["nodes"][record.node]
            node["label"] = f"{node['label']} · {' · '.join(costs)}"
    moved = {(edge.state, *edge.ends): edge.bytes_moved for edge in edges if not isinstance(edge.bytes_moved, str)}
    for number, state in enumerate(states):
        for edge in state["edges"]:
            ends = (int(edge["src"]), edge["src_connector"], int(edge["dst"]), edge["dst_connector"])
            if (number, *ends) in moved:
                edge["attributes"]["data"]["attributes"]["stepdown_bytes"] = moved[number, *ends]
    # DaCe writes a symbol with an unusual type out in full wherever it stands in an expression.
    return _LONG_SYMBOL.sub(r"\1", json.dumps(graph))


def _as_script(text: str) -> str:
    """``text`` as a JavaScript string that can stand in a page: it cannot end the script it stands in."""
    return json.dumps(text).replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _node_table(records: Iterable[NodeRecord]) -> str:
    headings = [(name, "") for name in ("node", "kind", "over", "detail", "reads", "writes")]
    rows = [
        [
            text_cell(record.name, "name"),
            *map(
                text_cell,
                (record.kind, record.dims, record.detail, ", ".join(record.inputs), ", ".join(record.outputs)),
            ),
            number_cell(quantity(record.flop, "flop"), record.flop),
            number_cell(quantity(record.bytes_moved, "B"), record.bytes_moved),
        ]
        for record in records
    ]
    return table([*headings, ("flop", "number"), ("bytes", "number")], rows, "sortable")


def _index_page(
    build: BuildFolder,
    pages: Mapping[tuple[str, Direction], str],
    records: list[dict[str, Any]],
    sizes: Mapping[str, int | None],
    analyses: Mapping[str, Analysis],
    machine: Machine,
) -> str:
    manifest = build.manifest
    heads = [("stage", ""), ("graph", ""), ("time", "number"), ("kernels", "number"), ("containers", "number")]
    heads += [("flop", "number"), ("bytes moved", "number"), ("change", "number"), ("bytes kept", "number")]
    heads += [("what changed", "")]
    rows = [_stage_row(record, before, pages) for before, record in zip([None, *records], records, strict=False)]
    chosen = canonical_stages(build)
    return _template("index.html").substitute(
        title=escaped(title_of(manifest)),
        sizes=escaped(sizes_line(sizes)),
        table=table(heads, rows, "stages"),
        passes=_pass_table(records),
        moved=_moved_chart(records),
        chosen=escaped(chosen[-1] if chosen else ""),
        stages="".join(f"<option>{escaped(name)}</option>" for name in analyses),
        analyses="".join(operators_section(name, analysis, machine) for name, analysis in analyses.items()),
        layer=_pairs(manifest["layer"]),
        options=_pairs(manifest["options"]),
        versions=_pairs(manifest.get("versions") or {}),
    )


def _stage_row(
    record: Mapping[str, Any], before: Mapping[str, Any] | None, pages: Mapping[tuple[str, Direction], str]
) -> list[Cell]:
    name = record["name"]
    parts = [record, *(record[part] for part in DIRECTIONS if record.get(part) is not None)]
    if record.get("backward") is None:
        parts = [record.get("forward") or record]
    links = "".join(
        f'<a target="graph" data-stage="{escaped(name)}" href="{escaped(pages[name, direction])}">{direction}</a>'
        for direction in DIRECTIONS
        if (name, direction) in pages
    )
    cells = [text_cell(name, "name"), Cell(links), number_cell(duration(record.get("seconds") or 0.0))]
    for column, unit in _COLUMNS:
        values = [part.get(column) for part in parts]
        shown = [quantity(value, unit) if unit else "–" if value is None else str(value) for value in values]
        first, *rest = map(escaped, shown)
        kind = "number symbolic" if any(isinstance(value, str) for value in values) else "number"
        cells.append(Cell(first + "".join(f'<span class="part">{text}</span>' for text in rest), kind))
        if column == "bytes_moved":
            cells.append(number_cell(moved_change(before, record)))
    return [*cells, text_cell(record.get("what") or "")]


def _pass_table(records: list[dict[str, Any]]) -> str:
    """Every pass with what it did, and where it was counted with the graph after it."""
    counted = {id(one): before for _, one, before in counted_passes(records)}
    rows = []
    for record in records:
        for one in record.get("passes") or []:
            counts = [one.get(name) for name in ("kernels", "flop", "bytes_moved", "kept_bytes")]
            kernels, flop, moved, kept = counts
            rows.append(
                [
                    text_cell(record["name"]),
                    text_cell(one.get("name", ""), "name"),
                    number_cell(duration(one.get("seconds") or 0.0)),
                    number_cell("" if kernels is None else str(kernels)),
                    number_cell("" if flop is None else quantity(flop, ""), flop),
                    number_cell("" if moved is None else quantity(moved, "B"), moved),
                    number_cell(moved_change(counted.get(id(one)), one) if moved is not None else ""),
                    number_cell("" if kept is None else quantity(kept, "B"), kept),
                    text_cell(one.get("what") or ""),
                ]
            )
    if not rows:
        return "<p>No pass is listed.</p>"
    headings = [("stage", ""), ("pass", ""), ("time", "number"), ("kernels", "number"), ("flop", "number")]
    headings += [("bytes moved", "number"), ("change", "number"), ("bytes kept", "number"), ("what it did", "")]
    return table(headings, rows, "passes")


def _moved_chart(records: list[dict[str, Any]]) -> str:
    """Bytes moved after every pass that ran on both directions."""
    bars = [
        Bar(one["name"], tuple(one[direction]["bytes_moved"] for direction in DIRECTIONS))
        for _, one, _ in counted_passes(records)
        if all(isinstance((one.get(direction) or {}).get("bytes_moved"), int) for direction in DIRECTIONS)
    ]
    if not bars:
        return ""
    chart = bar_chart("Bytes moved after every pass", bars, DIRECTIONS, "B")
    return f'<section class="moved">{chart}</section>'


def _pairs(values: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<tr><th>{escaped(name)}</th><td>{escaped('any' if value is None else value)}</td></tr>"
        for name, value in values.items()
    )
    return f"<table><tbody>{rows}</tbody></table>"
