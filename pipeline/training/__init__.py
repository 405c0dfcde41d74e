"""Masked-language-model training of BERT on a text file: data, model, loop, checkpoints, loss curve.

Importing this package needs none of the packages of the extra "train"; :func:`train` does.
"""

from collections.abc import Callable

from torch import nn

from stepdown.models.definition import EncoderLayer
from stepdown.models.errors import OptionError
from stepdown.pipeline.training.errors import CheckpointError, TextError, TrainingError
from stepdown.pipeline.training.options import BACKENDS, StepRecord, TrainingOptions, TrainingResult

__all__ = [
    "BACKENDS",
    "CheckpointError",
    "StepRecord",
    "TextError",
    "TrainingError",
    "TrainingOptions",
    "TrainingResult",
    "train",
]

_EXTRA = ("transformers", "tokenizers", "safetensors", "matplotlib")


def train(
    options: TrainingOptions,
    progress: bool = True,
    *,
    make_layer: Callable[[EncoderLayer], nn.Module] | None = None,
    on_step: Callable[[StepRecord], None] | None = None,
) -> TrainingResult:
    """Trains as ``options`` say and returns what came out.

    An interrupt (Ctrl-C) ends the run after the step in progress, with a checkpoint; a second one ends it at once.

    :param progress: show a progress bar on the standard error stream.
    :param make_layer: makes one encoder layer from its definition; by default one compiled layer is shared by all.
    :param on_step: called after every step.
    :raises OptionError: when an option cannot be, or a package of the extra "train" is missing.
    :raises TextError: when the text cannot be read or is too small.
    :raises CheckpointError: when ``options.out`` cannot be written, holds another run, or has nothing to resume from.
    :raises TrainingError: when the loss is no longer finite.
    """
    try:
        from stepdown.pipeline.training.loop import run  # noqa: PLC0415 (optional dependencies)
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.partition(".")[0] not in _EXTRA:
            raise
        raise OptionError(
            f'training needs the package "{missing.name}", which is not installed; install "stepdown[train]".'
        ) from None
    return run(options, progress=progress, make_layer=make_layer, on_step=on_step)
