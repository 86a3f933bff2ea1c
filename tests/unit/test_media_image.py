"""Partition tables against sfdisk; used ranges against real file systems; packed images."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import random
import shutil
import struct
import subprocess
from pathlib import Path

import pytest
from media_faults import Card

from colibri_kit.errors import FormatError, PreflightError, UsageError
from colibri_kit.media import source, usedmap, write
from colibri_kit.media.partitions import Partition, Table, make_mbr, read_table

MIB = 1 << 20


def sfdisk(path: Path) -> dict[str, object]:
    done = subprocess.run(["sfdisk", "--json", str(path)], capture_output=True, text=True, check=True)
    found: dict[str, object] = json.loads(done.stdout)["partitiontable"]
    return found


def test_sfdisk_reads_our_mbr(tmp_path: Path) -> None:
    parts = (Partition(1, 4 * MIB, 8 * MIB, 0x0C, True), Partition(2, 12 * MIB, 4 * MIB, 0x83))
    image = tmp_path / "image"
    image.write_bytes(make_mbr(0x1A2B3C4D, parts).ljust(20 * MIB, b"\0"))
    found = sfdisk(image)
    assert found["id"] == "0x1a2b3c4d" and found["label"] == "dos"
    rows = found["partitions"]
    assert isinstance(rows, list)
    assert [(r["start"] * 512, r["size"] * 512, r["type"], r.get("bootable", False)) for r in rows] == [
        (4 * MIB, 8 * MIB, "c", True),
        (12 * MIB, 4 * MIB, "83", False),
    ]
    verify = subprocess.run(["sfdisk", "-V", str(image)], capture_output=True, text=True, check=False)
    assert verify.returncode == 0, verify.stdout + verify.stderr
    with image.open("rb") as file:
        assert read_table(file, 20 * MIB) == Table("mbr", 0x1A2B3C4D, parts)


@pytest.mark.parametrize("label", ["dos", "gpt"])
def test_we_read_sfdisks_tables(tmp_path: Path, label: str) -> None:
    image = tmp_path / "image"
    with image.open("wb") as out:
        out.truncate(64 * MIB)
    script = f"label: {label}\nstart=2048, size=16384\nstart=20480, size=40960\n"
    subprocess.run(["sfdisk", "-q", str(image)], input=script, text=True, check=True, capture_output=True)
    with image.open("rb") as file:
        table = read_table(file, 64 * MIB)
    assert table.kind == {"dos": "mbr", "gpt": "gpt"}[label]
    assert [(p.number, p.start, p.size) for p in table.partitions] == [
        (1, 2048 * 512, 16384 * 512),
        (2, 20480 * 512, 40960 * 512),
    ]
    # Cut off: the second partition is not all there.
    with image.open("rb") as file, pytest.raises(FormatError, match=r"cut off|damaged"):
        read_table(file, 24 * MIB)


def test_what_is_no_image() -> None:
    for data in (b"", b"x" * 100, bytes(MIB), random.Random(1).randbytes(MIB)):
        assert read_table(io.BytesIO(data), len(data)).kind == "none"
    overlap = make_mbr(1, (Partition(1, MIB, 4 * MIB, 0x83), Partition(2, 2 * MIB, MIB, 0x83)))
    with pytest.raises(FormatError, match="overlap"):
        read_table(io.BytesIO(overlap), 8 * MIB)


def filesystems(folder: Path) -> tuple[Path, dict[str, bytes], Table]:
    """An image with FAT32 and ext4 (32 MiB groups, most of them never touched), both holding files."""
    rng = random.Random(3)
    fat, ext = Partition(1, MIB, 64 * MIB, 0x0C), Partition(2, 65 * MIB, 160 * MIB, 0x83)
    image = folder / "image"
    with image.open("wb") as out:
        out.truncate(ext.end)
        out.write(make_mbr(9, (fat, ext)))
    subprocess.run(
        ["mkfs.vfat", "-F", "32", "-s", "1", "--offset", "2048", str(image), str(64 * 1024)],
        check=True, capture_output=True,
    )  # fmt: skip
    files = {f"file{i}": rng.randbytes(rng.randrange(1, 3 * MIB)) for i in range(6)}
    tree = folder / "tree"
    tree.mkdir()
    for name, data in files.items():
        (tree / name).write_bytes(data)
    subprocess.run(
        ["mke2fs", "-q", "-F", "-t", "ext4", "-b", "4096", "-g", "8192", "-d", str(tree),
         "-E", f"offset={ext.start}", str(image), f"{160 * 1024}k"],
        check=True, capture_output=True,
    )  # fmt: skip
    for name in files:
        subprocess.run(
            ["mcopy", "-i", f"{image}@@{MIB}", str(tree / name), f"::{name}"], check=True, capture_output=True
        )
    return image, files, Table("mbr", 9, (fat, ext))


def test_a_dirty_card_gets_everything_that_matters(tmp_path: Path) -> None:
    """The card is full of 0xA5; what was skipped stays so. The file systems must be whole all the same."""
    image, files, table = filesystems(tmp_path)
    size = image.stat().st_size
    with image.open("rb") as file:
        assert read_table(file, size) == table
        ranges = usedmap.used_ranges(file, size, table)
        card = Card(size)
        done = write.write_image(file, size, ranges, card)
    used = sum(len(d) for d in files.values()) * 2
    assert used < done.written_bytes < size // 2, "metadata and journal, not the free space"
    out = tmp_path / "card"
    out.write_bytes(card.data)
    fat, ext = table.partitions
    part = tmp_path / "fat"
    part.write_bytes(card.data[fat.start : fat.end])
    for argv in (["fsck.vfat", "-n", str(part)], ["e2fsck", "-fn", f"{out}?offset={ext.start}"]):
        done_fsck = subprocess.run(argv, capture_output=True, text=True, check=False)
        assert done_fsck.returncode == 0, done_fsck.stdout
    for name, data in files.items():
        got = subprocess.run(
            ["mtype", "-i", f"{out}@@{fat.start}", f"::{name}"], capture_output=True, check=True
        ).stdout
        assert got == data
        got = subprocess.run(
            ["debugfs", "-R", f"cat {name}", f"{out}?offset={ext.start}"], capture_output=True, check=True
        ).stdout
        assert got == data


@pytest.mark.parametrize("seed", range(40))
def test_odd_superblocks_are_taken_whole(seed: int) -> None:
    """Random bytes in the superblock: never an exception, never a range outside the partition."""
    rng = random.Random(seed)
    data = bytearray(4 * MIB)
    sb = MIB + 1024
    data[sb : sb + 1024] = rng.randbytes(1024)
    data[sb + 56 : sb + 58] = b"\x53\xef"
    struct.pack_into("<I", data, sb + 24, rng.choice([0, 1, 2, 6, 7, 31]))
    struct.pack_into("<I", data, sb + 4, rng.choice([0, 1, 700, 3000, 1 << 31]))
    data[MIB + 510 : MIB + 512], data[MIB + 82 : MIB + 87] = b"\x55\xaa", rng.choice([b"FAT32", b"FAT16"])
    data[MIB + 11 : MIB + 48] = rng.randbytes(37)
    table = Table("mbr", 1, (Partition(1, MIB, 2 * MIB, 0x83),))
    ranges = usedmap.used_ranges(io.BytesIO(bytes(data)), len(data), table)
    assert all(0 <= a < b <= len(data) for a, b in ranges)
    assert ranges == sorted(ranges)
    assert ranges[0][0] == 0 and ranges[-1][1] == len(data)


@pytest.mark.parametrize("kind", ["raw", "xz", "gz", "zst"])
def test_packed_images(tmp_path: Path, kind: str) -> None:
    data = bytes(3 * MIB) + random.Random(2).randbytes(2 * MIB + 17) + bytes(MIB)
    packed = tmp_path / "image.img"
    if kind == "zst":
        if shutil.which("zstd") is None:
            pytest.fail("zstd is needed: apt install zstd")
        raw = tmp_path / "raw"
        raw.write_bytes(data)
        subprocess.run(["zstd", "-q", str(raw), "-o", str(packed)], check=True)
    else:
        packed.write_bytes({"raw": bytes, "xz": lzma.compress, "gz": gzip.compress}[kind](data))
    assert source.kind(packed) == kind
    out = tmp_path / "out"
    assert source.unpack(packed, out) == len(data)
    assert out.read_bytes() == data
    assert out.stat().st_blocks * 512 < len(data) - 2 * MIB, "zeros became holes"
    if kind != "raw":
        packed.write_bytes(packed.read_bytes()[:-1000])
        with pytest.raises(FormatError) as caught:
            source.unpack(packed, out)
        assert caught.value.code == "CK-IMAGE-DAMAGED"


def test_zip_and_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.zip").write_bytes(b"PK\3\4rest")
    with pytest.raises(UsageError, match="zip archive"):
        source.unpack(tmp_path / "a.zip", tmp_path / "out")
    with pytest.raises(UsageError, match="cannot read the image"):
        source.unpack(tmp_path / "nothing", tmp_path / "out")
    (tmp_path / "a.zst").write_bytes(b"\x28\xb5\x2f\xfdrest")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(PreflightError, match="zstd"):
        source.unpack(tmp_path / "a.zst", tmp_path / "out")
