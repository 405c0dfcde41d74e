"""Ctrl-C that waits for the end of a step."""

import signal
import threading
from types import FrameType


class Interrupt:
    """A context in which the first interrupt only sets ``requested``; a second one raises KeyboardInterrupt.

    Outside the main thread, where Python delivers no signals, it does nothing.
    """

    def __init__(self) -> None:
        self.requested = False
        self._before: signal.Handlers | object = None
        self._installed = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._note)
            self._installed = True
        return self

    def __exit__(self, *_: object) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, self._before)  # type: ignore[arg-type]
