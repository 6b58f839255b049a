"""What asks a command or a run to stop."""

import signal

STOP_SIGNALS: tuple[signal.Signals, ...] = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")
    if hasattr(signal, name)  # Windows lacks the last two
)
"""Ctrl-C, the end of a process or of its terminal, and the warning of a cluster's scheduler."""


def leave_signals_to_parent() -> None:
    """Ignore all stop signals but SIGTERM, which the parent sends when it stops itself."""
    for number in STOP_SIGNALS:
        if number != signal.SIGTERM:
            signal.signal(number, signal.SIG_IGN)


class Stopped(BaseException):
    """Raised by a run whose ``should_stop`` has asked it to, when it has saved a checkpoint."""
