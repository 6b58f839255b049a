"""The signals that ask a command or a run to stop."""

import signal

STOP_SIGNALS: tuple[signal.Signals, ...] = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")
    if hasattr(signal, name)  # Windows lacks the last two
)
"""Ctrl-C, the end of a process or of its terminal, and the warning of a cluster's scheduler."""
