"""What can go wrong in training, beside options that do not exist. A message is one sentence, as everywhere."""

from stepdown.models.errors import StepdownError


class TextError(StepdownError, ValueError):
    """The training text cannot be read, is not UTF-8, or is too small for one batch."""


class CheckpointError(StepdownError, OSError):
    """A checkpoint is missing, damaged, cannot be written, or belongs to a run with other options."""


class TrainingError(StepdownError, RuntimeError):
    """A run that cannot go on, such as a loss that is no longer finite."""
