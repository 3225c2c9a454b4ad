"""A headless Chromium, controlled over two pipes.

The pipes carry its DevTools protocol: JSON messages that end with a zero byte.
"""

import base64
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WAIT_S = 60.0
# Chromium reads requests from descriptor 3 and writes answers to 4. Move our pipes there.
_BEGIN = """
import fcntl, os, sys
high = [fcntl.fcntl(int(fd), fcntl.F_DUPFD, 64) for fd in sys.argv[1:3]]
for number, fd in enumerate(high, 3):
    os.dup2(fd, number)
    os.close(fd)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Chromium:
    """A browser with one page; `errors` has the errors that its console logged."""

    def __init__(self, path: str, *flags: str) -> None:
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        to_read, self._in = os.pipe()
        self._out, to_write = os.pipe()
        asked = [
            "--headless=new",
            "--no-sandbox",  # it has none as root in a container
            "--disable-gpu",
            "--hide-scrollbars",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--disable-background-networking",
            "--force-color-profile=srgb",
            "--remote-debugging-pipe",
            f"--user-data-dir={self._profile.name}",
            *flags,
        ]
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                _BEGIN,
                str(to_read),
                str(to_write),
                path,
                *asked,
                "about:blank",
            ],
            pass_fds=(to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self._data = b""
        self._number = 0
        self._session = ""
        self.errors: list[str] = []
        (target,) = [
            t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page"
        ]
        attached = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)
        self._profile.cleanup()

    # ---- the protocol --------------------------------------------------------------------

    def call(self, method: str, **arguments: Any) -> Any:
        self._number += 1
        request = {"id": self._number, "method": method, "params": arguments}
        if self._session:
            request["sessionId"] = self._session
        os.write(self._in, json.dumps(request).encode() + b"\0")
        while True:
            message = self._read()
            if message.get("id") == self._number:
                assert "error" not in message, f"{method}: {message['error']}"
                return message["result"]
            self._note(message)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._data:
            assert select.select([self._out], [], [], WAIT_S)[0], "the browser does not answer"
            data = os.read(self._out, 1 << 20)
            assert data, "the browser has ended"
            self._data += data
        message, _, self._data = self._data.partition(b"\0")
        parsed: dict[str, Any] = json.loads(message)
        return parsed

    def _note(self, message: dict[str, Any]) -> None:
        method, params = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
            self.errors.append(str([one.get("value") for one in params["args"]]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")

    # ---- the page ------------------------------------------------------------------------

    def size(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def scheme(self, name: str) -> None:
        """Set the preferred color scheme, "light" or "dark"."""
        self.call(
            "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}]
        )

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def value(self, expression: str) -> Any:
        result = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, f"{expression}: {result['exceptionDetails']}"
        return result["result"].get("value")

    def until(self, expression: str, holds: Callable[[Any], bool] = bool) -> Any:
        end = time.monotonic() + WAIT_S
        while not holds(value := self.value(expression)):
            assert time.monotonic() < end, f"{expression} is {value!r}; errors: {self.errors}"
            time.sleep(0.05)
        return value

    def type(self, text: str) -> None:
        """Type text into the focused element."""
        self.call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        codes = {"Enter": (13, "\r"), "Tab": (9, ""), "ArrowLeft": (37, "")}
        code, text = codes[key]
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, text=text
            )

    def picture(self, path: Path, top: float = 0, height: float = 0, scale: float = 1.0) -> None:
        """Save a picture of the page, or of a part of it given in pixels."""
        box = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {
            "x": 0,
            "y": top,
            "width": box["width"],
            "height": height or box["height"] - top,
            "scale": scale,
        }
        result = self.call(
            "Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True
        )
        path.write_bytes(base64.b64decode(result["data"]))
