"""checkkern: every ISA's kernels equal the scalar ones, and the scalar ones equal recorded hashes."""

from __future__ import annotations

import ctypes as ct
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from kernel_lib import FLAGS, NATIVE, adversarial, compiler, kernel_sources, ptr


def build_checkkern(
    tmp: Path, cc: list[str], isas: list[str], mutate: tuple[str, str, str] | None = None
) -> Path:
    """checkkern with the named ISA folders, each compiled with its own flags; mutate = (file, old, new)."""
    flags = {"sse41": ["-msse4.1"], "avx2": ["-mavx2", "-mfma", "-mf16c"], "neon": []}
    common = [*cc, *FLAGS, *(f"-DCB_HAVE_{isa.upper()}" for isa in isas)]
    jobs = [(p, []) for p in [*kernel_sources(), *sorted((NATIVE / "tests/checkkern").glob("*.c"))]]
    jobs += [(p, flags[isa]) for isa in isas for p in sorted((NATIVE / "kernels" / isa).glob("*.c"))]
    objects = []
    for i, (path, extra) in enumerate(jobs):
        include: list[str] = []
        if mutate and path.name == mutate[0] and path.parent.name == "scalar":
            text = path.read_text(encoding="utf-8")
            assert mutate[1] in text
            include = [f"-I{path.parent}"]
            text = text.replace(mutate[1], mutate[2]).replace('"../', f'"{path.parent.parent}/')
            path = tmp / path.name
            path.write_text(text, encoding="utf-8")
        objects.append(str(tmp / f"{i}.o"))
        subprocess.run([*common, *extra, *include, "-c", str(path), "-o", objects[-1]], check=True)
    out = tmp / "checkkern"
    subprocess.run([*cc, "-static", *objects, "-lm", "-o", str(out)], check=True)
    return out


def host_isas() -> list[str]:
    cpu = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").exists() else ""
    have = [isa for isa, flag in (("sse41", " sse4_1 "), ("avx2", " avx2 ")) if flag in cpu]
    return [isa for isa in have if any((NATIVE / "kernels" / isa).glob("init*.c"))]


def test_every_host_kernel_equals_scalar(tmp_path: Path) -> None:
    exe = build_checkkern(tmp_path, compiler(), host_isas())
    for seed in ("0", "12345"):
        res = subprocess.run([exe, "--seed", seed], capture_output=True, text=True)
        assert res.returncode == 0, res.stdout
        assert res.stdout.count("\nok   ") >= 27
        for isa in host_isas():
            assert f"ok   {isa} gemm_q4_k" in res.stdout


@pytest.mark.skipif(
    not (shutil.which("aarch64-linux-gnu-gcc") and shutil.which("qemu-aarch64-static")),
    reason="no aarch64 emulator",
)
def test_aarch64_equals_the_hashes_of_x86(tmp_path: Path) -> None:
    isas = ["neon"] if any((NATIVE / "kernels/neon").glob("init*.c")) else []
    exe = build_checkkern(tmp_path, ["aarch64-linux-gnu-gcc"], isas)
    for cpu in ("cortex-a53", "cortex-a72"):
        res = subprocess.run(["qemu-aarch64-static", "-cpu", cpu, exe], capture_output=True, text=True)
        assert res.returncode == 0, res.stdout


@pytest.mark.parametrize(
    ("file", "old", "new", "slot"),
    [
        ("vec.c", "cb_fmaf(a, x[i], y[i])", "a * x[i] + y[i]", "axpy"),
        ("gemm_q.c", "acc[r] = cb_fmaf(cb_row_d(sb, r) * a[b].d, s, acc[r])",
         "acc[r] = cb_fmaf(cb_row_d(sb, r), a[b].d * s, acc[r])", "gemm_q8_0"),
    ],
)  # fmt: skip
def test_checkkern_notices_a_wrong_rounding(tmp_path: Path, file: str, old: str, new: str, slot: str) -> None:
    exe = build_checkkern(tmp_path, compiler(), [], (file, old, new))
    res = subprocess.run([exe], capture_output=True, text=True)
    assert res.returncode == 1
    assert f"FAIL scalar {slot}" in res.stdout


FMA4 = r"""
#include <math.h>
#include "sse41/sse41.h"
void run(const float *a, const float *b, const float *c, float *o, float *exact, float *libm, size_t n)
{
    for (size_t i = 0; i < n; i += 4) {
        const __m128 x = _mm_loadu_ps(a + i), y = _mm_loadu_ps(b + i), z = _mm_loadu_ps(c + i);
        _mm_storeu_ps(o + i, cb_fma4(x, y, z));
        _mm_storeu_ps(exact + i, cb_fma4_exact_sse41(x, y, z));
    }
    for (size_t i = 0; i < n; i++) libm[i] = fmaf(a[i], b[i], c[i]);
}
"""


@pytest.mark.skipif("sse41" not in host_isas(), reason="no SSE4.1")
def test_sse41_fused_multiply_add_equals_the_c_library(tmp_path: Path) -> None:
    (tmp_path / "shim.c").write_text(FMA4, encoding="utf-8")
    kernels = NATIVE / "kernels"
    cmd = [
        *compiler(),
        *FLAGS,
        "-msse4.1",
        "-shared",
        "-fPIC",
        f"-I{kernels}",
        "-o",
        str(tmp_path / "fma.so"),
    ]
    subprocess.run([*cmd, str(tmp_path / "shim.c"), str(kernels / "sse41/fma.c"), "-lm"], check=True)
    lib = ct.CDLL(str(tmp_path / "fma.so"))
    for seed in range(4):
        a, b, c = adversarial(500_000, seed)
        special = np.random.default_rng(seed).choice([0.0, -0.0, np.inf, -np.inf, np.nan, 3e38], (3, 4000))
        a[:4000], b[1000:5000], c[2000:6000] = special
        out = [np.empty_like(a) for _ in range(3)]
        lib.run(ptr(a), ptr(b), ptr(c), *map(ptr, out), ct.c_size_t(a.size))
        for got in out[:2]:
            number = ~np.isnan(out[2])
            np.testing.assert_array_equal(np.isnan(got), ~number)
            np.testing.assert_array_equal(got.view(np.uint32)[number], out[2].view(np.uint32)[number])
