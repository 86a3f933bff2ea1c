"""A medium in memory whose faults can be chosen: what cards, readers and counterfeits do."""

from __future__ import annotations

import errno
from collections.abc import Callable


class Card:
    """``size`` bytes, filled with a pattern as a used card is.

    Args:
        short: most bytes that one write takes. dies_at: write number that fails, with that errno.
        real: bytes that are really there; beyond it ``beyond`` decides: ``zero``, ``wrap`` or ``error``.
        flip: offsets whose lowest bit reads back inverted.
        on_write: called before each write with its number.
    """

    direct = True

    def __init__(
        self,
        size: int,
        *,
        short: int = 1 << 30,
        dies_at: int | None = None,
        error: int = errno.EIO,
        real: int | None = None,
        beyond: str = "zero",
        flip: tuple[int, ...] = (),
        on_write: Callable[[int], None] = lambda _n: None,
    ) -> None:
        self.name, self.size = "card", size
        self.real = size if real is None else real
        self.data = bytearray(b"\xa5" * self.real)
        self.short, self.dies_at, self.error = short, dies_at, error
        self.beyond, self.flip, self.on_write = beyond, flip, on_write
        self.writes = 0
        self.flushed: list[int] = []
        self.log: list[tuple[int, int]] = []

    def write(self, data: bytes | memoryview, offset: int) -> int:
        self.writes += 1
        self.on_write(self.writes)
        if self.dies_at is not None and self.writes >= self.dies_at:
            raise OSError(self.error, "injected")
        piece = bytes(data[: self.short])
        self.log.append((offset, len(piece)))
        if offset >= self.real:
            if self.beyond == "error":
                raise OSError(errno.EIO, "injected")
            if self.beyond == "zero":
                return len(piece)
            offset %= self.real
        self.data[offset : offset + len(piece)] = piece[: max(0, self.real - offset)]
        return len(piece)

    def flush(self) -> None:
        self.flushed.append(self.writes)

    def read_back(self, length: int, offset: int) -> bytes:
        if offset >= self.real:
            if self.beyond == "zero":
                return bytes(length)
            offset %= self.real
        out = bytearray(self.data[offset : offset + length])
        for at in self.flip:
            if offset <= at < offset + length:
                out[at - offset] ^= 1
        return bytes(out)

    def close(self) -> None:
        pass
