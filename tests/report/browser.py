"""A headless Chromium that shows one page, driven over its DevTools pipe: no library, no port."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "chromium-headless-shell", "google-chrome", "chrome")
_LIMIT_SEC = 120.0
_OPTIONS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-extensions --mute-audio --remote-debugging-pipe"
)


class Browser:
    """One page.

    ``problems`` are errors and warnings of its console, and uncaught exceptions; ``requests`` are all addresses that it
    asked for.
    """

    def __init__(self, to: int, answers: int) -> None:
        self._to, self._answers, self._number, self._rest = to, answers, 0, b""
        self._session: str | None = None
        self.problems: list[str] = []
        self.requests: list[str] = []

    def open(self, page: Path, *, dark: bool = False, size: tuple[int, int] = (1400, 1000)) -> None:
        """Show it, and wait until it says that it is ready."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Runtime", "Log", "Page", "Network"):
            self.call(f"{domain}.enable")
        metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=page.as_uri())
        deadline = time.monotonic() + _LIMIT_SEC
        while self.run("document.documentElement?.dataset.ready") != "yes":
            assert time.monotonic() < deadline, self.problems
            time.sleep(0.1)

    def run(self, script: str) -> Any:
        """Return the value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def press(self, *keys: str) -> None:
        """Press each key, and wait for two frames, in which its effects are drawn."""
        for key in keys:
            text = {"text": key} if len(key) == 1 else {}
            self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
            self.call("Input.dispatchKeyEvent", type="keyUp", key=key)
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(0))))")

    def drag(self, *points: tuple[float, float]) -> None:
        """Press the button at the first point, move through all, and release it at the last; one point is a click."""
        self._pointer("mouseMoved", *points[0])
        self._pointer("mousePressed", *points[0], button="left", buttons=1, clickCount=1)
        for point in points[1:]:
            self._pointer("mouseMoved", *point, button="left", buttons=1)
        self._pointer("mouseReleased", *points[-1], button="left", clickCount=1)
        self.press()

    def wheel(self, at: tuple[float, float], by: float) -> None:
        self._pointer("mouseWheel", *at, deltaX=0, deltaY=by)
        self.press()

    def click(self, selector: str) -> None:
        box = f"document.querySelector('{selector}').getBoundingClientRect()"
        x, y = self.run(f"[{box}.x + {box}.width / 2, {box}.y + {box}.height / 2]")
        self.drag((x, y))

    def _pointer(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def call(self, method: str, **params: Any) -> Any:
        self._number += 1
        command = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            command["sessionId"] = self._session
        os.write(self._to, json.dumps(command).encode() + b"\0")
        while True:
            message = self._next()
            self._note(message)
            if message.get("id") == self._number:
                assert "error" not in message, message
                return message["result"]

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.problems.append(str(params["exceptionDetails"]))
        elif message.get("method") == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.problems.append(str(params["args"]))
        elif message.get("method") == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(str(params["entry"]))
        elif message.get("method") == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            assert select.select([self._answers], [], [], _LIMIT_SEC)[0], "the browser does not answer"
            more = os.read(self._answers, 1 << 20)
            assert more, "the browser has ended"
            self._rest += more
        text, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message


@contextmanager
def browser(directory: Path) -> Iterator[Browser]:
    """Start a Chromium that writes to an empty ``directory``, or skip the test where none is installed."""
    program = next((path for name in _NAMES if (path := shutil.which(name)) is not None), None)
    if program is None:
        pytest.skip(f"no Chromium here ({', '.join(_NAMES)}): `apt-get install chromium` installs it")
    (commands, to), (answers, out) = os.pipe(), os.pipe()
    # Chromium reads its commands from file 3 and writes to file 4
    command = f'exec 3<&{commands} 4>&{out}; exec "$0" "$@"'
    process = subprocess.Popen(
        ["bash", "-c", command, program, *_OPTIONS.split(), f"--user-data-dir={directory}"],
        pass_fds=(commands, out),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(commands)
    os.close(out)
    try:
        yield Browser(to, answers)
    finally:
        os.close(to)  # it ends when the pipe of its commands does
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait(20)
        os.close(answers)
