"""What is computed: operators, layers written in them, presets, and the same layers in plain PyTorch.

The PyTorch layer is imported when it is first used: a list of presets needs no PyTorch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from stepdown.models.definition import EncoderLayer, Parameter
from stepdown.models.presets import (
    PRESETS,
    Preset,
    bert_base,
    bert_large,
    bert_medium,
    bert_mini,
    bert_small,
    bert_tiny,
    find_preset,
    minilm,
    roberta_base,
)

if TYPE_CHECKING:
    from stepdown.models.reference import ReferenceEncoderLayer

__all__ = [
    "PRESETS",
    "EncoderLayer",
    "Parameter",
    "Preset",
    "ReferenceEncoderLayer",
    "bert_base",
    "bert_large",
    "bert_medium",
    "bert_mini",
    "bert_small",
    "bert_tiny",
    "find_preset",
    "minilm",
    "roberta_base",
]


def __getattr__(name: str) -> Any:
    if name == "ReferenceEncoderLayer":
        return importlib.import_module("stepdown.models.reference").ReferenceEncoderLayer
    raise AttributeError(f'module "{__name__}" has no attribute "{name}"')
