"""``stepdown train``."""

import inspect
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from stepdown.pipeline.commands.fields import field_options, with_options
from stepdown.pipeline.commands.terminal import output, print_json
from stepdown.pipeline.report import duration, quantity
from stepdown.pipeline.training import TrainingOptions, TrainingResult, train

_TEXT = inspect.Parameter(
    "text",
    inspect.Parameter.KEYWORD_ONLY,
    annotation=Annotated[Path, typer.Option("--text", help="The UTF-8 file to train on.")],
)
_OUT = inspect.Parameter(
    "out",
    inspect.Parameter.KEYWORD_ONLY,
    default=Path("runs/train"),
    annotation=Annotated[
        Path, typer.Option("--out", "-o", help="The folder for checkpoints, tokenizer and loss curve (CSV and PNG).")
    ],
)


@with_options(
    "options",
    [_TEXT, _OUT, *field_options(TrainingOptions, skip=("text", "out"), short={"learning_rate": "--lr"})],
    lambda values: TrainingOptions(**values),
)
def train_command(
    *, options: TrainingOptions, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False
) -> None:
    """Train a masked language model on a text, with compiled encoder layers or with PyTorch's."""
    result = train(options)
    if as_json:
        print_json({name: str(value) if isinstance(value, Path) else value for name, value in asdict(result).items()})
        return
    output().print(_summary(result))


def _summary(result: TrainingResult) -> Table:
    rows: dict[str, Any] = {
        "loss": f"{result.losses[0]:.4f} → {result.losses[-1]:.4f} in {len(result.losses)} steps",
        "speed": f"{result.tokens_per_second:,.0f} tokens/s",
        "time": duration(result.seconds),
        "peak memory": quantity(result.peak_memory, "B"),
        "parameters": f"{result.parameters:,} ({result.vocabulary:,} tokens, {result.blocks:,} blocks of text)",
        "loss curve": f"{result.curve_csv}, {result.curve_png}",
        "checkpoint": str(result.checkpoint),
    }
    if result.resumed_from:
        rows["resumed from"] = f"step {result.resumed_from}"
    if result.build is not None:
        rows["build"] = str(result.build)
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, str(value))
    return table
