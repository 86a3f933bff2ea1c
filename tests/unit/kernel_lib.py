"""Builds native/kernels as a shared library for the tests, and speaks x8c16.

The permutation here is written from docs/format.md alone, so that it checks the
C code (and the converter) instead of repeating it.
"""

from __future__ import annotations

import ctypes as ct
import functools
import shutil
import subprocess
import sys
import tempfile
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

NATIVE = Path(__file__).resolve().parents[2] / "native"
FLAGS = ["-std=c11", "-O2", "-Wall", "-Wextra", "-Wshadow", "-Wconversion", "-Werror", "-ffp-contract=off"]
U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]

# type id, block, bytes of a block
TYPES = {
    "F32": (0, 1, 4), "F16": (1, 1, 2), "BF16": (30, 1, 2),
    "Q4_0": (2, 32, 18), "Q4_1": (3, 32, 20), "Q5_0": (6, 32, 22), "Q5_1": (7, 32, 24), "Q8_0": (8, 32, 34),
    "Q4_K": (12, 256, 144), "Q5_K": (13, 256, 176), "Q6_K": (14, 256, 210),
}  # fmt: skip

# GGUF block -> x8c16 super-block: (first byte, bytes, bytes a row keeps together), in super-block order
FIELDS = {
    "Q8_0": [(0, 2, 2), (2, 32, 16)],
    "Q4_0": [(0, 2, 2), (2, 16, 16)],
    "Q4_1": [(0, 2, 2), (2, 2, 2), (4, 16, 16)],
    "Q5_0": [(0, 2, 2), (2, 4, 4), (6, 16, 16)],
    "Q5_1": [(0, 2, 2), (2, 2, 2), (4, 4, 4), (8, 16, 16)],
    "Q4_K": [(0, 2, 2), (2, 2, 2), (4, 12, 4), (16, 128, 16)],
    "Q5_K": [(0, 2, 2), (2, 2, 2), (4, 12, 4), (16, 32, 16), (48, 128, 16)],
    "Q6_K": [(208, 2, 2), (192, 16, 16), (128, 64, 16), (0, 128, 16)],
}
# where the binary16 scales stand in a GGUF block
SCALES = {
    "Q8_0": [0], "Q4_0": [0], "Q5_0": [0], "Q4_1": [0, 2], "Q5_1": [0, 2],
    "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208],
}  # fmt: skip

SHIM = r"""
#include <math.h>
#include "fma.h"
#include "f16.h"
void shim_fma_soft(const float *a, const float *b, const float *c, float *o, size_t n)
{ for (size_t i = 0; i < n; i++) o[i] = cb_fmaf_soft(a[i], b[i], c[i]); }
void shim_fma_libm(const float *a, const float *b, const float *c, float *o, size_t n)
{ for (size_t i = 0; i < n; i++) o[i] = fmaf(a[i], b[i], c[i]); }
void shim_f16_to_f32(const uint16_t *x, float *o, size_t n)
{ for (size_t i = 0; i < n; i++) o[i] = cb_f16_to_f32(x[i]); }
void shim_f32_to_f16(const float *x, uint16_t *o, size_t n)
{ for (size_t i = 0; i < n; i++) o[i] = cb_f32_to_f16(x[i]); }
float cb_expf(float);
void shim_expf(const float *x, float *o, size_t n)
{ for (size_t i = 0; i < n; i++) o[i] = cb_expf(x[i]); }
"""

P, F, Z = ct.c_void_p, ct.c_float, ct.c_size_t
# the slots after gemm, in the order of struct cb_kernels
_PROTO: dict[str, tuple[Any, list[Any]]] = {
    "quant_q8_0": (None, [P, P, Z]), "quant_q8_k": (None, [P, P, Z]),
    "dot": (F, [P, P, Z]), "sum": (F, [P, Z]), "max": (F, [P, Z]),
    "rmsnorm": (None, [P, P, P, Z, F]), "add": (None, [P, P, Z]), "scale": (None, [P, F, Z]),
    "axpy": (None, [P, F, P, Z]), "silu_mul": (None, [P, P, P, Z]), "softmax": (None, [P, Z]),
    "f32_to_f16": (None, [P, P, Z]), "f16_to_f32": (None, [P, P, Z]),
    "attn_score_f32": (None, [P, P, P, Z, Z, F]), "attn_score_f16": (None, [P, P, P, Z, Z, F]),
    "attn_mix_f32": (None, [P, P, P, Z, Z]), "attn_mix_f16": (None, [P, P, P, Z, Z]),
}  # fmt: skip


