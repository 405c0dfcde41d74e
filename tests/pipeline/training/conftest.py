"""A small text, small runs, and encoder layers to stand in for compiled ones."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from stepdown.models.definition import EncoderLayer
from stepdown.models.reference import ReferenceEncoderLayer
from stepdown.pipeline.training import TrainingOptions

SENTENCE = (
    "a layer is written once as a program and becomes a graph of operators whose passes fuse kernels choose layouts "
    "and move less data between memory and registers while gradients flow backward through every residual connection"
)
WORDS = SENTENCE.split()


@pytest.fixture(scope="session")
def small_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 4000 words in 400 lines."""
    draw = random.Random(7)
    lines = (" ".join(draw.choices(WORDS, weights=range(len(WORDS), 0, -1), k=10)) + "." for _ in range(400))
    path = tmp_path_factory.mktemp("text") / "small.txt"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.fixture
def small_options(small_text: Path, tmp_path: Path) -> Callable[..., TrainingOptions]:
    """Options of a run that takes about a second, with whatever is given replaced."""

    def options(**replaced: Any) -> TrainingOptions:
        values: dict[str, Any] = {
            "text": small_text,
            "out": tmp_path / "run",
            "model": "bert-tiny",
            "backend": "torch",
            "steps": 6,
            "batch": 2,
            "seq": 16,
            "vocabulary": 160,
            "learning_rate": 1e-3,
        }
        return TrainingOptions(**(values | replaced))

    return options


@pytest.fixture
def reference_layer() -> Callable[[EncoderLayer], nn.Module]:
    """Makes encoder layers in plain PyTorch, with the interface of compiled ones."""
    return ReferenceEncoderLayer
