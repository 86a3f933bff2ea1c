"""The quantiser (native/quant) against the gguf package, known bounds, and itself on other compilers.

Built here with gcc alone, without the kit, so that a failure points at the C code.
Run as a program it prints the table of docs/quantisation.md.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

NATIVE = Path(__file__).resolve().parents[2] / "native"
FLAGS = ["-std=c11", "-Wall", "-Wextra", "-Wshadow", "-Wconversion", "-Werror", "-ffp-contract=off"]
TYPES = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8,
    "Q4_K": 12, "Q5_K": 13, "Q6_K": 14, "BF16": 30,
}  # fmt: skip
SEARCHED = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"]
QUANTISED = [*SEARCHED, "Q8_0"]
EINVAL, ENUMERIC = -1, -6


class _Err(ctypes.Structure):
    _fields_ = (("code", ctypes.c_int), ("msg", ctypes.c_char * 256))


class QuantError(Exception):
    """code and message of a refused call."""


def _sources() -> list[str]:
    return [str(p) for p in sorted((NATIVE / "quant").glob("*.c"))] + [str(NATIVE / "core/err.c")]


class Quant:
    """The library's three functions on numpy arrays."""

    def __init__(self, path: Path) -> None:
        self.lib = ctypes.CDLL(str(path))
        u32, u64, ptr = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_void_p
        self.lib.cb_row_bytes.argtypes, self.lib.cb_row_bytes.restype = (u32, u64), u64
        self.lib.cb_quantise_rows.argtypes = (u32, ptr, u64, u64, ptr, ptr, u64, ptr)
        self.lib.cb_dequantise_rows.argtypes = (u32, ptr, u64, u64, u64, ptr, ptr)

    def row_bytes(self, name: str, cols: int) -> int:
        return int(self.lib.cb_row_bytes(TYPES[name], cols))

    def quantise(self, name: str, x: np.ndarray, importance: np.ndarray | None = None) -> np.ndarray:
        x = np.ascontiguousarray(x, np.float32)
        rows, cols = x.shape
        out = np.full((rows, self.row_bytes(name, cols)), 0xA5, np.uint8)
        err = _Err()
        w = None if importance is None else np.ascontiguousarray(importance, np.float32)
        rc = self.lib.cb_quantise_rows(
            TYPES[name], x.ctypes.data, rows, cols, None if w is None else w.ctypes.data,
            out.ctypes.data, out.nbytes, ctypes.addressof(err),
        )  # fmt: skip
        if rc:
            assert rc == err.code
            assert (out == 0xA5).all(), "a refused call must not write"
            raise QuantError(rc, err.msg.decode())
        return out

    def dequantise(self, name: str, blocks: np.ndarray, cols: int) -> np.ndarray:
        blocks = np.ascontiguousarray(blocks)
        out = np.empty((blocks.shape[0], cols), np.float32)
        err = _Err()
        rc = self.lib.cb_dequantise_rows(
            TYPES[name], blocks.ctypes.data, blocks.nbytes, blocks.shape[0], cols, out.ctypes.data,
            ctypes.addressof(err),
        )  # fmt: skip
        if rc:
            raise QuantError(rc, err.msg.decode())
        return out

    def round_trip(self, name: str, x: np.ndarray) -> np.ndarray:
        return self.dequantise(name, self.quantise(name, x), x.shape[1])


def _build(out: Path, *flags: str) -> Quant:
    subprocess.run(
        ["gcc", "-shared", "-fPIC", *FLAGS, *flags, f"-I{NATIVE / 'include'}", *_sources(), "-o", str(out)],
        check=True,
    )
    return Quant(out)


@pytest.fixture(scope="module")
def quant(tmp_path_factory: pytest.TempPathFactory) -> Quant:
    return _build(tmp_path_factory.mktemp("quant") / "libquant.so", "-O3")


def _rows(kind: str, rows: int = 96, cols: int = 1024, seed: int = 1) -> np.ndarray:
    rng = np.random.default_rng(seed)
    shape = (rows, cols)
    made = {
        "gauss": lambda: rng.standard_normal(shape),
        "heavy": lambda: rng.standard_t(3, shape),
        "laplace": lambda: rng.laplace(size=shape),
        "uniform": lambda: rng.uniform(-1, 1, shape),
        "positive": lambda: rng.exponential(size=shape),
    }[kind]()
    return (0.02 * made).astype(np.float32)


KINDS = ["gauss", "heavy", "laplace", "uniform", "positive"]


