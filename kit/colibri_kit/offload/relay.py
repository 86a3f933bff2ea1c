"""Relays between an engine and a module, on Unix sockets; one makes the link slow on purpose.

The throttle shows what offloading would give over a link that is not there yet. Tests derive relays
that do harm.
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
_LISTEN_S = 0.1
TO_MODULE, TO_BOARD = 0, 1


class Relay:
    """Listens on a Unix socket; each connection goes on to another, each way through :meth:`carry`.

    Args:
        listen, target: paths of Unix sockets; ``listen`` is made, ``target`` need not be there yet.
    """

    def __init__(self, listen: Path, target: Path) -> None:
        self._target = target
        self._stop = threading.Event()
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server.bind(str(listen))
        self._server.listen(8)
        self._server.settimeout(_LISTEN_S)
        self._thread = threading.Thread(target=self._accept, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """No new connection; those that are there go on until an end closes."""
        self._stop.set()
        self._thread.join()
        self._server.close()

    def __enter__(self) -> Relay:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

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
            for a, b, way in ((near, far, TO_MODULE), (far, near, TO_BOARD)):
                threading.Thread(target=self._pass, args=(a, b, way), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, way: int) -> None:
        with contextlib.suppress(OSError):
            self.carry(source, sink, way)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def carry(self, source: socket.socket, sink: socket.socket, way: int) -> None:
        """Passes bytes on until the source ends. OSErrors end it, too."""
        del way
        while data := source.recv(_PIECE):
            sink.sendall(data)


class Throttle(Relay):
    """Passes bytes on at a rate and with a delay: ``with Throttle(a, b, 30e6, 1e-4): …``.

    Args:
        bytes_s: each way, counted apart.
        delay_s: each way.
    """

    def __init__(self, listen: Path, target: Path, bytes_s: float, delay_s: float) -> None:
        super().__init__(listen, target)
        self.bytes_s, self.delay_s = bytes_s, delay_s

    def carry(self, source: socket.socket, sink: socket.socket, way: int) -> None:
        waiting: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()

        def read() -> None:
            free = 0.0  # when the wire is free again
            with contextlib.suppress(OSError):
                while data := source.recv(_PIECE):
                    free = max(free, time.monotonic()) + len(data) / self.bytes_s
                    waiting.put((free + self.delay_s, data))
            waiting.put((0.0, b""))

        threading.Thread(target=read, daemon=True).start()
        while True:
            at, data = waiting.get()
            if not data:
                return
            time.sleep(max(0.0, at - time.monotonic()))
            sink.sendall(data)
