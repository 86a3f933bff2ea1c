"""Reads a .coli folder back: heads, directories, every CRC, sha256, model id, completeness.

``convert`` runs it on what it has just written, ``verify`` on any folder.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

from colibri_kit.convert import container as box
from colibri_kit.convert.manifest import NAME, FileFact, Manifest
from colibri_kit.errors import FormatError
from colibri_kit.gguf.types import type_name

_CHUNK = 8 << 20
Advance = Callable[[int], None]


@dataclass(frozen=True)
class FileReport:
    """What a whole read of one file found."""

    fact: FileFact
    header: box.Header
    payload_sha256: bytes
    dense: tuple[box.DenseEntry, ...]
    records: tuple[box.ExpertEntry, ...]


def _bad(file: str, offset: int, what: str) -> NoReturn:
    raise FormatError(f"{file}: at byte {offset}: {what}", code="CK-FORMAT-COLI")


def read_head(path: Path, stream: IO[bytes], size: int) -> tuple[box.Header, bytes]:
    """Header and directory of an open file; the stream stands at the payload afterwards.

    Returns:
        The header, and every byte before the payload.
    """
    first = stream.read(box.HEADER_BYTES)
    header = box.parse_header(first, path.name, size)
    if header.payload_offset > size or header.payload_offset > 256 << 20:
        _bad(path.name, 24, f"a payload at {header.payload_offset} cannot be")
    rest = stream.read(header.payload_offset - box.HEADER_BYTES)
    if len(rest) != header.payload_offset - box.HEADER_BYTES:
        _bad(path.name, box.HEADER_BYTES + len(rest), "the file became shorter while it was read")
    return header, first + rest


def directory_of(header: box.Header, head: bytes) -> bytes:
    """The directory's bytes."""
    size = header.entries * box.ENTRY_BYTES[header.kind]
    return head[box.HEADER_BYTES : box.HEADER_BYTES + size]


def read_header(path: Path) -> box.Header:
    """The checked header of a file."""
    return read_directories(path, directories=False)[0]


def read_directories(
    path: Path, *, directories: bool = True
) -> tuple[box.Header, list[box.DenseEntry], list[box.ExpertEntry]]:
    """Header and checked directory entries of a file, without its payload."""
    try:
        with path.open("rb") as stream:
            header, head = read_head(path, stream, os.fstat(stream.fileno()).st_size)
    except OSError as err:
        raise FormatError(f"{path}: cannot be read: {err.strerror}", code="CK-FORMAT-COLI") from err
    if not directories:
        return header, [], []
    directory = directory_of(header, head)
    box.check_directory(directory, header, path.name)
    dense = box.parse_dense(directory, header, path.name) if header.kind == box.KIND_DENSE else []
    records = box.parse_experts(directory, header, path.name) if header.kind == box.KIND_EXPERTS else []
    return header, dense, records


def check_file(path: Path, advance: Advance | None = None) -> FileReport:
    """Reads a whole file once and checks all that it says about itself.

    Raises:
        FormatError: with file and offset; a damaged expert is named by layer, expert and part.
    """
    try:
        with path.open("rb") as stream:
            return _check_stream(path, stream, os.fstat(stream.fileno()).st_size, advance)
    except FileNotFoundError:
        raise FormatError(f"{path.name} is missing from {path.parent}", code="CK-FORMAT-COLI") from None
    except OSError as err:
        raise FormatError(f"{path}: cannot be read: {err.strerror}", code="CK-FORMAT-COLI") from err


def _check_stream(path: Path, stream: IO[bytes], size: int, advance: Advance | None) -> FileReport:
    header, head = read_head(path, stream, size)
    directory = directory_of(header, head)
    box.check_directory(directory, header, path.name)
    dense: list[box.DenseEntry] = []
    records: list[box.ExpertEntry] = []
    sections: list[box.Section] = []
    if header.kind == box.KIND_DENSE:
        dense = box.parse_dense(directory, header, path.name)
    elif header.kind == box.KIND_EXPERTS:
        records = box.parse_experts(directory, header, path.name)
    else:
        sections = box.parse_sections(directory, header, path.name)
    whole, payload = hashlib.sha256(head), hashlib.sha256()
    reader = _Payload(path, stream, header, [whole, payload], advance)
    for t in dense:
        if reader.crc(t.offset, t.size) != t.crc:
            _bad(path.name, t.offset, f"tensor {t.name} is damaged (CRC32C, {t.size} bytes)")
    for s in sections:
        if reader.crc(s.offset, s.size) != s.crc:
            _bad(path.name, s.offset, f"section {s.number} is damaged (CRC32C, {s.size} bytes)")
    for r in records:
        _check_record(path, reader, r)
    reader.rest()
    if stream.read(1):
        _bad(path.name, size, "the file grew while it was read")
    fact = FileFact(path.name, size, whole.hexdigest())
    return FileReport(fact, header, payload.digest(), tuple(dense), tuple(records))


