"""The small form of bounded.py: the bits of a model three times as large as the memory it gets."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from colibri_kit.bench.limit import memory_limit
from colibri_kit.errors import PreflightError
from tests.memory import bounded
from tests.memory.models import olmoe

MIB = 1 << 20


def has_limit() -> bool:
    try:
        with memory_limit(64 * MIB):
            return True
    except (PreflightError, OSError):
        return False


def test_under_a_true_limit(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """In a cgroup where this machine grants one, else in an emulated guest: slower, as strict."""
    model = olmoe(tmp_path_factory, "small")
    native = has_limit()
    n = 120 if native else 24
    budget = 36 * MIB
    _, got = bounded.check(model, budget if native else 2 * budget, n, tmp_path, in_vm=not native)
    # The last sample may be of a process that gives back what it had.
    later = got.samples[len(got.samples) // 2 : -2]
    assert later and max(later) == min(later)


@pytest.mark.skipif(not has_limit(), reason="no memory cgroup here; the guest stands in above")
def test_the_limit_counts_the_page_cache(tmp_path: Path) -> None:
    """Otherwise the comparison would show nothing: reading 200 MB leaves at most the limit behind."""
    big = tmp_path / "big"
    with big.open("wb") as f:
        for _ in range(200):
            f.write(os.urandom(MIB))
        os.fsync(f.fileno())
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with memory_limit(48 * MIB) as group:
        subprocess.run(group.wrap(["cat", str(big)]), stdout=subprocess.DEVNULL, check=True)
        peak = group.peak()
    assert peak is None or 24 * MIB < peak <= 48 * MIB
