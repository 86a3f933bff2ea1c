"""fma emulation, conversions, elementary functions and CRC32C against exact or 50-digit arithmetic."""

from __future__ import annotations

import ctypes as ct
import decimal
import random
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from kernel_lib import adversarial, load, ptr, round_f32

F32 = npt.NDArray[np.float32]
PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459230781640628620899862803482534")


def fma(which: str, a: F32, b: F32, c: F32) -> F32:
    out = np.empty_like(a)
    getattr(load(), which)(ptr(a), ptr(b), ptr(c), ptr(out), ct.c_size_t(a.size))
    return out


def test_fma_emulation_is_exact() -> None:
    a, b, c = adversarial(120_000, 1)
    got = fma("shim_fma_soft", a, b, c).tolist()
    subnormal = 0
    for x, y, z, g in zip(a.tolist(), b.tolist(), c.tolist(), got, strict=True):
        want = round_f32(Fraction(x) * Fraction(y) + Fraction(z))
        assert g == want, (x.hex(), y.hex(), z.hex())
        subnormal += 0 < abs(want) < 2.0**-126
    assert subnormal > 5_000


def test_fma_emulation_equals_the_c_library_bit_by_bit() -> None:
    for seed in range(8):
        a, b, c = adversarial(500_000, 100 + seed)
        soft, libm = fma("shim_fma_soft", a, b, c), fma("shim_fma_libm", a, b, c)
        np.testing.assert_array_equal(soft.view(np.uint32), libm.view(np.uint32))


def test_fma_emulation_special_values() -> None:
    edge = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 3.4e38, -3.4e38, 1e-45, -1e-45, 2.0**-126]
    a, b, c = (
        np.array(v, np.float32)
        for v in zip(*((x, y, z) for x in edge for y in edge for z in edge), strict=True)
    )
    soft, libm = fma("shim_fma_soft", a, b, c), fma("shim_fma_libm", a, b, c)
    np.testing.assert_array_equal(soft, libm)
    finite = ~np.isnan(libm)
    np.testing.assert_array_equal(np.signbit(soft[finite]), np.signbit(libm[finite]))


def test_f16_to_f32_all() -> None:
    x = np.arange(65536, dtype=np.uint32).astype(np.uint16)
    out = np.empty(65536, np.float32)
    load().shim_f16_to_f32(ptr(x), ptr(out), ct.c_size_t(65536))
    want = x.view(np.float16).astype(np.float32)
    np.testing.assert_array_equal(out, want)
    np.testing.assert_array_equal(np.signbit(out), np.signbit(want))


def to_f16(x: F32) -> npt.NDArray[np.uint16]:
    out = np.empty(x.size, np.uint16)
    load().shim_f32_to_f16(ptr(x), ptr(out), ct.c_size_t(x.size))
    return out


def test_f32_to_f16_every_value_and_every_tie() -> None:
    half = np.arange(0x7C00, dtype=np.uint32).astype(np.uint16).view(np.float16).astype(np.float32)
    tie = ((half[:-1].astype(np.float64) + half[1:]) / 2).astype(np.float32)  # exact
    near = np.concatenate([tie.view(np.uint32) - 1, tie.view(np.uint32) + 1, tie.view(np.uint32)]).view(
        np.float32
    )
    edge = np.array([65519.99, 65520.0, 65535.9, 3e38, np.inf, 2.0**-25, 2.0**-24, 1e-45, 0.0], np.float32)
    spread = np.arange(0, 2**32, 1021, dtype=np.uint64).astype(np.uint32).view(np.float32)
    for x in (half, near, edge, spread):
        for y in (x, -x):
            with np.errstate(over="ignore"):
                want = y.astype(np.float16).view(np.uint16)
            got = to_f16(y)
            nan = np.isnan(y)
            np.testing.assert_array_equal(got[~nan], want[~nan])
            assert np.isnan(got[nan].view(np.float16)).all()


def test_expf_error() -> None:
    bits = np.arange(0, 0x42B17218, 997, dtype=np.uint32)  # 0 … 88.72
    neg = np.arange(0x80000000, 0xC2D00000, 997, dtype=np.uint32)  # -0 … -104
    worst = 0.0
    for x in (bits.view(np.float32), neg.view(np.float32)):
        out = np.empty_like(x)
        load().shim_expf(ptr(x), ptr(out), ct.c_size_t(x.size))
        want = np.exp(x.astype(np.float64))
        ulp = np.maximum(2.0 ** (np.floor(np.log2(want)) - 23), 2.0**-149)
        worst = max(worst, float(np.max(np.abs(out - want) / ulp)))
    assert 0.4 < worst < 1.2, worst  # 2 is what the header promises


def test_expf_ends() -> None:
    expf = load().cb_expf
    assert expf(0.0) == expf(-0.0) == 1.0
    assert expf(88.8) == expf(float("inf")) == float("inf")
    assert np.isfinite(expf(88.72283))
    assert expf(-104.5) == expf(float("-inf")) == 0.0
    assert expf(-103.0) == 2.0**-149
    assert np.isnan(expf(float("nan")))


def ulps(got: float, want: Decimal) -> float:
    """Error in units of the last place of binary64."""
    w = float(want)
    return float(abs(Decimal(got) - want) / Decimal(max(np.spacing(abs(w)), 5e-324)))


