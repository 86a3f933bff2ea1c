"""Writes an image so that an interrupted or failed write never looks bootable, and proves what arrived.

Order: the first MiB (partition table) and the last are zeroed and flushed, everything
else is written, flushed and read back past the page cache, and only then is the first
MiB written, flushed and read back.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO

from colibri_kit.errors import KitError, TransferError, VerifyError
from colibri_kit.media.medium import Medium
from colibri_kit.media.usedmap import Range

CHUNK = 1 << 20
FIRST = 1 << 20

#: A failed write leaves this; the table is the first thing that goes and the last that comes.
UNSEALED = "the medium has no partition table: it cannot boot and holds nothing usable; write it again"

Step = Callable[[int], None]


@dataclass
class Written:
    """Figures of one write. sha256 is over the mapped bytes, in order."""

    written_bytes: int = 0
    skipped_bytes: int = 0
    verified_bytes: int = 0
    sha256: str = ""
    direct: bool = False
    sealing: bool = False
    digests: dict[bytes, int] = field(default_factory=dict)


def _chunks(ranges: Sequence[Range], begin: int, end: int) -> Iterator[Range]:
    """(offset, length) pieces of at most CHUNK of what lies in [begin, end). Pure."""
    for a, b in ranges:
        at, stop = max(a, begin), min(b, end)
        while at < stop:
            length = min(CHUNK - at % CHUNK, stop - at)
            yield at, length
            at += length


def _source(image: BinaryIO, offset: int, length: int) -> bytes:
    image.seek(offset)
    data = image.read(length)
    if len(data) != length:
        raise TransferError(
            f"the image ended at byte {offset + len(data)}: it was shortened meanwhile",
            code="CK-FLASH-SOURCE",
        )
    return data


def _put(medium: Medium, data: bytes, offset: int) -> None:
    """All of data, however short single writes are. A write of nothing is a failure."""
    view = memoryview(data)
    while view:
        try:
            count = medium.write(view, offset)
        except OSError as err:
            raise _failed(medium, offset, err) from err
        if count <= 0:
            raise TransferError(
                f"{medium.name} took no byte at offset {offset}: it is smaller than it says, or worn out",
                hint="try another card; this one is not to be trusted",
                code="CK-FLASH-WRITE",
            )
        view, offset = view[count:], offset + count


def _failed(medium: Medium, offset: int, err: OSError) -> TransferError:
    hints = {
        errno.ENOSPC: "it is smaller than it says, or the disk of --image is full",
        errno.EIO: "a worn-out or counterfeit card, or a bad reader: try another",
        errno.ENODEV: "it was unplugged",
        errno.ENXIO: "it was unplugged",
        errno.EROFS: "the card has turned itself read-only: it is worn out",
        errno.EPERM: "the card has turned itself read-only: it is worn out",
    }
    return TransferError(
        f"writing {medium.name} at byte {offset} failed: {err.strerror or os.strerror(err.errno or 0)}",
        hint=hints.get(err.errno or 0, "try another card or reader"),
        code="CK-FLASH-WRITE",
    )


def _flush(medium: Medium) -> None:
    try:
        medium.flush()
    except OSError as err:
        raise _failed(medium, 0, err) from err


def write_image(
    image: BinaryIO,
    size: int,
    ranges: Sequence[Range],
    medium: Medium,
    *,
    on_write: Step = lambda _n: None,
    on_verify: Step = lambda _n: None,
) -> Written:
    """Writes ``ranges`` of an image of ``size`` bytes and verifies them.

    Raises:
        TransferError: a write failed. VerifyError: other bytes came back.
        Both, and KeyboardInterrupt, leave a medium without a partition table; their state says so.
    """
    out = Written(direct=bool(getattr(medium, "direct", False)))
    try:
        _write(image, size, ranges, medium, out, on_write, on_verify)
    except BaseException as err:
        if out.sealing:  # the table is written but unproven: take it away again
            with contextlib.suppress(KitError, OSError):
                _put(medium, bytes(min(FIRST, medium.size)), 0)
                medium.flush()
        if isinstance(err, KitError):
            err.state = err.state or UNSEALED
        raise
    return out


def _write(
    image: BinaryIO,
    size: int,
    ranges: Sequence[Range],
    medium: Medium,
    out: Written,
    on_write: Step,
    on_verify: Step,
) -> None:
    assert size <= medium.size, "safety.judge compares the sizes first"
    _put(medium, bytes(min(FIRST, medium.size)), 0)
    tail = max(FIRST, medium.size - FIRST)  # a stale GPT keeps its copy at the end
    if size <= tail < medium.size:
        _put(medium, bytes(medium.size - tail), tail)
    _flush(medium)
    digest = hashlib.sha256()
    for offset, length in _chunks(ranges, FIRST, size):
        data = _source(image, offset, length)
        _put(medium, data, offset)
        digest.update(data)
        if length == CHUNK and any(data):
            out.digests[hashlib.blake2b(data, digest_size=16).digest()] = offset
        out.written_bytes += length
        on_write(length)
    _flush(medium)
    _verify(image, _chunks(ranges, FIRST, size), medium, out, on_verify)
    first = _source(image, 0, min(FIRST, size))
    out.sealing = True
    _put(medium, first, 0)
    _flush(medium)
    on_write(len(first))
    _verify(image, iter([(0, len(first))]), medium, out, on_verify)
    out.written_bytes += len(first)
    out.skipped_bytes = size - out.written_bytes
    digest.update(first)
    out.sha256 = digest.hexdigest()


def _verify(image: BinaryIO, chunks: Iterator[Range], medium: Medium, out: Written, on_verify: Step) -> None:
    """Raises VerifyError with what kind of damage it looks like."""
    wrong: list[Fault] = []
    for offset, length in chunks:
        want = _source(image, offset, length)
        try:
            got = medium.read_back(length, offset)
        except OSError as err:
            raise VerifyError(
                f"reading {medium.name} back at byte {offset} failed: {err.strerror}",
                hint="a worn-out or counterfeit card, or a bad reader: try another",
                code="CK-FLASH-VERIFY",
            ) from err
        out.verified_bytes += length
        on_verify(length)
        if got != want:
            wrong.append(_fault(want, got, offset, out.digests))
        elif wrong and len(wrong) < _ENOUGH:
            wrong[-1].followed_by_good = True
    if wrong:
        raise _explain(medium, wrong)


_ENOUGH = 1 << 16


@dataclass
class Fault:
    """A piece that came back otherwise: byte offset of the first difference, how many bytes differ."""

    first: int
    count: int
    zero: bool
    elsewhere: int | None
    followed_by_good: bool = False


def _fault(want: bytes, got: bytes, offset: int, digests: dict[bytes, int]) -> Fault:
    padded = got.ljust(len(want), b"\0")
    diff = int.from_bytes(want, "big") ^ int.from_bytes(padded, "big")
    first = len(want) - (diff.bit_length() + 7) // 8 if diff else len(got)
    count = sum(1 for a, b in zip(want, padded, strict=False) if a != b) if diff else len(want) - len(got)
    found = digests.get(hashlib.blake2b(got, digest_size=16).digest()) if len(got) == CHUNK else None
    return Fault(offset + first, count, not any(got), found if found != offset else None)


def _explain(medium: Medium, wrong: Sequence[Fault]) -> VerifyError:
    first = wrong[0].first
    where = f"{medium.name}: other bytes came back, first at byte {first}"
    wrapped = [f for f in wrong if f.elsewhere is not None]
    if len(wrapped) * 2 > len(wrong):
        what = (
            f"{where}; what is read there was written at byte {wrapped[0].elsewhere}: the medium's addresses "
            "wrap round, so it is smaller than it says (counterfeit)"
        )
        hint = "throw this card away"
    elif all(f.zero for f in wrong) and not any(f.followed_by_good for f in wrong):
        what = f"{where}; all zero from there on: the medium is smaller than it says (counterfeit)"
        hint = "throw this card away"
    else:
        total = sum(f.count for f in wrong)
        what = f"{where}; {total} bytes differ in {len(wrong)} scattered places: a bad reader, cable or card"
        hint = "try another reader or port first, then another card"
    return VerifyError(what, hint=hint, code="CK-FLASH-VERIFY")
