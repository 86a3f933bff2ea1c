"""Sends bytes by YMODEM or XMODEM, with 1024-byte blocks, or 128 when the line loses bytes.

Written after Forsberg's "XMODEM/YMODEM protocol reference" (1988) and the receivers' real
ways: U-Boot asks again with ``C``, not NAK, after its time-out; a receiver that misses
bytes of a block waits for them in silence, so after a pause it is fed padding until the
block is complete, fails its CRC and is asked for again at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from colibri_kit.errors import TransferError
from colibri_kit.transport.serial_line import Line

SOH, STX, EOT, ACK, NAK, CAN, CRC = 0x01, 0x02, 0x04, 0x06, 0x15, 0x18, 0x43
_PAD = b"\x1a"
#: Tries of one block before the transfer is given up; receivers stop at 10 to 25.
_TRIES = 24
#: Tries of a 1024-byte block before small ones are sent.
_LARGE_TRIES = 4
#: Bytes of padding sent step by step to complete a block that lost some.
_NUDGES = (4, 16, 64, 256, 1029)


class ModemError(TransferError):
    """The transfer broke off; the receiver was told."""

    default_code = "CK-SERIAL-MODEM"


def crc16(data: bytes) -> int:
    """CRC-16/XMODEM: polynomial 0x1021, start 0."""
    import binascii

    return binascii.crc_hqx(data, 0)


def packet(number: int, payload: bytes, *, crc: bool = True) -> bytes:
    """One block; payload is 128 or 1024 bytes."""
    if len(payload) not in (128, 1024):
        raise ValueError("a block holds 128 or 1024 bytes")
    head = bytes([STX if len(payload) == 1024 else SOH, number & 0xFF, ~number & 0xFF])
    tail = crc16(payload).to_bytes(2, "big") if crc else bytes([sum(payload) & 0xFF])
    return head + payload + tail


def next_block(data: bytes, at: int, large: bool) -> bytes:
    """The payload from ``at`` on: 1024 bytes where that wastes nothing, else 128, padded."""
    size = 1024 if large and len(data) - at > 896 else 128
    return data[at : at + size].ljust(size, _PAD)


@dataclass
class Stats:
    """What a transfer took: blocks sent again, padding pauses, seconds for the data alone."""

    repeats: int = 0
    nudges: int = 0
    seconds: float = 0.0


class Sender:
    """One transfer. The receiver must have been started already.

    Args:
        name: YMODEM's file name; None = plain XMODEM.
        finish: what a shell prints once the receiver ended. Some (lrzsz's rx) never send
            their last ACK; and an EOT too many would be the shell's end of input.
        start_timeout: seconds to wait for the receiver's first ``C``.
    """

    def __init__(
        self,
        line: Line,
        *,
        name: str | None,
        large: bool = True,
        finish: bytes | None = None,
        start_timeout: float = 12.0,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self._line, self._name, self.large = line, name, large
        self._start_timeout = start_timeout
        self._progress = progress or (lambda n: None)
        self._finish = finish
        self._crc = True
        self.stats = Stats()

    def send(self, data: bytes) -> Stats:
        """Sends data and ends the transfer.

        Raises:
            ModemError: the receiver stopped it or answers no more. ConnectionLost.
        """
        try:
            self._wait_start(self._start_timeout, must=True)
            if self._name is not None:
                head = f"{self._name}\0{len(data)} ".encode().ljust(128, b"\0")
                if not self._block(0, head, None, _TRIES):
                    raise ModemError(f"{self._line.name}: the file's name was refused {_TRIES} times")
                self._wait_start(1.5, must=False)
            began = time.monotonic()
            before: bytes | None = None
            at, number = 0, 1
            while at < len(data):
                payload = next_block(data, at, self.large)
                big = len(payload) == 1024
                if not self._block(number, payload, before, _LARGE_TRIES if big else _TRIES):
                    if not big:
                        raise ModemError(f"{self._line.name}: block {number} was refused {_TRIES} times")
                    self.large = False  # sizes may be mixed: the same number again, smaller
                    continue
                before = payload
                self._progress(min(len(data) - at, len(payload)))
                at += len(payload)
                number += 1
            self.stats.seconds = time.monotonic() - began
            self._end()
        except (ModemError, KeyboardInterrupt):
            self.cancel()
            raise
        return self.stats

    def cancel(self) -> None:
        """Tells the receiver that nothing more comes."""
        self._line.write(bytes([CAN]) * 8 + b"\b" * 8)

    def _wait_start(self, timeout: float, *, must: bool) -> None:
        """Until the receiver asks for the first block: ``C``, or NAK when it knows only sums."""
        end = time.monotonic() + timeout
        while (left := end - time.monotonic()) > 0:
            for byte in self._line.read(left):
                if byte in (CRC, NAK):
                    self._crc = byte == CRC
                    self._line.drain(0)
                    return
                if byte == CAN:
                    raise ModemError(f"{self._line.name}: the receiver refused the transfer")
        if must:
            raise ModemError(f"{self._line.name}: the receiver does not start (no 'C' in {timeout:.0f} s)")

    def _block(self, number: int, payload: bytes, before: bytes | None, tries: int) -> bool:
        """Sends one block until it is acknowledged; False after so many tries.

        A stray ACK can make us run one block ahead; a receiver that keeps refusing is
        therefore offered the block before once more, which it takes or acknowledges.
        """
        for attempt in range(tries):
            if attempt:
                self.stats.repeats += 1
            if attempt % 6 == 5 and before is not None:
                self._exchange(packet(number - 1, before, crc=self._crc))
            # U-Boot says nothing to a bad first block, and waits for the next header at once.
            patient = number != 0 or before is not None or attempt % 3 == 2
            if self._exchange(packet(number, payload, crc=self._crc), patient=patient) == ACK:
                return True
        return False

    def _exchange(self, data: bytes, *, patient: bool = True) -> int | None:
        """Sends bytes; returns the receiver's answer, helped along when it is stuck in a block.

        Args:
            patient: wait for the receiver's own time-out when nothing helps.
        """
        line = self._line
        line.drain(0)
        line.write(data)
        answer = self._answer(line.wire_time(len(data)) + max(0.12, 4 * line.latency))
        if answer is not None:
            return answer
        for count in _NUDGES:
            if count > len(data):
                break
            self.stats.nudges += 1
            line.write(b"\0" * count)
            answer = self._answer(line.wire_time(count) + max(0.06, 2 * line.latency))
            if answer is not None:
                return answer
        # Now the receiver's own time-out must pass: 2 to 3 s in U-Boot, 10 s in lrzsz.
        return self._answer(11.0) if patient else None

    def _answer(self, timeout: float) -> int | None:
        end = time.monotonic() + timeout
        cancels = 0
        seen = b""
        while (left := end - time.monotonic()) > 0:
            piece = self._line.read(left)
            for byte in piece:
                if byte in (ACK, NAK, CRC):
                    return byte
                cancels = cancels + 1 if byte == CAN else 0
                if cancels == 2:
                    raise ModemError(f"{self._line.name}: the receiver cancelled the transfer")
            seen += piece
            if self._finish is not None and self._finish in seen:
                return EOT
        return None

    def _end(self) -> None:
        """EOT until acknowledged; for YMODEM also the empty block that ends the batch."""
        answer: int | None = None
        for _ in range(10):
            self._line.drain(0)
            self._line.write(bytes([EOT]))
            answer = self._answer(3.5 if self._finish is None else 12.0)
            if answer in (ACK, EOT):
                break
            if answer is None and self._finish is not None:
                raise ModemError(f"{self._line.name}: the end of the file was not acknowledged")
        else:
            raise ModemError(f"{self._line.name}: the end of the file was not acknowledged")
        if self._name is None or answer == EOT:
            return
        self._wait_start(1.5, must=False)
        # Not fatal: the file is complete, and its checksum is compared anyway.
        for _ in range(3):
            self._line.write(packet(0, bytes(128)))
            if self._answer(1.5) == ACK:
                return
