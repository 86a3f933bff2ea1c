"""What tunnel and top are tested with: the real service, a server that does as the test says,
and the verbs as processes of their own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
for _path in (ROOT / "tests" / "unit", ROOT):
    if str(_path) not in sys.path:
        sys.path.insert(0, str(_path))

HEALTH = b'{"status":"ok","model":"said","golden":"00"}'


def small_chat(folder: Path) -> Path:
    """The small model with a chat template, made once in ``folder``."""
    from tests.service.small import small_chat_model

    made = folder / "served"
    if not (made / "chat.coli").exists():
        made.mkdir(exist_ok=True)
        return small_chat_model(made)
    return made / "chat.coli"


class Verb:
    """``colibri-kit ARGS`` as a process; ``out`` and ``err`` grow while it runs."""

    def __init__(self, *args: object, env: dict[str, str] | None = None) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="ck-verb-")
        self._out, self._err = Path(self.folder.name, "out"), Path(self.folder.name, "err")
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.child = subprocess.Popen(
                [sys.executable, "-m", "colibri_kit", *map(str, args)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**os.environ, **(env or {})},
            )

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    def lines(self) -> list[Any]:
        """The whole lines of stdout as JSON."""
        return [json.loads(line) for line in self.out.split("\n")[:-1]]

    def until(self, true: Callable[[], Any], what: str, seconds: float = 60) -> Any:
        """Waits for something that ``true`` gives."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if found := true():
                return found
            if self.child.poll() is not None:
                if found := true():
                    return found
                break
            time.sleep(0.05)
        raise AssertionError(f"no {what}; status {self.child.poll()}\n{self.out}\n{self.err}")

    def interrupt(self) -> int:
        """Ctrl-C; the exit status."""
        self.child.send_signal(signal.SIGINT)
        return self.child.wait(30)

    def __enter__(self) -> Verb:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.child.poll() is None:
            self.child.kill()
        self.child.wait()
        self.folder.cleanup()


class Said:
    """A server on loopback: ``/health`` as the service's, everything else as ``handler`` says."""

    def __init__(self, handler: Callable[[socket.socket, bytes], None]) -> None:
        self._handler = handler
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                threading.Thread(target=self._one, args=(sock,), daemon=True).start()

    def _one(self, sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError):
            head = b""
            while b"\r\n\r\n" not in head and (piece := sock.recv(4096)):
                head += piece
            if head.startswith(b"GET /health "):
                sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(HEALTH), HEALTH))
            elif head:
                self._handler(sock, head)

    def __enter__(self) -> Said:
        return self

    def __exit__(self, *exc: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
