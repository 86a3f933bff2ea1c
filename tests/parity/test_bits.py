"""Bar of the determinism contract: one .coli, one answer, whatever computes it.

Scalar, SSE4.1, AVX2 run here; NEON in the boards' own binaries under qemu-user, which refuses what a
Cortex-A53 or A72 does not have. Every combination of threads and prefill batch must give the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from .conftest import FAMILIES, REFS, kit, reference

THREADS = (1, 2, 3)
BATCHES = (1, 7, 40)  # 40 = all tokens at once
#: as the first engine of format version 1 computed them
GOLDENS = [
    ("granitemoe-shared", "q4_k_m", "8f5cec53738360ff2e4d1b53327700ad38c110b1b00179d1d21222c5c94dbe33"),
    ("qwen2moe", "q4_k_m", "e25b925e26a1addc7aabd8767c154bfccaea3b500e51120895bf11f3790406b3"),
]


def qemu(cpu: str) -> list[str]:
    tool = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    assert tool, "qemu-user is missing: apt-get install qemu-user"
    return [tool, "-cpu", cpu]


@cache
def engine(board: str, folder: Path) -> Path:
    path = folder / f"colibri-{board}"
    kit("build", "--board", board, "-o", path, "-q")
    return path


def run_logits(command: list[str], model: Path, tokens: Path, out: Path, *options: object) -> str:
    """sha256 over logits and experts of ``colibri logits``."""
    files = [out / "l.npy", out / "e.npy"]
    args = ["--model", model, "--tokens", tokens, "-o", files[0], "--experts", files[1], *options]
    done = subprocess.run(
        [*command, "logits", *map(str, args)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return hashlib.sha256(b"".join(np.load(f).tobytes() for f in files)).hexdigest()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bits")


@pytest.mark.parametrize("kind", ["f32", "q4_k_m"])
@pytest.mark.parametrize("family", FAMILIES)
def test_isa_threads_batch(family: str, kind: str, convert: Callable[..., Path], folder: Path) -> None:
    """The host's binary: every ISA it has, 1 to 3 threads, three ways to cut the prompt."""
    ref = reference(family, kind)
    model, host = convert(ref.gguf), [str(engine("host", folder))]
    tokens = Path(str(ref.gguf)[: -len(".gguf")] + ".tokens.npy")
    isas = [i for i in ("scalar", "sse41", "avx2") if i != "avx2" or "avx2" in cpu_flags()]
    hashes = {
        (isa, t, b): run_logits(host, model, tokens, folder, "--isa", isa, "--threads", t, "--batch", b)
        for isa in isas
        for t in THREADS
        for b in BATCHES
    }
    assert len(set(hashes.values())) == 1, hashes


@pytest.mark.parametrize(("board", "cpu"), [("a53-plc", "cortex-a53"), ("rpi4", "cortex-a72")])
@pytest.mark.parametrize("kind", ["f32", "q4_k_m"])
@pytest.mark.parametrize("family", FAMILIES)
def test_neon(
    family: str, kind: str, board: str, cpu: str, convert: Callable[..., Path], folder: Path
) -> None:
    """The boards' binaries give the bytes that scalar C gives here."""
    ref = reference(family, kind)
    model = convert(ref.gguf)
    tokens = Path(str(ref.gguf)[: -len(".gguf")] + ".tokens.npy")
    want = run_logits([str(engine("host", folder))], model, tokens, folder, "--isa", "scalar")
    arm = [*qemu(cpu), str(engine(board, folder))]
    # One family takes every combination; the others the corners.
    grid = (
        [(t, b) for t in THREADS for b in BATCHES]
        if (family, kind) == ("qwen2moe", "q4_k_m")
        else [(1, 7), (3, 40)]
    )
    for threads, batch in grid:
        got = run_logits(arm, model, tokens, folder, "--isa", "neon", "--threads", threads, "--batch", batch)
        assert got == want, (threads, batch)


@pytest.mark.parametrize(("board", "cpu"), [("a53-plc", "cortex-a53"), ("rpi4", "cortex-a72")])
def test_boards_reproduce_the_golden(
    board: str, cpu: str, convert: Callable[..., Path], folder: Path
) -> None:
    model = convert(reference("granitemoe-shared", "q4_k_m").gguf)
    done = subprocess.run(
        [*qemu(cpu), str(engine(board, folder)), "check", "--model", str(model)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "golden ok" in done.stdout and "neon" in done.stdout


def test_every_weight_type(convert: Callable[..., Path], folder: Path) -> None:
    """The kit's own quantisation to each type: the same bits on every ISA here and under qemu."""
    ref = reference("qwen3moe", "f32")
    tokens = REFS / "f32" / "qwen3moe.t64.f32.tokens.npy"
    for quant in ("f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1"):
        model = convert(ref.gguf, "--quant", quant)
        host = [str(engine("host", folder))]
        hashes = {
            run_logits(host, model, tokens, folder, "--isa", "scalar"),
            run_logits(host, model, tokens, folder, "--isa", "sse41", "--threads", 2),
            run_logits([*qemu("cortex-a53"), str(engine("a53-plc", folder))], model, tokens, folder),
        }
        if "avx2" in cpu_flags():
            hashes.add(run_logits(host, model, tokens, folder, "--isa", "avx2", "--batch", 3))
        assert len(hashes) == 1, quant


@cache
def cpu_flags() -> frozenset[str]:
    return frozenset(Path("/proc/cpuinfo").read_text().split())


@pytest.mark.parametrize(("family", "kind", "golden"), GOLDENS)
def test_bits_stay_what_they_were(family: str, kind: str, golden: str, convert: Callable[..., Path]) -> None:
    """Recorded: models that users converted earlier must pass with a later engine.

    A change of order inside the arithmetic is a new format version, never an accident.
    """
    manifest = json.loads((convert(reference(family, kind).gguf) / "manifest.json").read_text())
    assert manifest["golden"]["sha256"] == golden
