"""A real browser for tests: headless Chromium, driven by the DevTools protocol over a pipe."""

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--no-first-run", "--hide-scrollbars"),
    *("--disable-dev-shm-usage", "--remote-debugging-pipe"),
)
SECONDS = 120.0
"""Limit of each command; a busy machine may be slow."""


def find_chromium():
    """Return the path of a Chromium, or None."""
    return shutil.which("chromium") or shutil.which("google-chrome")


class Browser:
    """One browser with one tab."""

    def __init__(self):
        self._profile = tempfile.mkdtemp(prefix="chromium-")
        command_read, self._write = os.pipe()
        self._read, event_write = os.pipe()
        # Chromium reads commands from descriptor 3 and writes to descriptor 4.
        moved = f'exec "$@" 3<&{command_read} 4>&{event_write}'
        flags = (*FLAGS, f"--user-data-dir={self._profile}", "about:blank")
        self._process = subprocess.Popen(
            ["/bin/bash", "-c", moved, "bash", find_chromium(), *flags],
            pass_fds=(command_read, event_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(command_read)
        os.close(event_write)
        self._buffer, self._count = b"", 0
        self.problems, self.requests = [], []
        (target,) = (
            t for t in self.send("Target.getTargets")["targetInfos"] if t["type"] == "page"
        )
        self._session = None
        self._session = self.send(
            "Target.attachToTarget", targetId=target["targetId"], flatten=True
        )["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method, **params):
        """Send a command; return its result, and note the events that come before it."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if getattr(self, "_session", None):
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        limit = time.monotonic() + SECONDS
        while True:
            answer = self._receive(limit)
            if answer.get("id") == self._count:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self._note(answer)

    def _receive(self, limit):
        while b"\0" not in self._buffer:
            ready, *_ = select.select([self._read], [], [], max(0, limit - time.monotonic()))
            received = os.read(self._read, 2**20) if ready else b""
            if not received:
                raise RuntimeError("Chromium does not answer")
            self._buffer += received
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _note(self, event):
        method, params = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.problems.append(json.dumps(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(json.dumps(params["entry"]))
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def open(self, path, width=1200, height=900, dark=False):
        """Open a file in a window of that size, and wait until its figures are drawn."""
        self.problems, self.requests = [], []
        self.send(
            "Emulation.setDeviceMetricsOverride",
            **{"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500},
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.send("Page.navigate", url=Path(path).resolve().as_uri())
        self.wait("document.body && document.body.dataset.drawn === 'yes'")

    def evaluate(self, expression):
        """Return the value of an expression; wait for a promise."""
        found = self.send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in found:
            raise RuntimeError(json.dumps(found["exceptionDetails"]))
        return found["result"].get("value")

    def wait(self, condition):
        """Wait until an expression holds."""
        limit = time.monotonic() + SECONDS
        while not self.evaluate(f"!!({condition})"):
            assert time.monotonic() < limit, f"never: {condition}"
            time.sleep(0.05)

    def middle(self, selector):
        """Scroll an element into view; return the place of its middle."""
        return self.evaluate(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'center'}); const b = e.getBoundingClientRect();"
            "return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )

    def mouse(self, x, y, click=False):
        """Move the mouse, and click."""
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        for kind in ("mousePressed", "mouseReleased") if click else ():
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def screenshot(self, path):
        """Write a picture of the whole page."""
        found = self.send("Page.captureScreenshot", captureBeyondViewport=True)
        Path(path).write_bytes(base64.b64decode(found["data"]))

    def close(self):
        """End the browser, and remove its profile."""
        os.close(self._write)  # it ends with its pipe
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, 9)
            self._process.wait()
        os.close(self._read)
        shutil.rmtree(self._profile, ignore_errors=True)
