"""After start nothing is allocated: generation runs with mmap, mremap and brk forbidden by seccomp."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import engine_build as eb
import pytest
from tiny_model import tiny_model

SOURCE = str(Path(__file__).with_name("no_alloc.c"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory)


def run(model: Path, *args: str) -> subprocess.CompletedProcess[str]:
    program = eb.program(SOURCE)
    return subprocess.run([program, model, *args], capture_output=True, text=True, timeout=120, check=False)


def test_200_tokens_without_an_allocation(model: Path) -> None:
    done = run(model, "200")
    assert done.returncode == 0, done.stderr
    got = dict(pair.split("=") for pair in done.stdout.split())
    assert got["rc"] == "0"
    assert got["calls"] == "0"
    assert int(got["tokens"]) >= 200
    assert int(got["rss_before"]) > 0
    assert got["rss_before"] == got["rss_after"]  # KiB of whole pages: constant to the page


def test_the_trap_works(model: Path) -> None:
    assert run(model, "2", "cheat").returncode == -signal.SIGSYS
