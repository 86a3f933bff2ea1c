"""A relay that understands frames and does one chosen harm to the chosen ones."""

from __future__ import annotations

import random
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from colibri_kit.offload.frames import NAMES, Frame, Reader
from colibri_kit.offload.relay import TO_BOARD, TO_MODULE, Relay

__all__ = ["TO_BOARD", "TO_MODULE", "FaultyRelay"]

#: frame -> pieces to send; a number waits so many seconds, None ends the connection.
Harm = Callable[[Frame], "list[bytes | float | None]"]


def cut(frame: Frame) -> list[bytes | float | None]:
    """In the middle of the frame."""
    raw = frame.pack()
    return [raw[: len(raw) // 2], None]


def garbage(frame: Frame) -> list[bytes | float | None]:
    return [random.Random(frame.seq).randbytes(300), frame.pack()]


def drop_byte(frame: Frame) -> list[bytes | float | None]:
    raw = frame.pack()
    return [raw[: len(raw) // 2] + raw[len(raw) // 2 + 1 :]]


def flip(frame: Frame) -> list[bytes | float | None]:
    raw = bytearray(frame.pack())
    raw[len(raw) // 2] ^= 0x40
    return [bytes(raw)]


def swallow(frame: Frame) -> list[bytes | float | None]:
    del frame
    return []


def twice(frame: Frame) -> list[bytes | float | None]:
    return [frame.pack(), frame.pack()]


def version(frame: Frame) -> list[bytes | float | None]:
    """Another protocol version, in a frame that is whole."""
    return [replace(frame, payload=struct.pack("<H", 2) + frame.payload[2:]).pack()]


def other_bits(frame: Frame) -> list[bytes | float | None]:
    """A RESULT that is whole but wrong in its last bit."""
    last = frame.payload[-4] ^ 1
    return [replace(frame, payload=frame.payload[:-4] + bytes([last]) + frame.payload[-3:]).pack()]


def stall(seconds: float) -> Harm:
    return lambda frame: [seconds, frame.pack()]


class FaultyRelay(Relay):
    """Passes frames on; harms those of ``kind`` in ``direction`` numbered in ``which``, from 0."""

    def __init__(
        self, listen: Path, target: Path, kind: int, direction: int, harm: Harm, which: range
    ) -> None:
        super().__init__(listen, target)
        self.kind, self.direction, self.harm, self.which = kind, direction, harm, which
        self.seen = self.done = 0
        self.start()

    def _pieces(self, frame: Frame, way: int) -> list[bytes | float | None]:
        if way != self.direction or frame.type != self.kind:
            return [frame.pack()]
        self.seen += 1
        if self.seen - 1 not in self.which:
            return [frame.pack()]
        self.done += 1
        return self.harm(frame)

    def carry(self, source: socket.socket, sink: socket.socket, way: int) -> None:
        reader = Reader()
        while data := source.recv(65536):
            for frame in reader.feed(data):
                assert frame.type < len(NAMES)
                for piece in self._pieces(frame, way):
                    if piece is None:
                        return
                    if isinstance(piece, float):
                        time.sleep(piece)
                    else:
                        sink.sendall(piece)
