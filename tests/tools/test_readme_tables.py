"""The tables of README and docs are up to date, and the tool says when they are not."""

import subprocess
import sys
from pathlib import Path

from stepdown.pipeline.tables import fill_pages, pages_with_tables

ROOT = Path(__file__).resolve().parents[2]


def test_the_pages_are_up_to_date() -> None:
    names = [page.name for page in pages_with_tables(ROOT)]
    assert {"README.md", "counting.md"} <= set(names), "a page has no place for rows"
    assert fill_pages(ROOT, write=False) == [], "run tools/readme_tables.py"


def test_the_tool_checks() -> None:
    command = [sys.executable, str(ROOT / "tools" / "readme_tables.py"), "--check"]
    assert subprocess.run(command, check=False).returncode == 0
