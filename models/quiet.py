"""DaCe's own warnings, kept from those who call the project.

DaCe warns about what the project does on purpose (a nested graph that does not use every symbol it is given, a buffer
that is written piece by piece), some forty times a layer. None of it helps the caller of ``compile_layer``.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterator
from typing import Any, cast

_THREAD = threading.local()


class _DaceInAQuietThread:
    """Stands for the regular expression of a warning filter: matches modules of DaCe in threads that are quiet."""

    def match(self, module: str) -> bool:
        """Whether a warning from ``module`` is DaCe's and the thread that gives it is inside :func:`quiet_dace`."""
        return getattr(_THREAD, "depth", 0) > 0 and (module == "dace" or module.startswith("dace."))


_FILTER = ("ignore", None, Warning, _DaceInAQuietThread(), 0)
_GUARD = threading.Lock()
_quiet_threads = 0


@contextlib.contextmanager
def quiet_dace() -> Iterator[None]:
    """Ignores warnings that modules of DaCe give in this thread, and no others, whatever the filters say.

    ``warnings.catch_warnings`` would replace the filters of the whole process: it hides, or brings back, warnings of
    other threads, forgets filters that are added meanwhile, and lets every warning that was shown once appear again.
    Here one filter comes in front and is taken away again. A thread that replaces the process's filters by older
    ones (it leaves a ``catch_warnings`` that it entered before) takes it away early.
    """
    global _quiet_threads
    with _GUARD:
        _quiet_threads += 1
        if not (_filters() and _filters()[0] is _FILTER):
            _withdraw()
            _filters().insert(0, _FILTER)
    _THREAD.depth = getattr(_THREAD, "depth", 0) + 1
    try:
        yield
    finally:
        _THREAD.depth -= 1
        with _GUARD:
            _quiet_threads -= 1
            if _quiet_threads == 0:
                _withdraw()


def _filters() -> list[Any]:
    """The filters in force, not a copy."""
    return cast(list[Any], warnings.filters)


def _withdraw() -> None:
    with contextlib.suppress(ValueError):
        _filters().remove(_FILTER)
