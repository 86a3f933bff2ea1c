"""U-Boot's command line over a serial line: commands, memory, checksums, rates.

Every command is typed with its echo checked, and its exit status is printed and read, so
a lossy line costs time but never runs something else than was meant. Commands used here
may run twice with the same effect, since an answer that was damaged is asked for again.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

from colibri_kit.errors import TransferError, UnreachableError, VerifyError
from colibri_kit.transport.serial_line import Line
from colibri_kit.transport.serial_modem import ModemError, Sender

KILL = b"\x03"
#: Characters a command may have: U-Boot's console buffer is 256 bytes in small builds.
LINE_MAX = 220
#: Largest piece that is sent in one YMODEM transfer, bytes; pieces shrink on a bad line.
PIECE_MAX = 512 * 1024
_PIECE_MIN = 2048
_STATUS = re.compile(rb"ck-rc=(\d+)\r?\n")
#: The status line, or the prompt again without one: the line lost some of it.
_ENDED = re.compile(_STATUS.pattern + rb"|[\r\n](?:=>|[\w.-]*[>#]) $")
_CRC = re.compile(rb"==> ?([0-9a-f]{8})\r?\n")


class UBootError(TransferError):
    """A U-Boot command failed; carries its words."""

    default_code = "CK-UBOOT-COMMAND"


@dataclass
class Rate:
    """What YMODEM really carried: bytes and seconds; ``fixed`` are a piece's other seconds."""

    bytes: int = 0
    seconds: float = 0.0
    repeats: int = 0
    fixed: float = 5.0

    @property
    def bytes_s(self) -> float:
        return self.bytes / self.seconds if self.seconds else 0.0


