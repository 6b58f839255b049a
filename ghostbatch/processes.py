"""A process that ends with the one that started it."""

import ctypes
import os
import select
import signal
import sys

PR_SET_PDEATHSIG = 1
"""From linux/prctl.h: which signal the kernel sends when the parent is gone."""


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent, which holds its stdin, is gone.

    Works in every phase, also during imports that keep other threads waiting. Only Linux has it.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    stdin = select.poll()
    stdin.register(sys.stdin.fileno(), 0)
    if stdin.poll(0):  # hung up: the parent was gone before
        os._exit(1)
