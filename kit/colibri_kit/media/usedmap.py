"""Which bytes of an image matter: everything but what its file systems call free.

A hole in a sparse file is not proof that the bytes do not matter (an inode table of
zeros is a hole and must be zeros on the card), so holes are never used. FAT's
allocation table and ext4's block bitmaps are; a partition that is neither, or looks
odd, counts whole.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import BinaryIO

from colibri_kit.media.partitions import Partition, Table

Range = tuple[int, int]  # start, end in bytes

#: Ranges are widened to this and gaps below it are written too: fewer, larger writes.
GRAIN = 256 * 1024
_MAX_GROUPS = 1 << 20


def used_ranges(image: BinaryIO, size: int, table: Table) -> list[Range]:
    """Sorted, disjoint byte ranges that must reach the medium.

    Args:
        image: seekable; size: its length in bytes.
    """
    wanted: list[Range] = []
    at = 0
    for part in sorted(table.partitions, key=lambda p: p.start):
        wanted.append((at, part.start))
        wanted.extend(_partition(image, part))
        at = part.end
    wanted.append((at, size))
    return merge(wanted, size)


def merge(ranges: Iterable[Range], size: int, grain: int = GRAIN) -> list[Range]:
    """Widened to ``grain`` and joined. Pure."""
    out: list[Range] = []
    for start, end in sorted(r for r in ranges if r[1] > r[0]):
        start, end = start // grain * grain, min(size, -(-end // grain) * grain)
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((start, end))
    return out


def _partition(image: BinaryIO, part: Partition) -> list[Range]:
    whole = [(part.start, part.end)]
    image.seek(part.start)
    head = image.read(2048)
    if len(head) < 2048:
        return whole
    ranges = None
    if head[1080:1082] == b"\x53\xef":
        ranges = _ext(image, part, head[1024:2048])
    elif head[510:512] == b"\x55\xaa" and head[82:87] == b"FAT32":
        ranges = _fat32(image, part, head)
    if ranges is None:
        return whole
    return [(max(a, part.start), min(b, part.end)) for a, b in ranges]


def _fat32(image: BinaryIO, part: Partition, head: bytes) -> list[Range] | None:
    """Boot sectors and FATs, then the used clusters. None = odd."""
    sector, per_cluster, reserved, copies = struct.unpack_from("<HBHB", head, 11)
    (fat_sectors,) = struct.unpack_from("<I", head, 36)
    (total,) = struct.unpack_from("<I", head, 32)
    if sector not in (512, 1024, 2048, 4096) or not per_cluster or not copies or not fat_sectors:
        return None
    data = (reserved + copies * fat_sectors) * sector
    clusters = (total - data // sector) // per_cluster
    if total * sector > part.size or clusters <= 0 or (clusters + 2) * 4 > fat_sectors * sector:
        return None
    image.seek(part.start + reserved * sector)
    fat = image.read((clusters + 2) * 4)
    if len(fat) != (clusters + 2) * 4:
        return None
    ranges = [(part.start, part.start + data)]
    step = per_cluster * sector
    for first, last in _runs(bool(v & 0x0FFFFFFF) for (v,) in struct.iter_unpack("<I", fat[8:])):
        ranges.append((part.start + data + first * step, part.start + data + last * step))
    return ranges


def _runs(bits: Iterable[bool]) -> Iterator[Range]:
    """[first, last) of each run of true."""
    begin, index = -1, -1
    for index, bit in enumerate(bits):
        if bit and begin < 0:
            begin = index
        elif not bit and begin >= 0:
            yield begin, index
            begin = -1
    if begin >= 0:
        yield begin, index + 1


def _ext(image: BinaryIO, part: Partition, sb: bytes) -> list[Range] | None:
    """The blocks that ext2/3/4's bitmaps call used. None = odd or unsupported (bigalloc, meta_bg)."""
    (lo,) = struct.unpack_from("<I", sb, 4)
    first, shift = struct.unpack_from("<II", sb, 20)
    (per_group,) = struct.unpack_from("<I", sb, 32)
    compat, incompat, ro = struct.unpack_from("<III", sb, 92)
    is64 = bool(incompat & 0x80)
    hi = struct.unpack_from("<I", sb, 0x150)[0] if is64 else 0
    desc = struct.unpack_from("<H", sb, 0xFE)[0] if is64 else 32
    if shift > 6 or not per_group or incompat & 0x10 or ro & 0x200 or desc < 32:
        return None
    del compat
    block, total = 1024 << shift, lo | hi << 32
    groups = -(-(total - first) // per_group)
    if total * block > part.size or per_group > 8 * block or not 0 < groups <= _MAX_GROUPS:
        return None
    (inodes,) = struct.unpack_from("<I", sb, 40)
    (inode_bytes,) = struct.unpack_from("<H", sb, 88)
    (reserved,) = struct.unpack_from("<H", sb, 0xCE)
    inode_blocks = -(-inodes * inode_bytes // block)
    front = (
        1 + -(-groups * desc // block) + reserved
    )  # superblock, descriptors: in every group that may have them
    image.seek(part.start + (first + 1) * block)
    table = image.read(groups * desc)
    if len(table) != groups * desc:
        return None
    base = part.start
    ranges: list[Range] = [(base, base + (first + front) * block)]
    for group in range(groups):
        row = table[group * desc : (group + 1) * desc]
        where = list(struct.unpack_from("<III", row, 0))  # block bitmap, inode bitmap, inode table
        if is64 and desc >= 64:
            where = [a | b << 32 for a, b in zip(where, struct.unpack_from("<III", row, 0x20), strict=True)]
        if not all(0 < at < total for at in where):
            return None
        for at, count in zip(where, (1, 1, inode_blocks), strict=True):
            ranges.append((base + at * block, base + (at + count) * block))
        begin = first + group * per_group
        count = min(per_group, total - begin)
        ranges.append((base + begin * block, base + (begin + min(front, count)) * block))
        (flags,) = struct.unpack_from("<H", row, 18)
        if flags & 0x2:  # BLOCK_UNINIT: nothing in this group is used but the metadata above
            continue
        image.seek(base + where[0] * block)
        bits = image.read(block)
        if len(bits) != block:
            return None
        for a, b in _runs(bool(bits[i >> 3] >> (i & 7) & 1) for i in range(count)):
            ranges.append((base + (begin + a) * block, base + (begin + b) * block))
    return ranges
