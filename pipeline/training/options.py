"""What a training run is asked for, and what it hands back. Needs none of the packages of the extra "train"."""

import math
import typing
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from stepdown.models.dtypes import resolve_dtype
from stepdown.models.errors import OptionError
from stepdown.models.presets import Preset, find_preset

Backend = Literal["stepdown", "torch"]

BACKENDS: tuple[str, ...] = typing.get_args(Backend)
"""`"stepdown"`: the encoder layers are compiled ones; `"torch"`: they stay Hugging Face's."""

TRAINING_DTYPES = ("float32", "float64", "bfloat16")
"""Types that a whole model can train in; float16 would need loss scaling."""

SMALLEST_VOCABULARY = 64
"""WordPiece needs the special tokens, the letters and a few pieces."""

_FREE_ON_RESUME = frozenset({"text", "out", "resume", "checkpoint_every", "keep"})


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """A masked-language-model training run.

    :param text: the UTF-8 file to train on.
    :param out: the folder for checkpoints, tokenizer, loss curve (CSV and PNG); made if it is missing.
    :param model: a preset's name, such as ``"bert-mini"``.
    :param backend: whose encoder layers run: ``"stepdown"`` or ``"torch"``.
    :param steps: optimizer steps of the whole run; the learning rate falls to zero towards the last one.
    :param batch: blocks of text a step.
    :param seq: tokens a block, with ``[CLS]`` and ``[SEP]``.
    :param learning_rate: the highest learning rate, reached after ``warmup`` steps.
    :param warmup: steps of linear warm-up; ``None``: a tenth of ``steps``.
    :param weight_decay: AdamW's decay, on matrices only (not on biases and LayerNorm).
    :param clip: the largest norm of the whole gradient; a longer gradient is scaled down to it.
    :param seed: fixes the initial weights, the order of blocks, the masked tokens and dropout.
    :param dtype: of weights, activations and optimizer state: float32, float64 or bfloat16.
    :param dropout: replaces every dropout probability of the preset; ``None``: as published.
    :param vocabulary: the most tokens that WordPiece may learn; ``None``: as many as the preset has.
    :param mask_fraction: of a block's tokens, how many are to be predicted (Devlin et al. 2018, section 3.1: 0.15).
    :param checkpoint_every: steps between checkpoints; 0: only one, after the last step.
    :param keep: checkpoints that stay; older ones are deleted.
    :param resume: go on from the latest checkpoint in ``out``.
    :raises OptionError: in one sentence, for the first option that cannot be.
    """

    text: Path
    out: Path
    model: str = "bert-mini"
    backend: Backend = "stepdown"
    steps: int = 1000
    batch: int = 8
    seq: int = 128
    learning_rate: float = 5e-4
    warmup: int | None = None
    weight_decay: float = 0.01
    clip: float = 1.0
    seed: int = 0
    dtype: str = "float32"
    dropout: float | None = None
    vocabulary: int | None = None
    mask_fraction: float = 0.15
    checkpoint_every: int = 0
    keep: int = 3
    resume: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", Path(self.text))
        object.__setattr__(self, "out", Path(self.out))
        object.__setattr__(self, "dtype", resolve_dtype(self.dtype).name)
        preset = find_preset(self.model)
        object.__setattr__(self, "model", preset.name)
        if self.backend not in BACKENDS:
            raise OptionError(f'backend "{self.backend}" is unknown; accepted are {_quoted(BACKENDS)}.')
        if self.dtype not in TRAINING_DTYPES:
            raise OptionError(f'dtype "{self.dtype}" cannot train; accepted are {_quoted(TRAINING_DTYPES)}.')
        for name, smallest in (("steps", 1), ("batch", 1), ("seq", 4), ("checkpoint_every", 0), ("keep", 1)):
            _check_whole(name, getattr(self, name), smallest)
        _check_whole("seed", self.seed, 0)
        if self.seed >= 2**63:
            raise OptionError(f'"seed" is {self.seed}; accepted are whole numbers from 0 to 2^63 - 1.')
        if self.seq > preset.positions:
            raise OptionError(f'"seq" is {self.seq}; "{self.model}" accepts at most {preset.positions} positions.')
        if self.warmup is not None:
            _check_whole("warmup", self.warmup, 0)
            if self.warmup >= self.steps:
                raise OptionError(f'"warmup" is {self.warmup}; accepted are fewer steps than "steps", {self.steps}.')
        if self.vocabulary is not None:
            _check_whole("vocabulary", self.vocabulary, SMALLEST_VOCABULARY)
        _check_number("learning_rate", self.learning_rate, self.learning_rate > 0, "numbers above 0")
        _check_number("weight_decay", self.weight_decay, self.weight_decay >= 0, "numbers from 0")
        _check_number("clip", self.clip, self.clip > 0, "numbers above 0")
        _check_number("mask_fraction", self.mask_fraction, 0 < self.mask_fraction < 1, "numbers between 0 and 1")
        if self.dropout is not None:
            _check_number("dropout", self.dropout, 0 <= self.dropout < 1, "numbers from 0 up to but not 1")

    @property
    def preset(self) -> Preset:
        """The preset that ``model`` names."""
        return find_preset(self.model)

    @property
    def warmup_steps(self) -> int:
        """Steps of linear warm-up."""
        return self.steps // 10 if self.warmup is None else self.warmup

    @property
    def largest_vocabulary(self) -> int:
        """The most tokens that WordPiece may learn."""
        return self.preset.vocabulary if self.vocabulary is None else self.vocabulary

    def learning_rate_at(self, step: int) -> float:
        """The learning rate of ``step`` (1 to ``steps``): linear up during warm-up, then linear down towards 0."""
        if step <= self.warmup_steps:
            return self.learning_rate * step / self.warmup_steps
        return self.learning_rate * (self.steps - step + 1) / (self.steps - self.warmup_steps)

    def fixed(self) -> dict[str, object]:
        """The options that decide the numbers of a run: a resumed run must have the same."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in _FREE_ON_RESUME}
        return values | {"warmup": self.warmup_steps}


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step: its number from 1, the loss before the update, and what the update was made of."""

    step: int
    loss: float
    learning_rate: float
    gradient_norm: float
    seconds: float
    tokens: int

    @property
    def tokens_per_second(self) -> float:
        """Tokens of this step over its time."""
        return self.tokens / self.seconds


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """What a run left behind.

    ``losses`` has one entry for every step from the first, those before a resume included. ``seconds`` is the time of
    this process's steps but the first, which warms up; ``tokens_per_second`` is at their median. ``peak_memory`` is the
    largest resident size during the steps in bytes, ``None`` where the system does not tell. ``initial_weights`` is a
    SHA-256 of the parameters that the run began with. ``build`` is the folder of the compiled layer.
    """

    losses: tuple[float, ...]
    resumed_from: int
    seconds: float
    tokens_per_second: float
    peak_memory: int | None
    parameters: int
    vocabulary: int
    blocks: int
    initial_weights: str
    checkpoint: Path
    curve_csv: Path
    curve_png: Path
    build: Path | None


def _quoted(names: tuple[str, ...]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def _check_whole(name: str, value: object, smallest: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
        raise OptionError(f'"{name}" is {value!r}; accepted are whole numbers from {smallest}.')


def _check_number(name: str, value: float, valid: bool, accepted: str) -> None:
    if not math.isfinite(value) or not valid:
        raise OptionError(f'"{name}" is {value!r}; accepted are {accepted}.')
