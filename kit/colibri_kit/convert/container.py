"""Heads of .coli files: the 64-byte header and the directory behind it (docs/format.md).

Packing turns entries into bytes; parsing takes bytes that may be hostile and raises
FormatError with file and offset. Nothing here opens a file. A file is

    header (64) | directory | zeros up to the payload offset | payload

and each kind has its own directory entry.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from colibri_kit.errors import FormatError
from colibri_kit.gguf.types import ENGINE_TYPES, FLOATS, TYPES, type_name

if TYPE_CHECKING:
    from collections.abc import Iterator

MAGIC = b"COLI"
VERSION = 1
KIND_TOKENIZER, KIND_DENSE, KIND_EXPERTS = 1, 2, 3
KIND_NAMES = {KIND_TOKENIZER: "tokenizer", KIND_DENSE: "dense", KIND_EXPERTS: "experts"}
HEADER_BYTES = 64
DENSE_ENTRY_BYTES = 96
EXPERT_ENTRY_BYTES = 128
SECTION_ENTRY_BYTES = 32  # tokenizer (docs/tokenizer.md)
ENTRY_BYTES = {
    KIND_TOKENIZER: SECTION_ENTRY_BYTES,
    KIND_DENSE: DENSE_ENTRY_BYTES,
    KIND_EXPERTS: EXPERT_ENTRY_BYTES,
}
GROUP = 8  # rows of a weight group
TENSOR_ALIGN = 64
RECORD_ALIGN = 16 * 1024
SHARD_BYTES = 64 * 1024 * 1024
LAYOUT_ROWS, LAYOUT_X8C16 = 0, 1
PART_NAMES = ("gate", "up", "down")

_HEADER = struct.Struct("<4sHHIIQQQ16sI")  # 60 bytes; the header's own CRC follows
_DENSE = struct.Struct("<48sIIIIQQIIII")
_RECORD = struct.Struct("<IIQQII")
_PART = struct.Struct("<IIIIQQ")
_SECTION = struct.Struct("<IIQQII")
_MAX_ENTRIES = 1 << 20
_U63 = 1 << 63

Crc = Callable[[Any, int], int]


def crc32c(data: Any, seed: int = 0) -> int:
    """CRC32C of a bytes-like object, continuing from ``seed``: the engine's own routine."""
    from colibri_kit import native

    return native.crc32c(data, seed)


def align(value: int, to: int) -> int:
    """``value`` rounded up to a multiple of ``to``."""
    return (value + to - 1) // to * to


def mat_bytes(type_id: int, rows: int, cols: int) -> int:
    """Bytes of a matrix in the engine's layout (cb_mat_bytes); 0 when cols do not fit the block."""
    t = TYPES.get(type_id)
    if t is None or rows <= 0 or cols <= 0 or cols % t.block:
        return 0
    return align(rows, GROUP) * t.row_bytes(cols)


def tensor_bytes(type_id: int, rows: int, cols: int) -> int:
    """Stored bytes of a dense.coli tensor: vectors (one row) are F32 and not padded."""
    if rows == 1:
        return 4 * cols if type_id == 0 else 0
    return mat_bytes(type_id, rows, cols)


def layout_of(type_id: int) -> int:
    return LAYOUT_ROWS if type_id in FLOATS else LAYOUT_X8C16


@dataclass(frozen=True)
class Header:
    """The first 64 bytes, without the two CRCs that packing computes."""

    kind: int
    index: int
    entries: int
    payload_offset: int
    payload_bytes: int
    model_id: bytes
    directory_crc: int = 0

    @property
    def file_bytes(self) -> int:
        return self.payload_offset + self.payload_bytes


@dataclass(frozen=True)
class DenseEntry:
    """A tensor of dense.coli. ``offset`` counts from the start of the file."""

    name: str
    type_id: int
    rows: int
    cols: int
    crc: int
    offset: int
    size: int
    layout: int


@dataclass(frozen=True)
class Part:
    """gate, up or down inside an expert record; ``offset`` counts from the record's start."""

    type_id: int
    rows: int
    cols: int
    crc: int
    offset: int
    size: int


@dataclass(frozen=True)
class ExpertEntry:
    """An expert record; ``offset`` counts from the start of the file."""

    layer: int
    expert: int
    offset: int
    size: int
    crc: int
    parts: tuple[Part, Part, Part]


@dataclass(frozen=True)
class Section:
    """A section of tokenizer.coli; ``offset`` counts from the start of the file."""

    number: int
    count: int
    offset: int
    size: int
    crc: int


# ---- packing ---------------------------------------------------------------


def pack_dense(entries: Sequence[DenseEntry]) -> bytes:
    """The directory of dense.coli."""
    out = bytearray()
    for e in entries:
        name = e.name.encode("ascii")
        if not 0 < len(name) < 48:
            raise FormatError(f"tensor name {e.name!r} does not fit 47 bytes", code="CK-FORMAT-COLI")
        out += _DENSE.pack(name, e.type_id, e.rows, e.cols, e.crc, e.offset, e.size, e.layout, 0, 0, 0)
    return bytes(out)


