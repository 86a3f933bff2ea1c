"""NEON kernels under qemu: the same bits as scalar on both CPU models, and what they cost.

qemu's cortex-a53 and cortex-a72 refuse anything newer than ARMv8.0-A (SDOT raises
SIGILL), so a pass also shows that no newer instruction is reached.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from kernel_lib import NATIVE, kernel_sources

from colibri_kit.toolchain import zig

FLAGS = (
    "-std=c11 -O3 -g0 -ffp-contract=off -Wall -Wextra -Wshadow -Wconversion -Werror -static "
    f"-DCB_HAVE_NEON -I{NATIVE} -I{NATIVE}/include"
).split()
CPUS = ("cortex-a53", "cortex-a72")
NEON = sorted((NATIVE / "kernels/neon").glob("*.c"))

#: type id: (name, weights a block, bound of instructions for 256 weights: decode, prefill of 8 tokens).
#: What zig 0.17 needs (docs/kernels-arm.md) plus a tenth.
BOUNDS = {
    12: ("q4_k", 256, 99, 74),
    13: ("q5_k", 256, 162, 84),
    14: ("q6_k", 256, 170, 122),
    2: ("q4_0", 32, 95, 78),
    3: ("q4_1", 32, 102, 92),
    6: ("q5_0", 32, 137, 82),
    7: ("q5_1", 32, 150, 106),
    8: ("q8_0", 32, 92, 96),
}


def qemu() -> str:
    """The user-mode emulator; CI must have it, a developer may not."""
    exe = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    if exe is None:
        if os.environ.get("CI"):
            pytest.fail("CI needs qemu-aarch64 (package qemu-user or qemu-user-static)")
        pytest.skip("no qemu-aarch64")
    return exe


def build(out: Path, cpu: str, sources: list[Path], flags: tuple[str, ...] = ()) -> Path:
    target = ["-target", "aarch64-linux-musl", f"-mcpu={cpu.replace('-', '_')}"]
    zig.cc([*target, *FLAGS, *flags, *map(str, sources), "-o", str(out)], out.parent)
    return out


@pytest.fixture(scope="module")
def checkkern(tmp_path_factory: pytest.TempPathFactory) -> Path:
    qemu()
    sources = [*kernel_sources(), *NEON, *sorted((NATIVE / "tests/checkkern").glob("*.c"))]
    return build(tmp_path_factory.mktemp("neon") / "checkkern", CPUS[0], sources)


def slot_lines(text: str, isa: str) -> dict[str, tuple[int, str]]:
    """Slot -> (cases, hash) of checkkern's ``ok`` lines for an ISA."""
    found = re.findall(rf"^ok   {isa} (\w+): (\d+) cases, hash (\w+)$", text, re.M)
    return {name: (int(cases), value) for name, cases, value in found}


@pytest.mark.parametrize("cpu", CPUS)
def test_every_slot_equals_scalar(checkkern: Path, cpu: str) -> None:
    done = subprocess.run([qemu(), "-cpu", cpu, checkkern], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    scalar, neon = slot_lines(done.stdout, "scalar"), slot_lines(done.stdout, "neon")
    assert len(neon) == 28
    assert neon == scalar
    assert all(cases > 0 for cases, _ in neon.values())
    assert neon["gemm_q4_k"][0] >= 100


def test_the_table_has_a_neon_function_in_every_slot() -> None:
    """checkkern tests what the table holds: a slot left to scalar would pass there unseen."""
    header = (NATIVE / "kernels/kernels.h").read_text(encoding="utf-8")
    table = header[header.index("struct cb_kernels {") : header.index("int cb_kernels_init(")]
    slots = set(re.findall(r"\(\*(\w+)\)\(", table))
    init = (NATIVE / "kernels/neon/init_neon.c").read_text(encoding="utf-8")
    filled = dict(re.findall(r"k->(\w+) = (\w+);", init))
    assert set(filled) == slots
    assert all(value == f"cb_{name}_neon" for name, value in filled.items())
    types = set(re.findall(r"k->gemm\[CB_(\w+)\] = cb_gemm_\w+_neon;", init))
    assert types == set(re.findall(r"CB_([A-Z]+\d*(?:_[0-9K])?) = \d+", header)) - {"TYPE"}


@pytest.mark.parametrize(
    ("old", "new"),
    [("total4_by2_neon(p[0]", "total4_by4_neon(p[0]"), ("ql + 512 * h + 256", "ql + 512 * h + 240")],
)
def test_checkkern_notices_a_broken_neon_kernel(tmp_path: Path, old: str, new: str) -> None:
    """An int16 overflow and the neighbour's weights in Q6_K both show."""
    source = NATIVE / "kernels/neon/gemm_q6k_neon.c"
    text = source.read_text(encoding="utf-8")
    assert old in text
    broken = tmp_path / source.name
    broken.write_text(text.replace(old, new), encoding="utf-8")
    others = [path for path in NEON if path != source]
    sources = [*kernel_sources(), *others, broken, *sorted((NATIVE / "tests/checkkern").glob("*.c"))]
    exe = build(tmp_path / "broken", CPUS[0], sources, (f"-I{source.parent}",))
    done = subprocess.run([qemu(), "-cpu", CPUS[0], exe], capture_output=True, text=True)
    assert done.returncode == 1
    assert "FAIL neon gemm_q6_k" in done.stdout
    assert "ok   neon gemm_q4_k" in done.stdout


@pytest.fixture(scope="module", params=CPUS)
def counter(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    qemu()
    sources = [*NEON, NATIVE / "kernels/types.c", Path(__file__).with_name("neon_count.c")]
    return build(tmp_path_factory.mktemp("count") / "neon_count", request.param, sources)


def executed(exe: Path, type_id: int, blocks: int, tokens: int) -> int:
    """Guest instructions inside functions named ``*_neon``: one translation block each, logged by name."""
    emulator = qemu()
    usage = subprocess.run([emulator, "-h"], capture_output=True, text=True).stdout
    single = "-one-insn-per-tb" if "-one-insn-per-tb" in usage else "-singlestep"
    log = exe.with_name(f"{type_id}-{blocks}-{tokens}.log")
    args = [str(exe), str(type_id), str(blocks), str(tokens)]
    subprocess.run(
        [emulator, "-cpu", CPUS[0], single, "-d", "nochain,exec", "-D", str(log), *args], check=True
    )
    count = len(re.findall(r"^Trace .*\b\w+_neon\s*$", log.read_text(encoding="utf-8"), re.M))
    log.unlink()
    return count


@pytest.mark.parametrize("type_id", BOUNDS)
def test_instructions_per_256_weights(counter: Path, type_id: int) -> None:
    """Slope over the blocks, so calls and prologues do not count."""
    name, block, decode_bound, prefill_bound = BOUNDS[type_id]
    few, many = (1, 9) if block == 256 else (8, 40)
    weights = (many - few) * block * 8
    per_256 = {}
    for tokens in (1, 8):
        delta = executed(counter, type_id, many, tokens) - executed(counter, type_id, few, tokens)
        per_256[tokens] = delta * 256 / weights / tokens
    print(f"{counter.parent.name} {name}: decode {per_256[1]:.1f}, prefill {per_256[8]:.1f}")
    # 256 products take 32 multiplies at least: less means that the log was not understood
    assert 32 < per_256[1] <= decode_bound
    assert 32 < per_256[8] <= prefill_bound