def _rel(x: np.ndarray, y: np.ndarray) -> float:
    d = x.astype(np.float64) - y
    return float(np.sqrt((d * d).mean() / (x.astype(np.float64) ** 2).mean()))


def _gguf_quantise(name: str, x: np.ndarray) -> np.ndarray:
    made = quants.quantize(x, GGMLQuantizationType(TYPES[name]))
    return np.ascontiguousarray(made).view(np.uint8).reshape(x.shape[0], -1)


def _same_floats(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal bits; any NaN equals any NaN."""
    nan = np.isnan(a) & np.isnan(b)
    return bool(((a.view(np.uint32) == b.view(np.uint32)) | nan).all())


@pytest.mark.parametrize("name", TYPES)
def test_row_bytes_are_ggml_sizes(quant: Quant, name: str) -> None:
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType(TYPES[name])]
    assert quant.row_bytes(name, 6 * 256) == 6 * 256 // block * size
    assert quant.row_bytes(name, 0) == 0
    if block > 1:
        assert quant.row_bytes(name, block + 1) == 0
    assert quant.row_bytes(name, 1 << 63) == 0  # would overflow a size
    assert quant.lib.cb_row_bytes(99, 256) == 0


@pytest.mark.parametrize("name", TYPES)
def test_dequantise_equals_gguf_on_random_bytes(quant: Quant, name: str) -> None:
    cols = 512
    rng = np.random.default_rng(7)
    blocks = rng.integers(0, 256, (64, quant.row_bytes(name, cols)), dtype=np.uint8)
    with np.errstate(all="ignore"):
        want = quants.dequantize(blocks, GGMLQuantizationType(TYPES[name]))
    want = np.ascontiguousarray(want, np.float32).reshape(64, cols)
    assert _same_floats(quant.dequantise(name, blocks, cols), want)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "Q8_0"])
def test_the_direct_types_equal_gguf(quant: Quant, name: str, kind: str) -> None:
    x = _rows(kind)
    x[0, :32] = 0
    x[1] *= np.float32(1e-33)  # the scale is stored as 0
    assert (quant.quantise(name, x) == _gguf_quantise(name, x)).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_search_is_never_worse_than_gguf_in_any_block(quant: Quant, name: str, kind: str) -> None:
    x = _rows(kind)

    def block_errors(blocks: np.ndarray) -> np.ndarray:
        d = quant.dequantise(name, blocks, x.shape[1]).astype(np.float64) - x
        return (d * d).reshape(-1, 32).sum(axis=1)

    ours, theirs = block_errors(quant.quantise(name, x)), block_errors(_gguf_quantise(name, x))
    assert (ours <= theirs * (1 + 1e-5)).all()
    assert ours.sum() < 0.96 * theirs.sum()


# Relative RMS error; the measured values are in docs/quantisation.md, the bounds 2 % above them.
BOUNDS = {
    ("Q4_K", "gauss"): 0.0716, ("Q5_K", "gauss"): 0.0353, ("Q6_K", "gauss"): 0.0173,
    ("Q4_K", "heavy"): 0.0910, ("Q5_K", "heavy"): 0.0458, ("Q6_K", "heavy"): 0.0250,
}  # fmt: skip


@pytest.mark.parametrize(("name", "kind"), BOUNDS)
def test_k_quants_stay_within_their_bounds(quant: Quant, name: str, kind: str) -> None:
    x = _rows(kind, rows=256, cols=2048)
    error = _rel(x, quant.round_trip(name, x))
    assert error < BOUNDS[name, kind]
    if kind == "gauss":
        # Shannon: no code of R bits a value has a smaller relative error than 2^-R.
        bits = 8 * quant.row_bytes(name, 256) / 256
        assert error > 2.0**-bits


@pytest.mark.parametrize("kind", KINDS)
def test_k_quants_beat_the_plain_formats_of_equal_size(quant: Quant, kind: str) -> None:
    x = _rows(kind)

    def gguf_error(name: str) -> float:
        return _rel(x, quant.dequantise(name, _gguf_quantise(name, x), x.shape[1]))

    assert _rel(x, quant.round_trip("Q4_K", x)) < 0.90 * gguf_error("Q4_0")
    assert _rel(x, quant.round_trip("Q5_K", x)) < 0.90 * gguf_error("Q5_0")
    assert _rel(x, quant.round_trip("Q6_K", x)) < 0.50 * gguf_error("Q5_0")


@pytest.mark.parametrize("name", QUANTISED)
def test_quantising_twice_changes_little(quant: Quant, name: str) -> None:
    x = _rows("gauss")
    once = quant.round_trip(name, x)
    assert _rel(once, quant.round_trip(name, once)) < 0.25 * _rel(x, once)


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("value", [0.0, -0.0, 0.3, -0.3, 1.0, 6e4, -6e4])
def test_constant_rows(quant: Quant, name: str, value: float) -> None:
    x = np.full((2, 512), value, np.float32)
    assert np.abs(quant.round_trip(name, x) - x).max() <= 5e-4 * abs(value)


@pytest.mark.parametrize("name", QUANTISED)
def test_subnormal_rows_become_zero(quant: Quant, name: str) -> None:
    rng = np.random.default_rng(3)
    x = (rng.standard_normal((4, 512)) * 1e-41).astype(np.float32)
    assert (x != 0).any()
    assert (quant.round_trip(name, x) == 0).all()


@pytest.mark.parametrize("name", SEARCHED)
@pytest.mark.parametrize("scale", [1e-7, 3e-6, 1e-4])
def test_scales_among_the_smallest_halves_are_not_worse_than_zeros(
    quant: Quant, name: str, scale: float
) -> None:
    rng = np.random.default_rng(4)
    x = (rng.standard_normal((8, 512)) * scale).astype(np.float32)
    assert _rel(x, quant.round_trip(name, x)) <= 1.0
    if scale > 1e-5 or (scale > 1e-6 and name.endswith("_K")):
        assert _rel(x, quant.round_trip(name, x)) < 0.12


@pytest.mark.parametrize("name", QUANTISED)
def test_one_huge_value_among_small_ones(quant: Quant, name: str) -> None:
    rng = np.random.default_rng(5)
    x = (rng.standard_normal((2, 512)) * 1e-3).astype(np.float32)
    x[:, 7::256] = 6e4
    y = quant.round_trip(name, x)
    assert np.isfinite(y).all()
    assert np.abs(y - x)[:, 7::256].max() < 6e4 * 1e-3
    # Q4_1 … hold everything else in the block between two levels; 8.5 bits resolve 1/127 of it
    assert np.abs(np.delete(y, np.s_[7::256], axis=1)).max() < 6e4 / 7


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize(
    ("value", "what"), [(np.nan, "not a number"), (np.inf, "infinite"), (-np.inf, "infinite")]
)
def test_not_finite_is_refused_by_place(quant: Quant, name: str, value: float, what: str) -> None:
    x = _rows("gauss", rows=4, cols=512)
    x[3, 77] = value
    x[3, 78] = value
    with pytest.raises(QuantError) as e:
        quant.quantise(name, x)
    assert e.value.args == (ENUMERIC, f"row 3, column 77: {what}")


@pytest.mark.parametrize("name", [n for n in TYPES if n not in ("F32", "BF16")])
def test_too_large_is_refused_and_the_largest_is_not(quant: Quant, name: str) -> None:
    x = _rows("gauss", rows=2, cols=512)
    x[1, 5] = 1e30
    with pytest.raises(QuantError, match="row 1, column 5: too large"):
        quant.quantise(name, x)
    x[1, 5] = 65504
    y = quant.round_trip(name, x)
    assert abs(y[1, 5] - 65504) < 40
    assert np.isfinite(y).all()


def test_bf16_at_the_edge(quant: Quant) -> None:
    edge = np.array([[0x7F7F7FFF]], np.uint32).view(np.float32)
    assert np.isfinite(quant.round_trip("BF16", edge)).all()
    over = np.array([[0x7F7F8000]], np.uint32).view(np.float32)  # would round to infinity
    with pytest.raises(QuantError, match="row 0, column 0"):
        quant.quantise("BF16", over)


def test_wrong_shapes_and_types_are_refused(quant: Quant) -> None:
    x = np.zeros((2, 256), np.float32)
    out = np.zeros(10_000, np.uint8)
    err = _Err()

    def call(type_id: int, rows: int, cols: int, size: int) -> str:
        rc = quant.lib.cb_quantise_rows(
            type_id, x.ctypes.data, rows, cols, None, out.ctypes.data, size, ctypes.addressof(err)
        )
        assert rc == EINVAL
        return err.msg.decode()

    assert "type 99" in call(99, 2, 256, 288)
    assert "multiple of 256" in call(TYPES["Q4_K"], 2, 128, 144)
    assert "do not make 287 bytes" in call(TYPES["Q4_K"], 2, 256, 287)
    assert "do not make" in call(TYPES["Q4_K"], 1 << 62, 256, 0)
    assert not out.any()


@pytest.mark.parametrize("name", SEARCHED)
def test_importance_moves_the_error_to_where_it_matters_less(quant: Quant, name: str) -> None:
    x = _rows("gauss")
    rng = np.random.default_rng(6)
    w = rng.exponential(size=x.shape[1]).astype(np.float32) ** 2

    def weighted(blocks: np.ndarray) -> float:
        d = quant.dequantise(name, blocks, x.shape[1]).astype(np.float64) - x
        return float((w * d * d).sum())

    plain, aware = quant.quantise(name, x), quant.quantise(name, x, w)
    assert weighted(aware) < 0.97 * weighted(plain)
    assert (quant.quantise(name, x, np.full_like(w, 4)) == plain).all()
    assert (quant.quantise(name, x, np.zeros_like(w)) == plain).all()
    w[9] = -1
    with pytest.raises(QuantError, match="column 9"):
        quant.quantise(name, x, w)


@pytest.mark.parametrize("name", QUANTISED)
def test_rows_are_independent_of_each_other_and_of_threads(quant: Quant, name: str) -> None:
    x = _rows("heavy", rows=48)
    whole = quant.quantise(name, x)
    with ThreadPoolExecutor(4) as pool:
        parts = list(pool.map(lambda i: quant.quantise(name, x[i : i + 5]), range(0, 48, 5)))
    assert (np.concatenate(parts) == whole).all()


HARNESS = r"""
#include <stdio.h>
#include "quant.h"
static float x[8 * 1024];
static unsigned char out[1 << 20];
int main(void)
{
    static const unsigned types[] = {0, 1, 2, 3, 6, 7, 8, 12, 13, 14, 30};
    struct cb_err err;
    if (fread(x, sizeof x, 1, stdin) != 1) return 2;
    for (unsigned i = 0; i < sizeof types / sizeof types[0]; i++) {
        const unsigned long long n = 8 * cb_row_bytes(types[i], 1024);
        if (cb_quantise_rows(types[i], x, 8, 1024, 0, out, n, &err) != 0) return 3;
        fwrite(out, 1, n, stdout);
    }
    return 0;
}
"""


@pytest.mark.parametrize(
    "target", ["gcc -O0", "gcc -O3 -march=x86-64-v3", "aarch64-linux-gnu-gcc -O3 -static"]
)
def test_the_bytes_do_not_depend_on_compiler_flags_or_machine(
    quant: Quant, tmp_path: Path, target: str
) -> None:
    compiler, *flags = target.split()
    arm = compiler.startswith("aarch64")
    runner = [r for r in map(shutil.which, ("qemu-aarch64", "qemu-aarch64-static")) if r][:1] if arm else []
    if arm and (not runner or not shutil.which(compiler)):
        pytest.skip("no aarch64 compiler or qemu-user here")
    if "v3" in target and " avx2 " not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this CPU has no AVX2")
    main_c, main = tmp_path / "main.c", str(tmp_path / "main")
    main_c.write_text(HARNESS)
    include = [f"-I{NATIVE / 'include'}", f"-I{NATIVE / 'quant'}"]
    build = [
        compiler,
        "-std=c11",
        "-ffp-contract=off",
        *flags,
        *include,
        *_sources(),
        str(main_c),
        "-o",
        main,
    ]
    subprocess.run(build, check=True)
    x = np.concatenate([_rows(kind, rows=2, cols=1024) for kind in KINDS[:4]])
    x[7] *= np.float32(1e-5)
    run = subprocess.run([*runner, main], input=x.tobytes(), capture_output=True, check=True)
    names = sorted(TYPES, key=TYPES.__getitem__)
    assert run.stdout == b"".join(quant.quantise(name, x).tobytes() for name in names)


if __name__ == "__main__":
    with TemporaryDirectory() as tmp:
        q = _build(Path(tmp) / "libquant.so", "-O3")
        data = {kind: _rows(kind, rows=256, cols=2048) for kind in KINDS}
        for n in TYPES:
            errors = " | ".join(f"{_rel(x, q.round_trip(n, x)):.5f}" for x in data.values())
            print(f"| {n} | {8 * q.row_bytes(n, 256) / 256:g} | {errors} |")
