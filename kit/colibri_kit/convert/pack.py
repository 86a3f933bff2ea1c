"""The x8c16 permutation (docs/format.md) and its inverse: lossless, by strided copies.

A super-block holds one block of each of 8 rows. Every field moves as a whole: a field
of `width` bytes at `src` of row r's block goes to `dst + r * width`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from colibri_kit.convert.container import GROUP
from colibri_kit.gguf.types import FLOATS, TYPES, type_name

if TYPE_CHECKING:
    import numpy as np

    Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def _run(src: int, width: int, count: int = 1) -> list[tuple[int, int]]:
    """``count`` chunks of ``width`` bytes that follow each other from ``src``."""
    return [(src + i * width, width) for i in range(count)]


#: type id -> fields (offset in the GGUF block, bytes) in the order of the super-block
FIELDS: dict[int, list[tuple[int, int]]] = {
    8: _run(0, 2) + _run(2, 16, 2),  # Q8_0: d, qs
    2: _run(0, 2) + _run(2, 16),  # Q4_0: d, qs
    3: _run(0, 2) + _run(2, 2) + _run(4, 16),  # Q4_1: d, m, qs
    6: _run(0, 2) + _run(2, 4) + _run(6, 16),  # Q5_0: d, qh, qs
    7: _run(0, 2) + _run(2, 2) + _run(4, 4) + _run(8, 16),  # Q5_1: d, m, qh, qs
    12: _run(0, 2) + _run(2, 2) + _run(4, 4, 3) + _run(16, 16, 8),  # Q4_K: d, dmin, scales, qs
    13: _run(0, 2) + _run(2, 2) + _run(4, 4, 3) + _run(16, 16, 2) + _run(48, 16, 8),  # Q5_K: …, qh, qs
    14: _run(208, 2) + _run(192, 16) + _run(128, 16, 4) + _run(0, 16, 8),  # Q6_K: d, scales, qh, ql
}


def pack_rows(type_id: int, raw: Bytes, rows: int, cols: int) -> Bytes:
    """GGUF bytes of a matrix [rows][cols] -> engine layout, rows padded to 8 with zeros.

    Args:
        raw: uint8, contiguous, exactly ``rows`` · row bytes.

    Returns:
        uint8 of cb_mat_bytes(type, rows, cols).
    """
    import numpy as np

    row_bytes = TYPES[type_id].row_bytes(cols)
    if raw.size != rows * row_bytes:
        raise ValueError(f"{raw.size} bytes for {rows} rows of {row_bytes}")
    padded = -(-rows // GROUP) * GROUP
    if padded != rows:
        full = np.zeros(padded * row_bytes, np.uint8)
        full[: raw.size] = raw
        raw = full
    if type_id in FLOATS:
        return raw
    out = np.empty(raw.size, np.uint8)
    _copy(type_id, np.ascontiguousarray(raw), out, padded, cols, inverse=False)
    return out


def unpack_rows(type_id: int, packed: Bytes, rows: int, cols: int) -> Bytes:
    """The inverse of :func:`pack_rows`: the GGUF bytes, padding rows dropped."""
    import numpy as np

    row_bytes = TYPES[type_id].row_bytes(cols)
    padded = -(-rows // GROUP) * GROUP
    if packed.size != padded * row_bytes:
        raise ValueError(f"{packed.size} bytes for {padded} rows of {row_bytes}")
    if type_id in FLOATS:
        return packed[: rows * row_bytes]
    out = np.empty(packed.size, np.uint8)
    _copy(type_id, np.ascontiguousarray(packed), out, padded, cols, inverse=True)
    return out[: rows * row_bytes]


def _copy(type_id: int, src: Bytes, dst: Bytes, rows: int, cols: int, *, inverse: bool) -> None:
    """Moves each field as one strided copy over (group, block, row).

    16-byte chunks are void items: numpy moves those whole, six times as fast as 16 bytes.
    """
    import numpy as np

    fields = FIELDS.get(type_id)
    if fields is None:
        raise ValueError(f"{type_name(type_id)} has no x8c16 layout")
    kind = TYPES[type_id]
    groups, blocks, size = rows // GROUP, cols // kind.block, kind.block_bytes
    shape = (groups, blocks, GROUP)
    block_rows, supers = (dst, src) if inverse else (src, dst)
    at = 0
    for offset, width in fields:
        dtype = np.dtype(f"V{width}") if width == 16 else np.dtype(f"u{width}")
        plain: Any = np.ndarray(
            shape, dtype, block_rows.data, offset, (GROUP * blocks * size, size, blocks * size)
        )
        packed: Any = np.ndarray(shape, dtype, supers.data, at, (GROUP * blocks * size, GROUP * size, width))
        if inverse:
            plain[...] = packed
        else:
            packed[...] = plain
        at += GROUP * width
