"""A small MoE model of random weights as .coli: two layers, 8 experts, 2 used, 512 tokens.

tests/data/engine holds its GGUF and the logits and expert choices that llama.cpp gives for it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

DATA = Path(__file__).resolve().parents[1] / "data" / "engine"
NAME = "qwen3moe.t64.f32"


def tiny_model(factory: pytest.TempPathFactory) -> Path:
    """The converted model, made once a session."""
    out = factory.getbasetemp() / "tiny.coli"
    if not out.exists():
        cmd = [sys.executable, "-m", "colibri_kit", "convert", str(DATA / f"{NAME}.gguf"), "-o", str(out)]
        done = subprocess.run(cmd, capture_output=True, text=True, timeout=280, check=False)
        assert done.returncode == 0, done.stderr
    return out
