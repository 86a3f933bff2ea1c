"""Half a minute of hostile bytes for the frame parser, from the kept seeds (bar 5; longer by hand)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.fuzz.run import fuzz
from tests.fuzz.targets import TARGETS

SECONDS = float(os.environ.get("FUZZ_SECONDS", "30"))


@pytest.mark.timeout(600)
def test_frames(tmp_path: Path) -> None:
    result = fuzz(TARGETS["frame"], SECONDS, tmp_path)
    assert result.finding == "", result.finding
    assert result.runs > 50 * SECONDS
