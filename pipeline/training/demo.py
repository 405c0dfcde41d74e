"""The main job on real input: a small BERT learns the text of Python's own manual, with both backends.

``python -m stepdown.pipeline.training.demo`` (``make run``) trains from the same weights on the same batches, once with
compiled encoder layers and once with Hugging Face's. Without dropout, which the backends draw from different
generators, the two loss curves must lie on each other: a relative difference of at most 1e-4 at each of the first 200
steps. A third, shorter run shows that the compiled layers learn with dropout on. Then comes what the pipeline did to
the layer.

Each run has a process of its own, so that its peak of memory is its own.
"""

import json
import multiprocessing
import os
import pydoc_data.topics
import sys
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from stepdown.models.errors import StepdownError
from stepdown.pipeline.build_folder import read_build
from stepdown.pipeline.report import duration, quantity, stage_table
from stepdown.pipeline.training import TrainingError, TrainingOptions, TrainingResult, train
from stepdown.pipeline.training.curves import plot_losses, relative_differences

TOLERANCE = 1e-4
"""The largest relative difference of the two losses at any compared step."""

COMPARED_STEPS = 200
"""Later steps are drawn but not judged: rounding grows from step to step."""

_LAST = 10  # steps whose mean is "the loss at the end"


@dataclass(frozen=True)
class Comparison:
    """The largest relative difference between two loss curves, and the step where it is, counted from 1."""

    difference: float
    step: int
    steps: int

    @property
    def agrees(self) -> bool:
        """Whether the curves lie on each other."""
        return self.difference <= TOLERANCE


def compare(stepdown: TrainingResult, torch: TrainingResult) -> Comparison:
    """Compares two runs over their first 200 steps.

    :raises TrainingError: when they did not begin with the same weights.
    """
    if stepdown.initial_weights != torch.initial_weights:
        raise TrainingError("The two runs began with different weights; accepted are equal ones.")
    differences = relative_differences(stepdown.losses[:COMPARED_STEPS], torch.losses[:COMPARED_STEPS])
    largest = max(differences)
    return Comparison(largest, differences.index(largest) + 1, len(differences))


def write_manual(path: Path) -> None:
    """Writes the topics of Python's manual, which ship with Python (about 0.5 MB), as one text."""
    topics = pydoc_data.topics.topics
    path.write_text("\n\n".join(topics[name] for name in sorted(topics)), encoding="utf-8")


