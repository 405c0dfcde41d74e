"""``stepdown inspect``."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from stepdown.models.errors import OptionError
from stepdown.pipeline.analysis.build_stages import StageDifference, analyze_stage, compare_stages, load_stage
from stepdown.pipeline.analysis.html import write_html
from stepdown.pipeline.analysis.layouts import LayoutReport, report_layouts
from stepdown.pipeline.analysis.listing import NodeRecord, list_nodes, load_graph
from stepdown.pipeline.analysis.machine import DEFAULT_MACHINE, MACHINES, MeasuredTimes, find_machine, read_times
from stepdown.pipeline.analysis.operators import Analysis
from stepdown.pipeline.build_folder import DIRECTIONS, BuildFolder, find_build, known_sizes
from stepdown.pipeline.commands.layout_table import layout_table
from stepdown.pipeline.commands.operator_table import difference_table, operator_table
from stepdown.pipeline.commands.terminal import counting, output, print_json, working
from stepdown.pipeline.report import quantity, stage_records, stage_table

LAYOUT = "layout"
"""The stage whose layouts are shown when none is named."""


def inspect_command(
    build: Annotated[
        str, typer.Argument(metavar="BUILD", help="A build's folder, or the first characters of its key.")
    ],
    stage: Annotated[str | None, typer.Option(help="List the nodes of the graph after this stage.")] = None,
    batch: Annotated[int | None, typer.Option(help="Batch size B to evaluate the counts at.")] = None,
    seq: Annotated[int | None, typer.Option(help="Sequence length S to evaluate the counts at.")] = None,
    layouts: Annotated[
        bool, typer.Option("--layouts", help="Show how every container lies in memory, after --stage or layout.")
    ] = False,
    operators: Annotated[
        bool, typer.Option("--operators", help="Show what every operator costs, after --stage or before lowering.")
    ] = False,
    diff: Annotated[
        tuple[str, str] | None, typer.Option(metavar="STAGE STAGE", help="Show what changed between two stages.")
    ] = None,
    times: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A JSON file with measured seconds by operator, for MUE.")
    ] = None,
    machine: Annotated[
        str, typer.Option(help=f"Whose roofline the pages show: {', '.join(MACHINES)}.")
    ] = DEFAULT_MACHINE,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write web pages with a viewer on every graph into DIR.")
    ] = None,
) -> None:
    """Show what each stage did to a layer: kernels, containers, flop, bytes moved and kept."""
    found = find_build(build)
    sizes = known_sizes(found.manifest, batch, seq)
    measured = MeasuredTimes(find_machine(machine)) if times is None else read_times(times)
    if html is not None:
        page = _write_pages(found, html, batch, seq, measured)
        if not as_json:
            output().print(f"Open {page.resolve().as_uri()}", soft_wrap=True)
            return
    if as_json:
        records = stage_records(found.manifest, batch, seq)
        chosen: dict[str, Any] = {}
        if layouts:
            chosen["layouts"] = _layouts(found, stage or LAYOUT, sizes).to_dict()
        if operators:
            name, analysis = _analysis(found, stage, sizes, measured)
            chosen["operators"] = {"stage": name, **analysis.to_dict()}
        if diff is not None:
            chosen["diff"] = _difference(found, diff, sizes).to_dict()
        if stage is not None:
            records = [record for record in records if record["name"] == found.stage(stage)["name"]]
            nodes = _nodes(found, stage, sizes)
            records[0]["nodes"] = {
                direction: [node.to_dict() for node in listed] for direction, listed in nodes.items()
            }
        print_json({"layer": found.manifest["layer"], **_context(found, sizes), "stages": records, **chosen})
        return
    if layouts:
        output().print(layout_table(_layouts(found, stage or LAYOUT, sizes), f"layouts after {stage or LAYOUT}"))
        return
    if diff is not None:
        output().print(difference_table(_difference(found, diff, sizes)))
    if operators:
        name, analysis = _analysis(found, stage, sizes, measured)
        output().print(operator_table(analysis, f"operators after {name}"))
    if diff is not None or operators:
        return
    if stage is not None:
        for direction, listed in _nodes(found, stage, sizes).items():
            output().print(_node_table(f"{stage}, {direction}", listed))
        return
    output().print(stage_table(found.manifest, batch, seq))


def _context(build: BuildFolder, sizes: dict[str, int | None]) -> dict[str, Any]:
    return {"options": build.manifest["options"], "key": build.manifest.get("key"), "sizes": sizes}


def _write_pages(build: BuildFolder, folder: Path, batch: int | None, seq: int | None, times: MeasuredTimes) -> Path:
    with counting("writing pages", None) as progress:
        (task,) = progress.task_ids
        return write_html(build, folder, batch=batch, seq=seq, times=times, report=lambda _: progress.advance(task))


def _analysis(
    build: BuildFolder, stage: str | None, sizes: dict[str, int | None], times: MeasuredTimes
) -> tuple[str, Analysis]:
    with working("counting operators"):
        return analyze_stage(build, stage, sizes, times)


def _difference(build: BuildFolder, stages: tuple[str, str], sizes: dict[str, int | None]) -> StageDifference:
    with working("comparing stages"):
        return compare_stages(build, *stages, sizes)


def _nodes(build: BuildFolder, stage: str, sizes: dict[str, int | None]) -> dict[str, list[NodeRecord]]:
    """The nodes of each direction that was saved.

    :raises OptionError: when the stage is unknown or left no graph.
    """
    listed: dict[str, list[NodeRecord]] = {}
    with working(f"reading stage {stage}"):
        for direction in DIRECTIONS:
            file = build.graph_file(stage, direction)
            if file is not None:
                listed[direction] = list_nodes(load_graph(file), sizes)
    if not listed:
        raise OptionError(f'Stage "{stage}" left no graph in "{build.path}/stages"; accepted is a stage with one.')
    return listed


def _layouts(build: BuildFolder, stage: str, sizes: dict[str, int | None]) -> LayoutReport:
    """The layouts after a stage that left graphs in canonical form.

    :raises OptionError: when the stage is unknown or left no graph.
    :raises CanonicalFormError: when its graphs are lowered already.
    """
    with working(f"reading stage {stage}"):
        return report_layouts(load_stage(build, stage), sizes)


def _node_table(title: str, nodes: list[NodeRecord]) -> Table:
    table = Table(
        title=f"{title}: {len(nodes)} nodes",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for heading in ("node", "kind", "over", "reads", "writes"):
        table.add_column(heading, overflow="fold")
    for heading in ("flop", "moved"):
        table.add_column(heading, justify="right", overflow="fold")
    for node in nodes:
        cells = (node.name, node.kind, node.dims or node.detail, ", ".join(node.inputs), ", ".join(node.outputs))
        table.add_row(*map(escape, cells), quantity(node.flop, "flop"), quantity(node.bytes_moved, "B"))
    return table
