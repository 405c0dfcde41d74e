"""``stepdown report``."""

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich import box
from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from stepdown.pipeline.account import RULE, Account, Rows, account_for, write_account
from stepdown.pipeline.analysis.machine import MACHINES, find_machine
from stepdown.pipeline.commands.layer import ChosenLayer, with_layer
from stepdown.pipeline.commands.terminal import output, print_json, working
from stepdown.pipeline.tables import fill_pages

TITLES = {
    "words_by_pass": "Words moved by a training step after every pass",
    "step_totals": "Beside counts by hand",
    "step_differences": "Every difference to the counts by hand",
    "paper_forward": "The forward pass of the paper's layer (ReLU, dropout after it), counted by the paper and here",
    "classes": "Classes",
    "kept_bytes": "Kept from forward to backward, parameters excepted",
}


@with_layer
def report_command(
    *,
    layer: ChosenLayer,
    batch: Annotated[int, typer.Option(help="Batch size B.")] = 8,
    seq: Annotated[int, typer.Option(help="Sequence length S.")] = 512,
    dtype: Annotated[str, typer.Option(help="Type of weights and activations.")] = "float32",
    machine: Annotated[str, typer.Option(help=f"Whose peaks the charts use: {', '.join(MACHINES)}.")] = "v100",
    torch_keeps: Annotated[
        bool, typer.Option("--torch/--no-torch", help="Run PyTorch's layers once to see what they keep.")
    ] = True,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write tables (CSV) and charts (SVG) there, and fill the pages beside it."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Count a training step after every pass, beside counts by hand and what PyTorch keeps."""
    peaks = find_machine(machine)
    torch.manual_seed(0)
    with working(f"counting {layer.name}") as progress:
        account = account_for(
            layer.name,
            layer.layer,
            batch=batch,
            seq=seq,
            dtype=dtype,
            machine=peaks,
            torch_keeps=torch_keeps,
            progress=lambda step: progress(f"counting {layer.name}: {step}"),
        )
    written: list[Path] = []
    if out is not None:
        written = [*write_account(account, out), *fill_pages(out.resolve().parent)]
    if as_json:
        print_json(account.tables)
        return
    _show(account)
    for path in written:
        output().print(escape(f"wrote {path}"), soft_wrap=True)


def _show(account: Account) -> None:
    title = f"{account.name}, B={account.batch} S={account.seq}, {account.dtype}"
    tables = [part for name, rows in account.tables.items() if rows for part in (_title(name), _table(rows))]
    note = Text(f"Rule: {RULE}. Mwords: million words, MB: million bytes.", style="dim")
    output().print(Group(Text(title, style="bold"), *tables, note))


def _title(name: str) -> Text:
    return Text(f"\n{TITLES[name]}", style="bold")


def _table(rows: Rows) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.padding = (0, 1, 0, 0)
    columns = [column for column in dict.fromkeys(column for row in rows for column in row) if column != "layer"]
    for column in columns:
        numeric = all(isinstance(row.get(column, 0), int | float) or row.get(column) == "" for row in rows)
        table.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(escape(str(row.get(column, ""))) for column in columns))
    return table
