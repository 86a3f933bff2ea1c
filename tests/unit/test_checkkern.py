"""checkkern: every ISA's kernels equal the scalar ones, and the scalar ones equal recorded hashes."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from kernel_lib import FLAGS, NATIVE, compiler, kernel_sources


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
