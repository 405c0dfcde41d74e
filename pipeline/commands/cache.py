"""``stepdown cache``."""

from typing import Annotated, Any

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from stepdown.pipeline.cache import BuildCache, CacheEntry
from stepdown.pipeline.commands.terminal import output, print_json
from stepdown.pipeline.report import quantity

cache_app = typer.Typer(
    no_args_is_help=True, add_completion=False, rich_markup_mode=None, help="List, remove and clear cached builds."
)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@cache_app.command("list")
def list_command(as_json: AsJson = False) -> None:
    """List the cached builds, the last used first."""
    cache = BuildCache()
    entries = cache.list()
    if as_json:
        print_json({"root": str(cache.root), "entries": [_to_dict(entry) for entry in entries]})
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("key", "last used"):
        table.add_column(heading, no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("build", overflow="fold")
    for entry in entries:
        used = entry.last_used.astimezone().strftime("%Y-%m-%d %H:%M")
        table.add_row(entry.key[:12], used, quantity(entry.size, "B"), escape(entry.description))
    total = quantity(sum(entry.size for entry in entries), "B")
    console = output()
    if entries:
        console.print(table)
    console.print(f"{_count(entries)}, {total}, in {cache.root}", soft_wrap=True, markup=False)


@cache_app.command("clear")
def clear_command(as_json: AsJson = False) -> None:
    """Remove every cached build."""
    _removed(BuildCache().clear(), as_json)


@cache_app.command("remove")
def remove_command(
    key: Annotated[str, typer.Argument(help="The first characters of exactly one key.")], as_json: AsJson = False
) -> None:
    """Remove one cached build."""
    _removed((BuildCache().remove(key),), as_json)


@cache_app.command("path")
def path_command() -> None:
    """Print the folder of the cache."""
    print(BuildCache().root)


def _removed(entries: tuple[CacheEntry, ...], as_json: bool) -> None:
    if as_json:
        print_json({"removed": [_to_dict(entry) for entry in entries]})
        return
    freed = quantity(sum(entry.size for entry in entries), "B")
    print(f"Removed {_count(entries)}, {freed}.")


def _count(entries: tuple[CacheEntry, ...]) -> str:
    return "1 build" if len(entries) == 1 else f"{len(entries)} builds"


def _to_dict(entry: CacheEntry) -> dict[str, Any]:
    return {
        "key": entry.key,
        "path": str(entry.path),
        "size": entry.size,
        "created": entry.created.isoformat(),
        "last_used": entry.last_used.isoformat(),
        "description": entry.description,
    }
