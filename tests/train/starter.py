"""Starts ghostbatch again and again without importing torch each time: a fork per command.

Requests come in on stdin and are answered on stdout, one JSON object a line. What is started is a
process like any other: it can be killed, and nothing of it is left in the next.
"""

import json
import os
import signal
import sys
import time
import traceback

import faults
import torch._dynamo  # noqa: F401 (the first optimizer would)

from ghostbatch import cli


def start(argv, stdout, stderr, fault, options):
    """Run one command in a child, after injecting one of `faults` if it is named."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        for path, descriptor in ((os.devnull, 0), (stdout, 1), (stderr, 2)):
            flags = os.O_RDWR if descriptor == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            os.dup2(os.open(path, flags, 0o600), descriptor)
        if fault:
            getattr(faults, fault)(**options)
        sys.argv = ["ghostbatch", *argv]
        cli.main()
        code = 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def wait(pid, seconds):
    """The exit code of a child, negative for a signal; None where it had to be killed."""
    deadline = time.monotonic() + seconds
    late = False
    while not (done := os.waitpid(pid, os.WNOHANG))[0]:
        if not late and time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            late = True
        time.sleep(0.005)
    return None if late else os.waitstatus_to_exitcode(done[1])


if __name__ == "__main__":
    for line in sys.stdin:
        name, arguments = json.loads(line)
        print(json.dumps({"start": start, "wait": wait}[name](*arguments)), flush=True)
