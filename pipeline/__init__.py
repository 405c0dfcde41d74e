"""What runs when: compiler, build cache, PyTorch runtime, training and the command line."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepdown.pipeline.compiler import CompiledLayer, compile_layer

__all__ = ["CompiledLayer", "compile_layer"]


def __getattr__(name: str) -> Any:
    """Import the compiler when it is asked for: it brings DaCe and PyTorch, which take seconds."""
    if name in __all__:
        return getattr(importlib.import_module("stepdown.pipeline.compiler"), name)
    raise AttributeError(f'module "{__name__}" has no attribute "{name}"')
