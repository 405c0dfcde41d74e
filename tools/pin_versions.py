"""Writes ``constraints.txt``: the installed version of every package that the project needs, directly or not.

Run it with the interpreter of an environment in which the suite has passed.
"""

import argparse
import re
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
HEADER = """\
# The versions that the suite has passed with; "make" installs with them. Written by tools/pin_versions.py.
"""


def needed(name: str, extras: frozenset[str], seen: dict[tuple[str, frozenset[str]], None]) -> None:
    """Adds ``name`` with ``extras`` and all that it requires to ``seen``, leaving out what is not installed."""
    key = (canonicalize_name(name), extras)
    if key in seen:
        return
    try:
        requirements = metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return
    seen[key] = None
    for line in requirements:
        requirement = Requirement(line)
        environments = [{"extra": extra} for extra in extras] or [{"extra": ""}]
        if requirement.marker is None or any(requirement.marker.evaluate(env) for env in environments):
            needed(requirement.name, frozenset(requirement.extras), seen)


def constraints() -> str:
    """The text of the file: one ``name==version`` a line, without local version labels such as ``+cpu``."""
    seen: dict[tuple[str, frozenset[str]], None] = {}
    needed("stepdown", frozenset({"dev", "train"}), seen)
    names = sorted({name for name, _ in seen} - {"stepdown"})
    return HEADER + "".join(f"{name}=={re.sub(r'[+].*', '', metadata.version(name))}\n" for name in names)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "constraints.txt")
    parser.parse_args().output.write_text(constraints())


if __name__ == "__main__":
    main()
