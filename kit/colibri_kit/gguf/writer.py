"""Writes a GGUF version 3 file as a stream: the header first, then each tensor's bytes in order."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from colibri_kit.gguf.reader import ARRAY, BOOL, DEFAULT_ALIGNMENT, F32, I32, NUMPY_CODES, STRING, U32
from colibri_kit.gguf.types import TYPES

if TYPE_CHECKING:
    from colibri_kit.gguf.reader import GgufFile


@dataclass(frozen=True)
class OutTensor:
    """A tensor to be written; ``dims`` in ggml's order, fastest first."""

    name: str
    dims: tuple[int, ...]
    type_id: int

    @property
    def size(self) -> int:
        """Bytes."""
        count = 1
        for d in self.dims:
            count *= d
        kind = TYPES[self.type_id]
        return count // kind.block * kind.block_bytes


def _string(text: str | bytes) -> bytes:
    raw = text.encode("utf-8") if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def encode_value(kind: int, value: Any) -> bytes:
    """The bytes of a scalar or string value of GGUF type ``kind`` (type word excluded)."""
    if kind == STRING:
        return _string(value)
    import numpy as np

    return np.array(value, dtype=NUMPY_CODES[kind]).tobytes()


def encode_array(element: int, values: Sequence[Any]) -> bytes:
    """The bytes of an array value: element type, length, elements."""
    head = struct.pack("<IQ", element, len(values))
    if element == STRING:
        return head + b"".join(_string(v) for v in values)
    import numpy as np

    return head + np.asarray(values).astype(NUMPY_CODES[element]).tobytes()


class GgufHeader:
    """Collects key-values and tensors; :meth:`pack` gives the header, :attr:`offsets` the places.

    Values may be copied from an open file byte for byte (:meth:`copy`), so that nothing
    is lost whatever their type.
    """

    def __init__(self, alignment: int = DEFAULT_ALIGNMENT) -> None:
        self.alignment = alignment
        self._keys: dict[str, tuple[int, bytes]] = {}
        self.tensors: list[OutTensor] = []

    def set(self, key: str, value: str | bytes | bool | int | float, kind: int | None = None) -> None:
        """Adds or replaces a scalar; the GGUF type follows from Python's unless given."""
        if kind is None:
            if isinstance(value, bool):
                kind = BOOL
            elif isinstance(value, int):
                kind = U32 if value >= 0 else I32
            else:
                kind = F32 if isinstance(value, float) else STRING
        self._keys[key] = (kind, encode_value(kind, value))

    def set_array(self, key: str, element: int, values: Sequence[Any]) -> None:
        self._keys[key] = (ARRAY, encode_array(element, values))

    def copy(self, source: GgufFile, key: str) -> None:
        """Takes ``key`` over from ``source`` without interpreting its bytes."""
        info = source.keys[key]
        raw = source.read(info.start, info.end - info.start).tobytes()
        self._keys[key] = (info.type, raw)

    def pack(self) -> bytes:
        """Header bytes, padded so that the first tensor follows directly."""
        out = bytearray(struct.pack("<4sIQQ", b"GGUF", 3, len(self.tensors), len(self._keys)))
        for key, (kind, raw) in self._keys.items():
            out += _string(key) + struct.pack("<I", kind) + raw
        for t, offset in zip(self.tensors, self.offsets(), strict=True):
            out += _string(t.name) + struct.pack("<I", len(t.dims))
            out += struct.pack(f"<{len(t.dims)}QIQ", *t.dims, t.type_id, offset)
        return bytes(out) + bytes(-len(out) % self.alignment)

    def offsets(self) -> list[int]:
        """Each tensor's offset from the start of the data."""
        out, at = [], 0
        for t in self.tensors:
            out.append(at)
            at += t.size + -t.size % self.alignment
        return out

    def data_bytes(self) -> int:
        return sum(t.size + -t.size % self.alignment for t in self.tensors)


def pad(stream: IO[bytes], size: int, alignment: int) -> None:
    """Zeros after a tensor of ``size`` bytes."""
    stream.write(bytes(-size % alignment))
