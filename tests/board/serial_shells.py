"""Real shells on pseudo-terminals, served on a loopback port as a serial console would be."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import socket
import struct
import termios
import threading
from collections.abc import Mapping, Sequence


class PtyShell:
    """``argv`` on a terminal of 80 columns; whoever connects to ``port`` has its keyboard.

    A new connection meets the same shell, as with a cable that was pulled.
    """

    def __init__(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        self.pid, self._master = pty.fork()
        if self.pid == 0:
            os.execvpe(argv[0], list(argv), dict(env))
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self._listen = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listen.getsockname()[1]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def inject(self, text: bytes) -> None:
        """Appears on the console as a kernel message does: not typed, not by a program."""
        self._noise = text

    _noise = b""

    def _serve(self) -> None:
        client: socket.socket | None = None
        while not self._stop.is_set():
            sources: list[object] = [self._listen, self._master, *([client] if client else [])]
            ready, _, _ = select.select(sources, [], [], 0.05)
            with contextlib.suppress(OSError):
                if self._noise and client:
                    client.sendall(self._noise)
                    self._noise = b""
                if self._listen in ready:
                    if client:
                        client.close()
                    client, _ = self._listen.accept()
                    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if self._master in ready:
                    data = os.read(self._master, 4096)
                    if client:
                        client.sendall(data)
            if client and client in ready:
                try:
                    data = client.recv(4096)
                except OSError:
                    data = b""
                if not data:
                    client.close()
                    client = None
                else:
                    _write_all(self._master, data)
        if client:
            client.close()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(5)
        self._listen.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        os.close(self._master)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def _write_all(fd: int, data: bytes) -> None:
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(fd, data) :]
