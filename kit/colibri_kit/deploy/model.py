"""A .coli folder as a parcel: names, sizes and sha256 of its files.

Checks what can be checked without reading the weights (manifest, sizes, headers,
model id), so that a wrong parcel is refused before a byte is sent. The contents are
hashed while they travel and again on the board; ``colibri-kit verify`` does it here.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colibri_kit.errors import FormatError, UsageError

_MANIFEST_MAX = 1 << 20
_HEADER = struct.Struct("<4sHHIIQQQ16sII")
_KINDS = {"tokenizer": 1, "dense": 2, "experts": 3}
_NAME = re.compile(r"(tokenizer|dense|experts-[0-9]{4,6})\.coli")


@dataclass(frozen=True)
class Part:
    """One file to put on a board: where it is here, its name there, size in bytes, sha256."""

    name: str
    path: Path
    size: int
    sha256: str
    mode: int = 0o444


@dataclass(frozen=True)
class Parcel:
    """A model's files, manifest first, and what the plan needs to know of it.

    ``kv_bytes_per_token``: bytes the F16 KV cache takes for one position.
    """

    name: str
    model_id: str
    golden: str
    parts: tuple[Part, ...]
    ctx_train: int
    kv_bytes_per_token: int

    @property
    def size(self) -> int:
        return sum(p.size for p in self.parts)


def _bad(path: Path, why: str, number: int) -> FormatError:
    return FormatError(
        f"{path}: {why}",
        hint="convert the model again; `colibri-kit verify` checks every byte",
        state="nothing was sent",
        code=f"CK-DEPLOY-MODEL-{number}",
    )


def _crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli), bit by bit: for headers only."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def load(folder: Path) -> Parcel:
    """Reads and cheaply checks NAME.coli/.

    Raises:
        UsageError: no such folder. FormatError: the folder is not a whole, sane model.
    """
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise UsageError(
            f"{folder} {what}; a model is a folder NAME.coli/",
            hint="make one with: colibri-kit convert IN.gguf -o OUT.coli",
        )
    file = folder / "manifest.json"
    try:
        with file.open("rb") as handle:
            raw = handle.read(_MANIFEST_MAX + 1)
    except OSError as err:
        raise _bad(file, f"cannot be read: {err.strerror}", 1) from err
    if len(raw) > _MANIFEST_MAX:
        raise _bad(file, "larger than 1 MiB", 1)
    try:
        doc = json.loads(raw)
    except (ValueError, RecursionError) as err:
        raise _bad(file, f"is not JSON: {err}", 1) from err
    if not isinstance(doc, dict) or doc.get("format") != 1:
        raise _bad(file, "is not of format 1", 2)
    model_id = doc.get("model_id")
    if not isinstance(model_id, str) or not re.fullmatch(r"[0-9a-f]{32}", model_id):
        raise _bad(file, "has no model_id of 32 hex digits", 2)
    parts = [Part("manifest.json", file, len(raw), hashlib.sha256(raw).hexdigest())]
    listed = doc.get("files")
    if not isinstance(listed, list) or not listed:
        raise _bad(file, "lists no files", 2)
    for item in listed:
        parts.append(_part(folder, file, item, bytes.fromhex(model_id)))
    names = [p.name for p in parts]
    if len(set(names)) != len(names):
        raise _bad(file, "lists a file twice", 2)
    for needed in ("dense.coli", "tokenizer.coli"):
        if needed not in names:
            raise _bad(file, f"does not list {needed}", 2)
    golden = doc.get("golden")
    geometry = doc.get("geometry")
    geometry = geometry if isinstance(geometry, dict) else {}
    return Parcel(
        name=str(doc.get("name") or folder.name.removesuffix(".coli"))[:64],
        model_id=model_id,
        golden=str(golden.get("sha256", "")) if isinstance(golden, dict) else "",
        parts=tuple(parts),
        ctx_train=_count(geometry, "ctx_train"),
        kv_bytes_per_token=4
        * _count(geometry, "n_layer")
        * _count(geometry, "n_head_kv")
        * _count(geometry, "head_dim"),
    )


def _count(geometry: dict[str, Any], key: str) -> int:
    value = geometry.get(key)
    return value if isinstance(value, int) and 0 <= value < 1 << 32 else 0


def _part(folder: Path, manifest: Path, item: object, model_id: bytes) -> Part:
    if not isinstance(item, dict):
        raise _bad(manifest, "has a malformed list of files", 2)
    name, size, digest = item.get("name"), item.get("bytes"), item.get("sha256")
    # The name becomes a path on the board: only the format's own names may pass.
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _bad(manifest, f"lists a file with an unknown name: {name!r}", 3)
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise _bad(manifest, f"gives no size for {name}", 2)
    if not isinstance(digest, str) or not re.fullmatch(r"[0-9a-f]{64}", digest):
        raise _bad(manifest, f"gives no sha256 for {name}", 2)
    path = folder / name
    try:
        real = path.stat().st_size
        with path.open("rb") as handle:
            head = handle.read(_HEADER.size)
    except OSError as err:
        raise _bad(path, f"is listed in the manifest but cannot be read: {err.strerror}", 4) from err
    if real != size:
        raise _bad(path, f"has {real} bytes, the manifest says {size}", 5)
    _check_header(path, head, real, model_id)
    return Part(name, path, size, digest)


def _check_header(path: Path, head: bytes, size: int, model_id: bytes) -> None:
    if len(head) < _HEADER.size:
        raise _bad(path, "is shorter than a header", 6)
    magic, version, kind, _, _, _, payload, length, owner, _, crc = _HEADER.unpack(head)
    if magic == b"ILOC":
        raise _bad(path, "is byte-swapped (ILOC): it was copied by something that swaps bytes", 6)
    if magic != b"COLI":
        raise _bad(path, "is not a .coli file", 6)
    if crc != _crc32c(head[:-4]):
        raise _bad(path, "has a damaged header (CRC32C)", 6)
    if version != 1:
        raise _bad(path, f"is of format version {version}, this kit writes 1", 6)
    if kind != _KINDS[path.name.split(".")[0].split("-")[0]]:
        raise _bad(path, f"holds another kind of data ({kind}) than its name says", 6)
    if payload + length != size:
        raise _bad(path, f"should have {payload + length} bytes, it has {size}", 5)
    if owner != model_id:
        raise _bad(path, f"belongs to another model ({owner.hex()}, not {model_id.hex()})", 7)
