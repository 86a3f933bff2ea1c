"""A listener on this machine's loopback whose connections are carried to a board.

Two threads a connection, one each way, so that a slow side holds up only itself. Bytes
are passed on as they come: nothing is collected, kept or logged. The end of one direction
is passed on alone; a connection whose link breaks is reset, never ended as if whole.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Protocol

from colibri_kit.errors import KitError, UsageError

#: Bytes moved at a time, at most.
PIECE_BYTES = 1 << 16
#: How soon a broken connection is noticed while its client reads nothing.
_PATIENCE_SECONDS = 0.5
_DONT_WAIT = getattr(socket, "MSG_DONTWAIT", 0)  # not on Windows, where a send after select suffices
#: A port that a service of ours is usually behind.
USUAL_PORT = 8080


class Far(Protocol):
    """The board's end of a connection: a paramiko channel, or anything that does the same."""

    closed: bool
    eof_received: bool | int

    def recv(self, nbytes: int) -> bytes: ...
    def sendall(self, s: bytes) -> object: ...
    def shutdown_write(self) -> None: ...
    def close(self) -> None: ...


def listen(port: int | None) -> socket.socket:
    """A listening socket on 127.0.0.1: at ``port``, or at 8080 and else wherever is room.

    Raises:
        UsageError: the named port is taken or may not be used.
    """
    for wanted in (USUAL_PORT, 0) if port is None else (port,):
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            if os.name == "posix":  # elsewhere it would share the port with its owner
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(("127.0.0.1", wanted))
            sock.listen(128)
            return sock
        except OSError as err:
            sock.close()
            if port is not None or wanted == 0:
                raise UsageError(
                    f"cannot listen on 127.0.0.1:{wanted}: {err.strerror}",
                    hint="leave --local out for a free port, or name another",
                    code="CK-TUNNEL-LOCAL",
                ) from err
    raise AssertionError


class Forward:
    """Accepts on ``listener`` and carries each connection over ``dial()`` until :meth:`close`.

    Args:
        dial: connects at the board; a KitError resets the local connection.
        moved: told whenever bytes came from the board.
    """

    def __init__(
        self, listener: socket.socket, dial: Callable[[], Far], moved: Callable[[], None] = lambda: None
    ) -> None:
        self._listener, self._dial, self._moved = listener, dial, moved
        self._lock = threading.Lock()
        self._open: set[_Pair] = set()
        self._closed = False
        self.carried = 0  # connections so far
        threading.Thread(target=self._accept, name="tunnel-accept", daemon=True).start()

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    @property
    def active(self) -> int:
        with self._lock:
            return len(self._open)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(0.2)  # out of descriptors: those in use will end
                continue
            try:
                near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=self._carry, args=(near,), name="tunnel-up", daemon=True).start()
            except (OSError, RuntimeError):  # its client is gone already; no thread is to be had
                _reset(near)

    def _carry(self, near: socket.socket) -> None:
        try:
            far = self._dial()
        except KitError:
            _reset(near)
            return
        pair = _Pair(near, far, self._moved)
        with self._lock:
            self._open.add(pair)
            self.carried += 1
            late = self._closed
        try:
            if late:
                pair.abort()
            pair.run()
        finally:
            with self._lock:
                self._open.discard(pair)

    def abort_all(self) -> None:
        """Resets every connection."""
        with self._lock:
            pairs = list(self._open)
        for pair in pairs:
            pair.abort()

    def close(self) -> None:
        """Takes no more connections and resets those there are."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # close alone does not wake accept
        self._listener.close()
        self.abort_all()


class _Pair:
    """One connection: the local socket and the board's end."""

    def __init__(self, near: socket.socket, far: Far, moved: Callable[[], None]) -> None:
        self._near, self._far, self._moved = near, far, moved
        self._broken = False
        self._up_ended = threading.Event()

    def run(self) -> None:
        """Carries both ways until both have ended; closes both."""
        down = threading.Thread(target=self._down, name="tunnel-down", daemon=True)
        try:
            down.start()
        except RuntimeError:  # no thread is to be had
            self._broken = True
        else:
            self._up()
            down.join()
        if self._broken:
            _reset(self._near)
        else:
            self._near.close()
        with contextlib.suppress(OSError, EOFError):
            self._far.close()

    def abort(self) -> None:
        self._broken = True
        with contextlib.suppress(OSError, EOFError):
            self._far.close()
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._near.shutdown(socket.SHUT_RD)

    def _up(self) -> None:
        try:
            while piece := self._near.recv(PIECE_BYTES):
                self._far.sendall(piece)
            if not self._broken:
                self._far.shutdown_write()
        except ConnectionError:  # the client broke off: the service must see it go
            self.abort()
        except (OSError, EOFError):  # the board's end is closed: _down sees it too
            pass
        finally:
            self._up_ended.set()

    def _down(self) -> None:
        try:
            with selectors.DefaultSelector() as room:
                room.register(self._near, selectors.EVENT_WRITE)
                while piece := self._far.recv(PIECE_BYTES):
                    self._moved()
                    self._give(room, memoryview(piece))
        except (OSError, EOFError):
            self.abort()
            return
        if not self._far.eof_received:
            self._broken = True  # closed without an end: the link or the service broke off
        elif not self._broken:
            with contextlib.suppress(OSError):
                self._near.shutdown(socket.SHUT_WR)
            # The client may go on sending, unless the board's end is closed altogether.
            while not self._far.closed and not self._up_ended.wait(0.05):
                pass
        self._wake()

    def _give(self, room: selectors.BaseSelector, piece: memoryview) -> None:
        """Sends as the client reads; one that has stopped reading does not outlive :meth:`abort`."""
        while piece:
            if self._broken:
                raise ConnectionAbortedError
            if room.select(_PATIENCE_SECONDS):
                with contextlib.suppress(BlockingIOError):
                    piece = piece[self._near.send(piece, _DONT_WAIT) :]


def _reset(sock: socket.socket) -> None:
    """Closes so that the other side sees a reset, not an end."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()
