"""A TCP proxy before a serial console that loses bytes, adds garbage, throttles, or is cut."""

from __future__ import annotations

import random
import select
import socket
import threading
import time


class Proxy:
    """Listens on a loopback port and passes bytes to ``target``, one connection at a time.

    Args:
        loss: probability that a byte is dropped, each way.
        rate: bytes a second each way at most, 0 = no limit.
        cut_after: bytes towards the board after which both ends are closed once, 0 = never.
        seed: of the losses.
    """

    def __init__(
        self, target: int, *, loss: float = 0.0, rate: float = 0.0, cut_after: int = 0, seed: int = 1
    ) -> None:
        self.target, self.loss, self.rate, self.cut_after = target, loss, rate, cut_after
        self.dropped = self.passed = self.cuts = 0
        self._random = random.Random(seed)
        self._listen = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listen.getsockname()[1]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"socket://127.0.0.1:{self.port}"

    def close(self) -> None:
        self._stop.set()
        self._listen.close()
        self._thread.join(5)

    def _serve(self) -> None:
        while not self._stop.is_set():
            ready, _, _ = select.select([self._listen], [], [], 0.1)
            if not ready:
                continue
            try:
                client, _ = self._listen.accept()
                board = socket.create_connection(("127.0.0.1", self.target))
            except OSError:
                continue
            for end in (client, board):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with client, board:
                self._pass(client, board)

    def _pass(self, client: socket.socket, board: socket.socket) -> None:
        towards = 0
        while not self._stop.is_set():
            ready, _, _ = select.select([client, board], [], [], 0.1)
            for end in ready:
                try:
                    data = end.recv(4096)
                except OSError:
                    return
                if not data:
                    return
                if end is client:
                    towards += len(data)
                    if self.cut_after and towards > self.cut_after:
                        self.cut_after = 0
                        self.cuts += 1
                        return
                if self.rate:
                    time.sleep(len(data) / self.rate)
                kept = bytes(b for b in data if self._random.random() >= self.loss) if self.loss else data
                self.dropped += len(data) - len(kept)
                self.passed += len(kept)
                try:
                    (board if end is client else client).sendall(kept)
                except OSError:
                    return
