"""``flash --image`` never writes over a file that it was not told to replace."""

from __future__ import annotations

import lzma
import os
import subprocess
import sys
from pathlib import Path

import pytest


def flash(*args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "colibri_kit", "flash", "--board", "rpi4", *map(str, args)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_an_image_that_exists_stays(tmp_path: Path, more: list[str]) -> None:
    source, image = tmp_path / "from.img.xz", tmp_path / "card.img"
    # One MBR partition, so that it counts as an image.
    mbr = bytes(446) + bytes([0, 0, 2, 0, 0x83, 0, 2, 0, 1, 0, 0, 0, 7, 0, 0, 0]) + bytes(48) + b"\x55\xaa"
    source.write_bytes(lzma.compress(mbr + os.urandom(7 * 512)))
    image.write_bytes(b"months of work")
    done = flash("--from", source, "--image", image, *more)
    assert done.returncode == 2 and "exists" in done.stderr and "--force" in done.stderr
    assert image.read_bytes() == b"months of work"
    done = flash("--from", source, "--image", image, "--force", *more)
    assert done.returncode == 0, done.stderr
    assert image.read_bytes() == (b"months of work" if more else lzma.decompress(source.read_bytes()))
