"""Tensor values: float types to and from binary32 in numpy, quantised ones by the engine's C code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from colibri_kit.errors import FormatError
from colibri_kit.gguf.types import BF16, F16, F32, type_name

if TYPE_CHECKING:
    import numpy as np

    Bytes = np.ndarray[Any, np.dtype[np.uint8]]
    Floats = np.ndarray[Any, np.dtype[np.float32]]


def to_f32(type_id: int, raw: Bytes, rows: int, cols: int) -> Floats:
    """GGUF bytes -> float32 [rows, cols]; exact for every type."""
    import numpy as np

    if type_id == F32.id:
        return raw.view("<f4").reshape(rows, cols)
    if type_id == F16.id:
        return raw.view("<f2").astype(np.float32).reshape(rows, cols)
    if type_id == BF16.id:
        wide = raw.view("<u2").astype(np.uint32) << np.uint32(16)
        return wide.view(np.float32).reshape(rows, cols)
    from colibri_kit import native

    return native.dequantise_rows(type_id, raw, rows, cols)


def from_f32(type_id: int, x: Floats, threads: int, what: str) -> Bytes:
    """float32 [rows, cols] -> GGUF bytes, rounded to nearest even or quantised.

    Raises:
        FormatError: NaN or infinity, or a value above the half-precision range; ``what``
            names the tensor.
    """
    import numpy as np

    if not np.isfinite(x).all():
        raise FormatError(f"{what}: holds NaN or infinity", code="CK-FORMAT-GGUF", state="unchanged")
    if type_id == F32.id:
        return np.ascontiguousarray(x, dtype="<f4").view(np.uint8).reshape(-1)
    if type_id == F16.id:
        with np.errstate(over="ignore"):
            half = np.ascontiguousarray(x).astype("<f2")
        if not np.isfinite(half).all():
            raise FormatError(
                f"{what}: a value of {float(np.abs(x).max()):.6g} does not fit F16",
                code="CK-FORMAT-GGUF",
                hint="use --quant bf16 or f32",
                state="unchanged",
            )
        return half.view(np.uint8).reshape(-1)
    if type_id == BF16.id:
        bits = np.ascontiguousarray(x, dtype="<f4").view(np.uint32)
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        return rounded.astype("<u2").view(np.uint8).reshape(-1)
    from colibri_kit import native

    return native.quantise_rows(type_id, np.ascontiguousarray(x, dtype=np.float32), threads).reshape(-1)


def convert(src: int, dst: int, raw: Bytes, rows: int, cols: int, threads: int, what: str) -> Bytes:
    """GGUF bytes of type ``src`` -> GGUF bytes of type ``dst``; untouched when equal."""
    if src == dst:
        return raw
    if src != F32.id and dst == F32.id:
        return to_f32(src, raw, rows, cols).view("u1").reshape(-1)
    try:
        return from_f32(dst, to_f32(src, raw, rows, cols), threads, what)
    except ValueError as err:
        raise FormatError(
            f"{what}: cannot become {type_name(dst)}: {err}", code="CK-FORMAT-GGUF", state="unchanged"
        ) from err
