"""A headless Chromium, spoken to over a pipe by its DevTools protocol."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CHROMIUM = next((p for n in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(n))), None)
LIMIT_S = 90.0


class Browser:
    """One page. Calls wait for their answers; the console's errors are in ``complaints``."""

    def __init__(self, profile: Path) -> None:
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()

        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe",
                 f"--user-data-dir={profile}", "--window-size=1280,860", "--no-first-run", "about:blank"]  # fmt: skip
        # The protocol's places are 3 and 4; moved by a process of its own, since a shell may know one digit only.
        code = "import os, sys; i, o, *c = sys.argv[1:]; a, b = os.dup(int(i)), os.dup(int(o)); os.dup2(a, 13);"
        code += "os.dup2(b, 14); os.dup2(13, 3); os.dup2(14, 4); os.execv(c[0], c)"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, str(theirs_in), str(theirs_out), CHROMIUM or "chromium", *flags],
            pass_fds=(theirs_in, theirs_out), start_new_session=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        self._buffer = b""
        self._number = 0
        self._session = ""
        self.complaints: list[str] = []
        page = next(t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)["sessionId"]
        self.call("Runtime.enable")
        self.call("Log.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a command. Raises RuntimeError, TimeoutError."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + LIMIT_S
        while True:
            answer = self._receive(deadline)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
            is_complaint = answer.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded")
            if is_complaint and answer["params"].get("entry", {}).get("level") != "verbose":  # which is advice
                self.complaints.append(json.dumps(answer["params"]))

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            if not select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError("the browser does not answer")
            part = os.read(self._in, 1 << 16)
            if not part:
                raise RuntimeError("the browser ended")
            self._buffer += part
        message, self._buffer = self._buffer.split(b"\0", 1)
        found: dict[str, Any] = json.loads(message)
        return found

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression; promises are awaited."""
        result = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in result:
            raise RuntimeError(str(result["exceptionDetails"]))
        return result["result"].get("value")

    def until(self, script: str) -> None:
        """Wait until an expression is true."""
        self.run(
            "new Promise((done, fail) => { const end = performance.now() + "
            f"{LIMIT_S * 800}; (function look() {{ if ({script}) done(); else if (performance.now() > end) "
            "fail(new Error('never')); else setTimeout(look, 50); })(); })"
        )

    def show(self, *, width: int, height: int = 860, scheme: str = "light") -> None:
        """Take a window's size, and the colours that its user likes."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.call("Emulation.setFocusEmulationEnabled", enabled=True)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def picture(self, place: Path) -> None:
        """Write what is shown, as PNG."""
        place.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def close(self) -> None:
        os.close(self._out)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        os.close(self._in)