@dataclass
class UBoot:
    """A U-Boot that shows its prompt."""

    line: Line
    note: Callable[[str], None] = lambda text: None
    rate: Rate = field(default_factory=Rate)
    piece: int = PIECE_MAX
    large: bool = True

    def command(self, text: str, *, timeout: float = 10.0, tries: int = 12) -> tuple[int, str]:
        """Runs one command; returns its status and its output.

        Raises:
            TransferError: no status came back. EchoLost, ConnectionLost.
        """
        if len(text) > LINE_MAX:
            raise ValueError(f"the command has {len(text)} characters, U-Boot's line {LINE_MAX}")
        for _ in range(tries):
            self.line.type_line(f"{text}; echo ck-rc=$?", kill=KILL)
            found, seen = self.line.wait_for(_ENDED, timeout)
            if found and found.group(1):
                self.line.drain(self.line.latency)
                words = seen[: found.start()].decode("ascii", "replace")
                return int(found.group(1)), words.replace("\r", "").strip()
            if found is None:
                self.interrupt()
        raise TransferError(f"U-Boot on {self.line.name} gives no answer to `{text}`", code="CK-UBOOT-SILENT")

    def ask(self, text: str, *, timeout: float = 10.0) -> str:
        """As :meth:`command`, for one that must succeed. Raises UBootError."""
        status, words = self.command(text, timeout=timeout)
        if status != 0:
            last = words.splitlines()[-1] if words else "no message"
            raise UBootError(f"U-Boot: `{text}` failed: {last}")
        return words

    def interrupt(self) -> None:
        """Back to an empty prompt, whatever is half typed."""
        self.line.write(KILL * 3)
        self.line.drain(self.line.latency * 2 + 0.05, limit=3)

    def value(self, text: str, pattern: str) -> str | None:
        """Runs a command until two runs give the same first group of ``pattern``: a lost byte shows.

        Returns:
            The group, or None when the command fails.

        Raises:
            TransferError: it never says the same twice.
        """
        seen: set[str] = set()
        for _ in range(30):
            status, words = self.command(text)
            if status != 0:
                return None
            found = re.search(pattern, words, re.MULTILINE)
            if found and found.group(1) in seen:
                return found.group(1)
            if found:
                seen.add(found.group(1))
        raise TransferError(f"U-Boot answers `{text}` differently each time", code="CK-UBOOT-SILENT")

    def can(self, *names: str) -> frozenset[str]:
        """Which of these commands this build has."""
        return frozenset(n for n in names if self._has(n))

    def _has(self, name: str) -> bool:
        """The status of ``help`` is 1 either way in some versions: only its words tell."""
        for _ in range(12):
            _, words = self.command(f"help {name}")
            if words.startswith(f"{name} - "):
                return True
            if "nknown command" in words:
                return False
        return False

    def variable(self, name: str) -> str | None:
        """An environment variable's value, or None."""
        return self.value(f"printenv {name}", rf"^{re.escape(name)}=(.*)$")

    def set_variable(self, name: str, value: str) -> None:
        """Sets it (in memory) and reads it back. Raises VerifyError, UBootError."""
        if "'" in value or "\n" in value:
            raise ValueError("a value in single quotes cannot hold one")
        for _ in range(3):
            self.ask(f"setenv {name} '{value}'")
            if self.variable(name) == value:
                return
        raise VerifyError(f"U-Boot does not keep {name}", code="CK-UBOOT-ENV")

    def crc32(self, address: int, size: int) -> int:
        """U-Boot's CRC-32 of its memory, the one of zlib."""
        for _ in range(12):
            _, words = self.command(f"crc32 {address:x} {size:x}", timeout=10 + size / 2e6)
            if found := _CRC.search(words.encode() + b"\n"):
                return int(found.group(1), 16)
        raise TransferError("U-Boot's crc32 gives no sum", code="CK-UBOOT-SILENT")

    def load(self, address: int, data: bytes, *, progress: Callable[[int], None] | None = None) -> None:
        """Puts bytes into memory, piece by piece, each compared by CRC-32 and sent again if wrong.

        Raises:
            VerifyError: a piece was wrong too often. ConnectionLost.
        """
        at = 0
        failures = 0
        while at < len(data):
            piece = data[at : at + self.piece]
            if self._piece(address + at, piece):
                at += len(piece)
                failures = 0
                if progress is not None:
                    progress(len(piece))
                continue
            failures += 1
            if failures == 12:
                raise VerifyError(
                    f"the line {self.line.name} damages too much: {len(piece)} bytes failed 12 times",
                    hint="a lower --baud, a shorter cable, or --txdelay 0.002",
                    code="CK-SERIAL-NOISE",
                )
            self.large = False
            self.piece = max(_PIECE_MIN, self.piece // 4)
            self.note(f"bad line: 128-byte blocks, {self.piece} bytes a piece")

    def _piece(self, address: int, piece: bytes) -> bool:
        import time

        began = time.monotonic()
        ok = True
        data_seconds = 0.0
        try:
            self.line.type_line(f"loady {address:x}", kill=KILL)
            sender = Sender(self.line, name="f", large=self.large)
            stats = sender.send(piece)
            self.rate.repeats += stats.repeats
            data_seconds = stats.seconds
            self.large = sender.large
        except ModemError as err:
            self.note(err.message)
            ok = False
        # loady swallows what comes for about 2 s after the end; then the prompt is back.
        self.line.wait_for(re.compile(rb"=> ?$|> ?$|# ?$"), 5.0)
        self.interrupt()
        if self.crc32(address, len(piece)) != zlib.crc32(piece):
            return False
        if ok:
            self.rate.bytes += len(piece)
            self.rate.seconds += data_seconds
            self.rate.fixed = time.monotonic() - began - data_seconds
        return True

    def set_baud(self, baud: int) -> bool:
        """Asks for another rate and follows. False when this U-Boot does not take it.

        Raises:
            UnreachableError: it took the rate but is not understood any more.
        """
        old = self.line.baud
        self.line.type_line(f"setenv baudrate {baud}", kill=KILL)
        found, seen = self.line.wait_for(re.compile(rb"press ENTER|not supported|=> ?$"), 3.0)
        if found is None or b"press ENTER" not in seen:
            self.interrupt()
            return False
        self.line.set_baud(baud)
        for _ in range(5):
            self.line.write(b"\r")
            if self.line.wait_for(re.compile(rb"=> ?$|> ?$|# ?$"), 1.0)[0] and self.alive():
                return True
        self.line.set_baud(old)
        self.line.write(b"\r\r")
        if self.alive():
            return False
        raise UnreachableError(
            f"U-Boot switched to {baud} baud and is not understood at it",
            hint=f"power-cycle the board, then repeat without --max-baud (it starts at {old} again)",
            state="nothing was written",
            code="CK-SERIAL-BAUD",
        )

    def alive(self) -> bool:
        """Does it still answer?"""
        try:
            return self.command("echo", timeout=1.0, tries=2)[0] == 0
        except TransferError:
            return False