def train_apart(options: TrainingOptions) -> TrainingResult:
    """Trains in a new process.

    :raises TrainingError: when that process dies.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as pool:
        try:
            return pool.submit(train, options).result()
        except BrokenProcessPool:
            raise TrainingError(f'The process that trained with the backend "{options.backend}" died.') from None


def results_table(runs: dict[str, TrainingResult]) -> Table:
    """Loss, speed and memory of each run."""
    table = Table(
        title="Masked-language-model training",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("run", no_wrap=True)
    for heading in ("steps", "first\nloss", "last\nloss", "tokens/s", "time", "peak\nmemory"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, result in runs.items():
        table.add_row(
            name,
            str(len(result.losses)),
            f"{result.losses[0]:.4f}",
            f"{_final_loss(result):.4f}",
            f"{result.tokens_per_second:,.0f}",
            duration(result.seconds),
            quantity(result.peak_memory, "B"),
        )
    return table


def _final_loss(result: TrainingResult) -> float:
    last = result.losses[-_LAST:]
    return sum(last) / len(last)


def demonstrate(options: TrainingOptions, dropout_steps: int, console: Console) -> None:
    """Runs everything below the folder ``options.out`` and prints the tables.

    :param options: of the two compared runs; backend, folder and dropout are set here.
    :param dropout_steps: the length of the run with dropout as published.
    :raises StepdownError: when a run fails, the curves do not lie on each other, or the loss does not fall.
    """
    out = options.out
    plain = replace(options, dropout=0.0)
    dropout = f"stepdown, p={options.preset.layer.dropout:g}"
    planned = {
        "stepdown": replace(plain, out=out / "stepdown", backend="stepdown"),
        "torch": replace(plain, out=out / "torch", backend="torch"),
        dropout: replace(options, out=out / "stepdown-dropout", backend="stepdown", steps=dropout_steps),
    }
    runs = {name: train_apart(run) for name, run in planned.items()}
    stepdown, torch = runs["stepdown"], runs["torch"]
    comparison = compare(stepdown, torch)
    picture = out / "loss_curves.png"
    plot_losses(
        picture,
        {"torch": torch.losses, "stepdown": stepdown.losses},
        f"{options.model}, {options.dtype}, batch {options.batch}, {options.seq} tokens, no dropout",
        accepted=TOLERANCE,
    )
    summary = {
        "model": options.model,
        "parameters": stepdown.parameters,
        "vocabulary": stepdown.vocabulary,
        "batch": options.batch,
        "seq": options.seq,
        "largest_relative_difference": comparison.difference,
        "at_step": comparison.step,
        "runs": {
            name: {
                "steps": len(run.losses),
                "first_loss": run.losses[0],
                "last_loss": _final_loss(run),
                "tokens_per_second": run.tokens_per_second,
                "peak_memory": run.peak_memory,
            }
            for name, run in runs.items()
        },
    }
    (out / "demo.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")

    console.print()
    console.print(results_table(runs))
    console.print(
        f"{options.model}: {stepdown.parameters / 1e6:.1f} M parameters, a vocabulary of {stepdown.vocabulary}, "
        f"{options.batch} x {options.seq} tokens a step; p is the dropout probability. "
        f"Last loss: mean of {_LAST} steps; tokens/s: at the median step."
    )
    console.print(
        f"Largest relative difference of the losses: {comparison.difference:.1e} at step {comparison.step} "
        f"of {comparison.steps} (accepted: {TOLERANCE:g})."
    )
    console.print("The two curves:", str(picture), soft_wrap=True)
    console.print()
    if stepdown.build is not None:
        console.print("What the pipeline did to the layer:")
        console.print(stage_table(read_build(stepdown.build).manifest, options.batch, options.seq))
    if not comparison.agrees:
        raise TrainingError(
            f"The losses of the two backends differ by {comparison.difference:.1e} at step {comparison.step}; "
            f"accepted is at most {TOLERANCE:g}."
        )
    for name, run in runs.items():
        if len(run.losses) > 2 * _LAST and _final_loss(run) >= run.losses[0]:
            raise TrainingError(f'The loss of the run "{name}" did not fall; accepted is a falling one.')


def main(
    out: Annotated[Path | None, typer.Option(help="Folder for the results; by default a new one below runs/.")] = None,
    model: Annotated[str, typer.Option(help="Preset.")] = "bert-mini",
    steps: Annotated[int, typer.Option(help="Steps of the two compared runs.")] = COMPARED_STEPS,
    dropout_steps: Annotated[int, typer.Option(help="Steps of the run with dropout.")] = 40,
    batch: Annotated[int, typer.Option(help="Blocks of text a step.")] = 8,
    seq: Annotated[int, typer.Option(help="Tokens a block.")] = 128,
    vocabulary: Annotated[int, typer.Option(help="Most tokens that WordPiece may learn.")] = 4096,
    learning_rate: Annotated[float, typer.Option("--lr", help="Highest learning rate.")] = 5e-4,
    seed: Annotated[int, typer.Option(help="Seed of weights, batches and dropout.")] = 0,
) -> None:
    """Train a small BERT with both backends, compare them, and show what the pipeline did to the layer."""
    # For the training processes: where others compute, threads that spin while they wait cost a multiple of the time.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    folder = out or Path("runs") / f"demo-{datetime.now():%Y%m%d-%H%M%S}"
    try:
        options = TrainingOptions(
            text=folder / "manual.txt",
            out=folder,
            model=model,
            steps=steps,
            batch=batch,
            seq=seq,
            vocabulary=vocabulary,
            learning_rate=learning_rate,
            seed=seed,
        )
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_manual(options.text)
        except OSError as error:
            raise TrainingError(f'The folder "{folder}" cannot be written ({error.strerror}).') from None
        demonstrate(options, dropout_steps, Console())
    except StepdownError as error:
        print(f"Error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


if __name__ == "__main__":
    typer.run(main)
