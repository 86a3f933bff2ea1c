"""Converted random models for tests, made once a session."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.memory import make_olmoe


def convert(source: Path, out: Path) -> Path:
    """The kit's converter as a user runs it."""
    cmd = [sys.executable, "-m", "colibri_kit", "convert", str(source), "-o", str(out), "-q"]
    done = subprocess.run(cmd, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return out


def olmoe(factory: pytest.TempPathFactory, scale: str, seed: int = 1) -> Path:
    """A .coli of ``scale``; its GGUF stays beside it."""
    base = factory.getbasetemp()
    out = base / f"olmoe-{scale}-{seed}.coli"
    if not out.exists():
        convert(make_olmoe.write(out.with_suffix(".gguf"), scale, seed), out)
    return out


def ids(n: int, n_vocab: int, seed: int = 0) -> list[int]:
    """Fixed tokens, spread over the vocabulary."""
    return [((i + seed) * 2654435761 + 12345) % 2**32 % n_vocab for i in range(n)]
