"""The other virtual boards: each boots, is what it says, and runs the engine built for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from virtual import board, good, inside

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize(
    ("profile", "words", "isa"),
    [
        ("virt-x86", ("x86_64", " avx2 "), "avx2"),
        ("qemu-rpi3", ("Raspberry Pi 3 Model B", "0xd03"), "neon"),
        ("qemu-rpi4", ("Raspberry Pi 4 Model B", "0xd08"), "neon"),
    ],
)
def test_boots_and_runs_its_engine(
    board_dir: Path, olmoe: Path, profile: str, words: tuple[str, ...], isa: str
) -> None:
    with board(profile, "other", "--timeout", "400") as told:
        assert told["boot_seconds"] < 400
        seen = inside("other", "uname -m; cat /proc/cpuinfo /proc/device-tree/model 2>/dev/null; true")
        assert all(word in seen for word in words), seen
        done = good("deploy", "--board", profile, "@other", olmoe)
        assert good("status", "@other", "--check")["current"] == done["release"]
        assert good("probe", "--latency", "@other")["probe"]["isa"] == isa
        assert good("board", "down", "other")["ended"]["other"] in ("off", "quit")
