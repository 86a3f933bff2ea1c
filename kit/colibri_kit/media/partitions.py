"""Partition tables: our own MBR, and what an image's MBR or GPT says.

The MBR is 440 bytes of code, a 32-bit disk signature, two zero bytes, four entries of 16 bytes,
55 AA. GPT as in the UEFI specification, chapter 5.
"""

from __future__ import annotations

import itertools
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO

from colibri_kit.errors import FormatError

SECTOR = 512
FAT32_LBA = 0x0C
LINUX = 0x83
_EXTENDED = (0x05, 0x0F, 0x85)
_ENTRY = struct.Struct("<B3sB3sII")


@dataclass(frozen=True)
class Partition:
    """One partition. start and size are bytes; kind is the MBR type (0 for GPT)."""

    number: int
    start: int
    size: int
    kind: int
    bootable: bool = False

    @property
    def end(self) -> int:
        return self.start + self.size


@dataclass(frozen=True)
class Table:
    """kind: ``mbr``, ``gpt`` or ``none``; signature: the MBR's disk signature."""

    kind: str
    signature: int
    partitions: tuple[Partition, ...]


def make_mbr(signature: int, partitions: Sequence[Partition]) -> bytes:
    """One sector. CHS fields say "use LBA" (FE FF FF), as every current reader does."""
    assert len(partitions) <= 4
    sector = bytearray(SECTOR)
    struct.pack_into("<I", sector, 440, signature)
    for index, part in enumerate(partitions):
        assert part.start % SECTOR == 0 and part.size % SECTOR == 0
        _ENTRY.pack_into(
            sector,
            446 + 16 * index,
            0x80 if part.bootable else 0,
            b"\xfe\xff\xff",
            part.kind,
            b"\xfe\xff\xff",
            part.start // SECTOR,
            part.size // SECTOR,
        )
    sector[510:] = b"\x55\xaa"
    return bytes(sector)


def read_table(image: BinaryIO, size: int) -> Table:
    """The partition table of an image of ``size`` bytes.

    Raises:
        FormatError: there is a table, but it contradicts itself or the image's size.
    """
    image.seek(0)
    head = image.read(SECTOR)
    if len(head) < SECTOR or head[510:] != b"\x55\xaa":
        return Table("none", 0, ())
    # A file system's own boot sector ends with 55 AA too: there the entries are code, not a table.
    entries = [_ENTRY.unpack_from(head, 446 + 16 * i) for i in range(4)]
    if any(e[0] not in (0, 0x80) for e in entries):
        return Table("none", 0, ())
    if any(e[2] == 0xEE for e in entries):
        return Table("gpt", 0, _read_gpt(image, size))
    found = []
    for index, (flag, _, kind, _, start, count) in enumerate(entries):
        if kind and count:
            found.append(Partition(index + 1, start * SECTOR, count * SECTOR, kind, flag == 0x80))
    (signature,) = struct.unpack_from("<I", head, 440)
    return Table("mbr", signature, _checked(found, size))


def _checked(found: Sequence[Partition], size: int) -> tuple[Partition, ...]:
    inside = sorted(found, key=lambda p: p.start)
    for part in inside:
        if part.start < SECTOR or part.end > size:
            raise FormatError(
                f"partition {part.number} ends at byte {part.end}, the image has {size}: it is cut off",
                hint="fetch or unpack the image again",
                state="nothing was changed",
                code="CK-IMAGE-TABLE",
            )
    for before, after in itertools.pairwise(inside):
        if before.end > after.start:
            raise FormatError(
                f"partitions {before.number} and {after.number} overlap",
                state="nothing was changed",
                code="CK-IMAGE-TABLE",
            )
    return tuple(inside)


def _read_gpt(image: BinaryIO, size: int) -> tuple[Partition, ...]:
    image.seek(SECTOR)
    head = image.read(92)
    if len(head) < 92 or head[:8] != b"EFI PART":
        raise FormatError("the GPT header is missing", state="nothing was changed", code="CK-IMAGE-TABLE")
    length, crc = struct.unpack_from("<II", head, 12)
    if not 92 <= length <= SECTOR:
        raise FormatError("the GPT header is malformed", state="nothing was changed", code="CK-IMAGE-TABLE")
    image.seek(SECTOR)
    whole = bytearray(image.read(length))
    whole[16:20] = bytes(4)
    at, count, each = struct.unpack_from("<QII", head, 72)
    if zlib.crc32(whole) != crc or not 128 <= each <= 4096 or count > 1024:
        raise FormatError("the GPT header is damaged", state="nothing was changed", code="CK-IMAGE-TABLE")
    image.seek(at * SECTOR)
    rows = image.read(count * each)
    found = []
    for index in range(len(rows) // each):
        row = rows[index * each : (index + 1) * each]
        if any(row[:16]):
            first, last = struct.unpack_from("<QQ", row, 32)
            found.append(Partition(index + 1, first * SECTOR, (last - first + 1) * SECTOR, 0))
    return _checked(found, size)


def has_extended(table: Table) -> bool:
    return any(p.kind in _EXTENDED for p in table.partitions)
