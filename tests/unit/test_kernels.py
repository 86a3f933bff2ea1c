"""The scalar kernels against independent sources: gguf's dequantizers, float64 and exact rationals."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from kernel_lib import SCALES, TYPES, Kernels, random_blocks, round_f32, to_x8c16

QUANTISED = list(SCALES)
F32 = npt.NDArray[np.float32]
Q8_0 = np.dtype([("d", "<f4"), ("sum", "<i4"), ("q", "i1", 32)])
Q8_K = np.dtype([("d", "<f4"), ("bsum", "<i2", 16), ("q", "i1", 256)])


@pytest.fixture(scope="module")
def kern() -> Kernels:
    return Kernels()


def prepare(kern: Kernels, name: str, x: F32) -> npt.NDArray[Any]:
    """One activation row as the type wants it."""
    k = name.endswith("_K")
    out = np.zeros(x.size // (256 if k else 32), Q8_K if k else Q8_0)
    kern.call("quant_q8_k" if k else "quant_q8_0", out, x, x.size)
    return out


def as_float(act: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    return (act["d"].astype(np.float64)[:, None] * act["q"]).reshape(-1)


def to_gguf_type(name: str) -> GGMLQuantizationType:
    return GGMLQuantizationType(TYPES[name][0])


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("cols", [256, 768, 2048])
def test_gemm_equals_dequantised_product(kern: Kernels, name: str, cols: int) -> None:
    rng = np.random.default_rng(cols)
    rows, n_tok = 24, 3
    blocks = random_blocks(name, rows, cols, rng)
    w = dequantize(blocks.reshape(rows, -1), to_gguf_type(name)).astype(np.float64)
    acts = [prepare(kern, name, rng.standard_normal(cols).astype(np.float32)) for _ in range(n_tok)]
    y = kern.gemm(name, to_x8c16(name, blocks), acts, rows, cols)
    for t, act in enumerate(acts):
        a = as_float(act)
        # one rounding of 2^-24 for each product and sum of the at most 64 blocks, and W's own
        bound = 2.0**-24 * (np.abs(w) @ np.abs(a)) * 4
        assert np.all(np.abs(y[t] - w @ a) <= bound)
        assert np.abs(w @ a).max() > 1e3 * bound.max()  # the bound says something


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("raw", [False, True])
def test_dequant_row_is_ggufs(kern: Kernels, name: str, raw: bool) -> None:
    rng = np.random.default_rng(5)
    rows, cols = 8, 1024
    blocks = random_blocks(name, rows, cols, rng, raw)
    with np.errstate(all="ignore"):
        want = dequantize(blocks.reshape(rows, -1), to_gguf_type(name))
    group = to_x8c16(name, blocks)
    for r in range(rows):
        got = np.empty(cols, np.float32)
        kern.lib.cb_dequant_row(TYPES[name][0], group.ctypes.data, r, cols, got.ctypes.data)
        np.testing.assert_array_equal(got, want[r])


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_float_gemm_and_row(kern: Kernels, name: str) -> None:
    rng = np.random.default_rng(9)
    rows, cols = 16, 100
    exact = rng.standard_normal((rows, cols)).astype(np.float32)
    if name == "F16":
        stored: npt.NDArray[Any] = exact.astype(np.float16)
        exact = stored.astype(np.float32)
    elif name == "BF16":
        stored = (exact.view(np.uint32) >> 16).astype(np.uint16)
        exact = (stored.astype(np.uint32) << 16).view(np.float32)
    else:
        stored = exact
    x = rng.standard_normal((2, cols)).astype(np.float32)
    y = kern.gemm(name, stored.view(np.uint8).reshape(-1), list(x), rows, cols)
    for t in range(2):
        want = [lane_dot(exact[r], x[t]) for r in range(rows)]
        np.testing.assert_array_equal(y[t], np.array(want, np.float32))
    row = np.empty(cols, np.float32)
    group = np.ascontiguousarray(stored[8:])
    kern.lib.cb_dequant_row(TYPES[name][0], group.ctypes.data, 3, cols, row.ctypes.data)
    np.testing.assert_array_equal(row, exact[11])


def lane_dot(a: F32, b: F32) -> float:
    """docs/determinism.md §2 in exact rationals: 32 lanes, each step rounded once."""
    lane = [0.0] * 32
    for i, (x, y) in enumerate(zip(a.tolist(), b.tolist(), strict=True)):
        lane[i % 32] = round_f32(Fraction(x) * Fraction(y) + Fraction(lane[i % 32]))
    return reduce_lanes(lane)


def reduce_lanes(lane: list[float]) -> float:
    for h in (16, 8, 4, 2, 1):
        for j in range(h):
            lane[j] = round_f32(Fraction(lane[j]) + Fraction(lane[j + h]))
    return lane[0]


@pytest.mark.parametrize("n", [1, 31, 32, 33, 64, 100, 257])
def test_lane_order(kern: Kernels, n: int) -> None:
    rng = np.random.default_rng(n)
    a, b = (rng.standard_normal((2, n)) * 10.0 ** rng.integers(-4, 5, (2, n))).astype(np.float32)
    assert kern.call("dot", a, b, n) == lane_dot(a, b)
    lane = [0.0] * 32
    for i, v in enumerate(a.tolist()):
        lane[i % 32] = round_f32(Fraction(lane[i % 32]) + Fraction(v))
    assert kern.call("sum", a, n) == reduce_lanes(lane)


def test_quant_q8_0_follows_the_contract(kern: Kernels) -> None:
    rng = np.random.default_rng(1)
    x = (rng.standard_normal(32 * 500) * np.repeat(10.0 ** rng.uniform(-12, 5, 500), 32)).astype(np.float32)
    x[:32] = 0
    x[32:64] = np.arange(32, dtype=np.float32) / 2
    x[32] = 127  # inverse scale 1: halves are ties
    got = prepare(kern, "Q8_0", x)
    rows = x.reshape(-1, 32)
    amax = np.abs(rows).max(axis=1)
    with np.errstate(divide="ignore"):
        inverse = np.where(amax > 0, np.float32(127) / amax, np.float32(0)).astype(np.float32)
    q = np.rint(rows * inverse[:, None])
    np.testing.assert_array_equal(got["q"], q)
    np.testing.assert_array_equal(got["sum"], q.sum(axis=1))
    np.testing.assert_array_equal(got["d"], (amax / np.float32(127)).astype(np.float16).astype(np.float32))


def test_quant_q8_k_follows_the_contract(kern: Kernels) -> None:
    rng = np.random.default_rng(2)
    x = (rng.standard_normal(256 * 200) * np.repeat(10.0 ** rng.uniform(-30, 30, 200), 256)).astype(
        np.float32
    )
    x[:256] = 0
    x[256:512] = np.resize([3.0, -3.0], 256)  # the first of the largest decides the sign
    x[512:768] = np.resize([-3.0, 3.0], 256)
    got = prepare(kern, "Q4_K", x)
    rows = x.reshape(-1, 256)
    first = rows[np.arange(200), np.abs(rows).argmax(axis=1)]
    with np.errstate(divide="ignore"):
        iscale = np.where(first != 0, np.float32(-127) / first, np.float32(0)).astype(np.float32)
        d = np.where(iscale != 0, np.float32(1) / iscale, np.float32(0)).astype(np.float32)
    q = np.minimum(127, np.rint(rows * iscale[:, None]))
    np.testing.assert_array_equal(got["q"], q)
    np.testing.assert_array_equal(got["d"], d)
    np.testing.assert_array_equal(got["bsum"], q.reshape(-1, 16, 16).sum(axis=2))
    assert got["q"][1, 0] == -127
    assert got["q"][1, 1] == 127
    assert got["q"].min() == -127


@pytest.mark.parametrize("scale", [1e-38, 1e-42])
def test_quantisers_take_blocks_too_small_to_scale_as_zero(kern: Kernels, scale: float) -> None:
    x = (np.random.default_rng(3).standard_normal(256) * scale).astype(np.float32)
    for name in ("Q8_0", "Q4_K"):
        got = prepare(kern, name, x)
        assert not got["q"].any()
        assert not got["d"].any()


def test_max_rules(kern: Kernels) -> None:
    def largest(*v: float) -> float:
        a = np.array(v, np.float32)
        return float(kern.call("max", a, a.size))

    assert largest(1.0, 3.0, -7.0) == 3.0
    assert largest() == float("-inf")
    assert np.isnan(largest(5.0, float("nan"), 7.0))
    assert np.isnan(largest(float("nan")))
    assert not np.signbit(largest(-0.0, -0.0))
    assert largest(float("inf"), 1.0) == float("inf")


def test_rmsnorm_softmax_silu(kern: Kernels) -> None:
    rng = np.random.default_rng(4)
    x, w, y = (rng.standard_normal((3, 999)) * 3).astype(np.float32)
    x64, w64 = x.astype(np.float64), w.astype(np.float64)
    kern.call("rmsnorm", y, x, w, 999, 1e-5)
    np.testing.assert_allclose(
        y, x64 / np.sqrt(np.mean(x64**2) + np.float64(np.float32(1e-5))) * w64, rtol=4e-7
    )
    kern.call("rmsnorm", y, x, None, 999, 1e-5)
    np.testing.assert_allclose(y, x64 / np.sqrt(np.mean(x64**2) + 1e-5), rtol=4e-7)
    kern.call("silu_mul", y, x, w, 999)
    np.testing.assert_allclose(y, x64 / (1 + np.exp(-x64)) * w64, rtol=5e-7)
    soft = x.copy()
    kern.call("softmax", soft, 999)
    e = np.exp((x - x.max()).astype(np.float64))  # the difference is rounded first
    np.testing.assert_allclose(soft, e / e.sum(), rtol=6e-7)


def test_axpy_add_scale_and_attention(kern: Kernels) -> None:
    rng = np.random.default_rng(6)
    y, x = rng.standard_normal((2, 77)).astype(np.float32)
    got = y.copy()
    kern.call("axpy", got, 0.3, x, 77)
    a = Fraction(float(np.float32(0.3)))
    want = [round_f32(a * Fraction(p) + Fraction(q)) for p, q in zip(x.tolist(), y.tolist(), strict=True)]
    assert got.tolist() == want
    got = y.copy()
    kern.call("add", got, x, 77)
    np.testing.assert_array_equal(got, y + x)
    kern.call("scale", got, 1.7, 77)
    np.testing.assert_array_equal(got, (y + x) * np.float32(1.7))

    n_pos, hd = 9, 20
    k = rng.standard_normal((n_pos, hd)).astype(np.float16)
    q = rng.standard_normal(hd).astype(np.float32)
    s, s16, o, o16 = np.empty((4, 32), np.float32)
    wide = k.astype(np.float32)
    kern.call("attn_score_f32", s, q, wide, n_pos, hd, 0.25)
    kern.call("attn_score_f16", s16, q, k, n_pos, hd, 0.25)
    want_s = np.array([lane_dot(q, row) for row in wide], np.float32) * np.float32(0.25)
    np.testing.assert_array_equal(s[:n_pos], want_s)
    np.testing.assert_array_equal(s16[:n_pos], want_s)
    kern.call("attn_mix_f32", o, s, wide, n_pos, hd)
    kern.call("attn_mix_f16", o16, s, k, n_pos, hd)
    for i in range(hd):
        acc = 0.0
        for p in range(n_pos):
            acc = round_f32(Fraction(float(s[p])) * Fraction(float(wide[p, i])) + Fraction(acc))
        assert o[i] == acc == o16[i]


def test_sizes(kern: Kernels) -> None:
    lib = kern.lib
    for type_id, block, size in TYPES.values():
        assert lib.cb_mat_bytes(type_id, 8, 256) == 8 * 256 // block * size
        assert lib.cb_mat_bytes(type_id, 9, 512) == 16 * 512 // block * size
        assert lib.cb_mat_bytes(type_id, 2**62, 2**62) == 0
        assert lib.cb_mat_bytes(type_id, 2**64 - 1, 256) == 0
        assert lib.cb_mat_bytes(type_id, 1, 2**63) == (0 if size * 8 // block >= 2 else 2**63)
        assert block == 1 or lib.cb_mat_bytes(type_id, 8, block + 1) == 0
    for unknown in (4, 5, 9, 15, 31, 40, 2**32 - 1):
        assert lib.cb_mat_bytes(unknown, 8, 256) == 0
    assert lib.cb_act_bytes(0, 100) == 400
    assert lib.cb_act_bytes(1, 64) == 2 * Q8_0.itemsize
    assert lib.cb_act_bytes(2, 512) == 2 * Q8_K.itemsize
    assert lib.cb_act_bytes(1, 33) == 0
    assert lib.cb_act_bytes(0, 2**63) == 0
