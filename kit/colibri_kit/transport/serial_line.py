"""A serial line: bytes out and in with deadlines, and text typed with its echo checked.

Lines lose bytes: a UART without flow control, a long cable, a busy kernel. Whatever is
typed here is compared with its echo before it is ended with Return, so a command that
lost a byte on its way is never run.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import select
import time
from typing import Any

from colibri_kit.errors import TransferError
from colibri_kit.transport.base import ConnectionLost

#: How much typed text may be under way before its echo is awaited, bytes.
WINDOW = 48


class EchoLost(TransferError):
    """A line of text would not come back as it was typed, however often it was tried."""

    default_code = "CK-SERIAL-ECHO"


def lost(name: str) -> ConnectionLost:
    """The error for a port that went away."""
    return ConnectionLost(
        f"the serial port {name} went away",
        hint="plug the adapter again and repeat the command: it goes on where it stopped",
        code="CK-SERIAL-LOST",
    )


class Line:
    """One open port.

    Args:
        port: a pyserial port, or anything with ``fileno``/``read``/``write``/``close``.
        name: what the user called it.
        baud: bits a second, for waiting times.
        txdelay: seconds after each byte written.
    """

    def __init__(self, port: Any, name: str, *, baud: int, txdelay: float = 0.0) -> None:
        self._port, self.name, self.baud, self.txdelay = port, name, baud, txdelay
        self._fd: int | None = None
        with contextlib.suppress(OSError, AttributeError, io.UnsupportedOperation):
            self._fd = port.fileno() if os.name == "posix" else None
        self._back = b""
        self.sent_bytes = self.got_bytes = 0
        self.retyped = 0
        #: How far typing runs ahead of its echo now, bytes: grows while all is well.
        self.window = WINDOW
        #: Slowest answer to a typed byte seen so far, seconds; waits are multiples of it.
        self.latency = 0.05

    @property
    def paced(self) -> bool:
        """Does the rate mean anything here? Not on a socket nor a pseudo-terminal."""
        return "://" not in self.name and not os.path.realpath(self.name).startswith("/dev/pts/")

    def wire_time(self, n: int) -> float:
        """Seconds that n bytes take on the wire: ten bits each."""
        return n * (10 / self.baud + self.txdelay)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._port.close()

    def set_baud(self, baud: int) -> None:
        """Changes our side's rate. Raises TransferError when the port cannot."""
        try:
            self._port.baudrate = baud
        except (OSError, ValueError) as err:
            raise TransferError(f"{self.name} does not take {baud} baud: {err}") from err
        self.baud = baud

    def write(self, data: bytes) -> None:
        """Sends all of data. Raises ConnectionLost."""
        self.sent_bytes += len(data)
        pieces = [data[i : i + 1] for i in range(len(data))] if self.txdelay else [data]
        for piece in pieces:
            self._write(piece)
            if self.txdelay:
                time.sleep(self.txdelay)

    def _write(self, data: bytes) -> None:
        try:
            if self._fd is None:
                self._port.write(data)
                return
            while data:
                _, ready, _ = select.select([], [self._fd], [], 30)
                if not ready:
                    raise lost(self.name)
                data = data[os.write(self._fd, data) :]
        except BlockingIOError:
            time.sleep(0.005)
            self._write(data)
        except OSError as err:
            raise lost(self.name) from err

    def read(self, wait: float) -> bytes:
        """What comes within ``wait`` seconds, as soon as anything does; empty when nothing came."""
        if self._back:
            data, self._back = self._back, b""
            return data
        try:
            if self._fd is None:
                self._port.timeout = max(wait, 0.001)
                data = self._port.read(1)
                data += self._port.read(getattr(self._port, "in_waiting", 0) or 0) if data else b""
                return bytes(data)
            ready, _, _ = select.select([self._fd], [], [], max(wait, 0))
            if not ready:
                return b""
            data = os.read(self._fd, 65536)
        except BlockingIOError:
            return b""
        except OSError as err:
            raise lost(self.name) from err
        if not data:
            raise lost(self.name)
        self.got_bytes += len(data)
        return data

    def unread(self, data: bytes) -> None:
        self._back = data + self._back

    def drain(self, quiet: float, limit: float = 2.0) -> bytes:
        """Reads until nothing came for ``quiet`` seconds, at most ``limit``; returns what came."""
        end = time.monotonic() + limit
        out = b""
        while (piece := self.read(quiet)) and time.monotonic() < end:
            out += piece
        return out

    def wait_for(
        self, pattern: re.Pattern[bytes], timeout: float, *, quiet: float | None = None
    ) -> tuple[re.Match[bytes] | None, bytes]:
        """Reads until the pattern occurs. Returns the match or None, and all that was read.

        What came after the match is kept for the next read.

        Args:
            quiet: give up early when something came and then nothing for so many seconds.
        """
        end = time.monotonic() + timeout
        seen = b""
        while (left := end - time.monotonic()) > 0:
            piece = self.read(left if quiet is None or not seen else min(quiet, left))
            if not piece and seen and quiet is not None:
                break
            seen += piece
            if piece and (found := pattern.search(seen)):
                self.unread(seen[found.end() :])
                return found, seen[: found.end()]
        return None, seen

    def type_line(
        self, text: str, *, kill: bytes, end: bytes = b"\r", tries: int = 40, window: int = WINDOW
    ) -> None:
        """Types one line, checks its echo byte for byte, then ends it.

        Args:
            kill: bytes that discard a half-typed line on the other side.
            end: what Return sends.

        Raises:
            EchoLost: it did not come back whole in ``tries`` attempts.
        """
        data = text.encode("ascii")
        quiet = False
        for attempt in range(tries):
            if attempt:
                self.retyped += 1
            if attempt or not quiet:
                self.drain(0)
            if self._echoed(data, min(window, self.window)) and self._ended(end):
                self.window = min(self.window * 2, 1024)
                return
            self.window = max(self.window // 2, 16)
            self.write(kill * 3)
            # A late echo would be taken for the next attempt's: wait longer each time.
            pause = max(self.latency * 2, min(0.03 * 1.3**attempt, 1.0)) + self.wire_time(window)
            self.drain(pause, limit=2.0 + self.wire_time(len(data)))
            quiet = True
        raise EchoLost(
            f"{self.name} does not echo what is typed: {tries} attempts at {text[:40]!r}",
            hint="is the rate right (--baud)? a bad cable or too fast for the board: try --txdelay 0.002",
        )

    def _echoed(self, data: bytes, window: int) -> bool:
        """Sends data, never more than a window ahead of its echo. False at the first wrong byte."""
        sent = got = 0
        while got < len(data):
            if sent < len(data) and sent - got < window:
                piece = data[sent : sent + window - (sent - got)]
                self.write(piece)
                sent += len(piece)
            began = time.monotonic()
            echo = self.read(self.latency * 3 + self.wire_time(2 * window) + 0.03)
            if not echo:
                self.latency = min(self.latency * 1.2, 0.5)
                return False
            self.latency = max(0.01, self.latency * 0.95, min(time.monotonic() - began, 0.5))
            if echo != data[got : got + len(echo)]:
                return False
            got += len(echo)
        return True

    def _ended(self, end: bytes) -> bool:
        """Sends Return until its echo, a line break, is seen: an extra empty line does no harm."""
        for _ in range(8):
            self.write(end)
            found, _ = self.wait_for(re.compile(rb"[\r\n]"), self.latency * 4 + self.wire_time(8) + 0.05)
            if found:
                return True
        return False
