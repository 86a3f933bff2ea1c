"""Fixtures: the small models and a service that several tests share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))

from tiny_model import tiny_model

from tests.service.rig import Service, with_chat


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, 8 experts, random weights, no chat template."""
    return tiny_model(tmp_path_factory)


@pytest.fixture(scope="session")
def model(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a chat template."""
    return with_chat(plain, tmp_path_factory.getbasetemp() / "chat.coli")


@pytest.fixture(scope="session")
def service(model: Path) -> Iterator[Service]:
    with Service(model, "--sequences", "4", "--queue", "12", "--batch", "16") as running:
        yield running