class Table(ct.Structure):
    """struct cb_kernels, pointers untyped."""

    _fields_ = [("isa", ct.c_char_p), ("gemm", P * 40), *[(name, P) for name in _PROTO]]


def compiler() -> list[str]:
    """gcc where there is one, else the kit's own compiler."""
    gcc = shutil.which("gcc")
    return [gcc] if gcc else [sys.executable, "-m", "ziglang", "cc"]


def kernel_sources() -> list[Path]:
    """The baseline sources: everything but the ISA folders."""
    return sorted((NATIVE / "kernels").glob("*.c")) + sorted((NATIVE / "kernels/scalar").glob("*.c"))


@functools.cache
def load(*extra: str) -> ct.CDLL:
    """The scalar kernels and the shim as a shared library, built once per set of extra flags."""
    folder = Path(tempfile.mkdtemp(prefix="cb-kernels-"))
    (folder / "shim.c").write_text(SHIM)
    out = folder / "libkern.so"
    cmd = [*compiler(), *FLAGS, *extra, "-shared", "-fPIC", f"-I{NATIVE / 'kernels'}", "-o", str(out)]
    subprocess.run([*cmd, str(folder / "shim.c"), *map(str, kernel_sources()), "-lm"], check=True)
    lib = ct.CDLL(str(out))
    shutil.rmtree(folder)
    lib.cb_mat_bytes.restype = ct.c_uint64
    lib.cb_mat_bytes.argtypes = [ct.c_uint32, ct.c_uint64, ct.c_uint64]
    lib.cb_act_bytes.restype = Z
    lib.cb_act_bytes.argtypes = [ct.c_int, Z]
    lib.cb_crc32c.restype = ct.c_uint32
    lib.cb_crc32c.argtypes = [ct.c_uint32, ct.c_char_p, Z]
    lib.cb_dequant_row.argtypes = [ct.c_uint32, P, Z, Z, P]
    lib.cb_expf.restype, lib.cb_expf.argtypes = F, [F]
    for name, n in (("cb_log", 1), ("cb_exp", 1), ("cb_pow_inv", 3)):
        fn = getattr(lib, name)
        fn.restype, fn.argtypes = ct.c_double, [ct.c_double] * n
    lib.cb_sincos.argtypes = [ct.c_double, P, P]
    return lib


