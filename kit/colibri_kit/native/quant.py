"""Quantising, dequantising and checksums by the engine's own C code."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from colibri_kit.errors import UsageError
from colibri_kit.native import binding

_BYTES_A_JOB = 1 << 20  # smaller parts would spend their time in Python


def row_bytes(type_id: int, cols: int) -> int:
    """Bytes of one row of ``cols`` weights in ggml's block layout.

    Raises:
        UsageError: unknown type, or cols is not a multiple of its block.
    """
    _ffi, lib = binding.load()
    n = int(lib.cb_row_bytes(type_id, cols))
    if n == 0:
        raise UsageError(f"type {type_id} has no rows of {cols} weights")
    return n


def _jobs(rows: int, total_bytes: int, threads: int) -> list[tuple[int, int]]:
    """Row ranges [start, end), at most one a thread."""
    threads = threads or os.cpu_count() or 1
    parts = max(1, min(threads, rows, total_bytes // _BYTES_A_JOB + 1))
    edges = [rows * i // parts for i in range(parts + 1)]
    return list(pairwise(edges))


def quantise_rows(
    type_id: int, x: npt.ArrayLike, threads: int = 0, importance: npt.ArrayLike | None = None
) -> npt.NDArray[np.uint8]:
    """Quantises float32 rows ``[rows, cols]`` to ggml blocks.

    Rows are independent, so the result does not depend on ``threads`` (0 = all CPUs).

    Args:
        importance: float32 ``[cols]`` weights of the columns, or None.

    Returns:
        uint8 ``[rows, row_bytes]``.

    Raises:
        UsageError: unknown type or shape. EngineError: a value is not finite.
    """
    ffi, lib = binding.load()
    data = np.ascontiguousarray(x, dtype=np.float32)
    if data.ndim != 2:
        raise UsageError(f"expected a matrix, got {data.ndim} dimensions")
    rows, cols = data.shape
    out = np.empty((rows, row_bytes(type_id, cols)), np.uint8)
    weights: Any = ffi.NULL
    if importance is not None:
        columns = np.ascontiguousarray(importance, dtype=np.float32)
        if columns.shape != (cols,):
            raise UsageError(f"importance has shape {columns.shape}, expected ({cols},)")
        weights = ffi.from_buffer("float[]", columns)

    def job(part: tuple[int, int]) -> None:
        start, end = part
        err = ffi.new("struct cb_err *")
        raw, target = ffi.from_buffer("float[]", data[start:end]), out[start:end]
        rc = lib.cb_quantise_rows(
            type_id, raw, end - start, cols, weights, ffi.from_buffer(target), target.nbytes, err
        )
        binding.raise_for(ffi, rc, err, f"quantising to type {type_id}")

    _run(job, _jobs(rows, data.nbytes, threads) if rows else [])
    return out


def dequantise_rows(
    type_id: int, raw: npt.ArrayLike | bytes, rows: int, cols: int
) -> npt.NDArray[np.float32]:
    """Turns ggml blocks back to float32 ``[rows, cols]``.

    Raises:
        UsageError: unknown type or shape, or raw has not rows × row_bytes bytes.
    """
    ffi, lib = binding.load()
    size = row_bytes(type_id, cols)
    given = np.frombuffer(raw, np.uint8) if isinstance(raw, bytes) else np.ascontiguousarray(raw)
    data = given.view(np.uint8).reshape(-1)
    if data.nbytes != rows * size:
        raise UsageError(f"{data.nbytes} bytes given, {rows} rows need {rows * size}")
    out = np.empty((rows, cols), np.float32)

    def job(part: tuple[int, int]) -> None:
        start, end = part
        err = ffi.new("struct cb_err *")
        blocks = ffi.from_buffer(data[start * size : end * size])
        target = ffi.from_buffer("float[]", out[start:end])
        rc = lib.cb_dequantise_rows(type_id, blocks, len(blocks), end - start, cols, target, err)
        binding.raise_for(ffi, rc, err, f"dequantising type {type_id}")

    _run(job, _jobs(rows, out.nbytes, 0) if rows else [])
    return out


def crc32c(buf: bytes | bytearray | memoryview | npt.NDArray[Any], crc: int = 0) -> int:
    """CRC32C (Castagnoli) of a buffer, continuing from ``crc``."""
    ffi, lib = binding.load()
    if isinstance(buf, np.ndarray):
        buf = np.ascontiguousarray(buf).data
    view = memoryview(buf).cast("B")
    return int(lib.cb_crc32c(crc, ffi.from_buffer(view), len(view)))


def _run(job: Any, parts: list[tuple[int, int]]) -> None:
    if len(parts) == 1:
        job(parts[0])
    elif parts:
        with ThreadPoolExecutor(len(parts)) as pool:
            list(pool.map(job, parts))
