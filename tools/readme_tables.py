"""Writes measured rows into README.md and docs/*.md (:mod:`stepdown.pipeline.tables` says how places look)."""

import argparse
import sys
from pathlib import Path

from stepdown.pipeline.tables import fill_pages

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Write measured rows into README.md and docs/*.md.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a page is out of date")
    arguments = parser.parse_args()
    changed = fill_pages(ROOT, write=not arguments.check)
    if arguments.check and changed:
        names = ", ".join(str(page.relative_to(ROOT)) for page in changed)
        sys.exit(f"{names}: out of date; run tools/readme_tables.py.")


if __name__ == "__main__":
    main()