class Kernels:
    """The slots of the scalar table as Python callables that take arrays."""

    def __init__(self) -> None:
        self.lib = load()
        self.table = Table()
        assert self.lib.cb_kernels_init(ct.byref(self.table), b"scalar", None) == 0

    def call(self, slot: str, *args: Any) -> Any:
        """Calls a slot; arrays go as their address."""
        res, argtypes = _PROTO[slot]
        fn = ct.CFUNCTYPE(res, *argtypes)(getattr(self.table, slot))
        return fn(*[a.ctypes.data if isinstance(a, np.ndarray) else a for a in args])

    def gemm(
        self, name: str, w: U8, acts: list[npt.NDArray[Any]], rows: int, cols: int
    ) -> npt.NDArray[np.float32]:
        """[n_tok, rows]; w in the engine's layout, acts prepared rows."""
        fn = ct.CFUNCTYPE(None, P, P, Z, P, Z, Z)(self.table.gemm[TYPES[name][0]])
        y = np.full((len(acts), rows), 7e7, np.float32)
        ys = (P * len(acts))(*[y[t].ctypes.data for t in range(len(acts))])
        xs = (P * len(acts))(*[a.ctypes.data for a in acts])
        buf = np.zeros(w.size + 64, np.uint8)
        at = -buf.ctypes.data % 16
        buf[at : at + w.size] = w
        fn(ys, xs, len(acts), buf.ctypes.data + at, rows // 8, cols)
        return y


def to_x8c16(name: str, gguf_bytes: U8) -> U8:
    """[rows, blocks, block_bytes] in GGUF order -> the engine's bytes; rows a multiple of 8."""
    rows, blocks, size = gguf_bytes.shape
    groups = gguf_bytes.reshape(rows // 8, 8, blocks, size).transpose(0, 2, 1, 3)  # group, block, row, byte
    parts = []
    for at, n, unit in FIELDS[name]:
        field = groups[..., at : at + n].reshape(rows // 8, blocks, 8, n // unit, unit)
        parts.append(field.transpose(0, 1, 3, 2, 4).reshape(rows // 8, blocks, 8 * n))
    return np.ascontiguousarray(np.concatenate(parts, axis=-1)).reshape(-1)


def random_blocks(name: str, rows: int, cols: int, rng: np.random.Generator, raw: bool = False) -> U8:
    """[rows, blocks, block_bytes] of random GGUF bytes; scales of ordinary size unless raw."""
    _, block, size = TYPES[name]
    out = rng.integers(0, 256, (rows, cols // block, size), dtype=np.uint8)
    for at in [] if raw else SCALES[name]:
        d = (rng.standard_normal((rows, cols // block, 1)) * 0.02).astype(np.float16)
        out[..., at : at + 2] = d.view(np.uint8)
    return out


def round_f32(v: Fraction) -> float:
    """The binary32 number nearest to an exact rational, ties to even, subnormals included."""
    if v == 0:
        return 0.0
    mag = abs(v)
    e = mag.numerator.bit_length() - mag.denominator.bit_length()
    if Fraction(2) ** e > mag:
        e -= 1
    quantum = Fraction(2) ** max(e - 23, -149)
    r = round(mag / quantum) * quantum
    out = float("inf") if r >= Fraction(2) ** 128 else float(r)
    return -out if v < 0 else out


def ptr(a: npt.NDArray[Any]) -> ct.c_void_p:
    return ct.c_void_p(a.ctypes.data)


def adversarial(n: int, seed: int) -> tuple[F32, F32, F32]:
    """(a, b, c) near the hard places: ties, cancellation, subnormal results, far exponents."""
    rng = np.random.default_rng(seed)
    man = rng.integers(0, 2**23, (3, n), dtype=np.uint32)
    simple = rng.random((3, n)) < 0.4  # few bits set: exact ties
    man[simple] &= np.uint32(0x7F0000) >> rng.integers(0, 22, simple.sum(), dtype=np.uint32)
    exp = rng.integers(0, 255, (3, n), dtype=np.uint32)
    near = rng.random(n) < 0.6  # the addend within 2^±60 of the product, often at its rounding edge
    product = exp[0].astype(np.int64) + exp[1] - 127 + rng.integers(-60, 61, n)
    exp[2] = np.where(near, np.clip(product, 0, 254), exp[2])
    tiny = rng.random(n) < 0.3  # products around the subnormal border
    exp[1] = np.where(
        tiny, np.clip(127 - 140 + 127 - exp[0].astype(np.int64) + rng.integers(0, 40, n), 0, 254), exp[1]
    )
    exp[2] = np.where(tiny, rng.integers(0, 40, n), exp[2])
    sign = rng.integers(0, 2, (3, n), dtype=np.uint32) << 31
    bits = (sign | exp << 23 | man).astype(np.uint32)
    a, b, c = bits.view(np.float32)
    cancel = rng.random(n) < 0.1  # c = -a·b rounded: only the error remains
    with np.errstate(all="ignore"):
        c = np.where(cancel & np.isfinite(a * b), -(a * b), c).astype(np.float32)
    return a, b, c