def _check_record(path: Path, reader: _Payload, r: box.ExpertEntry) -> None:
    data = reader.take(r.offset, r.size)
    damaged = [
        (name, p.offset)
        for name, p in zip(box.PART_NAMES, r.parts, strict=True)
        if box.crc32c(data[p.offset : p.offset + p.size]) != p.crc
    ]
    what = f"layer {r.layer} expert {r.expert}"
    if damaged:
        parts = ", ".join(name for name, _ in damaged)
        _bad(path.name, r.offset + damaged[0][1], f"{what} is damaged: {parts} (CRC32C)")
    if box.crc32c(data) != r.crc:
        _bad(path.name, r.offset, f"{what} is damaged between its parts (CRC32C of the record)")


class _Payload:
    """Reads the payload forwards; every byte passes through the hashes exactly once."""

    def __init__(
        self,
        path: Path,
        stream: IO[bytes],
        header: box.Header,
        hashes: Sequence[Any],
        advance: Advance | None,
    ) -> None:
        self._path, self._stream, self._hashes, self._advance = path, stream, hashes, advance
        self._at, self._end = header.payload_offset, header.file_bytes

    def _read(self, n: int) -> memoryview:
        data = self._stream.read(n)
        if len(data) != n:
            _bad(self._path.name, self._at + len(data), "the file became shorter while it was read")
        for h in self._hashes:
            h.update(data)
        self._at += n
        if self._advance:
            self._advance(n)
        return memoryview(data)

    def _skip_to(self, offset: int) -> None:
        while self._at < offset:
            self._read(min(_CHUNK, offset - self._at))

    def take(self, offset: int, size: int) -> memoryview:
        """[offset, offset + size) in one piece; offsets only grow."""
        self._skip_to(offset)
        return self._read(size)

    def crc(self, offset: int, size: int) -> int:
        self._skip_to(offset)
        value, left = 0, size
        while left:
            piece = self._read(min(_CHUNK, left))
            value, left = box.crc32c(piece, value), left - len(piece)
        return value

    def rest(self) -> None:
        self._skip_to(self._end)


# ---- the folder as a whole -------------------------------------------------


def model_id(reports: Sequence[FileReport]) -> bytes:
    """16 bytes over the payloads' digests: dense, experts in order, tokenizer."""
    order = {box.KIND_DENSE: 0, box.KIND_EXPERTS: 1, box.KIND_TOKENIZER: 2}
    ranked = sorted(reports, key=lambda r: (order[r.header.kind], r.header.index))
    return hashlib.sha256(b"".join(r.payload_sha256 for r in ranked)).digest()[:16]


def check_listing(folder: Path, manifest: Manifest) -> None:
    """Every listed file is there with its size, and no other .coli file is."""
    listed = {f.name: f for f in manifest.files}
    try:
        present = {p.name: p.stat().st_size for p in folder.iterdir() if p.name != NAME}
    except OSError as err:
        raise FormatError(f"{folder}: cannot be read: {err.strerror}", code="CK-FORMAT-COLI") from err
    for name, fact in listed.items():
        if name not in present:
            raise FormatError(
                f"{name} is missing: {NAME} lists it with {fact.bytes} bytes",
                code="CK-FORMAT-COLI",
                hint="copy the whole model folder again",
            )
        size = present[name]
        if size != fact.bytes:
            _bad(name, min(size, fact.bytes), f"has {size} bytes; {NAME} says {fact.bytes}")
    extra = sorted(n for n in present if n not in listed and n.endswith(".coli"))
    if extra:
        raise FormatError(f"{extra[0]} does not belong here: {NAME} does not list it", code="CK-FORMAT-COLI")


def check_head(name: str, header: box.Header, manifest: Manifest) -> None:
    """Kind and index match the file's name, the model id the manifest's."""
    kind = box.KIND_NAMES[header.kind]
    index = int(name[8:-5]) if name.startswith("experts-") else 0
    if kind != name.partition(".")[0].partition("-")[0] or header.index != index:
        _bad(name, 6, f"holds {kind} file {header.index}: was it renamed?")
    if header.model_id != manifest.model_id:
        _bad(
            name,
            40,
            f"belongs to another model: its id is {header.model_id.hex()}, "
            f"{NAME} says {manifest.model_id.hex()}",
        )


