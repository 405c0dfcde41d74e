"""``stepdown ablate``."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from stepdown.pipeline.ablation import Ablation, ablate_layer, step_count
from stepdown.pipeline.commands.layer import ChosenLayer, use_threads, with_layer
from stepdown.pipeline.commands.terminal import counting, output, print_json
from stepdown.pipeline.compare import CASES
from stepdown.pipeline.report import duration, quantity
from stepdown.pipeline.results import check_suffix, save_rows


@with_layer
def ablate_command(
    *,
    layer: ChosenLayer,
    batch: Annotated[int, typer.Option(help="Batch size B.")] = 8,
    seq: Annotated[int, typer.Option(help="Sequence length S.")] = 128,
    dtype: Annotated[str, typer.Option(help="Type of weights and activations.")] = "float32",
    target: Annotated[str, typer.Option(help="Where to run.")] = "cpu",
    passes: Annotated[
        list[str] | None,
        typer.Option("--pass", metavar="PASS", help="Switch off this pass only; repeatable. All in turn by default."),
    ] = None,
    repeats: Annotated[int, typer.Option(help="Measured repetitions of each variant.")] = 20,
    threads: Annotated[int | None, typer.Option(help="Threads; as PyTorch chooses by default.")] = None,
    seed: Annotated[int, typer.Option(help="Fixes weights and input.")] = 0,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Put the rows into this JSON or CSV file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Time a layer with each optional pass switched off in turn, beside the full pipeline in one run."""
    if out is not None:
        check_suffix(out)
    use_threads(threads)
    torch.manual_seed(seed)
    chosen = passes or None
    with counting(f"ablating {layer.name}", step_count(chosen, max(repeats, 0))) as progress:
        (task,) = progress.task_ids
        ablation = ablate_layer(
            layer.name,
            layer.layer,
            batch=batch,
            seq=seq,
            dtype=dtype,
            target=target,
            passes=chosen,
            repeats=repeats,
            report=lambda step: progress.update(task, description=step, advance=1),
        )
    rows = ablation.rows()
    if out is not None:
        save_rows(out, rows)
    if as_json:
        print_json([asdict(row) for row in rows])
        return
    output().print(_table(ablation))


def _table(ablation: Ablation) -> RenderableType:
    rows = {(row.implementation, row.case): row for row in ablation.rows()}
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    for case in CASES:
        table.add_column(case, justify="right", no_wrap=True)
        table.add_column("it / full", justify="right", no_wrap=True)
    for heading in ("words", "kept", "kernels"):
        table.add_column(heading, justify="right", no_wrap=True)
    for position, variant in enumerate(ablation.variants):
        cells = []
        for case in CASES:
            row = rows[variant.name, case]
            cells.append(f"{duration(row.median / 1e3)} ± {duration(row.spread / 1e3)}")
            cells.append(f"{ablation.slowdown(variant, case):.2f}" if position else "")
        counts = variant.counts
        cells += [quantity(counts["words"], ""), quantity(counts["kept_bytes"], "B"), str(counts["kernels"])]
        table.add_row(variant.name, *cells)
    first = next(iter(rows.values()))
    title = f"{ablation.name}, B={ablation.batch} S={ablation.seq}, {ablation.dtype}, {first.device}"
    note = (
        f"Median of {first.repeats} interleaved repetitions ± distance between the quartiles, in training mode. "
        "it / full: median over repetitions. words: read and written by all kernels of a training step."
    )
    return Group(Text(title, style="bold"), table, Text(note, style="dim"))
