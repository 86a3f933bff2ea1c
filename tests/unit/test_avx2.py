"""The AVX2 kernels: checkkern passes on every slot, and notices when one of them is wrong.

The second half is what makes the first mean something: each mutation changes one
line of the AVX2 sources, and exactly the slots that depend on it must fail.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

NATIVE = Path(__file__).resolve().parents[2] / "native"
FLAGS = ["-std=c11", "-O1", "-Wall", "-Wextra", "-Wshadow", "-Wconversion", "-Werror"]
FLAGS += ["-ffp-contract=off", "-DCB_HAVE_AVX2", f"-I{NATIVE / 'include'}"]
AVX2_FLAGS = ["-mavx2", "-mfma", "-mf16c"]

CPUINFO = Path("/proc/cpuinfo")
CPU = f" {CPUINFO.read_text(encoding='utf-8')} " if CPUINFO.exists() else ""
HAS_AVX2 = all(f" {flag} " in CPU for flag in ("avx2", "fma", "f16c"))
needs_avx2 = pytest.mark.skipif(not HAS_AVX2, reason="this CPU has no AVX2, FMA and F16C")

GEMM_TYPES = ["f32", "f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k"]
SLOTS = {f"gemm_{t}" for t in GEMM_TYPES} | {
    "quant_q8_0", "quant_q8_k", "dot", "sum", "max", "rmsnorm", "add", "scale", "axpy", "silu_mul",
    "softmax", "f32_to_f16", "f16_to_f32", "attn_score_f32", "attn_score_f16", "attn_mix_f32", "attn_mix_f16",
}  # fmt: skip


def compile_file(source: Path, out: Path, flags: list[str]) -> str:
    """The object of one C file."""
    obj = str(out / f"{source.parent.name}_{source.stem}.o")
    subprocess.run(["gcc", *FLAGS, *flags, "-c", str(source), "-o", obj], check=True)
    return obj


def report(objects: list[str], out: Path) -> tuple[int, dict[str, str]]:
    """Exit status of checkkern on AVX2, and slot -> "ok" or "FAIL"."""
    exe = str(out / "checkkern")
    subprocess.run(["gcc", *objects, "-lm", "-o", exe], check=True)
    run = subprocess.run([exe, "--isa", "avx2"], capture_output=True, text=True, check=False)
    lines = re.findall(r"^(\w+)\s+avx2\s+(\w+)", run.stdout, re.MULTILINE)
    return run.returncode, {slot: verdict for verdict, slot in lines}


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """checkkern's objects by "folder/file.c": baseline x86-64, but for the AVX2 folder."""
    out = tmp_path_factory.mktemp("objects")
    folders = {"kernels": [], "kernels/scalar": [], "tests/checkkern": [], "kernels/avx2": AVX2_FLAGS}
    return {
        f"{source.parent.name}/{source.name}": compile_file(source, out, flags)
        for folder, flags in folders.items()
        for source in sorted((NATIVE / folder).glob("*.c"))
    }


@needs_avx2
def test_every_slot_gives_the_bits_of_scalar(objects: dict[str, str], tmp_path: Path) -> None:
    status, verdicts = report(list(objects.values()), tmp_path)
    assert verdicts == dict.fromkeys(SLOTS, "ok")
    assert status == 0


#: (file to change, file to compile, old, new, slots that must fail)
MUTATIONS = [
    ("gemm_q.c", "gemm_q.c", "z * a[t][b].sum", "(z + 1) * a[t][b].sum", {"gemm_q4_0", "gemm_q5_0"}),
    ("gemm_q.c", "gemm_q.c", "cb_rows16_avx2(w + 16)", "cb_rows16_avx2(w)", {"gemm_q4_1", "gemm_q5_1"}),
    # a weight of -128
    ("gemm_q.c", "gemm_q.c", "_mm256_abs_epi8(w)",
     "_mm256_abs_epi8(_mm256_max_epi8(w, _mm256_set1_epi8(-127)))",
     {"gemm_q8_0"}),
    ("gemm_k.c", "gemm_k.c", "set1_epi8(63)", "set1_epi8(31)", {"gemm_q4_k", "gemm_q5_k"}),
    ("gemm_k.c", "gemm_k.c", "0x40 : 0x10", "0x40 : 0x20", {"gemm_q5_k"}),
    ("gemm_q6_k.c", "gemm_q6_k.c", "_mm256_add_epi32(a, b), 5)", "_mm256_add_epi32(a, b), 4)", {"gemm_q6_k"}),
    # every tile size runs on other tokens than the first
    ("avx2.h", "gemm_q6_k.c", "tile4(y + i, x + i", "tile4(y + i, x", {"gemm_q6_k"}),
    ("avx2.h", "gemm_q6_k.c", "tile2(y + i, x + i", "tile2(y + i, x", {"gemm_q6_k"}),
    ("avx2.h", "gemm_q6_k.c", "tile1(y + i, x + i", "tile1(y + i, x", {"gemm_q6_k"}),
    # the tail of a sum over lanes
    ("lanes.h", "gemm_float.c", "(n) * sizeof(type)", "((n) - 1) * sizeof(type)",
     {"gemm_f32", "gemm_f16", "gemm_bf16"}),
    ("expf.c", "expf.c", "-104.0f", "-102.0f", {"softmax"}),
    ("expf.c", "expf.c", "2.12194440e-4f", "2.12194400e-4f", {"softmax", "silu_mul"}),
    ("quant.c", "quant.c", "id <= FLT_MAX ? id : 0.0f", "id", {"quant_q8_0"}),
    ("quant.c", "quant.c", "x[i + (hit != 0 ? (size_t)__builtin_ctz(hit) : 0)]", "-amax", {"quant_q8_k"}),
    ("vec.c", "vec.c", "return best + bad;", "return best;", {"max"}),
    ("vec.c", "vec.c", "ss / (float)n + eps", "(ss + eps) / (float)n", {"rmsnorm"}),
    ("vec.c", "vec.c", "y[i] = cb_fmaf(a, x[i], y[i])", "y[i] = a * x[i] + y[i]", {"axpy"}),
    ("attn.c", "attn.c", "acc[j] = _mm256_fmadd_ps(w, widen(v + 8 * j), acc[j])",
     "acc[j] = _mm256_add_ps(_mm256_mul_ps(w, widen(v + 8 * j)), acc[j])", {"attn_mix_f32", "attn_mix_f16"}),
]  # fmt: skip


