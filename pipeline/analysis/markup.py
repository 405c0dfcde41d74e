"""Pieces of the pages: escaped text, cells, and tables that a click on a heading sorts (``tables.js``)."""

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stepdown.pipeline.analysis.expressions import Number


def escaped(text: object) -> str:
    """Text that can stand between tags and in attributes."""
    return html.escape(str(text), quote=True)


@dataclass(frozen=True)
class Cell:
    """A cell of a table: its markup, its class, and what a column is sorted by."""

    markup: str
    kind: str = ""
    value: object = None

    def __str__(self) -> str:
        value = "" if self.value is None else f' data-value="{escaped(self.value)}"'
        kind = f' class="{self.kind}"' if self.kind else ""
        return f"<td{kind}{value}>{self.markup}</td>"


def text_cell(text: object, kind: str = "") -> Cell:
    """A cell of text, which may be broken after an underscore."""
    return Cell(escaped(text).replace("_", "_<wbr>"), kind)


def number_cell(shown: str, value: Number | None = None) -> Cell:
    """A number, sorted by its value; text in B and S may be long and wraps."""
    if isinstance(value, str):
        return Cell(escaped(shown), "number symbolic")
    return Cell(escaped(shown), "number", value)


def table(headings: Sequence[tuple[str, str]], rows: Iterable[Sequence[Cell]], kind: str = "") -> str:
    """A table of ``rows``; ``headings`` are texts and classes. With ``sortable`` in ``kind`` headings sort it."""
    head = "".join(
        f'<th class="{name}">{escaped(text)}</th>' if name else f"<th>{escaped(text)}</th>" for text, name in headings
    )
    body = "".join(f"<tr>{''.join(map(str, row))}</tr>" for row in rows)
    opening = f'<table class="{kind}">' if kind else "<table>"
    return f"{opening}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