def pack_experts(entries: Sequence[ExpertEntry]) -> bytes:
    """The directory of an expert shard."""
    out = bytearray()
    for e in entries:
        out += _RECORD.pack(e.layer, e.expert, e.offset, e.size, e.crc, 3)
        for p in e.parts:
            out += _PART.pack(p.type_id, p.rows, p.cols, p.crc, p.offset, p.size)
    return bytes(out)


def payload_start(kind: int, directory_bytes: int) -> int:
    """Where the payload of a file with such a directory begins."""
    return align(HEADER_BYTES + directory_bytes, RECORD_ALIGN if kind == KIND_EXPERTS else TENSOR_ALIGN)


def pack_head(
    kind: int,
    index: int,
    entries: int,
    directory: bytes,
    payload_bytes: int,
    model_id: bytes,
    *,
    payload_offset: int | None = None,
    crc: Crc = crc32c,
) -> bytes:
    """Header + directory + zeros up to the payload: everything before ``payload_offset``.

    Args:
        entries: directory entries (0 for a kind that needs none).
        model_id: 16 bytes.
        payload_offset: default is :func:`payload_start`.
    """
    if len(model_id) != 16:
        raise ValueError("a model id has 16 bytes")
    start = payload_start(kind, len(directory)) if payload_offset is None else payload_offset
    first = _HEADER.pack(
        MAGIC,
        VERSION,
        kind,
        index,
        entries,
        HEADER_BYTES,
        start,
        payload_bytes,
        model_id,
        crc(directory, 0),
    )
    head = first + struct.pack("<I", crc(first, 0)) + directory
    return head + bytes(start - len(head))


# ---- parsing ---------------------------------------------------------------


def _bad(file: str, offset: int, what: str, hint: str | None = None) -> FormatError:
    return FormatError(f"{file}: at byte {offset}: {what}", code="CK-FORMAT-COLI", hint=hint)


def parse_header(data: bytes, file: str, file_bytes: int, *, crc: Crc = crc32c) -> Header:
    """Checks the first 64 bytes of a file that is ``file_bytes`` long.

    Raises:
        FormatError: swapped or wrong magic, version, kind, CRC, or sizes that do not add up.
    """
    if file_bytes < HEADER_BYTES or len(data) < HEADER_BYTES:
        raise _bad(file, file_bytes, f"truncated: a header has {HEADER_BYTES} bytes")
    magic, version, kind, index, entries, dir_at, start, size, model_id, dir_crc = _HEADER.unpack(data[:60])
    if magic == MAGIC[::-1]:
        raise _bad(
            file,
            0,
            "the magic reads ILOC, not COLI: somebody swapped the bytes of this file",
            "copy the file again in binary mode, without byte swapping",
        )
    if magic != MAGIC:
        raise _bad(file, 0, f"the magic is {magic!r}, not {MAGIC!r}: not a .coli file")
    if version != VERSION:
        raise _bad(file, 4, f"format version {version}; this kit reads version {VERSION}")
    if struct.unpack("<I", data[60:64])[0] != crc(data[:60], 0):
        raise _bad(file, 60, "the header's CRC32C does not match: the header is damaged")
    if kind not in KIND_NAMES:
        raise _bad(file, 6, f"unknown kind {kind}")
    if dir_at != HEADER_BYTES:
        raise _bad(file, 16, f"the directory begins at {dir_at}, not at {HEADER_BYTES}")
    if entries > _MAX_ENTRIES:
        raise _bad(file, 12, f"{entries} directory entries are more than {_MAX_ENTRIES}")
    if start + size != file_bytes:
        raise _bad(
            file,
            24,
            f"the payload ends at {start + size}, but the file has {file_bytes} bytes: "
            + ("truncated" if start + size > file_bytes else "bytes were appended"),
        )
    if start < HEADER_BYTES + entries * ENTRY_BYTES[kind]:
        raise _bad(file, 24, f"a payload at {start} overlaps the directory of {entries} entries")
    return Header(kind, index, entries, start, size, model_id, dir_crc)


def check_directory(directory: bytes, header: Header, file: str, *, crc: Crc = crc32c) -> None:
    """Compares the directory's bytes with the CRC in the header."""
    if crc(directory, 0) != header.directory_crc:
        raise _bad(file, HEADER_BYTES, "the directory's CRC32C does not match: the directory is damaged")


