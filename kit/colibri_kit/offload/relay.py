"""A link made slow on purpose: passes bytes both ways at a rate and with a delay.

Used to measure what offloading would give over a link that is not there yet.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from pathlib import Path
from types import TracebackType

_PIECE = 8192
_LISTEN_S = 0.2


class Throttle:
    """Listens on a Unix socket and passes on to another: ``with Throttle(a, b, 30e6, 1e-4): …``.

    Args:
        listen, target: paths of Unix sockets; ``listen`` is made, ``target`` must be there.
        bytes_s: each way, counted apart.
        delay_s: each way.
    """

    def __init__(self, listen: Path, target: Path, bytes_s: float, delay_s: float) -> None:
        self._target, self.bytes_s, self.delay_s = target, bytes_s, delay_s
        self._stop = threading.Event()
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server.bind(str(listen))
        self._server.listen(4)
        self._server.settimeout(_LISTEN_S)
        self._thread = threading.Thread(target=self._accept, daemon=True)

    def __enter__(self) -> Throttle:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._server.close()

    def _accept(self) -> None:
        while not self._stop.is_set():
            try:
                near, _ = self._server.accept()
            except TimeoutError:
                continue
            far = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                far.connect(str(self._target))
            except OSError:
                near.close()
                continue
            for a, b in ((near, far), (far, near)):
                self._pass(a, b)

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        waiting: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()

        def read() -> None:
            free = 0.0  # when the wire is free again
            with contextlib.suppress(OSError):
                while data := source.recv(_PIECE):
                    free = max(free, time.monotonic()) + len(data) / self.bytes_s
                    waiting.put((free + self.delay_s, data))
            waiting.put((0.0, b""))

        def write() -> None:
            with contextlib.suppress(OSError):
                while True:
                    at, data = waiting.get()
                    if not data:
                        break
                    time.sleep(max(0.0, at - time.monotonic()))
                    sink.sendall(data)
            for end in (source, sink):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

        for work in (read, write):
            threading.Thread(target=work, daemon=True).start()
