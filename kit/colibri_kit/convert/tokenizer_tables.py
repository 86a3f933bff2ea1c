"""tokenizer.coli's sections as bytes (docs/tokenizer.md); numpy does the hashing.

Hash tables are open-addressed without wrap-around and sorted by hash: an entry stands at
its home slot or up to ``probe`` slots later, so a look-up ends at the first larger hash.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from colibri_kit.convert.container import (
    HEADER_BYTES,
    KIND_TOKENIZER,
    TENSOR_ALIGN,
    Crc,
    align,
    payload_start,
)
from colibri_kit.errors import FormatError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    U32 = npt.NDArray[np.uint32]

NONE = 0xFFFFFFFF
SECTIONS = ("params", "offsets", "bytes", "types", "byte_ids", "pairs", "special", "words", "eog")
_ELEMENT_BYTES = (64, 4, 1, 1, 4, 16, 16, 4, 4)
_ENTRY = struct.Struct("<IIQQII")
_LOAD = 0.75
_MAX_PROBE = 255
SPECIAL_BYTES = 1024  # CB_SPECIAL_BYTES: longest special token
CONTROL, LSTRIP, RSTRIP = 1, 2, 4  # flags of a special token


@dataclass(frozen=True)
class Vocabulary:
    """A byte-level BPE tokenizer, ready to be written.

    ``pieces`` holds the raw bytes of the tokens and, behind them, of byte strings that only
    merges name. ``merges`` are (left, right, result) piece numbers, rank = position; None
    for a merge that cannot happen. ``special`` maps token id to its flags.
    """

    pre: int
    pieces: list[bytes]
    types: list[int]
    byte_ids: list[int]
    merges: Sequence[tuple[int, int, int] | None]
    special: dict[int, int]
    words: list[int] = field(default_factory=list)  # tokens for ignore_merges
    ignore_merges: bool = False
    add_bos: bool = False
    bos: int | None = None
    eos: int | None = None
    unk: int | None = None
    eog: list[int] = field(default_factory=list)

    @property
    def n_vocab(self) -> int:
        return len(self.types)


def pair_hash(left: U32, right: U32) -> U32:
    """cb_pair_hash() of native/text."""
    import numpy as np

    k = (left.astype(np.uint64) << np.uint64(32)) | right.astype(np.uint64)
    k *= np.uint64(0x9E3779B97F4A7C15)
    k ^= k >> np.uint64(32)
    k *= np.uint64(0xD6E8FEB86659FD93)
    return (k >> np.uint64(32)).astype(np.uint32)


def word_hash(words: Sequence[bytes]) -> U32:
    """cb_word_hash() of native/text for every word: FNV-1a, column by column."""
    import numpy as np

    length = np.fromiter(map(len, words), dtype=np.int64, count=len(words))
    start = np.cumsum(length) - length
    blob = np.frombuffer(b"".join(words), dtype=np.uint8)
    h = np.full(len(words), 0x811C9DC5, dtype=np.uint32)
    for i in range(int(length.max(initial=0))):
        live = np.flatnonzero(length > i)
        h[live] = (h[live] ^ blob[start[live] + i]) * np.uint32(0x01000193)
    h ^= h >> np.uint32(16)
    h *= np.uint32(0x85EBCA6B)
    return h ^ (h >> np.uint32(13))


def place(hashes: U32) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], int, int]:
    """Slots for entries: (order of entries, slot of each in that order, home slots, probe)."""
    import numpy as np

    if len(hashes) == 0:
        empty = np.zeros(0, dtype=np.int64)
        return empty, empty, 0, 0
    homes = int(len(hashes) / _LOAD) + 1
    order = np.argsort(hashes, kind="stable").astype(np.int64)
    home = ((hashes[order].astype(np.uint64) * np.uint64(homes)) >> np.uint64(32)).astype(np.int64)
    index = np.arange(len(home), dtype=np.int64)
    slot = index + np.maximum.accumulate(home - index)  # the home, or one past the entry before
    probe = int((slot - home).max())
    if probe > _MAX_PROBE:
        raise FormatError(
            f"the tokenizer's hash table needs {probe} probes, at most {_MAX_PROBE} are allowed",
            code="CK-FORMAT-TOKENIZER",
        )
    return order, slot, homes, probe


def _pairs(merges: Sequence[tuple[int, int, int] | None]) -> tuple[bytes, int, int]:
    """Section bytes, home slots and probe. Of equal pairs the lowest rank counts."""
    import numpy as np

    rows = np.array(
        [(m[0], m[1], rank, m[2]) for rank, m in enumerate(merges) if m is not None], dtype=np.uint32
    ).reshape(-1, 4)
    key = (rows[:, 0].astype(np.uint64) << np.uint64(32)) | rows[:, 1]
    rows = rows[np.sort(np.unique(key, return_index=True)[1])]
    order, slot, homes, probe = place(pair_hash(rows[:, 0], rows[:, 1]))
    table = np.full((homes + probe, 4), NONE, dtype="<u4")
    table[slot] = rows[order]
    return table.tobytes(), homes, probe


def _words(vocabulary: Vocabulary) -> tuple[bytes, int, int]:
    import numpy as np

    ids = np.array(vocabulary.words, dtype=np.uint32)
    order, slot, homes, probe = place(word_hash([vocabulary.pieces[i] for i in vocabulary.words]))
    table = np.full(homes + probe, NONE, dtype="<u4")
    table[slot] = ids[order]
    return table.tobytes(), homes, probe


def _special(vocabulary: Vocabulary) -> bytes:
    """Entries sorted by bytes; each knows the longest other one that is a prefix of it."""
    ids = sorted(vocabulary.special, key=lambda i: vocabulary.pieces[i])
    out = bytearray()
    chain: list[int] = []  # entries that are prefixes of one another
    for at, i in enumerate(ids):
        text = vocabulary.pieces[i]
        if not 0 < len(text) <= SPECIAL_BYTES:
            raise FormatError(
                f"special token {i} has {len(text)} bytes; 1 to {SPECIAL_BYTES} are supported",
                code="CK-FORMAT-TOKENIZER",
            )
        while chain and not text.startswith(vocabulary.pieces[ids[chain[-1]]]):
            chain.pop()
        out += struct.pack("<IIII", i, chain[-1] if chain else NONE, vocabulary.special[i], 0)
        chain.append(at)
    return bytes(out)


def build_payload(vocabulary: Vocabulary, crc: Crc) -> tuple[bytes, bytes]:
    """(directory, payload) of tokenizer.coli; the directory counts from the file's start."""
    import numpy as np

    v = vocabulary
    pairs, pair_home, pair_probe = _pairs(v.merges)
    words, word_home, word_probe = _words(v) if v.ignore_merges else (b"", 0, 0)
    lengths = np.fromiter(map(len, v.pieces), dtype=np.int64, count=len(v.pieces))
    offsets = np.zeros(len(v.pieces) + 1, dtype="<u4")
    offsets[1:] = np.cumsum(lengths)
    params = struct.pack(
        "<16I",
        *(1, v.pre, int(v.ignore_merges) | int(v.add_bos) << 1),
        *(v.n_vocab, len(v.pieces), len(v.merges)),
        *(NONE if i is None else i for i in (v.bos, v.eos, v.unk)),
        *(pair_home, pair_probe, word_home, word_probe, 0, 0, 0),
    )
    sections: tuple[Any, ...] = (
        params,
        offsets.tobytes(),
        b"".join(v.pieces),
        bytes(v.types),
        np.array(v.byte_ids, dtype="<u4").tobytes(),
        pairs,
        _special(v),
        words,
        np.array(sorted(v.eog), dtype="<u4").tobytes(),
    )
    return _lay_out(sections, crc)


def _lay_out(sections: Sequence[bytes], crc: Crc) -> tuple[bytes, bytes]:
    start = at = payload_start(KIND_TOKENIZER, len(sections) * _ENTRY.size)
    assert start >= HEADER_BYTES
    directory, payload = bytearray(), bytearray()
    for number, (data, size) in enumerate(zip(sections, _ELEMENT_BYTES, strict=True)):
        directory += _ENTRY.pack(number, len(data) // size, at, len(data), crc(data, 0), 0)
        payload += data
        payload += bytes(align(len(payload), TENSOR_ALIGN) - len(payload))
        at = start + len(payload)
    return bytes(directory), bytes(payload)
