"""Which layer a command is for: a preset, a JSON file, or options of its own."""

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import typer

from stepdown.models.definition import LAYER_TYPE, EncoderLayer
from stepdown.models.errors import DefinitionError, OptionError
from stepdown.models.presets import PRESETS, find_preset
from stepdown.pipeline.commands.fields import field_options, with_options

Result = TypeVar("Result")

_MODEL_HELP = (
    f"A preset ({', '.join(PRESETS)}) or a JSON file with a layer's fields; options below replace single fields, "
    "and make a layer by themselves without it."
)


@dataclass(frozen=True)
class ChosenLayer:
    """A layer and what to call it in a table."""

    name: str
    layer: EncoderLayer


def choose_layer(values: dict[str, Any]) -> ChosenLayer:
    """The layer that ``model`` names, with every other value that is not ``None`` in place of its field.

    :raises OptionError: when nothing is named, or the preset is unknown.
    :raises DefinitionError: when the file cannot be read, or no such layer exists.
    """
    model = values.get("model")
    given = {name: value for name, value in values.items() if name != "model" and value is not None}
    if model is None:
        if not given:
            raise OptionError("No layer is named; accepted are a preset, a JSON file, or --embed, --heads and --ffn.")
        return ChosenLayer("layer", EncoderLayer.from_dict({"type": LAYER_TYPE, **given}))
    if model.endswith(".json"):
        name, base = Path(model).stem, _read_layer(Path(model))
    else:
        preset = find_preset(model)
        name, base = preset.name, preset.layer.to_dict()
    changes = " ".join(f"{field}={value}" for field, value in given.items())
    return ChosenLayer(f"{name} {changes}".strip(), EncoderLayer.from_dict({**base, **given}))


def _read_layer(file: Path) -> dict[str, Any]:
    """The fields in ``file``; the type may be left out there, because there is one only."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise DefinitionError(f'"{file}" cannot be read: {error.strerror}.') from error
    except ValueError as error:
        raise DefinitionError(f'"{file}" is not JSON: {error}.') from error
    if not isinstance(content, dict):
        raise DefinitionError(f'"{file}" holds {type(content).__name__}; accepted is an object with a layer\'s fields.')
    return {"type": LAYER_TYPE, **content}


def with_layer(command: Callable[..., Result]) -> Callable[..., Result]:
    """Gives a command the argument ``PRESET|FILE.json`` and an option for every field, as its parameter ``layer``."""
    model = inspect.Parameter(
        "model",
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[str | None, typer.Argument(metavar="PRESET|FILE.json", help=_MODEL_HELP)],
    )
    options = field_options(EncoderLayer, optional=True, panel="Layer")
    return with_options("layer", [model, *options], choose_layer)(command)


def use_threads(threads: int | None) -> None:
    """Let PyTorch and the generated code compute on so many threads; None leaves the choice to PyTorch.

    :raises OptionError: when the number is not positive.
    """
    if threads is None:
        return
    if threads < 1:
        raise OptionError(f'"threads" is {threads}; accepted is a positive integer.')
    torch.set_num_threads(threads)
