"""Writes the files of a .coli folder, tensor by tensor: never the whole model in memory.

The head of a file needs the CRCs of its payload and the model id needs every payload, so
payloads are written first and heads last.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from colibri_kit.convert import container as box
from colibri_kit.convert.elements import convert
from colibri_kit.convert.pack import pack_rows
from colibri_kit.convert.plan import DensePlan, FilePlan, PartPlan, Plan, RecordPlan
from colibri_kit.gguf.types import F32

if TYPE_CHECKING:
    from collections.abc import Iterator

    from colibri_kit.convert.tokenizer import ExportedTokenizer
    from colibri_kit.gguf.reader import GgufFile, Tensor

_CHUNK_WEIGHTS = 4 << 20  # weights in memory at once: 16 MiB as F32
Advance = Callable[[int], None]


@dataclass(frozen=True)
class Written:
    """A file whose payload stands; its head waits for the model id."""

    plan: FilePlan
    directory: bytes
    payload_sha256: bytes


class _PayloadFile:
    """Writes a payload forwards, gaps as zeros, hashing what it writes."""

    def __init__(self, stream: IO[bytes], start: int) -> None:
        self._stream, self._at = stream, start
        self.sha256 = hashlib.sha256()
        stream.seek(start)

    def write(self, data: Any) -> None:
        self._stream.write(data)
        self.sha256.update(data)
        self._at += len(data)

    def pad_to(self, offset: int) -> None:
        self.write(bytes(offset - self._at))


def write_weights(gguf: GgufFile, plan: Plan, folder: Path, threads: int, advance: Advance) -> list[Written]:
    """dense.coli and the expert shards, without their heads.

    Args:
        advance: called with the GGUF bytes done.
    """
    out = [_write_dense(gguf, plan, folder, threads, advance)]
    for file, records in plan.shards:
        out.append(_write_shard(gguf, file, records, folder, threads, advance))
    return out


def _write_dense(gguf: GgufFile, plan: Plan, folder: Path, threads: int, advance: Advance) -> Written:
    entries = []
    file = plan.dense_file
    with (folder / file.name).open("wb") as stream:
        payload = _PayloadFile(stream, file.payload_offset)
        for d in plan.dense:
            payload.pad_to(d.offset)
            crc = 0
            for piece in _dense_pieces(gguf, d, threads):
                crc = box.crc32c(piece, crc)
                payload.write(piece)
            kind, layout = d.choice.type.id, box.layout_of(d.choice.type.id)
            entries.append(
                box.DenseEntry(
                    d.source.name, kind, d.source.rows, d.source.cols, crc, d.offset, d.size, layout
                )
            )
            advance(d.source.tensor.size)
        payload.pad_to(file.size)
    return Written(file, box.pack_dense(entries), payload.sha256.digest())


def _dense_pieces(gguf: GgufFile, d: DensePlan, threads: int) -> Iterator[memoryview]:
    source, tensor = d.source, d.source.tensor
    if source.vector:
        raw = gguf.read(tensor.offset, tensor.size)
        yield convert(tensor.type.id, F32.id, raw, 1, source.cols, threads, tensor.name).data
        return
    yield from _matrix_pieces(
        gguf, tensor, 0, source.rows, source.cols, d.choice.type.id, threads, tensor.name
    )


def _matrix_pieces(
    gguf: GgufFile,
    tensor: Tensor,
    first_row: int,
    rows: int,
    cols: int,
    target: int,
    threads: int,
    what: str,
) -> Iterator[memoryview]:
    """Engine-layout bytes of rows [first_row, first_row + rows), some groups at a time.

    Row groups are independent in x8c16, so pieces simply follow each other.
    """
    step = max(box.GROUP, _CHUNK_WEIGHTS // cols // box.GROUP * box.GROUP)
    row_bytes = tensor.type.row_bytes(cols)
    for at in range(0, rows, step):
        n = min(step, rows - at)
        raw = gguf.read(tensor.offset + (first_row + at) * row_bytes, n * row_bytes)
        done = convert(tensor.type.id, target, raw, n, cols, threads, what)
        yield pack_rows(target, done, n, cols).data


def _write_shard(
    gguf: GgufFile,
    file: FilePlan,
    records: tuple[RecordPlan, ...],
    folder: Path,
    threads: int,
    advance: Advance,
) -> Written:
    entries = []
    with (folder / file.name).open("wb") as stream:
        payload = _PayloadFile(stream, file.payload_offset)
        for r in records:
            data = bytearray(r.size)
            parts = [
                _fill_part(gguf, r, part, tensor, data, threads)
                for part, tensor in zip(r.parts, r.layer.parts, strict=True)
            ]
            crc = box.crc32c(data)
            entries.append(
                box.ExpertEntry(
                    r.layer.layer, r.expert, r.offset, r.size, crc, (parts[0], parts[1], parts[2])
                )
            )
            payload.write(data)
            advance(sum(t.size // t.dims[-1] for t in r.layer.parts))
    return Written(file, box.pack_experts(entries), payload.sha256.digest())


def _fill_part(
    gguf: GgufFile, r: RecordPlan, part: PartPlan, tensor: Tensor, data: bytearray, threads: int
) -> box.Part:
    at, crc = part.offset, 0
    what = f"{tensor.name} expert {r.expert}"
    for piece in _matrix_pieces(
        gguf, tensor, r.expert * part.rows, part.rows, part.cols, part.choice.type.id, threads, what
    ):
        data[at : at + len(piece)] = piece
        crc = box.crc32c(piece, crc)
        at += len(piece)
    return box.Part(part.choice.type.id, part.rows, part.cols, crc, part.offset, part.size)


def write_tokenizer(tokenizer: ExportedTokenizer, folder: Path) -> Written:
    """tokenizer.coli's payload."""
    start = box.payload_start(box.KIND_TOKENIZER, len(tokenizer.directory))
    file = FilePlan("tokenizer.coli", box.KIND_TOKENIZER, 0, tokenizer.entries, start, len(tokenizer.payload))
    with (folder / file.name).open("wb") as stream:
        payload = _PayloadFile(stream, start)
        payload.write(tokenizer.payload)
    return Written(file, tokenizer.directory, payload.sha256.digest())


def model_id(written: list[Written]) -> bytes:
    """16 bytes; ``written`` is dense, experts in order, tokenizer."""
    return hashlib.sha256(b"".join(w.payload_sha256 for w in written)).digest()[:16]


def write_heads(written: list[Written], folder: Path, identity: bytes) -> None:
    """Headers and directories into place; every file is on the disk afterwards."""
    for w in written:
        p = w.plan
        head = box.pack_head(
            p.kind,
            p.index,
            p.entries,
            w.directory,
            p.payload_bytes,
            identity,
            payload_offset=p.payload_offset,
        )
        with (folder / p.name).open("r+b") as stream:
            stream.write(head)
            stream.flush()
            os.fsync(stream.fileno())
            _forget(stream)


def _forget(stream: IO[bytes]) -> None:
    """Drops the file from the page cache, so that reading it back reads the disk."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
