"""The compiled layer as a PyTorch module."""

from stepdown.pipeline.runtime.binding import Binding, load_build
from stepdown.pipeline.runtime.memory import release_memory
from stepdown.pipeline.runtime.module import StepdownLayer

__all__ = ["Binding", "StepdownLayer", "load_build", "release_memory"]
