"""Writes small .coli folders that are well formed on the outside (docs/format.md).

The headers are true; the payloads are random bytes. Enough for everything that moves
models around without computing with them.
"""

from __future__ import annotations

import hashlib
import json
import random
import struct
from pathlib import Path


def crc32c(data: bytes) -> int:
    """CRC-32C, table driven (the kit's own is bit by bit)."""
    table = []
    for n in range(256):
        for _ in range(8):
            n = (n >> 1) ^ (0x82F63B78 if n & 1 else 0)
        table.append(n)
    crc = 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def header(kind: int, index: int, payload: int, model_id: bytes, magic: bytes = b"COLI") -> bytes:
    head = magic + struct.pack("<HHIIQQQ16sI", 1, kind, index, 0, 64, 64, payload, model_id, crc32c(b""))
    return head + struct.pack("<I", crc32c(head))


def write(
    folder: Path, *, seed: int = 1, shards: int = 3, shard_bytes: int = 1 << 20, note: str = ""
) -> Path:
    """``folder`` with a manifest, dense, tokenizer and ``shards`` expert files.

    The same seed gives the same bytes. ``note`` goes into the manifest.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    model_id = bytes(range(16))
    sizes = {"dense.coli": (2, 0, 200_000), "tokenizer.coli": (1, 0, 5_000)}
    for i in range(shards):
        sizes[f"experts-{i:04d}.coli"] = (3, i, shard_bytes)
    for name, (kind, index, size) in sizes.items():
        body = rng.randbytes(size)
        (folder / name).write_bytes(header(kind, index, size, model_id) + body)
    manifest(folder, note=note)
    return folder


def manifest(folder: Path, *, note: str = "") -> None:
    """(Re)writes manifest.json to match the files that are there."""
    files = []
    for path in sorted(folder.glob("*.coli")):
        data = path.read_bytes()
        files.append({"name": path.name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()})
    doc = {
        "format": 1,
        "name": "tiny",
        "arch": "llama",
        "note": note,
        "model_id": bytes(range(16)).hex(),
        "geometry": {"n_layer": 2, "n_head_kv": 1, "head_dim": 8, "ctx_train": 128},
        "files": files,
        "golden": {"tokens": 16, "kv": "f16", "sha256": "0" * 64},
    }
    (folder / "manifest.json").write_text(json.dumps(doc))


def change_shard(folder: Path, name: str = "experts-0001.coli") -> int:
    """Other bytes in one expert shard, as after training one layer. Returns its size."""
    path = folder / name
    data = bytearray(path.read_bytes())
    data[1000:1064] = bytes(64)
    path.write_bytes(data)
    manifest(folder)
    return len(data)
