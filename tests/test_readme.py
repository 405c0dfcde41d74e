"""What the README shows works as shown."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from stepdown.models.presets import PRESETS

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
COMMAND_LINES = [
    line.partition("#")[0].strip() for _, block in BLOCKS for line in block.splitlines() if line.startswith("stepdown ")
]


def test_the_example_runs() -> None:
    (example,) = [block for language, block in BLOCKS if language == "python"]
    lines = [line for line in example.splitlines() if line]
    assert 8 <= len(lines) <= 12, "a ten-line example"
    names: dict[str, object] = {}
    exec(compile(example, "README.md", "exec"), names)
    x, y = names["x"], names["y"]
    assert y.shape == x.shape  # type: ignore[attr-defined]
    assert x.grad.isfinite().all()  # type: ignore[attr-defined]


@pytest.mark.parametrize("line", COMMAND_LINES)
def test_commands_and_their_options_exist(line: str) -> None:
    _, command, *rest = line.replace("[", " ").replace("]", " ").split()
    page = subprocess.run(
        [sys.executable, "-m", "stepdown.pipeline.cli", command, "--help"],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert page.returncode == 0, page.stderr
    options = [word for word in rest if word.startswith("-")]
    assert [option for option in options if not re.search(rf"(?<![\w-]){option}\b", page.stdout)] == []


def test_the_make_targets_exist() -> None:
    targets = set(re.findall(r"`?make (\w+)", README)) - {"run"}
    assert {"test", "lint", "fuzz", "clean"} <= targets
    makefile = (ROOT / "Makefile").read_text()
    assert [target for target in targets | {"run"} if not re.search(rf"^{target}:", makefile, re.MULTILINE)] == []


def test_the_presets_are_all_there() -> None:
    (row,) = [line for line in README.splitlines() if line.startswith("| presets |")]
    assert re.findall(r"`([\w-]+)`", row) == list(PRESETS)


def test_the_links_to_files_are_not_broken() -> None:
    links = [target for target in re.findall(r"\]\(([^)#]+)", README) if not target.startswith("http")]
    assert [target for target in links if not (ROOT / target).exists()] == []
