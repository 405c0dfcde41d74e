"""``stepdown compare``."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from stepdown.pipeline.commands.layer import ChosenLayer, use_threads, with_layer
from stepdown.pipeline.commands.terminal import counting, output, print_json
from stepdown.pipeline.compare import BASELINES, CASES, Comparison, check_baselines, compare_layer, step_count
from stepdown.pipeline.report import duration, quantity
from stepdown.pipeline.results import Row, check_suffix, save_rows


@with_layer
def compare_command(
    *,
    layer: ChosenLayer,
    against: Annotated[
        str, typer.Option(metavar="NAME,...", help=f"What to compare against: {', '.join(BASELINES)}.")
    ] = "eager,compile",
    batch: Annotated[int, typer.Option(help="Batch size B.")] = 8,
    seq: Annotated[int, typer.Option(help="Sequence length S.")] = 128,
    dtype: Annotated[str, typer.Option(help="Type of weights and activations.")] = "float32",
    target: Annotated[str, typer.Option(help="Where to run.")] = "cpu",
    symbolic: Annotated[bool, typer.Option("--symbolic", help="Compile for any batch and length.")] = False,
    repeats: Annotated[int, typer.Option(help="Measured repetitions of each implementation.")] = 20,
    threads: Annotated[int | None, typer.Option(help="Threads; as PyTorch chooses by default.")] = None,
    seed: Annotated[int, typer.Option(help="Fixes weights and input.")] = 0,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Put the rows into this JSON or CSV file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Time a layer beside PyTorch's in one run: time, memory and error."""
    names = check_baselines(against.split(","))
    if out is not None:
        check_suffix(out)
    use_threads(threads)
    torch.manual_seed(seed)
    with counting(f"comparing {layer.name}", step_count(names, max(repeats, 0))) as progress:
        (task,) = progress.task_ids

        def report(step: str) -> None:
            progress.update(task, description=step, advance=1)

        comparison = compare_layer(
            layer.name,
            layer.layer,
            batch=batch,
            seq=seq,
            dtype=dtype,
            target=target,
            against=names,
            repeats=repeats,
            symbolic=symbolic,
            report=report,
        )
    rows = comparison.rows()
    if out is not None:
        save_rows(out, rows)
    if as_json:
        print_json([asdict(row) for row in rows])
        return
    output().print(_table(comparison, rows))


def _table(comparison: Comparison, rows: list[Row]) -> RenderableType:
    by_case = {(row.implementation, row.case): row for row in rows}
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for case in CASES:
        table.add_column(case, justify="right", no_wrap=True)
        table.add_column("ours / it", justify="right", no_wrap=True)
    for heading in ("kept", "output error", "gradient error"):
        table.add_column(heading, justify="right", no_wrap=True)
    ours = comparison.measured[0].implementation
    for one in comparison.measured:
        cells = []
        for case in CASES:
            row = by_case[one.implementation, case]
            ratio = by_case[ours, case].median / row.median
            times = f"{duration(row.median / 1e3)} ± {duration(row.spread / 1e3)}"
            cells += [times, "" if one.implementation == ours else f"{ratio:.2f}"]
        errors = (one.output_error, one.gradient_error)
        table.add_row(one.implementation, *cells, quantity(one.kept_bytes, "B"), *(f"{error:.1e}" for error in errors))
    first = rows[0]
    title = f"{comparison.name}, B={comparison.batch} S={comparison.seq}, {comparison.dtype}, {first.device}"
    note = (
        f"Median of {first.repeats} interleaved repetitions ± distance between the quartiles, in training mode. "
        "kept: what autograd saves, parameters excepted. "
        "Errors: relative Frobenius norm against eager, without dropout."
    )
    return Group(Text(title, style="bold"), table, Text(note, style="dim"))
