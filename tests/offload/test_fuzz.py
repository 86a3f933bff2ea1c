"""Half a minute of hostile bytes for the frame parser, from the kept seeds (bar 5; longer by hand)."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

NATIVE = Path(__file__).resolve().parents[2] / "native"
SECONDS = int(os.environ.get("FUZZ_SECONDS", "30"))


def test_frames(tmp_path: Path) -> None:
    clang = shutil.which("clang") or shutil.which("clang-14")
    if clang is None:
        pytest.fail("clang is missing: apt-get install clang")
    program = tmp_path / "fuzz"
    sources = (
        "tests/fuzz/fuzz_frame.c",
        "offload/frame.c",
        "core/err.c",
        "kernels/crc32c.c",
        "kernels/types.c",
    )
    subprocess.run(
        [
            clang, "-std=c11", "-g", "-O1", "-fsanitize=fuzzer,address,undefined",
            "-fno-sanitize-recover=all", "-I.", "-Iinclude", *sources, "-o", program,
        ],
        cwd=NATIVE, check=True,
    )  # fmt: skip
    (tmp_path / "corpus").mkdir()
    done = subprocess.run(
        [program, f"-max_total_time={SECONDS}", "-max_len=20000", tmp_path / "corpus",
         NATIVE / "tests/fuzz/seeds_frame"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Done" in done.stderr
