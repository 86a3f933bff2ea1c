"""The offload protocol in Python: what discovery asks a port, and a second reading of docs/offload.md.

Everything is little-endian. A frame is a header of 24 bytes with its own CRC32C, the payload, its CRC32C.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace

MAGIC = b"\xc5BXP"
PROTOCOL = 1
HEAD = struct.Struct("<4sB3xIII")  # magic, type, seq, ref, length; the header's CRC follows
HEAD_BYTES, EXTRA_BYTES = 24, 28
HELLO, EXEC, RESULT, CREDIT, PING, PONG, ERROR = range(1, 8)
NAMES = ("", "HELLO", "EXEC", "RESULT", "CREDIT", "PING", "PONG", "ERROR")

_HELLO = struct.Struct("<HH16s32s10I40s12x")
_POLY = 0x82F63B78
_NESTED_MOST = 8


def _table() -> list[int]:
    out = []
    for n in range(256):
        for _ in range(8):
            n = n >> 1 ^ (_POLY if n & 1 else 0)
        out.append(n)
    return out


_TABLE = _table()


def crc32c(data: bytes) -> int:
    """CRC32C (Castagnoli); 0xE3069283 for ``b"123456789"``."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 255]
    return crc ^ 0xFFFFFFFF


@dataclass(frozen=True)
class Frame:
    """One frame. ``ref`` is the seq of the frame that this one answers, 0 = none."""

    type: int
    seq: int
    ref: int
    payload: bytes

    def pack(self) -> bytes:
        """The frame as it stands on the wire."""
        head = HEAD.pack(MAGIC, self.type, self.seq, self.ref, len(self.payload))
        tail = struct.pack("<I", crc32c(self.payload))
        return head + struct.pack("<I", crc32c(head)) + self.payload + tail


class Reader:
    """Bytes in, frames out; what is no frame is skipped (``garbage`` counts its runs, ``bad_crc`` CRCs)."""

    def __init__(self, max_payload: int = 16 << 20) -> None:
        self._buf = bytearray()
        self._max = max_payload
        self._in_garbage = False
        self._nested = self._bad_left = 0  # as in frame.c: a bad frame holds few other bad ones
        self.garbage = self.bad_crc = 0

    def feed(self, data: bytes) -> list[Frame]:
        """Every frame that is complete now."""
        self._buf += data
        out = []
        while (frame := self._next()) is not None:
            out.append(frame)
        return out

    def _skip(self, n: int) -> None:
        if n:
            self.garbage += not self._in_garbage
            self._in_garbage = True
            self._drop(n)

    def _drop(self, n: int) -> None:
        del self._buf[:n]
        self._bad_left = max(0, self._bad_left - n)
        self._nested *= self._bad_left > 0

    def _next(self) -> Frame | None:
        while True:
            at = self._buf.find(MAGIC)
            if at < 0:
                keep = next((k for k in (3, 2, 1) if self._buf.endswith(MAGIC[:k])), 0)
                self._skip(len(self._buf) - keep)
                return None
            self._skip(at)
            if len(self._buf) < HEAD_BYTES:
                return None
            _, kind, seq, ref, size = HEAD.unpack_from(self._buf)
            good = crc32c(bytes(self._buf[:20])) == int.from_bytes(self._buf[20:24], "little")
            if good and size <= self._max:
                if self._nested >= _NESTED_MOST:
                    self._skip(1)
                    continue
                if len(self._buf) < EXTRA_BYTES + size:
                    return None
                payload = bytes(self._buf[HEAD_BYTES : HEAD_BYTES + size])
                tail = int.from_bytes(self._buf[HEAD_BYTES + size : EXTRA_BYTES + size], "little")
                if crc32c(payload) == tail:
                    self._drop(EXTRA_BYTES + size)
                    self._in_garbage = False
                    return Frame(kind, seq, ref, payload)
                self._nested += 1
                self._bad_left = max(self._bad_left, EXTRA_BYTES + size)
            self.bad_crc += 1
            self._skip(1)


@dataclass(frozen=True)
class Hello:
    """The payload of HELLO. ``role`` 0 is the board, 1 the module."""

    protocol: int
    role: int
    model_id: bytes
    golden: bytes
    n_layer: int
    first_layer: int
    n_embd: int
    n_expert: int
    n_used: int
    n_expert_ff: int
    max_payload: int
    window: int
    max_token: int
    max_row: int
    who: bytes

    @classmethod
    def unpack(cls, payload: bytes) -> Hello:
        """From 144 bytes.

        Raises:
            ValueError: another length.
        """
        if len(payload) != _HELLO.size:
            raise ValueError(f"a HELLO of {len(payload)} bytes")
        hello = cls(*_HELLO.unpack(payload))
        return replace(hello, who=hello.who.split(b"\0")[0])

    def pack(self) -> bytes:
        return _HELLO.pack(*(getattr(self, name) for name in self.__dataclass_fields__))


#: Asks a module which model it has: no model's id is all zeros, so it answers ERROR and its name.
QUESTION = Hello(PROTOCOL, 0, bytes(16), bytes(32), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, b"colibri-kit detect")
