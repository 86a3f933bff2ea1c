"""A tunnel's listener when this machine runs out of threads, and with clients that are gone at once."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import Any

import pytest

from colibri_kit.live import forward


class Echo:
    """A board's end that sends back what it gets."""

    def __init__(self) -> None:
        self._near, self._far = socket.socketpair()
        self.closed = False
        self.eof_received: bool | int = False

    def recv(self, nbytes: int) -> bytes:
        piece = self._far.recv(nbytes)
        self.eof_received = not piece
        return piece

    def sendall(self, s: bytes) -> None:
        self._near.sendall(s)

    def shutdown_write(self) -> None:
        self._near.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.closed = True
        for end in (self._near, self._far):
            end.close()


def talk(port: int) -> bytes:
    with socket.create_connection(("127.0.0.1", port), 5) as client:
        client.sendall(b"ping")
        client.shutdown(socket.SHUT_WR)
        got = b""
        while piece := client.recv(100):
            got += piece
        return got


class Few(threading.Thread):
    """Threads of one name cannot be started for a while, as under a limit of processes."""

    refused = ""

    def start(self) -> None:
        if self.refused and self.name == self.refused:
            raise RuntimeError("can't start new thread")
        super().start()


@pytest.mark.parametrize("name", ["tunnel-up", "tunnel-down"])
def test_without_a_thread_one_connection_is_reset_and_the_next_is_carried(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(threading, "Thread", Few)
    dialled: list[Echo] = []

    def dial() -> Echo:
        dialled.append(Echo())
        return dialled[-1]

    carried = forward.Forward(forward.listen(0), dial)
    try:
        monkeypatch.setattr(Few, "refused", name)
        with pytest.raises(OSError, match=r"reset|not connected|pipe"):
            talk(carried.port)
        monkeypatch.setattr(Few, "refused", "")
        assert talk(carried.port) == b"ping"
        end = time.monotonic() + 5
        while carried.active and time.monotonic() < end:
            time.sleep(0.01)
        assert carried.active == 0
        assert all(far.closed for far in dialled)
    finally:
        carried.close()


class Gone:
    """A listener whose first client is gone when it is accepted: some systems refuse every option then."""

    def __init__(self) -> None:
        self._listener = forward.listen(0)
        self._first = True

    def accept(self) -> tuple[Any, Any]:
        near, who = self._listener.accept()
        if self._first:
            self._first = False
            near.close()  # EBADF from setsockopt, where others say EINVAL
        return near, who

    def __getattr__(self, name: str) -> Any:
        return getattr(self._listener, name)


def test_a_client_that_is_gone_when_it_is_accepted_ends_nothing() -> None:
    listener: Any = Gone()
    carried = forward.Forward(listener, Echo)
    try:
        with contextlib.suppress(OSError):
            assert talk(carried.port) == b""
        assert talk(carried.port) == b"ping"
    finally:
        carried.close()


class Flood(Echo):
    """A board's end that sends without end."""

    def recv(self, nbytes: int) -> bytes:
        if self.closed:
            raise EOFError
        return bytes(1 << 26)  # more than any socket takes at once: whoever sends it has to wait


def test_a_client_that_reads_nothing_does_not_outlive_its_link() -> None:
    carried = forward.Forward(forward.listen(0), Flood)
    with contextlib.closing(carried), socket.create_connection(("127.0.0.1", carried.port), 5) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        assert client.recv(1) == b"\0"
        time.sleep(1)  # by now the socket is full, and the thread waits for room
        assert carried.active == 1
        carried.abort_all()
        end = time.monotonic() + 10
        while carried.active:
            assert time.monotonic() < end
            time.sleep(0.05)
        assert not [t for t in threading.enumerate() if t.name in ("tunnel-up", "tunnel-down")]
        with pytest.raises(ConnectionResetError):
            while client.recv(1 << 20):
                pass