def test_log_exp_pow_in_double() -> None:
    rng = random.Random(7)
    lib = load()
    with decimal.localcontext() as ctx:
        ctx.prec = 50
        logs = [rng.uniform(0.5, 2) for _ in range(1500)] + [
            2.0 ** rng.uniform(-1074, 1023) for _ in range(500)
        ]
        assert max(ulps(lib.cb_log(x), Decimal(x).ln()) for x in [*logs, 1.0000000000000002, 10000.0]) < 2.0
        exps = [rng.uniform(-1, 1) for _ in range(700)] + [rng.uniform(-745, 709.7) for _ in range(700)]
        assert max(ulps(lib.cb_exp(x), Decimal(x).exp()) for x in exps) < 2.0
        worst = 0.0
        for base in (10000.0, 500000.0, 1e6, 5e6, 1.5):
            for den in (64, 80, 96, 128, 256):
                for num in range(0, den, 2):
                    want = (-(Decimal(base).ln()) * num / den).exp()
                    worst = max(worst, float(abs(Decimal(lib.cb_pow_inv(base, num, den)) / want - 1)))
        assert worst < 4e-15
    assert lib.cb_log(1.0) == 0.0
    assert lib.cb_log(0.0) == float("-inf")
    assert np.isnan(lib.cb_log(-1.0))
    assert lib.cb_exp(0.0) == 1.0
    assert lib.cb_exp(710.0) == float("inf")
    assert lib.cb_exp(-746.0) == 0.0
    assert lib.cb_pow_inv(10000.0, 0.0, 64.0) == 1.0


def exact_sin_cos(x: float) -> tuple[Decimal, Decimal]:
    """Taylor series at 80 digits after reduction by pi/2."""
    v = Decimal(x)
    k = int((v / (PI / 2)).to_integral_value())
    r = v - k * (PI / 2)
    s, c, term = Decimal(0), Decimal(0), Decimal(1)
    for i in range(60):
        if i % 2:
            s += term if i % 4 == 1 else -term
        else:
            c += term if i % 4 == 0 else -term
        term = term * r / (i + 1)
    return [(s, c), (c, -s), (-s, -c), (-c, s)][k % 4]


def test_sincos() -> None:
    rng = random.Random(3)
    lib = load()
    s, c = ct.c_float(), ct.c_float()
    xs = [rng.uniform(-4, 4) for _ in range(600)] + [rng.uniform(-(2.0**31), 2.0**31) for _ in range(600)]
    xs += [pos * 10000.0 ** (-i / 32) for pos in (0, 1, 2, 511, 8191, 131071) for i in range(32)]
    with decimal.localcontext() as ctx:
        ctx.prec = 80
        # the doubles next to multiples of pi/2, where a careless reduction loses every digit
        xs += [float(PI / 2 * k) for k in [*range(1, 200), *(rng.randrange(2**30) for _ in range(600))]]
        xs += [1.5707963267948966, 3.141592653589793, 0.7853981633974483, 5e-324, 1e-30, 0.0]
        worst = 0.0
        for x in xs:
            lib.cb_sincos(x, ct.byref(s), ct.byref(c))
            for got, want in zip((s.value, c.value), exact_sin_cos(x), strict=True):
                step = max(float(np.spacing(np.float32(abs(float(want))))), 2.0**-149)
                worst = max(worst, float(abs(Decimal(got) - want)) / step)
    assert worst < 0.51, worst


def crc_bitwise(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def crc_builds() -> list[list[str]]:
    """The table, and the instruction where this CPU has it."""
    info = Path("/proc/cpuinfo")
    sse42 = info.exists() and " sse4_2 " in info.read_text(encoding="utf-8")
    return [[], ["-msse4.2"]] if sse42 else [[]]


@pytest.mark.parametrize("flags", crc_builds())
def test_crc32c(flags: list[str]) -> None:
    crc = load(*flags).cb_crc32c
    # RFC 3720, B.4, and the check value of the catalogue of CRC algorithms
    assert crc(0, b"\0" * 32, 32) == 0x8A9136AA
    assert crc(0, b"\xff" * 32, 32) == 0x62A8AB43
    assert crc(0, bytes(range(32)), 32) == 0x46DD794E
    assert crc(0, bytes(range(31, -1, -1)), 32) == 0x113FDB5C
    assert crc(0, b"123456789", 9) == 0xE3069283
    assert crc(0, b"", 0) == 0
    rng = random.Random(8)
    for n in range(70):
        data = rng.randbytes(n)
        cut = rng.randrange(n + 1)
        assert crc(0, data, n) == crc_bitwise(data)
        assert crc(crc(0, data[:cut], cut), data[cut:], n - cut) == crc_bitwise(data)


def test_bf16_widening_is_a_shift() -> None:
    raw = np.arange(65536, dtype=np.uint32)
    x = raw.astype(np.uint16)
    out = np.empty(65536, np.float32)
    load().cb_dequant_row(30, ptr(x), 0, 65536, ptr(out))
    assert out.view(np.uint32).tolist() == (raw << 16).tolist()
    assert out[0x3FC0] == 1.5
