"""The layouts of a build as a table."""

from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from stepdown.pipeline.analysis.layouts import ContainerLayout, LayoutReport
from stepdown.pipeline.report import quantity

BOTH = ("forward", "backward")


def layout_table(report: LayoutReport, title: str) -> RenderableType:
    """Containers with logical dimensions, order in memory, padding, bytes and users; below them the conversions."""
    containers = _table(
        f"{title}: {len(report.containers)} containers",
        ("container", "graph", "kind", "logical", "memory", "padding", "bytes", "written by → read by"),
        ("padding", "bytes", "written by → read by"),
    )
    for container in report.containers:
        containers.add_row(
            container.name,
            "both" if container.graphs == BOTH else container.graphs[0],
            container.kind,
            container.dims,
            _memory(container),
            ", ".join(f"{letter}: {elements}" for letter, elements in container.padding.items()),
            quantity(container.bytes, "B"),
            escape(f"{', '.join(container.written_by)} → {', '.join(container.read_by)}".strip()),
        )
    if not report.conversions:
        return Group(containers, "No conversions.")
    count = len(report.conversions)
    conversions = _table(
        f"{count} conversion{'s' if count > 1 else ''}, {quantity(report.conversion_bytes, 'B')} moved",
        ("conversion", "graph", "from", "memory", "to", "memory", "moved"),
        ("moved",),
    )
    for found in report.conversions:
        cells = (found.name, found.graph, found.source, found.order, found.target, found.target_order)
        conversions.add_row(*map(escape, cells), quantity(found.bytes_moved, "B"))
    return Group(containers, conversions)


def _table(title: str, headings: tuple[str, ...], folded: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.padding = (0, 1, 0, 0)
    for heading in headings:
        number = heading in ("bytes", "moved")
        table.add_column(heading, justify="right" if number else "left", no_wrap=heading not in folded, overflow="fold")
    return table


def _memory(container: ContainerLayout) -> str:
    """The order in memory, in bold where it is not the logical one."""
    return container.order if container.order == container.dims else f"[bold]{container.order}[/bold]"
