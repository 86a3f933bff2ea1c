"""Starts `colibri serve` for a test, speaks with it raw, freezes its engine's thread."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import engine_build as eb
import hostile

#: "address" or "thread": all services of a test run are built so
SANITIZE = os.environ.get("COLIBRI_SANITIZE", "")
REPORTS = ("AddressSanitizer", "LeakSanitizer", "ThreadSanitizer", "runtime error:")

CHATML = {
    "template": "parts",
    "system_default": "",
    "first": "",
    "prefix": {"system": "<|s|>", "user": "<|u|>", "assistant": "<|a|>"},
    "suffix": {"system": "\n", "user": "\n", "assistant": "\n"},
    "generation": "<|a|>",
}


def with_chat(model: Path, out: Path, **changes: Any) -> Path:
    """A copy of a model whose manifest has a chat template."""
    if not out.exists():
        shutil.copytree(model, out)
        manifest = json.loads((out / "manifest.json").read_text())
        manifest["chat"] = {**CHATML, **changes}
        (out / "manifest.json").write_text(json.dumps(manifest))
    return out


def tool(sanitizer: str = "") -> Path:
    """`colibri`, with AddressSanitizer and UndefinedBehaviorSanitizer, or with ThreadSanitizer."""
    if not sanitizer:
        return eb.tool()
    extra, link = hostile.SANITIZE[sanitizer]
    sources = [*eb.engine_sources(), *eb.cli_sources()]
    return eb._link(sources, (*eb._macros(), *extra), link, f"colibri-{sanitizer}")


class Service:
    """A running service. ``log()`` are its JSON lines so far.

    ``group``: in a process group of its own, as a terminal's job is. A sanitizer's report in its journal
    fails the test when the service ends.
    """

    def __init__(
        self,
        model: Path,
        *options: str,
        env: dict[str, str] | None = None,
        sanitizer: str = SANITIZE,
        group: bool = False,
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="colibri-serve-"))
        self.journal = self.folder / "journal"
        listen = () if "--listen" in options else ("--listen", "127.0.0.1:0")
        more = {**(hostile.ENV if sanitizer else {}), **(env or {})}
        command = [str(tool(sanitizer)), "serve", "--model", str(model), "--log", "json", "--threads", "1"]
        with self.journal.open("wb") as out:
            self.process = subprocess.Popen(
                [*command, *listen, *options],
                stderr=out,
                env={**os.environ, **more},
                start_new_session=group,
            )
        self.port = 0

    def __enter__(self) -> Service:
        self.port = int(self.wait_for("ready")["port"])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        said = self.journal.read_text(errors="replace")
        shutil.rmtree(self.folder, ignore_errors=True)
        assert not any(word in said for word in REPORTS), said[-6000:]

    def log(self, event: str | None = None) -> list[dict[str, Any]]:
        """Whole lines that are JSON; those of one event if it is named."""
        out = []
        for line in self.journal.read_text().split("\n")[:-1]:
            with contextlib.suppress(json.JSONDecodeError):
                doc = json.loads(line)
                if event is None or doc.get("event") == event:
                    out.append(doc)
        return out

    def wait_for(self, event: str, count: int = 1, seconds: float = 60) -> dict[str, Any]:
        """The ``count``-th line of an event."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            lines = self.log(event)
            if len(lines) >= count:
                return lines[count - 1]
            if self.process.poll() is not None and len(self.log(event)) < count:
                raise AssertionError(f"it ended with {self.process.returncode}: {self.journal.read_text()}")
            time.sleep(0.02)
        raise AssertionError(f"no {event!r} within {seconds} s: {self.journal.read_text()}")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Of the process that answers, also under --supervise."""
        return int(self.log("ready")[-1]["pid"])

    def connect(self, timeout: float = 30) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout)

    def raw(self, data: bytes, timeout: float = 30) -> bytes:
        """Sends bytes on a connection of its own and reads until the service closes it."""
        with self.connect(timeout) as s:
            with contextlib.suppress(ConnectionError):
                s.sendall(data)
            return read_all(s)

    def get(self, path: str, **headers: str) -> tuple[int, bytes]:
        return parse(self.raw(request("GET", path, **headers)))

    def json(self, path: str, **headers: str) -> Any:
        status, body = self.get(path, **headers)
        assert status == 200, body
        return json.loads(body)

    def post(self, path: str, doc: Any, **headers: str) -> tuple[int, Any]:
        body = doc if isinstance(doc, bytes) else json.dumps(doc).encode()
        status, answer = parse(self.raw(request("POST", path, body, **headers)))
        return status, json.loads(answer) if answer[:1] == b"{" else answer

    def complete(self, prompt: Any, **more: Any) -> Any:
        status, doc = self.post("/v1/completions", {"prompt": prompt, **more})
        assert status == 200, doc
        return doc

    def metrics(self) -> dict[str, float]:
        return self._figures(self.get("/metrics")[1].decode())

    def metrics_with(self, token: str) -> dict[str, float]:
        return self._figures(self.get("/metrics", Authorization=f"Bearer {token}")[1].decode())

    @staticmethod
    def _figures(text: str) -> dict[str, float]:
        pairs = (line.rsplit(" ", 1) for line in text.splitlines() if line and line[0] != "#")
        return {name.removeprefix("colibri_"): float(value) for name, value in pairs}

    def rss_anon(self) -> int:
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
        raise AssertionError("no RssAnon")


def request(method: str, path: str, body: bytes = b"", **headers: str) -> bytes:
    """One request that closes its connection."""
    head = {"Host": "localhost", "Connection": "close"}
    if method == "POST":
        head |= {"Content-Type": "application/json", "Content-Length": str(len(body))}
    head |= {k.replace("_", "-"): v for k, v in headers.items()}
    lines = [f"{method} {path} HTTP/1.1", *(f"{k}: {v}" for k, v in head.items()), "", ""]
    return "\r\n".join(lines).encode() + body


def read_all(s: socket.socket) -> bytes:
    out = b""
    with contextlib.suppress(ConnectionResetError):
        while data := s.recv(65536):
            out += data
    return out


def parse(answer: bytes) -> tuple[int, bytes]:
    """(status, body) of one answer; chunks put together, lengths checked."""
    head, _, body = answer.partition(b"\r\n\r\n")
    status = int(head.split()[1])
    if b"Transfer-Encoding: chunked" in head:
        out, ended = b"", False
        while body and not ended:
            size, _, body = body.partition(b"\r\n")
            n = int(size, 16)
            assert body[n : n + 2] == b"\r\n"
            out, body, ended = out + body[:n], body[n + 2 :], n == 0
        assert ended, "the last chunk is missing"
        return status, out
    length = [line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
    assert len(length) == 1, head
    assert int(length[0].split(b":")[1]) == len(body)
    return status, body


def read_answer(s: socket.socket) -> tuple[int, bytes]:
    """One answer with Content-Length of a kept connection."""
    head = b""
    while b"\r\n\r\n" not in head:
        head += s.recv(1)
    n = int(next(x for x in head.split(b"\r\n") if x.startswith(b"Content-Length:")).split(b":")[1])
    body = b""
    while len(body) < n:
        body += s.recv(n - len(body))
    return int(head.split()[1]), body


# ---- an engine's thread that makes no progress -------------------------------

_SEIZE, _INTERRUPT, _DETACH = 0x4206, 0x4207, 17
_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


def _ptrace(what: int, tid: int) -> None:
    if _libc.ptrace(what, tid, None, None) != 0:
        raise OSError(ctypes.get_errno(), f"ptrace {what:#x}")


def engine_thread(pid: int) -> int:
    for task in Path(f"/proc/{pid}/task").iterdir():
        if (task / "comm").read_text().strip() == "colibri-engine":
            return int(task.name)
    raise AssertionError("no engine thread")


def _stop(tid: int) -> None:
    _ptrace(_SEIZE, tid)
    _ptrace(_INTERRUPT, tid)
    os.waitpid(tid, 0x40000000)  # __WALL


def _release(tid: int) -> None:
    try:
        _ptrace(_DETACH, tid)
    except OSError:  # dead: its process is not gone before we have taken note
        with contextlib.suppress(OSError):
            os.waitpid(tid, 0x40000000)


@contextlib.contextmanager
def frozen(service: Service) -> Iterator[None]:
    """The engine's thread stands still as if a read never came back; all others run on.

    A debugger may stop it inside a short critical section, which no read is in: then once more.
    """
    tid = engine_thread(service.pid)
    for _ in range(50):
        _stop(tid)
        try:
            service.raw(request("GET", "/health"), timeout=0.5)
            break
        except TimeoutError:
            _release(tid)
            time.sleep(0.001)
    else:
        raise AssertionError("the service does not answer without its engine's thread")
    try:
        yield
    finally:
        _release(tid)