IDS = [f"{m[0]}-{i}" for i, m in enumerate(MUTATIONS)]


@needs_avx2
@pytest.mark.parametrize(("edited", "compiled", "old", "new", "wrong"), MUTATIONS, ids=IDS)
def test_checkkern_sees_a_mutation(
    objects: dict[str, str], tmp_path: Path, edited: str, compiled: str, old: str, new: str, wrong: set[str]
) -> None:
    folder = tmp_path / "kernels/avx2"
    folder.mkdir(parents=True)
    for path in [*(NATIVE / "kernels").glob("*.h"), *(NATIVE / "kernels/avx2").glob("*.h")]:
        shutil.copy(path, tmp_path / path.relative_to(NATIVE))
    shutil.copy(NATIVE / "kernels/avx2" / compiled, folder)
    text = (folder / edited).read_text(encoding="utf-8")
    assert old in text
    (folder / edited).write_text(text.replace(old, new), encoding="utf-8")
    changed = compile_file(folder / compiled, tmp_path, AVX2_FLAGS)
    status, verdicts = report([*(objects | {f"avx2/{compiled}": changed}).values()], tmp_path)
    assert {slot for slot, verdict in verdicts.items() if verdict != "ok"} == wrong
    assert status == 1


@pytest.mark.skipif(not shutil.which("nm"), reason="no binutils")
def test_every_function_says_its_instruction_set(objects: dict[str, str]) -> None:
    """Also those the compiler leaves out of line: the build's instruction scan goes by the name."""
    mine = [obj for name, obj in objects.items() if name.startswith("avx2/")]
    assert mine
    for obj in mine:
        out = subprocess.run(["nm", "--defined-only", obj], capture_output=True, text=True, check=True).stdout
        functions = re.findall(r" [tT] (\S+)", out)
        assert functions
        assert [f for f in functions if not f.split(".")[0].endswith("_avx2")] == []


NEGATIVE_ZERO = r"""
#include <stdio.h>
#include "kernels/impl.h"
int main(void)
{
    struct cb_kernels k = {0};
    float a[96], b[96];
    uint16_t h[96];
    cb_kernels_init_scalar(&k);
    cb_kernels_init_avx2(&k);
    for (int i = 0; i < 96; i++) { a[i] = -1e-30f; b[i] = 1e-30f; h[i] = 0x8001; }
    for (size_t n = 1; n < 96; n++) {
        float s[1], x[1];
        k.attn_score_f32(s, a, b, 1, n, 1.0f);
        for (size_t i = 0; i < 96; i++) b[i] = 1e-42f;
        k.attn_score_f16(x, b, h, 1, n, 1.0f);
        for (size_t i = 0; i < 96; i++) b[i] = 1e-30f;
        const float d = k.dot(a, b, n);
        printf("%d %d ", __builtin_signbit(d) != 0, __builtin_signbit(s[0]) != 0);
        printf("%d\n", __builtin_signbit(x[0]) != 0);
    }
    return 0;
}
"""


@needs_avx2
def test_lanes_without_an_element_keep_a_negative_zero(objects: dict[str, str], tmp_path: Path) -> None:
    """Products too small for binary32 leave -0 in their lanes; from n = 32 on no lane is left at +0."""
    (tmp_path / "main.c").write_text(NEGATIVE_ZERO, encoding="utf-8")
    main = str(tmp_path / "main.o")
    subprocess.run(["gcc", *FLAGS, f"-I{NATIVE}", "-c", str(tmp_path / "main.c"), "-o", main], check=True)
    kernels = [obj for name, obj in objects.items() if not name.startswith("checkkern/")]
    subprocess.run(["gcc", main, *kernels, "-lm", "-o", str(tmp_path / "main")], check=True)
    out = subprocess.run([str(tmp_path / "main")], capture_output=True, text=True, check=True).stdout
    assert out.split("\n")[:-1] == ["0 0 0"] * 31 + ["1 1 1"] * 64
