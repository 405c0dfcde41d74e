"""The command ``stepdown``.

A command's module is imported when that command runs: PyTorch and DaCe take seconds, and ``stepdown --help`` needs
neither. Exit codes: 0 for success, 1 for a check that failed, 2 for wrong usage and everything that Stepdown refuses
(one sentence on the standard error stream), 130 for an interrupt.
"""

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, cast

import typer
import typer.core
import typer.main

import stepdown
from stepdown.models.errors import StepdownError

REFUSED = 2
"""Exit code for wrong usage, and for what Stepdown refuses."""

_PACKAGE = "stepdown.pipeline.commands"


@dataclass(frozen=True)
class Command:
    """A command: a function or a typer app in the module of its name, and its line in the list of commands."""

    attribute: str
    help: str


COMMANDS = {
    "compile": Command("compile_command", "Compile a layer into a build."),
    "inspect": Command("inspect_command", "Show what each stage did to a layer."),
    "verify": Command("verify_command", "Check output and gradients against float64."),
    "compare": Command("compare_command", "Time a layer beside PyTorch's, in one run."),
    "ablate": Command("ablate_command", "Time a layer with each optional pass switched off in turn."),
    "report": Command("report_command", "Count a training step after every pass, beside counts by hand."),
    "train": Command("train_command", "Train a masked language model on a text."),
    "cache": Command("cache_app", "List, remove and clear cached builds."),
}
"""The commands in the order in which they are listed."""


class _DeferredCommand(typer.core.TyperCommand):
    """Stands for a command until that is called."""

    def __init__(self, name: str, command: Command) -> None:
        super().__init__(name=name, callback=None, help=command.help)
        self.command = command

    def make_context(self, info_name: Any, args: list[str], parent: Any = None, **extra: Any) -> Any:
        return self._load().make_context(info_name, args, parent=parent, **extra)

    def _load(self) -> Any:
        loaded = getattr(importlib.import_module(f"{_PACKAGE}.{self.name}"), self.command.attribute)
        if isinstance(loaded, typer.Typer):
            return typer.main.get_command(loaded)
        app = typer.Typer(add_completion=False, rich_markup_mode=None)
        app.command(self.name)(cast(Callable[..., Any], loaded))
        return typer.main.get_command(app)


class StepdownGroup(typer.core.TyperGroup):
    """The commands, and what happens to the errors that they raise."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = COMMANDS.get(cmd_name)
        return None if command is None else _DeferredCommand(cmd_name, command)

    def main(self, *args: Any, **extra: Any) -> Any:
        standalone_mode = extra.get("standalone_mode", True)
        try:
            return super().main(*args, **extra)
        except StepdownError as error:
            if not standalone_mode:
                raise
            print(f"stepdown: {_sentence(error)}", file=sys.stderr)
            sys.exit(REFUSED)
        except OSError as error:
            if not standalone_mode or error.filename is None:
                raise
            print(f'stepdown: "{error.filename}" cannot be used: {error.strerror}.', file=sys.stderr)
            sys.exit(REFUSED)


def _sentence(error: StepdownError) -> str:
    """The message of ``error``; those that are also an OSError may print their error number before it."""
    message = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(message.split())


app = typer.Typer(
    cls=StepdownGroup,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"stepdown {stepdown.__version__}")
        raise typer.Exit


@app.callback()
def stepdown_command(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Compile transformer layers so that they move less data."""


def main() -> None:
    """Entry point of the command ``stepdown``."""
    app(prog_name="stepdown")


if __name__ == "__main__":
    main()
