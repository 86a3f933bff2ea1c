"""Fixtures: one warm virtual board for the session, models, engines."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import virtual


def _terminated(number: int, frame: object) -> None:
    raise KeyboardInterrupt


@pytest.fixture(scope="session")
def board_dir() -> Iterator[Path]:
    """The folder of this session's virtual boards; the user's own are not touched."""
    path = Path(tempfile.mkdtemp(prefix="ckv-"))
    before = os.environ.get("COLIBRI_VBOARD_DIR")
    os.environ["COLIBRI_VBOARD_DIR"] = str(path)
    # `timeout` and CI end pytest by SIGTERM, which would leave guests behind.
    handler = signal.signal(signal.SIGTERM, _terminated)
    try:
        yield path
    finally:
        virtual.kit("board", "down", "--all", "--power-cut")
        signal.signal(signal.SIGTERM, handler)
    if before is None:
        del os.environ["COLIBRI_VBOARD_DIR"]
    else:
        os.environ["COLIBRI_VBOARD_DIR"] = before
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="session")
def a53(board_dir: Path) -> Iterator[dict[str, Any]]:
    """A Cortex-A53 with 512 MiB, up for the whole session: what `board up --json` said."""
    with virtual.board("virt-a53", "a53", "--ram", "512MiB") as told:
        yield told


@pytest.fixture(scope="session")
def a53_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real engine for it."""
    out = tmp_path_factory.mktemp("engine") / "colibri-a53"
    ran = virtual.kit("build", "--board", "virt-a53", "-o", out)
    assert ran.rc == 0, ran.err
    return out


def _model(factory: pytest.TempPathFactory, arch: str) -> Path:
    out = factory.mktemp("model") / f"{arch}.coli"
    ran = virtual.kit("convert", virtual.REFS / f"{arch}.t64.f32.gguf", "-o", out)
    assert ran.rc == 0, ran.err
    return out


@pytest.fixture(scope="session")
def olmoe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _model(tmp_path_factory, "olmoe")


@pytest.fixture(scope="session")
def granite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _model(tmp_path_factory, "granitemoe")


@pytest.fixture(scope="session")
def twins(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models of one geometry and other weights, 6 MB each."""
    return virtual.tiny_models(tmp_path_factory.mktemp("twins"), 2)


@pytest.fixture(scope="session")
def standin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stand-in engine that can serve."""
    return virtual.compile_standin(tmp_path_factory.mktemp("standin") / "engine")
