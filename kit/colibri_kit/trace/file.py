"""Trace files (docs/streaming.md): which experts each token used, layer by layer.

64-byte header, then for each token uint16 [n_moe_layer][n_used] in rank order. Bit 15 of a
token's first value marks the first token of a chunk (tokens evaluated together ask a layer
for each distinct expert once); 0xFFFF is an empty place.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from colibri_kit.errors import FormatError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

MAGIC = b"COLT"
VERSION = 1
HEADER_BYTES = 64
#: flag: chunk starts are marked; without it every token is a chunk
MARKED = 1
EMPTY = 0xFFFF
_START = 0x8000
_HEAD = struct.Struct("<4sHHIIII16s20x")
_MAX_EXPERT, _MAX_LAYER = 1024, 1024


@dataclass(frozen=True)
class Trace:
    """A recorded session.

    Attributes:
        first_layer: block number of the first MoE layer.
        model_id: 16 bytes, the manifest's.
        experts: uint16 [token][n_moe_layer][n_used], EMPTY where fewer were chosen.
        starts: bool [token]: the token begins a chunk.
    """

    n_expert: int
    first_layer: int
    model_id: bytes
    experts: npt.NDArray[np.uint16]
    starts: npt.NDArray[np.bool_]

    @property
    def n_token(self) -> int:
        return int(self.experts.shape[0])

    @property
    def n_layer(self) -> int:
        return int(self.experts.shape[1])

    @property
    def n_used(self) -> int:
        return int(self.experts.shape[2])

    def chunks(self) -> Iterator[list[list[int]]]:
        """For each chunk, for each layer: its distinct experts, ascending."""
        import numpy as np

        first = np.flatnonzero(self.starts)
        for a, b in zip(first, [*first[1:], self.n_token], strict=True):
            part = self.experts[a:b].astype(np.int64)
            yield [[int(e) for e in np.unique(part[:, il]) if e != EMPTY] for il in range(self.n_layer)]

    def counts(self) -> npt.NDArray[np.int64]:
        """How often each was chosen: int64 [n_moe_layer][n_expert]."""
        import numpy as np

        out = np.zeros((self.n_layer, self.n_expert), np.int64)
        for il in range(self.n_layer):
            values = self.experts[:, il].astype(np.int64).ravel()
            out[il] = np.bincount(values[values != EMPTY], minlength=self.n_expert)
        return out


def _fail(path: Path, why: str) -> FormatError:
    return FormatError(f"{path}: {why}", code="CK-FORMAT-TRACE", hint="see docs/streaming.md")


def read(path: Path) -> Trace:
    """Reads and checks a trace. A file cut inside a token loses that token only.

    Raises:
        FormatError: not a trace, damaged, or an expert that the header rules out.
    """
    import numpy as np

    try:
        data = path.read_bytes()
    except OSError as err:
        raise _fail(path, f"cannot be read: {err.strerror or err}") from err
    layers, n_expert, used, first, flags, identity = _read_head(path, data)
    width = layers * used
    n = (len(data) - HEADER_BYTES) // (2 * width)
    if n == 0:
        raise _fail(path, "holds no token")
    raw = np.frombuffer(data, "<u2", n * width, HEADER_BYTES).reshape(n, layers, used).astype(np.uint16)
    starts = np.ones(n, np.bool_)
    if flags & MARKED:
        head = raw[:, 0, 0]
        starts = (head & _START) != 0
        raw[:, 0, 0] = np.where(starts & (head != EMPTY), head & (_START - 1), head)
        starts[0] = True
    bad = (raw >= n_expert) & (raw != EMPTY)
    if bad.any():
        t, il, k = (int(i[0]) for i in np.nonzero(bad))
        raise _fail(path, f"token {t}, layer {il + first}: expert {raw[t, il, k]} of {n_expert}")
    return Trace(n_expert, first, identity, raw, starts)


def _read_head(path: Path, data: bytes) -> tuple[int, int, int, int, int, bytes]:
    from colibri_kit.convert.container import crc32c

    if len(data) < HEADER_BYTES or data[:4] != MAGIC:
        raise _fail(path, "is no expert trace (it does not begin with COLT)")
    _magic, version, flags, layers, n_expert, used, first, identity = _HEAD.unpack_from(data)
    if version != VERSION:
        raise _fail(path, f"version {version}; this kit reads {VERSION}")
    if struct.unpack_from("<I", data, 60)[0] != crc32c(data[:60]):
        raise _fail(path, "the header's CRC32C does not match")
    if not 1 <= layers <= _MAX_LAYER or not 1 <= n_expert <= _MAX_EXPERT or not 1 <= used <= n_expert:
        raise _fail(path, f"{layers} layers, {n_expert} experts, {used} used: not possible")
    return layers, n_expert, used, first, flags, identity


def pack_head(layers: int, n_expert: int, used: int, first_layer: int, model_id: bytes, flags: int) -> bytes:
    """The 64 bytes at the start of a trace."""
    from colibri_kit.convert.container import crc32c

    body = _HEAD.pack(MAGIC, VERSION, flags, layers, n_expert, used, first_layer, model_id)
    return body + struct.pack("<I", crc32c(body))


def write(path: Path, chunks: Sequence[Any], n_expert: int, first_layer: int, model_id: bytes) -> None:
    """Writes a trace.

    Args:
        chunks: what ``Engine.eval`` gives as experts: int [n_moe_layer][T][n_used] a call of at
            most one batch.
    """
    import numpy as np

    layers, _, used = np.shape(chunks[0])
    with path.open("wb") as out:
        out.write(pack_head(layers, n_expert, used, first_layer, model_id, MARKED))
        for chunk in chunks:
            raw = np.ascontiguousarray(np.swapaxes(np.asarray(chunk), 0, 1)).astype("<u2")
            raw[0, 0, 0] |= _START
            out.write(raw.tobytes())
