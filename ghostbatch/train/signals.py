"""SIGINT and SIGTERM while a run goes: they wait until the update is done and saved."""

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

REPEATED = 1.0
"""Seconds within which a launcher may pass on what its ranks have received already."""


class Signals:
    """Notes a first signal, for the run to answer between two updates; a second acts at once.

    Args:
        launched: whether a launcher such as torchrun repeats the terminal's signals to its ranks.

    """

    def __init__(self, launched: bool = False) -> None:
        self.noted: int | None = None
        self._noted_at = 0.0
        self._launched = launched
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> "Signals":
        """Listen, where Python allows it: in the main thread, to what is not ignored."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                handler = signal.getsignal(number)
                if handler not in (None, signal.SIG_IGN):
                    self._handlers[number] = handler
                    signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave the signals to whoever had them before; one that came too late to wait, too."""
        self._let_go()
        if self.noted is not None and kind is None:
            self.follow()

    def follow(self) -> None:
        """Let the noted signal take its usual course, now that everything is saved."""
        number = self.noted or signal.SIGTERM  # another rank's: this one is to end with it
        self.noted = None
        self._let_go()
        signal.raise_signal(number)

    def _let_go(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers.clear()

    def _note(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.noted is None:
            self.noted, self._noted_at = number, now
        elif not self._launched or now - self._noted_at > REPEATED:
            self.noted = number
            self.follow()
