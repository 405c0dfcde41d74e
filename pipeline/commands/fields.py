"""Command-line options made of a dataclass's fields, with the help text of its docstring's ``:param:`` lines."""

import functools
import inspect
import re
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields
from typing import Annotated, Any, TypeVar

import typer

Result = TypeVar("Result")

_PARAMETER = re.compile(r"^:param (\w+): (.*?)(?=^:|\Z)", re.MULTILINE | re.DOTALL)


def parameter_help(cls: type) -> dict[str, str]:
    """What the docstring of ``cls`` says about each parameter, in one line."""
    found = _PARAMETER.findall(inspect.getdoc(cls) or "")
    return {name: " ".join(text.replace("`", "").split()) for name, text in found}


def field_options(
    cls: type,
    *,
    optional: bool = False,
    panel: str | None = None,
    skip: Iterable[str] = (),
    short: Mapping[str, str] | None = None,
) -> list[inspect.Parameter]:
    """One option for each field of the dataclass ``cls``.

    :param optional: every default is ``None``, which stands for "not given".
    :param skip: fields without an option.
    :param short: by field, a second and shorter spelling, such as ``--lr``.
    """
    help_texts, hints, skipped = parameter_help(cls), typing.get_type_hints(cls), set(skip)
    parameters = []
    for field in fields(cls):
        if field.name in skipped:
            continue
        flag = field.name.replace("_", "-")
        names = [f"--{flag}/--no-{flag}"] if hints[field.name] is bool else [f"--{flag}"]
        names += [short[field.name]] if short and field.name in short else []
        option = typer.Option(*names, help=_capitalised(help_texts.get(field.name, "")), rich_help_panel=panel)
        kind: Any = hints[field.name] | None if optional else hints[field.name]
        default: Any = None if optional else inspect.Parameter.empty if field.default is MISSING else field.default
        parameters.append(
            inspect.Parameter(
                field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
            )
        )
    return parameters


def with_options(
    into: str, parameters: list[inspect.Parameter], make: Callable[[dict[str, Any]], Any]
) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Gives a command further options: their values go through ``make`` into its parameter ``into``."""

    def decorate(command: Callable[..., Result]) -> Callable[..., Result]:
        @functools.wraps(command)
        def wrapper(**values: Any) -> Result:
            given = {parameter.name: values.pop(parameter.name) for parameter in parameters}
            return command(**values, **{into: make(given)})

        own = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for parameter in inspect.signature(command, eval_str=True).parameters.values()
            if parameter.name != into
        ]
        everything = [*parameters, *own]
        wrapper.__signature__ = inspect.Signature(everything)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in everything}
        del wrapper.__wrapped__  # type: ignore[attr-defined]
        return wrapper

    return decorate


def _capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]
