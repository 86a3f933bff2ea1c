"""The soak in a short form, and that it would notice."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any

import pytest

from tests.memory import soak
from tests.memory.models import olmoe

#: CI sets 300
SECONDS = float(os.environ.get("COLIBRI_SOAK_SECONDS", "10"))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return olmoe(tmp_path_factory, "tiny"), olmoe(tmp_path_factory, "tiny", seed=2)


@pytest.mark.timeout(max(300, 4 * SECONDS))
def test_soak(pair: tuple[Path, Path]) -> None:
    got = soak.soak(pair, SECONDS, cache_experts=9, threads=2)
    assert got.problems == ()
    assert got.swaps >= 13 and got.tokens > 200


def test_a_leak_is_noticed(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A hot swap that forgot 1 MiB and a file would not pass."""
    held: list[Any] = []
    real = soak.Engine.swap

    def leaky(self: Any, model: Path) -> None:
        page = mmap.mmap(
            -1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )  # malloc could hand out pages that an earlier test has freed
        page.write(os.urandom(1 << 20))
        held.append((page, (model / "manifest.json").open("rb")))
        real(self, model)

    monkeypatch.setattr(soak.Engine, "swap", leaky)
    got = soak.soak(pair, 3, cache_experts=9, threads=2)
    assert any("anonymous memory" in p for p in got.problems)
    assert any("open files" in p for p in got.problems)
    for page, stream in held:
        page.close()
        stream.close()
