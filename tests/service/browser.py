"""Headless Chromium for a test, driven by the DevTools protocol over two pipes."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

WORDS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-extensions",
    "--disable-background-networking", "--disable-component-update", "--no-first-run",
    "--disable-sync", "--mute-audio", "--remote-debugging-pipe", "--hide-scrollbars",
)  # fmt: skip


class Browser:
    """One page. ``requests`` are the URLs that it asked for, ``complaints`` what its console says."""

    def __init__(self, width: int = 360, height: int = 740, dark: bool = False) -> None:
        program = shutil.which("chromium") or shutil.which("chromium-browser")
        assert program, "chromium is missing: apt-get install chromium"
        self.folder = Path(tempfile.mkdtemp(prefix="colibri-browser-"))
        to_read, self._to = os.pipe()
        self._from, from_write = os.pipe()

        def descriptors() -> None:  # the protocol is spoken on 3 and 4
            high = [os.dup(to_read), os.dup(from_write)]
            os.dup2(high[0], 3)
            os.dup2(high[1], 4)
            os.set_inheritable(3, True)
            os.set_inheritable(4, True)

        with (self.folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [program, *WORDS, f"--user-data-dir={self.folder}", "about:blank"],
                preexec_fn=descriptors, close_fds=False, stdout=log, stderr=log,
            )  # fmt: skip
        os.close(to_read)
        os.close(from_write)
        self._next, self._rest, self._session = 0, b"", ""
        self.requests: list[str] = []
        self.complaints: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=2, mobile=True
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._to)
        os.close(self._from)
        shutil.rmtree(self.folder, ignore_errors=True)

    # ---- the protocol --------------------------------------------------------

    def _message(self, seconds: float) -> dict[str, Any] | None:
        end = time.monotonic() + seconds
        while b"\0" not in self._rest:
            left = end - time.monotonic()
            if left <= 0 or not select.select([self._from], [], [], left)[0]:
                return None
            data = os.read(self._from, 1 << 20)
            if not data:
                raise AssertionError(f"chromium ended: {(self.folder / 'log').read_text()[-2000:]}")
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\0")
        doc: dict[str, Any] = json.loads(line)
        return doc

    def _note(self, doc: dict[str, Any]) -> None:
        params = doc.get("params", {})
        match doc.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(params["exceptionDetails"]))
            case "Log.entryAdded":
                self.complaints.append(json.dumps(params["entry"]))
            case "Runtime.consoleAPICalled":
                self.complaints.append(json.dumps(params["args"]))

    def call(self, method: str, **params: Any) -> Any:
        self._next += 1
        doc = {"id": self._next, "method": method, "params": params}
        if self._session:
            doc["sessionId"] = self._session
        os.write(self._to, json.dumps(doc).encode() + b"\0")
        while True:
            got = self._message(60)
            assert got is not None, f"no answer to {method}"
            if got.get("id") == self._next:
                assert "error" not in got, f"{method}: {got}"
                return got["result"]
            self._note(got)

    # ---- a page ----------------------------------------------------------------

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def run(self, code: str) -> Any:
        """The value of a JavaScript expression."""
        got = self.call("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in got, got
        return got["result"].get("value")

    def until(self, true: Callable[[], Any], seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while True:
            self.run("0")  # what has happened meanwhile is noted
            if true():
                return
            assert time.monotonic() < end, f"it did not happen: {self.run('document.body.innerText')}"
            time.sleep(0.05)

    def picture(self, path: Path) -> None:
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        got = self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(got["data"]))