def check_model(manifest: Manifest, reports: Sequence[FileReport]) -> None:
    """sha256 of every file, the model id, and that every tensor and expert is there once."""
    for report, fact in zip(reports, manifest.files, strict=True):
        if report.fact.sha256 != fact.sha256:
            _bad(
                fact.name,
                0,
                f"sha256 is {report.fact.sha256}, {NAME} says {fact.sha256}, although every CRC32C "
                "matches: another version of the file, or bytes between the tensors changed",
            )
    if model_id(reports) != manifest.model_id:
        raise FormatError(
            f"{NAME}: model_id {manifest.model_id.hex()} does not follow from the files "
            f"({model_id(reports).hex()})",
            code="CK-FORMAT-COLI",
        )
    _check_experts(manifest, reports)
    _check_dense(manifest, reports)


def _check_experts(manifest: Manifest, reports: Sequence[FileReport]) -> None:
    g = manifest.geometry
    want = ((i, e) for i in range(g.n_dense_layer, g.n_layer) for e in range(g.n_expert))
    shapes = [(g.n_expert_ff, g.n_embd), (g.n_expert_ff, g.n_embd), (g.n_embd, g.n_expert_ff)]
    for report in reports:
        for r in report.records:
            expected = next(want, None)
            what = f"layer {r.layer} expert {r.expert}"
            if (r.layer, r.expert) != expected:
                _bad(report.fact.name, r.offset, f"{what} stands where {expected} should")
            if [(p.rows, p.cols) for p in r.parts] != shapes:
                _bad(report.fact.name, r.offset, f"{what}: its shape is not the manifest's")
    missing = next(want, None)
    if missing is not None:
        raise FormatError(f"layer {missing[0]} expert {missing[1]} is in no shard", code="CK-FORMAT-COLI")


def _check_dense(manifest: Manifest, reports: Sequence[FileReport]) -> None:
    entries = {t.name: t for r in reports for t in r.dense}
    for name, (rows, cols, required) in dense_shapes(manifest).items():
        t = entries.pop(name, None)
        if t is None:
            if required:
                raise FormatError(f"dense.coli: tensor {name} is missing", code="CK-FORMAT-COLI")
        elif (t.rows, t.cols) != (rows, cols):
            _bad(
                "dense.coli",
                t.offset,
                f"tensor {name} is {t.rows} × {t.cols}; the manifest's geometry says {rows} × {cols}",
            )
        elif name.endswith(".router") and t.type_id != 0:
            _bad("dense.coli", t.offset, f"tensor {name} is {type_name(t.type_id)}, not F32")
    if entries:
        raise FormatError(
            f"dense.coli: tensor {next(iter(entries))} is not one of this format", code="CK-FORMAT-COLI"
        )


def dense_shapes(manifest: Manifest) -> dict[str, tuple[int, int, bool]]:
    """name -> (rows, cols, required) of every tensor that dense.coli may hold."""
    g, qk = manifest.geometry, manifest.features.qk_norm
    d, nq, nk = g.n_embd, g.n_head * g.head_dim, g.n_head_kv * g.head_dim
    out: dict[str, tuple[int, int, bool]] = {
        "token_embd": (g.n_vocab, d, True),
        "output_norm": (1, d, True),
        "output": (g.n_vocab, d, False),
    }
    if g.rope_dim:
        out["rope_freqs"] = (1, g.rope_dim // 2, False)
    for i in range(g.n_layer):
        block: dict[str, tuple[int, int, bool]] = {"attn_norm": (1, d, True), "ffn_norm": (1, d, True)}
        for n, rows, cols in (("q", nq, d), ("k", nk, d), ("v", nk, d), ("output", d, nq)):
            block[f"attn_{n}"] = (rows, cols, True)
            block[f"attn_{n}_bias"] = (1, rows, False)
        if qk != "none":
            block["attn_q_norm"] = (1, nq if qk == "row" else g.head_dim, True)
            block["attn_k_norm"] = (1, nk if qk == "row" else g.head_dim, True)
        if g.n_expert == 0 or i < g.n_dense_layer:
            block |= _ffn_shapes("ffn", g.n_ff, d)
        else:
            block["router"] = (g.n_expert, d, True)
            if g.n_shexp_ff:
                block |= _ffn_shapes("shexp", g.n_shexp_ff, d)
                block["shexp_router"] = (1, d, False)
        out |= {f"blk.{i}.{n}": shape for n, shape in block.items()}
    return out


def _ffn_shapes(prefix: str, n_ff: int, d: int) -> dict[str, tuple[int, int, bool]]:
    shapes = {"gate": (n_ff, d, True), "up": (n_ff, d, True), "down": (d, n_ff, True)}
    return {f"{prefix}_{n}": s for n, s in shapes.items()}
