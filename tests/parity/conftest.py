"""Converted reference models, once a session."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

REFS = Path(__file__).resolve().parents[1] / "data" / "moe-refs"
FAMILIES = ["llama", "olmoe", "granitemoe", "granitemoe-shared", "qwen2moe", "qwen3moe"]


def kit(*args: object) -> subprocess.CompletedProcess[str]:
    """Runs ``colibri-kit``; the test fails with its stderr when it does."""
    done = subprocess.run(
        [sys.executable, "-m", "colibri_kit", *map(str, args)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done


@dataclass(frozen=True)
class Reference:
    """A model and llama.cpp's answers: tokens [T], logits [T, V], experts [L, T, K]."""

    gguf: Path
    tokens: Any
    logits: Any
    experts: Any


@cache
def reference(family: str, kind: str) -> Reference:
    (path,) = (REFS / kind).glob(f"{family}.t*.gguf")
    stem = str(path)[: -len(".gguf")]
    return Reference(path, *(np.load(f"{stem}.{n}.npy") for n in ("tokens", "logits", "experts")))


@pytest.fixture(scope="session")
def convert(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``convert(gguf, *options)`` -> the .coli folder; each combination is made once."""
    folder = tmp_path_factory.mktemp("coli")

    @cache
    def make(gguf: Path, *options: str) -> Path:
        out = folder / ("-".join([gguf.name, *(o.strip("-") for o in options)]) + ".coli")
        kit("convert", gguf, "-o", out, "-q", *options)
        return out

    return make
