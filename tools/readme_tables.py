"""Writes measured rows into README.md.

The README holds the places::

    <!-- table: results/FILE.csv | columns: one, two -->
    <!-- /table -->

What stands between the two lines is replaced by a Markdown table of the file's rows (CSV with a header, or JSON: a list
of objects). Without ``columns`` the table has all of the first row's. A file that is not there leaves the place empty.
"""

import argparse
import csv
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PLACE = re.compile(
    r"(?P<begin><!-- table: (?P<file>\S+)(?: \| columns: (?P<columns>[^>]*?))? -->\n).*?(?P<end><!-- /table -->)",
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
    unknown = [column for column in columns if not any(column in row for row in rows)]
    if unknown:
        raise ValueError(f'The column "{unknown[0]}" is in none of the rows; they have "{", ".join(rows[0])}".')
    lines = [columns, ["---"] * len(columns)]
    lines += [[str(row.get(column, "")).replace("|", "\\|") for column in columns] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def filled(text: str, root: Path) -> str:
    """``text`` with every place filled from the files under ``root``."""

    def fill(match: re.Match[str]) -> str:
        path = root / match["file"]
        columns = [name.strip() for name in match["columns"].split(",")] if match["columns"] else None
        table = markdown_table(read_rows(path), columns) if path.is_file() else ""
        return match["begin"] + table + match["end"]

    return PLACE.sub(fill, text)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Write measured rows into README.md.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail when the README is out of date")
    arguments = parser.parse_args()
    readme = ROOT / "README.md"
    before = readme.read_text()
    after = filled(before, ROOT)
    if arguments.check:
        sys.exit("README.md is out of date: run tools/readme_tables.py." if before != after else 0)
    readme.write_text(after)


if __name__ == "__main__":
    main()
