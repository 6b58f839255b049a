"""What asks a run to stop, handled after the current update is finished and saved."""

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from ghostbatch.stop import STOP_SIGNALS, Stopped

REPEATED = 1.0
"""Seconds within which a launcher may repeat a signal that its ranks have already received."""


class Signals:
    """Notes the first signal, for the run to handle between updates; a second acts at once.

    Args:
        launched: whether a launcher such as torchrun passes the terminal's signals on to its ranks.
        should_stop: asked between updates; for runs in other threads, which receive no signals.

    """

    def __init__(
        self, launched: bool = False, should_stop: Callable[[], bool] | None = None
    ) -> None:
        self.noted: int | None = None
        self._should_stop = should_stop
        self._noted_at = 0.0
        self._launched = launched
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> "Signals":
        """Install the handlers, in the main thread only, for signals that are not ignored."""
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                handler = signal.getsignal(number)
                if handler not in (None, signal.SIG_IGN):
                    self._handlers[number] = handler
                    signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Restore the handlers; raise a noted signal that the run did not handle."""
        self._restore()
        if self.noted is not None and kind is None:
            self.raise_noted()

    @property
    def stop(self) -> bool:
        """Whether the run is to save and stop."""
        return self.noted is not None or (self._should_stop is not None and self._should_stop())

    def raise_noted(self) -> None:
        """Raise the noted signal with the original handlers, or `Stopped`, after the checkpoint."""
        if self.noted is None and self._should_stop is not None:
            raise Stopped
        number = self.noted or signal.SIGTERM  # none was noted here: another rank got it
        self.noted = None
        self._restore()
        signal.raise_signal(number)

    def _restore(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers.clear()

    def _note(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.noted is None:
            self.noted, self._noted_at = number, now
        elif not self._launched or now - self._noted_at > REPEATED:
            self.noted = number
            self.raise_noted()
