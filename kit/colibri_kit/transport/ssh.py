"""A board over SSH: fabric's connection and gateways, with host keys checked.

Programs and files both travel over exec channels: boards without sftp work, and it is
faster than sftp. A link that stops moving is closed by TCP_USER_TIMEOUT and, because
a proxy may go on acknowledging for a dead board, by a watchdog of our own.
"""

from __future__ import annotations

import contextlib
import select
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import fabric
import paramiko

from colibri_kit.errors import KitError
from colibri_kit.transport.base import (
    WRITE_BYTES,
    CommandTimeout,
    Completed,
    ConnectionLost,
    Reader,
    Sink,
    TransportBase,
    script,
    sh_join,
)
from colibri_kit.transport.sshconfig import Hop
from colibri_kit.transport.sshforward import Endpoint, ForwardingTransport, dial

#: $$ on the first line of stderr, so that Ctrl-C here can end the program there.
_WITH_PID = 'printf "%s\\n" "$$" >&2; exec "$@"'


class SshTransport(TransportBase):
    """See the module. Made by :func:`colibri_kit.transport.sshconnect.connect`."""

    def __init__(self, connections: list[fabric.Connection], hop: Hop, stall_timeout: float) -> None:
        self._connections, self._hop, self._stall = connections, hop, stall_timeout
        transport = connections[-1].transport
        assert isinstance(transport, ForwardingTransport)
        self._transport = transport
        self._moved: float | None = None  # when the last byte of an upload moved; None: nothing is awaited
        self._stalled = False
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="ssh-watchdog", daemon=True).start()

    def describe(self) -> str:
        return self._hop.label

    def close(self) -> None:
        self._closed.set()
        for connection in reversed(self._connections):
            with contextlib.suppress(Exception):
                connection.close()

    @property
    def is_up(self) -> bool:
        """False once the link is known to be gone; :meth:`beat` finds out."""
        return bool(self._transport.is_active())

    def dial(self, to: Endpoint) -> paramiko.Channel:
        """A connection from the board to a port or Unix socket there: like a socket of our own.

        Raises:
            ForwardRefused: nothing listens there, or the server forwards none. ConnectionLost.
        """
        try:
            return dial(self._transport, to, self.describe(), self._stall)
        except KitError:
            raise
        except (paramiko.SSHException, EOFError, OSError) as err:
            raise self._lost() from err

    def beat(self) -> bool:
        """Asks the server for an answer and waits for it; False when the link goes meanwhile.

        The watchdog closes a link that is silent for ``stall_timeout`` seconds.
        """
        self._moved = time.monotonic()
        try:
            with contextlib.suppress(paramiko.SSHException, EOFError, OSError):
                self._transport.global_request("keepalive@openssh.com", wait=True)
        finally:
            self._moved = None
        return self.is_up

    def moved(self) -> None:
        """Bytes came over a dialled connection: a :meth:`beat` that waits behind them lives."""
        if self._moved is not None:
            self._moved = time.monotonic()

    def _watch(self) -> None:
        while not self._closed.wait(min(1.0, self._stall / 4)):
            moved = self._moved
            if moved is not None and time.monotonic() - moved > self._stall:
                self._stalled = True
                self._transport.close()
                return

    def _lost(self) -> ConnectionLost:
        why = f"no byte moved for {self._stall:.0f} s" if self._stalled else "the connection was lost"
        return ConnectionLost(
            f"{self.describe()}: {why}", hint="check power and network, then repeat the command"
        )

    @contextlib.contextmanager
    def _channel(self, argv: Sequence[str]) -> Iterator[paramiko.Channel]:
        """An exec channel running ``argv``; whatever breaks it becomes ConnectionLost."""
        channel: paramiko.Channel | None = None
        try:
            channel = self._transport.open_session(timeout=self._stall)
            channel.exec_command(sh_join(argv))
            yield channel
        except KitError:
            raise
        except (paramiko.SSHException, EOFError, OSError) as err:
            raise self._lost() from err
        finally:
            if channel is not None:
                # On a dead link even closing raises (EOFError): it must not hide the reason.
                with contextlib.suppress(paramiko.SSHException, EOFError, OSError):
                    channel.close()

    def run(self, argv: Sequence[str], *, stdin: bytes | None = None, timeout: float = 60.0) -> Completed:
        out: list[bytes] = []
        err: list[bytes] = []
        with self._channel(argv) as channel:
            _feed(channel, stdin)
            rc = self._drain(channel, out.append, err.append, timeout, argv)
        return Completed(rc, b"".join(out), b"".join(err))

    def stream(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes | None = None,
        on_out: Sink,
        on_err: Sink | None = None,
        timeout: float | None = None,
    ) -> Completed:
        pid = _PidLine(on_err)
        with self._channel(script(_WITH_PID, *argv)) as channel:
            try:
                _feed(channel, stdin)
                rc = self._drain(channel, on_out, pid, timeout, argv)
            except (KeyboardInterrupt, CommandTimeout):
                self._end(pid.pid)
                raise
        return Completed(rc, b"", pid.rest)

    def _end(self, pid: str) -> None:
        """Interrupts a program on the board; two seconds later insists."""
        if pid.isdigit():
            text = 'kill -INT "$1" && n=0 && while [ $n -lt 20 ] && kill -0 "$1" 2>/dev/null; do '
            text += 'sleep 0.1 2>/dev/null || sleep 1; n=$((n+1)); done; kill -KILL "$1"'
            with contextlib.suppress(KitError):
                self.run(script(text, pid), timeout=25)

    def pipe(
        self,
        argv: Sequence[str],
        reader: Reader,
        size: int,
        *,
        progress: Callable[[int], None] | None = None,
    ) -> Completed:
        out: list[bytes] = []
        err: list[bytes] = []
        self._moved = time.monotonic()
        try:
            with self._channel(argv) as channel:
                whole = self._send(channel, reader, size, progress)
                self._moved = None
                with contextlib.suppress(OSError, EOFError):
                    channel.shutdown_write()
                rc = self._drain(channel, out.append, err.append, max(120.0, self._stall), argv)
        finally:
            self._moved = None
        return Completed(rc if rc or whole else 1, b"".join(out), b"".join(err))

    def _send(
        self,
        channel: paramiko.Channel,
        reader: Reader,
        size: int,
        progress: Callable[[int], None] | None,
    ) -> bool:
        """Sends all; False when the program there stopped reading (its exit status tells why)."""
        left = size
        while left:
            piece: Any = memoryview(reader.read(min(WRITE_BYTES, left)))
            if not len(piece):
                raise ConnectionLost(f"the source ended {left} bytes early")
            left -= len(piece)
            while len(piece):
                try:
                    n = channel.send(piece)
                except (OSError, EOFError):
                    n = 0
                if not n:
                    if not self._transport.is_active():
                        raise self._lost()
                    return False
                piece = piece[n:]
                self._moved = time.monotonic()
                if progress is not None:
                    progress(n)
        return True

    def _drain(
        self,
        channel: paramiko.Channel,
        on_out: Sink,
        on_err: Sink,
        timeout: float | None,
        argv: Sequence[str],
    ) -> int:
        """Takes output until the program ends. Returns its exit status (128 + n for signals)."""
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            finished = channel.exit_status_ready() or channel.closed
            moved = False
            while channel.recv_ready():
                on_out(channel.recv(1 << 16))
                moved = True
            while channel.recv_stderr_ready():
                on_err(channel.recv_stderr(1 << 16))
                moved = True
            if moved:
                continue
            if finished and (channel.eof_received or channel.closed):
                break
            if not self._transport.is_active():
                raise self._lost()
            wait = 0.5
            if end is not None:
                wait = min(wait, end - time.monotonic())
                if wait <= 0:
                    raise CommandTimeout(
                        f"`{_short(argv)}` did not end within {timeout:.0f} s on {self.describe()}"
                    )
            if channel.eof_received:
                channel.status_event.wait(min(wait, 0.05))
            else:
                select.select([channel], [], [], wait)
        rc = channel.recv_exit_status() if channel.exit_status_ready() else -1
        if rc < 0:
            if not self._transport.is_active():
                raise self._lost()
            return 137  # ended by a signal: paramiko does not say which
        return rc


class _PidLine:
    """Takes the pid off the first stderr line and passes the rest on."""

    def __init__(self, sink: Sink | None) -> None:
        self._sink, self._head, self.pid = sink, b"", ""
        self.rest = b""

    def __call__(self, piece: bytes) -> None:
        if not self.pid:
            self._head += piece
            line, found, piece = self._head.partition(b"\n")
            if not found:
                return
            self.pid = line.decode("ascii", "replace").strip() or "?"
        if piece:
            self.rest += piece
            if self._sink is not None:
                self._sink(piece)


def _feed(channel: paramiko.Channel, stdin: bytes | None) -> None:
    # A program that ends without reading its input is no fault of the link.
    with contextlib.suppress(OSError, EOFError):
        if stdin:
            channel.sendall(stdin)
        channel.shutdown_write()


def _short(argv: Sequence[str]) -> str:
    words = sh_join(argv)
    return words if len(words) <= 60 else words[:57] + "…"
