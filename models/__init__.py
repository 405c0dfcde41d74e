"""What is computed: operators, layers written in them, presets, and the same layers in plain PyTorch."""

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
