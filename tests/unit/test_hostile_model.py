"""Model folders that lie, with every CRC right: a clear error, the right code, nothing left behind."""

from __future__ import annotations

import json
import os
import re
import struct
from pathlib import Path
from typing import Any

import hostile as h
import pytest
from hostile import Change

EINVAL, EIO, EFORMAT, EBUDGET, ENUMERIC, ENOTSUP = -1, -2, -3, -4, -6, -9
GIB = 1 << 30


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return h.sample_model(tmp_path_factory)


@pytest.fixture
def folder(model: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return h.copy(model, tmp_path)


def set_entry(name: str, at: int, value: Any) -> Change:
    return h.dense(lambda e, _: e[name].__setitem__(at, value))


def alias(new_name: str) -> Change:
    """An optional tensor becomes a second, larger one of another name."""

    def edit(e: dict[str, list[Any]], _: bytearray) -> None:
        e["blk.1.attn_q_bias"][:] = [new_name.encode(), *e["token_embd"][1:]]

    return h.dense(edit)


def set_record(part: int, at: int, value: int) -> Change:
    def edit(r: list[list[list[int]]], _: bytearray) -> None:
        r[3][part][at] = value

    return h.records(edit)


def twice(r: list[list[list[int]]], _: bytearray) -> None:
    r[3][0][:2] = r[2][0][:2]


def overlap(r: list[list[list[int]]], _: bytearray) -> None:
    r[3][2][4] = r[3][1][4]


def four_gib(folder: Path) -> None:
    """A sparse shard with a record of 4 GiB and a bit, whose size is small modulo 2^32."""
    path = folder / "experts-0000.coli"
    size = path.stat().st_size
    with path.open("r+b") as f:
        f.truncate(6 * GIB)
        head = bytearray(f.read(64 + 128 * 16))
        (start,) = struct.unpack_from("<Q", head, 24)
        struct.pack_into("<Q", head, 32, 6 * GIB - start)
        struct.pack_into("<Q", head, 64 + 16, 4 * GIB + 16384 * 32)
        f.seek(0)
        f.write(h.mend(head, 128))
    assert size < GIB


def many_keys(folder: Path) -> None:
    text = json.dumps({f"{i:x}": 0 for i in range(90_000)}, separators=(",", ":"))
    (folder / "manifest.json").write_text(text)


GEO, FEA, TOP = "geometry", "features", ""
CASES: dict[str, tuple[Change, int, str]] = {
    "1024 experts": (h.manifest(GEO, n_expert=1024), EFORMAT, r"stands in no shard"),
    "1025 experts": (h.manifest(GEO, n_expert=1025), EFORMAT, r"manifest.json: .*n_expert is 1025"),
    "512 layers": (h.manifest(GEO, n_layer=512), EFORMAT, r"layer 2, expert 0 stands in no shard"),
    "more dense layers": (h.manifest(GEO, n_dense_layer=3), EFORMAT, r"manifest.json: geometry"),
    "a dense layer less": (h.manifest(GEO, n_dense_layer=1), EFORMAT, r"experts-0000.coli: holds layer 0"),
    "odd rope_dim": (h.manifest(GEO, rope_dim=63), EFORMAT, r"manifest.json: geometry.*rope 63"),
    "rope_dim past the head": (h.manifest(GEO, rope_dim=66), EFORMAT, r"manifest.json: geometry"),
    "no rope_dim": (h.manifest(GEO, rope_dim=0), EFORMAT, r"manifest.json: rope without rope_dim"),
    "head_dim 4096": (h.manifest(GEO, head_dim=4096), EFORMAT, r"dense.coli: blk.0.attn_q is 256 x 256"),
    "head_dim 2^31": (h.manifest(GEO, head_dim=1 << 31), EFORMAT, r"manifest.json: .*head_dim"),
    "no heads": (h.manifest(GEO, n_head=0), EFORMAT, r"manifest.json: .*n_head is 0"),
    "3 heads over 2": (h.manifest(GEO, n_head=3), EFORMAT, r"manifest.json: geometry: .*3 heads over 2"),
    "larger vocabulary": (h.manifest(GEO, n_vocab=1 << 24), EFORMAT, r"token_embd is 512 x 256.*16777216"),
    "used > experts": (h.manifest(GEO, n_expert_used=9), EFORMAT, r"9 of 8 experts"),
    "none used": (h.manifest(GEO, n_expert_used=0), EFORMAT, r"manifest.json: geometry"),
    "-1 layers": (h.manifest(GEO, n_layer=-1), EFORMAT, r"n_layer is not a whole number"),
    "2^70 layers": (h.manifest(GEO, n_layer=1 << 70), EFORMAT, r"n_layer is out of range"),
    "a string": (h.manifest(GEO, n_layer="2"), EFORMAT, r"n_layer is missing or not a number"),
    "context of 3": (h.manifest(GEO, ctx_train=3), EINVAL, r"ctx 3 is outside 16 to 3"),
    "unknown feature": (h.manifest(FEA, alibi=True), ENOTSUP, r'feature "alibi"'),
    "unknown rope": (h.manifest(FEA, rope="yarn"), ENOTSUP, r'rope is "yarn"'),
    "rope out of range": (
        h.manifest(FEA, rope_base=1.0, rope_scale=1e6),
        EFORMAT,
        r"RoPE angle of dimension 0 is out of range",
    ),
    "base NaN": (h.manifest(FEA, rope_base=float("nan")), EFORMAT, r"manifest.json: JSON.*at byte"),
    "base 1e400": (h.manifest(FEA, rope_base=10**400), EFORMAT, r"rope_base is missing or out of range"),
    "negative eps": (h.manifest(FEA, norm_eps=-1e-5), EFORMAT, r"norm_eps is missing or out of range"),
    "logit_scale 0": (h.manifest(FEA, logit_scale=0), EFORMAT, r"logit_scale is missing or out of range"),
    "another id": (h.manifest(TOP, model_id="0" * 32), EFORMAT, r"dense.coli belongs to another model"),
    "format 2": (h.manifest(TOP, format=2), EFORMAT, r"manifest.json: format 2; this engine reads"),
    "no shards": (h.manifest(TOP, files=[]), EFORMAT, r"manifest.json: 0 expert files for 2 MoE layers"),
    "two shards": (
        h.manifest(TOP, files=[{"name": "experts-0000.coli"}, {"name": "experts-0001.coli"}]),
        EFORMAT,
        r"experts-0001.coli",
    ),
    "90,000 keys": (many_keys, EFORMAT, r"manifest.json: JSON: too many members in one object"),
    "deep nesting": (
        lambda d: (d / "manifest.json").write_text("[" * 100_000) and None,
        EFORMAT,
        r"manifest.json: JSON: nested too deeply at byte 32",
    ),
    "dense version": (h.header("dense.coli", version=2), EFORMAT, r"dense.coli: format version 2"),
    "dense kind": (h.header("dense.coli", kind=3), EFORMAT, r"dense.coli: is a experts file"),
    "dense count": (h.header("dense.coli", count=(1 << 32) - 1), EFORMAT, r"dense.coli: directory of"),
    "one entry less": (h.header("dense.coli", count=3), EFORMAT, r"dense.coli: .* is missing"),
    "directory elsewhere": (h.header("dense.coli", dir_offset=128), EFORMAT, r"dense.coli: directory"),
    "payload past the end": (
        h.header("dense.coli", payload_offset=1 << 63, payload_size=1 << 63),
        EFORMAT,
        r"dense.coli: directory of",
    ),
    "payload wraps": (h.header("dense.coli", payload_size=(1 << 64) - 1), EFORMAT, r"dense.coli: is \d+ b"),
    "shard index": (h.header("experts-0000.coli", index=7), EFORMAT, r"says that it is number 7"),
    "tokenizer kind": (h.header("tokenizer.coli", kind=2), EFORMAT, r"tokenizer.coli: is a dense file"),
    "tensor twice": (alias("output_norm"), EFORMAT, r"dense.coli: tensor output_norm stands twice"),
    "tensor alias 00": (alias("blk.00.attn_norm"), ENOTSUP, r"tensor blk.00.attn_norm is unknown"),
    "tensor alias +0": (alias("blk.+0.attn_norm"), ENOTSUP, r"tensor blk.\+0.attn_norm is unknown"),
    "tensor alias 2^32": (alias("blk.4294967296.attn_norm"), ENOTSUP, r"is unknown to this engine"),
    "tensor name of 48": (alias("x" * 48), ENOTSUP, r"dense.coli: tensor x{48} is unknown"),
    "offset wraps": (set_entry("output_norm", 5, (1 << 64) - 64), EFORMAT, r"output_norm lies outside"),
    "offset in the header": (set_entry("output_norm", 5, 0), EFORMAT, r"output_norm lies outside the file"),
    "offset of 4": (
        h.dense(lambda e, _: e["output_norm"].__setitem__(5, e["output_norm"][5] + 4)),
        EFORMAT,
        r"output_norm lies outside",
    ),
    "size": (set_entry("output_norm", 6, 1 << 40), EFORMAT, r"output_norm: shape 1 x 256 F32"),
    "no rows": (set_entry("token_embd", 2, 0), EFORMAT, r"token_embd: shape 0 x 256"),
    "2^32-1 rows": (set_entry("token_embd", 2, (1 << 32) - 1), EFORMAT, r"token_embd: shape 4294967295"),
    "columns off the block": (set_entry("token_embd", 3, 255), EFORMAT, r"token_embd: shape 512 x 255"),
    "type": (set_entry("token_embd", 1, 99), ENOTSUP, r"token_embd: unknown tensor type 99"),
    "layout": (set_entry("token_embd", 7, 0), EFORMAT, r"token_embd: shape .* layout 0"),
    "record wraps": (set_record(0, 2, (1 << 64) - 16384), EFORMAT, r"experts-0000.coli: record 3"),
    "record misaligned": (set_record(0, 2, 64), EFORMAT, r"experts-0000.coli: record 3"),
    "record of nothing": (set_record(0, 3, 0), EFORMAT, r"experts-0000.coli: layer 0, expert 3: part 0"),
    "record size wraps": (set_record(0, 3, (1 << 64) - 16384), EFORMAT, r"experts-0000.coli: record 3"),
    "record of 4 GiB": (four_gib, EFORMAT, r"experts-0000.coli: record 0 .*exceeds 4 GiB"),
    "two parts": (set_record(0, 5, 2), EFORMAT, r"experts-0000.coli: record 3"),
    "expert out of range": (set_record(0, 1, 8), EFORMAT, r"experts-0000.coli: holds layer 0, expert 8"),
    "expert twice": (h.records(twice), EFORMAT, r"experts-0000.coli: layer 0, expert 2 stands twice"),
    "part type": (set_record(1, 0, 99), EFORMAT, r"expert 3: part 0 has type 99"),
    "part rows": (set_record(2, 1, 248), EFORMAT, r"expert 3: part 1"),
    "part offset wraps": (set_record(3, 4, (1 << 64) - 64), EFORMAT, r"expert 3: part 2"),
    "part offset of 4": (set_record(3, 4, 4), EFORMAT, r"expert 3: part 2"),
    "parts overlap": (h.records(overlap), EFORMAT, r"expert 3: part 1 .* do not agree"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_lie_is_named(folder: Path, name: str) -> None:
    change, want, message = CASES[name]
    change(folder)
    opt = [f"model={folder}", "threads=2", "ctx=0", f"budget={GIB // 2}"]
    if name == "rope out of range":
        opt += ["ctx=512", "over=1"]
        h.manifest(GEO, ctx_train=1 << 20)(folder)
        opt += ["ctx=4096"]
    out = h.drive(*opt, "open", timeout=30)
    assert h.code(out["open"]) == want, out
    assert re.search(message, out["open"]), out
    assert out["left"] == "fds=0 maps=0"
    if name != "rope out of range":  # what only the loaded tensors show, a plan cannot know
        again = h.drive(*opt, "plan", timeout=30)
        assert h.code(again["plan"]) in (want, 0) and again["left"] == "fds=0 maps=0"


FILES = ("manifest.json", "dense.coli", "tokenizer.coli", "experts-0000.coli")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("instead", ["nothing", "fifo", "folder", "loop", "empty", "socket", "device"])
def test_something_else_in_a_file_s_place(folder: Path, name: str, instead: str) -> None:
    path = folder / name
    path.unlink()
    if instead == "fifo":
        os.mkfifo(path)
    elif instead == "folder":
        path.mkdir()
    elif instead == "loop":
        path.symlink_to(path)
    elif instead == "empty":
        path.touch()
    elif instead == "device":
        path.symlink_to("/dev/zero")
    elif instead == "socket":
        import socket

        with socket.socket(socket.AF_UNIX) as s:
            here = os.open(folder, os.O_RDONLY)
            s.bind(f"/proc/self/fd/{here}/{name}")  # a socket's path is short
            os.close(here)
    out = h.drive(f"model={folder}", "plan", "open", timeout=20)
    for verb in ("plan", "open"):
        assert h.code(out[verb]) in (EIO, EFORMAT)
        assert name in out[verb]
    assert out["left"] == "fds=0 maps=0"


def test_links_to_files_are_fine(model: Path, tmp_path: Path) -> None:
    for name in FILES:
        (tmp_path / name).symlink_to(model / name)
    assert h.code(h.drive(f"model={tmp_path}", "open")["open"]) == 0


def test_no_model_at_all() -> None:
    out = h.drive("plan", "model=/nonexistent", "open")
    assert h.code(out["plan"]) == EINVAL and "no model folder" in out["plan"]
    assert h.code(out["open"]) in (EIO, EFORMAT) and "/nonexistent/manifest.json" in out["open"]


def test_a_context_of_terabytes_is_refused_by_the_sum(folder: Path) -> None:
    h.manifest(GEO, ctx_train=1 << 30)(folder)
    for budget in ((), ("budget=100000000",)):
        out = h.drive(f"model={folder}", "ctx=1073741824", *budget, "plan", "open", timeout=20)
        for verb in ("plan", "open"):
            assert h.code(out[verb]) == EBUDGET
            assert re.search(r"needs \d{6,}\.\d MiB = .*KV \d{6,}", out[verb])
        assert int(re.search(r"total=(\d+)", out["plan"]).group(1)) > 1 << 40  # type: ignore[union-attr]


def grow_head(d: Path) -> None:
    """A sparse dense.coli with a vocabulary of 2^24: 16 GiB of token_embd, in F32."""
    h.manifest(GEO, n_vocab=1 << 24)(d)
    path, size = d / "dense.coli", (1 << 24) * 256 * 4

    def edit(e: dict[str, list[Any]], data: bytearray) -> None:
        at = (len(data) + 63) // 64 * 64
        e["token_embd"][1:8] = [0, 1 << 24, 256, 0, at, size, 0]
        struct.pack_into("<Q", data, 32, at + size - struct.unpack_from("<Q", data, 24)[0])

    h.dense(edit)(d)
    os.truncate(path, (path.stat().st_size + 63) // 64 * 64 + size)


def test_weights_of_a_sparse_file_are_refused_by_the_sum(folder: Path) -> None:
    def no_head(e: dict[str, list[Any]], _: bytearray) -> None:
        if "output" in e:
            e["output"][0] = b"token_embd_2"

    h.dense(no_head)(folder)
    grow_head(folder)
    out = h.drive(f"model={folder}", f"budget={GIB}", "plan", "open", timeout=20)
    assert h.code(out["plan"]) == h.code(out["open"]) == EBUDGET
    assert re.search(r"dense 16\d{3}\.\d", out["open"])


@pytest.mark.parametrize("where", ["router", "ffn_norm", "attn_q", "output_norm"])
@pytest.mark.parametrize("value", [b"\0\0\xc0\x7f", b"\0\0\x80\x7f", b"\xff\xff\x7f\x7f"])
def test_weights_that_are_no_numbers(folder: Path, where: str, value: bytes) -> None:
    """NaN, infinity and the largest float all over one tensor: no quantiser makes them zeros."""
    name = where if where.startswith("out") else f"blk.1.{where}"

    def edit(e: dict[str, list[Any]], data: bytearray) -> None:
        t = e[name]
        data[t[5] : t[5] + t[6]] = value * (t[6] // 4)
        t[4] = h.box.crc32c(bytes(data[t[5] : t[5] + t[6]]), 0)

    h.dense(edit)(folder)
    out = h.drive(f"model={folder}", "threads=2", "open", "eval=9", "gen=3", "golden")
    assert h.code(out["open"]) == 0
    if name != "output_norm":
        assert h.code(out["eval=9"]) == ENUMERIC and "layer 1" in out["eval=9"]
    assert h.code(out["gen"]) == ENUMERIC
    assert "wrong" in out["golden"]
