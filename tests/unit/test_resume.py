"""A partial file on the board that a power cut damaged: as much of it as is ours is kept."""

from __future__ import annotations

import hashlib
import random
import shutil
from pathlib import Path

import pytest

from colibri_kit.deploy.model import Part
from colibri_kit.deploy.store import Store
from colibri_kit.transport.local import LocalTransport

MIB = 1 << 20
SIZE = 6 * MIB + 12345


class Counting(LocalTransport):
    """This machine, with the questions to it counted."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def _spawn(self, argv, *, stdin):  # type: ignore[no-untyped-def]
        self.asked += 1
        return super()._spawn(argv, stdin=stdin)


@pytest.fixture(params=["system", "busybox"])
def tools(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the board's programs are: this machine's, or busybox's alone."""
    if request.param == "system":
        return
    busybox = shutil.which("busybox")
    assert busybox, "tests need busybox"
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sh", "dd", "sha256sum", "cat", "chmod", "mv", "rm"):
        (folder / name).symlink_to(busybox)
    monkeypatch.setenv("PATH", str(folder))


def put(tmp_path: Path, left: bytes, size: int = SIZE) -> tuple[Store, bytes, list[str], int]:
    """Sends a file of random bytes to a folder where ``left`` lies as its partial file."""
    data = random.Random(size).randbytes(size)
    source = tmp_path / "experts-0000.coli"
    source.write_bytes(data)
    part = Part(source.name, source, size, hashlib.sha256(data).hexdigest())
    blobs = tmp_path / "board" / "blobs"
    blobs.mkdir(parents=True)
    partial = blobs / f"{part.sha256}.part"
    partial.write_bytes(left)
    partial.chmod(0o444)  # as when the cut fell between chmod and rename
    notes: list[str] = []
    board = Counting()
    store = Store(board, str(tmp_path / "board"), notes.append)
    moved = []
    store.put(part, len(left), moved.append)
    assert (blobs / part.sha256).read_bytes() == data
    assert not partial.exists()
    assert sum(moved) == size and store.sent.bytes_sent + store.sent.bytes_resumed == size
    return store, data, notes, board.asked


def beginning(size: int = SIZE) -> bytes:
    return random.Random(size).randbytes(size)


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize(
    ("left", "kept"),
    [
        (beginning()[: 5 * MIB - 5], 5 * MIB - 5),  # undamaged: to the byte
        (beginning()[: 5 * MIB - 40960] + bytes(40960), 4 * MIB),  # pages that were never written
        (beginning()[: 3 * MIB + 100] + bytes(2 * MIB), 3 * MIB),  # a long tail
        (beginning()[: 4 * MIB] + b"\xa5" * 777, 4 * MIB),  # another file's bytes
        (flipped(beginning()[: 5 * MIB], 2 * MIB + 7), 2 * MIB),  # the middle
        (flipped(beginning(), 0), 0),  # its first byte
        (bytes(5 * MIB), 0),
        (flipped(beginning()[: MIB - 1], 9), 0),  # less than a block
        (beginning()[:-4096] + bytes(4096), 6 * MIB),  # whole, with a damaged end
        (beginning() + b"more", 0),  # longer than the file can be
    ],
    ids=["true", "zeros", "long-zeros", "garbage", "middle", "first", "all", "short", "full", "longer"],
)  # fmt: skip
def test_what_is_kept(tools: None, tmp_path: Path, left: bytes, kept: int) -> None:
    store, _, notes, _ = put(tmp_path, left)
    assert store.sent.bytes_resumed == kept
    assert bool(notes) == bool(kept)


def test_large_files_cost_no_more_questions(tmp_path: Path) -> None:
    """Blocks grow with the file: 130 MiB are 43 blocks of 3 MiB, asked for in one question."""
    size = 130 * MIB
    data = beginning(size)
    left = data[: 100 * MIB] + bytes(29 * MIB)
    store, _, notes, asked = put(tmp_path, left, size)
    assert store.sent.bytes_resumed == 99 * MIB
    assert notes == ["experts-0000.coli: 31457280 damaged bytes cut off, goes on after 103809024"]
    assert asked == 6  # hash, hashes of blocks, cut, send, hash, rename
