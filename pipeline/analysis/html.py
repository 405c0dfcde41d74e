"""A build as a folder of web pages: the stage table, and DaCe's own SDFG viewer on every graph.

The pages open from disk, without a server or a network: the viewer comes with the installed DaCe and is copied.
"""

import html
import json
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

import dace

from stepdown.models.errors import CanonicalFormError, OptionError
from stepdown.pipeline.analysis.listing import NodeRecord, list_nodes, load_graph, read_graph
from stepdown.pipeline.analysis.machine import MeasuredTimes
from stepdown.pipeline.build_folder import DIRECTIONS, BuildFolder, Direction, known_sizes
from stepdown.pipeline.report import duration, moved_change, quantity, sizes_line, stage_records, title_of

INDEX = "index.html"
VIEWER_FILES = ("LICENSE", "dist", "external_lib")
"""What is copied of the ``viewer/webclient`` folder of DaCe."""

_ASSETS = resources.files("stepdown.pipeline.analysis") / "assets"
_COPIED = ("page.css", "index.js", "stage.js", "icons.js")
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
    for (name, direction), page in pages.items():
        report(page)
        file = build.graph_file(name, direction)
        assert file is not None
        text = _stage_page(file, name, direction, pages, sizes)
        (folder / page).write_text(text, encoding="utf-8")
    report(INDEX)
    index = folder / INDEX
    index.write_text(_index_page(build, pages, batch, seq), encoding="utf-8")
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
    name: str,
    direction: Direction,
    pages: Mapping[tuple[str, Direction], str],
    sizes: Mapping[str, int | None],
) -> str:
    records = list_nodes(load_graph(file), sizes)
    others = [
        f'<a href="{_escaped(Path(page).name)}">{_escaped(other)}</a>'
        for (stage, other), page in pages.items()
        if stage == name and other != direction
    ]
    return _template("stage.html").substitute(
        title=_escaped(f"{name}, {direction}"),
        others=" ".join([*others, f'<a href="../{INDEX}" target="_top">all stages</a>']),
        count=f"{len(records)} nodes in the order in which they may run",
        nodes=_node_table(records),
        graph=_as_script(_annotated(file, records)),
    )


def _annotated(file: Path, records: Iterable[NodeRecord]) -> str:
    """The saved graph's JSON, with flop and bytes in the labels that the viewer draws."""
    graph = read_graph(file)
    states = [block for block in graph["nodes"] if block.get("type") == "SDFGState"]
    for record in records:
        costs = [quantity(record.bytes_moved, "B")] if not isinstance(record.bytes_moved, str) else []
        if record.flop is not None and not isinstance(record.flop, str):
            costs.insert(0, quantity(record.flop, "flop"))
        if record.kind != "Map" and costs and record.state < len(states):
            node = states[record.state]["nodes"][record.node]
            node["label"] = f"{node['label']} · {' · '.join(costs)}"
    # DaCe writes a symbol with an unusual type out in full wherever it stands in an expression.
    return _LONG_SYMBOL.sub(r"\1", json.dumps(graph))


def _as_script(text: str) -> str:
    """``text`` as a JavaScript string that can stand in a page: it cannot end the script it stands in."""
    return json.dumps(text).replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _node_table(records: Iterable[NodeRecord]) -> str:
    heads = ("node", "kind", "over", "detail", "reads", "writes")
    rows = [
        "<tr>"
        + f'<td class="name">{_escaped(record.name)}</td>'
        + "".join(
            f"<td>{_escaped(cell)}</td>"
            for cell in (record.kind, record.dims, record.detail, ", ".join(record.inputs), ", ".join(record.outputs))
        )
        + _number(quantity(record.flop, "flop"), record.flop)
        + _number(quantity(record.bytes_moved, "B"), record.bytes_moved)
        + "</tr>"
        for record in records
    ]
    head = "".join(f"<th>{name}</th>" for name in heads) + '<th class="number">flop</th><th class="number">bytes</th>'
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _index_page(
    build: BuildFolder, pages: Mapping[tuple[str, Direction], str], batch: int | None, seq: int | None
) -> str:
    manifest = build.manifest
    sizes = known_sizes(manifest, batch, seq)
    records = stage_records(manifest, batch, seq)
    rows, passes = [], []
    before: dict[str, Any] | None = None
    for record in records:
        rows.append(_stage_row(record, before, pages))
        passes += [
            f'<tr><td class="name">{_escaped(record["name"])}</td><td>{_escaped(one.get("name", ""))}</td>'
            f'<td class="number">{_escaped(duration(one.get("seconds") or 0.0))}</td>'
            f"<td>{_escaped(one.get('what') or '')}</td></tr>"
            for one in record.get("passes") or []
        ]
        before = record
    heads = [("stage", ""), ("graph", ""), ("time", "number"), ("kernels", "number"), ("containers", "number")]
    heads += [("flop", "number"), ("bytes moved", "number"), ("change", "number"), ("bytes kept", "number")]
    heads += [("what changed", "")]
    head = "".join(f'<th class="{kind}">{name}</th>' for name, kind in heads)
    return _template("index.html").substitute(
        title=_escaped(title_of(manifest)),
        sizes=_escaped(sizes_line(sizes)),
        table=f'<table class="stages"><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table>',
        passes=f"<table><tbody>{''.join(passes)}</tbody></table>" if passes else "<p>None are listed.</p>",
        layer=_pairs(manifest["layer"]),
        options=_pairs(manifest["options"]),
        versions=_pairs(manifest.get("versions") or {}),
    )


def _stage_row(
    record: Mapping[str, Any], before: Mapping[str, Any] | None, pages: Mapping[tuple[str, Direction], str]
) -> str:
    name = record["name"]
    parts = [record, *(record[part] for part in DIRECTIONS if record.get(part) is not None)]
    if record.get("backward") is None:
        parts = [record.get("forward") or record]
    links = "".join(
        f'<a target="graph" data-stage="{_escaped(name)}" href="{_escaped(pages[name, direction])}">{direction}</a>'
        for direction in DIRECTIONS
        if (name, direction) in pages
    )
    counts = ""
    for column, unit in _COLUMNS:
        values = [part.get(column) for part in parts]
        shown = [quantity(value, unit) if unit else "–" if value is None else str(value) for value in values]
        first, *rest = map(_escaped, shown)
        cells = first + "".join(f'<span class="part">{text}</span>' for text in rest)
        counts += _number(cells, *values, markup=True)
        if column == "bytes_moved":
            counts += _number(moved_change(before, record))
    return (
        f'<tr><td class="name">{_escaped(name)}</td><td>{links}</td>'
        f'<td class="number">{_escaped(duration(record.get("seconds") or 0.0))}</td>{counts}'
        f"<td>{_escaped(record.get('what') or '')}</td></tr>"
    )


def _number(shown: str, *values: object, markup: bool = False) -> str:
    kind = "number symbolic" if any(isinstance(value, str) for value in values) else "number"
    return f'<td class="{kind}">{shown if markup else _escaped(shown)}</td>'


def _pairs(values: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<tr><th>{_escaped(name)}</th><td>{_escaped('any' if value is None else value)}</td></tr>"
        for name, value in values.items()
    )
    return f"<table><tbody>{rows}</tbody></table>"


def _escaped(text: object) -> str:
    return html.escape(str(text), quote=True)
