"""``stepdown verify``."""

from typing import Annotated

import typer

from stepdown.models.dtypes import DTYPES
from stepdown.models.errors import OptionError
from stepdown.pipeline.commands.layer import ChosenLayer, with_layer
from stepdown.pipeline.commands.terminal import counting, output, print_json
from stepdown.pipeline.verification.cases import MASK_KINDS
from stepdown.pipeline.verification.rule import DRAWS
from stepdown.pipeline.verification.verify import verify_definition

FAILED_CHECK = 1
"""Exit code when a result is beyond its limit."""


@with_layer
def verify_command(
    *,
    layer: ChosenLayer,
    batch: Annotated[int, typer.Option(help="Batch size B.")] = 2,
    seq: Annotated[int, typer.Option(help="Sequence length S.")] = 48,
    dtype: Annotated[str, typer.Option(help=f"Type of weights and activations: {', '.join(DTYPES)}.")] = "float32",
    mask: Annotated[str, typer.Option(help=f"Which keys are masked: {', '.join(MASK_KINDS)}.")] = "right",
    draws: Annotated[int, typer.Option(help="Draws of weights and inputs that errors are pooled over.")] = DRAWS,
    seed: Annotated[int, typer.Option(help="Everything is drawn from it.")] = 0,
    no_dropout: Annotated[bool, typer.Option("--no-dropout", help="Evaluation mode.")] = False,
    target: Annotated[str, typer.Option(help="What to compile for.")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check a layer's output, every gradient and every dropout mask against float64.

    Exit code 1 if one of them is beyond its limit.
    """
    for name, value, least in (("batch", batch, 1), ("seq", seq, 1), ("draws", draws, 1), ("seed", seed, 0)):
        if value < least:
            raise OptionError(f'"{name}" is {value}; accepted are whole numbers from {least}.')
    if mask not in MASK_KINDS:
        raise OptionError(f'mask "{mask}" is unknown; accepted are {", ".join(f"{kind!r}" for kind in MASK_KINDS)}.')
    with counting(f"verifying {layer.name}", draws) as progress:
        (task,) = progress.task_ids
        report = verify_definition(
            layer.layer,
            dtype,
            batch,
            seq,
            mask=mask,
            draws=draws,
            seed=seed,
            dropout=not no_dropout,
            target=target,
            on_draw=lambda done: progress.update(task, completed=done),
        )
    if as_json:
        print_json(report.to_dict())
    else:
        output().print(report)
    if not report.passed:
        raise typer.Exit(FAILED_CHECK)
