"""Tables of result files in Markdown files: README.md and docs hold the places, this fills them.

A place is::

    <!-- table: results/FILE.csv | columns: one, two | where: column=value -->
    <!-- /table -->

What stands between the two lines is replaced by a Markdown table of the file's rows (CSV with a header, or JSON: a list
of objects). Without ``columns`` the table has all of the first row's; ``where`` keeps the rows with that value. A file
that is not there leaves the place empty.
"""

import csv
import json
import re
from pathlib import Path
from typing import Any

PLACE = re.compile(
    r"(?P<begin><!-- table: (?P<file>\S+)(?: \| columns: (?P<columns>[^>|]*?))?"
    r"(?: \| where: (?P<where>[^>|]*?))? -->\n).*?(?P<end><!-- /table -->)",
    re.DOTALL,
)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a CSV or JSON file.

    :raises ValueError: for a JSON file that is not a list of objects, and for other kinds of files.
    """
    if path.suffix == ".csv":
        with path.open(newline="") as stream:
            return list(csv.DictReader(stream))
    if path.suffix == ".json":
        rows = json.loads(path.read_text())
        if isinstance(rows, list) and all(isinstance(row, dict) for row in rows):
            return rows
        raise ValueError(f'"{path}" holds something else; a list of objects is accepted.')
    raise ValueError(f'"{path}" has the ending "{path.suffix}"; accepted are ".csv" and ".json".')


def markdown_table(rows: list[dict[str, Any]], columns: list[str] | None = None) -> str:
    """A Markdown table of ``rows``; empty without rows.

    :raises ValueError: when a column is in none of the rows.
    """
    if not rows:
        return ""
    columns = columns or list(rows[0])
    _check_columns(rows, columns)
    lines = [columns, ["---"] * len(columns)]
    lines += [[str(row.get(column, "")).replace("|", "\\|") for column in columns] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def filled(text: str, root: Path) -> str:
    """``text`` with every place filled from the files under ``root``.

    :raises ValueError: when a column is in none of a file's rows.
    """

    def fill(match: re.Match[str]) -> str:
        path = root / match["file"]
        columns = [name.strip() for name in match["columns"].split(",")] if match["columns"] else None
        rows = read_rows(path) if path.is_file() else []
        if match["where"] and rows:
            column, _, value = (part.strip() for part in match["where"].partition("="))
            _check_columns(rows, [column])
            rows = [row for row in rows if str(row.get(column)) == value]
        return match["begin"] + markdown_table(rows, columns) + match["end"]

    return PLACE.sub(fill, text)


def pages_with_tables(root: Path) -> list[Path]:
    """The project's Markdown files that hold a place, README.md first."""
    candidates = [root / "README.md", *sorted((root / "docs").glob("*.md"))]
    return [page for page in candidates if page.is_file() and PLACE.search(page.read_text(encoding="utf-8"))]


def fill_pages(root: Path, *, write: bool = True) -> list[Path]:
    """Fill the places of every page; returns the pages that were out of date.

    :param write: False leaves them so.
    :raises ValueError: when a column is in none of a file's rows.
    """
    changed = []
    for page in pages_with_tables(root):
        before = page.read_text(encoding="utf-8")
        after = filled(before, root)
        if before != after:
            changed.append(page)
            if write:
                page.write_text(after, encoding="utf-8")
    return changed


def _check_columns(rows: list[dict[str, Any]], columns: list[str]) -> None:
    unknown = [column for column in columns if not any(column in row for row in rows)]
    if unknown:
        raise ValueError(f'The column "{unknown[0]}" is in none of the rows; they have "{", ".join(rows[0])}".')