def parse_dense(directory: bytes, header: Header, file: str) -> list[DenseEntry]:
    """The tensors of dense.coli; checks names, types, shapes, offsets, overlap and order."""
    out: list[DenseEntry] = []
    seen: set[str] = set()
    end = header.payload_offset
    for i, at in enumerate(_entries(directory, header, file, DENSE_ENTRY_BYTES)):
        raw, type_id, rows, cols, crc, offset, size, layout, *zero = _DENSE.unpack_from(directory, i * 96)
        name_bytes, _, tail = raw.partition(b"\0")
        if not name_bytes or any(tail) or not all(33 <= c < 127 for c in name_bytes) or len(name_bytes) > 47:
            raise _bad(file, at, f"bad tensor name {raw!r}")
        name = name_bytes.decode("ascii")
        if name in seen:
            raise _bad(file, at, f"tensor {name} appears twice")
        seen.add(name)
        _check_type(type_id, file, at + 48, name)
        if size != tensor_bytes(type_id, rows, cols) or size == 0:
            raise _bad(file, at + 72, f"{name}: {size} bytes do not fit {type_name(type_id)} {rows} × {cols}")
        if layout != (LAYOUT_ROWS if rows == 1 else layout_of(type_id)) or any(zero):
            raise _bad(file, at + 80, f"{name}: layout {layout} is not valid for {type_name(type_id)}")
        if offset % TENSOR_ALIGN or offset < end or offset + size > header.file_bytes:
            raise _bad(file, at + 64, f"{name}: bytes {offset}…{offset + size} are misplaced")
        end = offset + size
        out.append(DenseEntry(name, type_id, rows, cols, crc, offset, size, layout))
    return out


def parse_experts(directory: bytes, header: Header, file: str) -> list[ExpertEntry]:
    """The records of a shard; checks order, types, shapes, offsets and overlap."""
    out: list[ExpertEntry] = []
    last, end = (-1, -1), header.payload_offset
    for i, at in enumerate(_entries(directory, header, file, EXPERT_ENTRY_BYTES)):
        layer, expert, offset, size, crc, n_parts = _RECORD.unpack_from(directory, i * 128)
        what = f"layer {layer} expert {expert}"
        if (layer, expert) <= last:
            raise _bad(file, at, f"{what} comes after layer {last[0]} expert {last[1]}: not sorted")
        if n_parts != 3:
            raise _bad(file, at + 28, f"{what}: {n_parts} parts, not 3")
        if offset % RECORD_ALIGN or size % RECORD_ALIGN or not size or offset < end:
            raise _bad(file, at + 8, f"{what}: record {offset}…{offset + size} is misplaced")
        if offset + size > header.file_bytes:
            raise _bad(file, at + 8, f"{what}: record ends at {offset + size}, past the file's end")
        parts: list[Part] = []
        inner = 0
        for k, part_name in enumerate(PART_NAMES):
            here = at + 32 + 32 * k
            part = Part(*_PART.unpack_from(directory, i * 128 + 32 + 32 * k))
            _check_type(part.type_id, file, here, f"{what} {part_name}")
            if part.size != mat_bytes(part.type_id, part.rows, part.cols) or part.size == 0:
                raise _bad(
                    file,
                    here + 24,
                    f"{what} {part_name}: {part.size} bytes do not fit "
                    f"{type_name(part.type_id)} {part.rows} × {part.cols}",
                )
            if part.offset % TENSOR_ALIGN or part.offset < inner or part.offset + part.size > size:
                raise _bad(file, here + 16, f"{what} {part_name}: misplaced in its record")
            inner = part.offset + part.size
            parts.append(part)
        last, end = (layer, expert), offset + size
        out.append(ExpertEntry(layer, expert, offset, size, crc, (parts[0], parts[1], parts[2])))
    return out


def parse_sections(directory: bytes, header: Header, file: str) -> list[Section]:
    """The sections of tokenizer.coli; checks that they lie in the payload, in order."""
    out: list[Section] = []
    end = header.payload_offset
    for i, at in enumerate(_entries(directory, header, file, SECTION_ENTRY_BYTES)):
        number, count, offset, size, crc, _ = _SECTION.unpack_from(directory, i * SECTION_ENTRY_BYTES)
        if offset < end or offset + size > header.file_bytes:
            raise _bad(file, at + 8, f"section {number}: bytes {offset}…{offset + size} are misplaced")
        end = offset + size
        out.append(Section(number, count, offset, size, crc))
    return out


def _entries(directory: bytes, header: Header, file: str, entry_bytes: int) -> Iterator[int]:
    """File offset of each entry, once the directory is known to be whole."""
    if len(directory) != header.entries * entry_bytes:
        raise _bad(
            file, HEADER_BYTES, f"the directory has {len(directory)} bytes for {header.entries} entries"
        )
    return (HEADER_BYTES + i * entry_bytes for i in range(header.entries))


def _check_type(type_id: int, file: str, at: int, what: str) -> None:
    if type_id not in ENGINE_TYPES:
        raise _bad(file, at, f"{what}: {type_name(type_id)} is not a type of this format version")
