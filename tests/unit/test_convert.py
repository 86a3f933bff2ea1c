"""convert and its parts: packing, adapters, type mix, chat parts, and whole conversions."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf_maker import FAMILIES, make, random_blocks
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri_kit import cli
from colibri_kit.convert import container as box
from colibri_kit.convert import manifest as mf
from colibri_kit.convert.check import check_file
from colibri_kit.convert.elements import from_f32, to_f32
from colibri_kit.convert.pack import FIELDS, pack_rows, unpack_rows
from colibri_kit.errors import FormatError
from colibri_kit.gguf.types import BY_NAME, TYPES

Q = gguf.GGMLQuantizationType


def run(*argv: object) -> int:
    """The CLI in this process; returns the exit status."""
    try:
        cli.main([str(a) for a in argv])
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def crc32c_by_bits(data: bytes, crc: int = 0) -> int:
    """RFC 3720's CRC32C, one bit at a time."""
    crc ^= 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


# ---- x8c16 -----------------------------------------------------------------


def packed_by_the_book(type_id: int, raw: bytes, rows: int, cols: int) -> bytes:
    """docs/format.md's table, written out by hand: (name, offset in ggml's block, bytes)."""
    table = {
        "Q8_0": [(0, 2), (2, 16), (18, 16)],
        "Q4_0": [(0, 2), (2, 16)],
        "Q4_1": [(0, 2), (2, 2), (4, 16)],
        "Q5_0": [(0, 2), (2, 4), (6, 16)],
        "Q5_1": [(0, 2), (2, 2), (4, 4), (8, 16)],
        "Q4_K": [(0, 2), (2, 2), (4, 4), (8, 4), (12, 4), *[(16 + 16 * c, 16) for c in range(8)]],
        "Q5_K": [(0, 2), (2, 2), (4, 4), (8, 4), (12, 4), (16, 16), (32, 16),
                 *[(48 + 16 * c, 16) for c in range(8)]],
        "Q6_K": [(208, 2), (192, 16), *[(128 + 16 * c, 16) for c in range(4)],
                 *[(16 * c, 16) for c in range(8)]],
    }  # fmt: skip
    t = TYPES[type_id]
    row_bytes = cols // t.block * t.block_bytes
    raw += bytes(-rows % 8 * row_bytes)
    out = bytearray()
    for group in range(0, len(raw) // row_bytes, 8):
        for block in range(cols // t.block):
            for at, width in table[t.name]:
                for row in range(group, group + 8):
                    start = row * row_bytes + block * t.block_bytes + at
                    out += raw[start : start + width]
    return bytes(out)


@pytest.mark.parametrize("name", [TYPES[i].name for i in FIELDS])
def test_packing_follows_the_format_and_comes_back(name: str) -> None:
    kind = BY_NAME[name]
    rng = np.random.default_rng(kind.id)
    for rows, blocks in ((1, 1), (8, 3), (13, 2), (24, 5)):
        cols = blocks * kind.block
        raw = rng.integers(0, 256, rows * kind.row_bytes(cols), dtype=np.uint8)
        packed = pack_rows(kind.id, raw, rows, cols)
        assert packed.tobytes() == packed_by_the_book(kind.id, raw.tobytes(), rows, cols)
        assert packed.size == box.mat_bytes(kind.id, rows, cols)
        assert (unpack_rows(kind.id, packed, rows, cols) == raw).all()


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_float_matrices_are_padded_only(name: str) -> None:
    kind = BY_NAME[name]
    raw = np.arange(3 * kind.row_bytes(5), dtype=np.uint8)
    packed = pack_rows(kind.id, raw, 3, 5)
    assert packed.tobytes() == raw.tobytes() + bytes(5 * kind.row_bytes(5))
    assert (unpack_rows(kind.id, packed, 3, 5) == raw).all()


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(FIELDS)), st.integers(1, 30), st.integers(1, 4), st.integers(0, 99))
def test_packing_is_lossless(type_id: int, rows: int, blocks: int, seed: int) -> None:
    cols = blocks * TYPES[type_id].block
    size = rows * TYPES[type_id].row_bytes(cols)
    raw = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    assert (unpack_rows(type_id, pack_rows(type_id, raw, rows, cols), rows, cols) == raw).all()


def test_f32_dequantises_as_the_gguf_package_does(tmp_path: Path) -> None:
    source, out = make(tmp_path / "m.gguf", d=256, ff=256, kind=Q.Q4_K), tmp_path / "m.coli"
    assert run("convert", "-q", "--quant", "f32", source, "-o", out) == 0
    raw = {t.name: t.data for t in gguf.GGUFReader(source).tensors}
    report = check_file(out / "experts-0000.coli")
    data = (out / "experts-0000.coli").read_bytes()
    r = report.records[6]
    part = r.parts[2]
    got = np.frombuffer(data[r.offset + part.offset :][: part.size], "<f4").reshape(256, 256)
    want = gguf.quants.dequantize(raw[f"blk.{r.layer}.ffn_down_exps.weight"][r.expert], Q.Q4_K)
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-9)


@pytest.mark.parametrize("name", [TYPES[i].name for i in FIELDS])
def test_dequantising_unpacked_rows_gives_ggufs_values(name: str) -> None:
    kind = Q[name]
    raw = random_blocks(kind, (11, 512), seed=7)
    want = gguf.quants.dequantize(raw, kind)
    packed = pack_rows(kind.value, raw.reshape(-1), 11, 512)
    got = to_f32(kind.value, unpack_rows(kind.value, packed, 11, 512), 11, 512)
    # The package may round in another order; the engine's own tests hold the exact bits.
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-9)


def test_halves_round_to_nearest_even() -> None:
    x = np.random.default_rng(3).standard_normal((4, 64)).astype(np.float32)
    x[0, :4] = [1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-8, 1 + 3 * 2**-9]
    for kind in (Q.F16, Q.BF16):
        want = gguf.quants.quantize(x, kind).tobytes()
        assert from_f32(kind.value, x, 1, "x").tobytes() == want
    for bad in (np.nan, np.inf):
        with pytest.raises(FormatError, match=r"blk\.0\.x.*NaN or infinity"):
            from_f32(8, np.full((1, 32), bad, np.float32), 1, "blk.0.x")
    with pytest.raises(FormatError, match="does not fit F16"):
        from_f32(1, np.full((1, 4), 1e6, np.float32), 1, "x")


# ---- whole conversions -----------------------------------------------------


@pytest.mark.parametrize(
    ("arch", "kind", "d"),
    [(a, Q.F32, 64) for a in FAMILIES]
    + [("llama", k, 256) for k in (Q.F16, Q.BF16, Q.Q8_0, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1)]
    + [("qwen3moe", k, 256) for k in (Q.Q4_K, Q.Q5_K, Q.Q6_K)],
)
def test_every_weight_arrives_unchanged(tmp_path: Path, arch: str, kind: Q, d: int) -> None:
    source, out = make(tmp_path / "m.gguf", arch, d=d, ff=d, kind=kind), tmp_path / "m.coli"
    assert run("convert", "-q", source, "-o", out) == 0
    manifest = mf.read(out)
    tensors = {t.name: t for t in gguf.GGUFReader(source).tensors}
    reports = {f.name: check_file(out / f.name) for f in manifest.files}
    data = (out / "dense.coli").read_bytes()
    names = {"router": "ffn_gate_inp", "shexp_router": "ffn_gate_inp_shexp"}
    for e in reports["dense.coli"].dense:
        base, _, role = e.name.rpartition(".")
        role = names.get(role, role)
        if role.startswith("shexp_"):
            role = f"ffn_{role[6:]}_shexp"
        stem = role.removesuffix("_bias") + (".bias" if role.endswith("_bias") else ".weight")
        t = tensors.pop(f"{base}.{stem}" if base else stem)
        raw = np.frombuffer(data[e.offset : e.offset + e.size], np.uint8)
        if e.rows > 1:
            raw = unpack_rows(e.type_id, raw, e.rows, e.cols)
        assert raw.tobytes() == t.data.tobytes(), e.name
        assert e.crc == crc32c_by_bits(data[e.offset : e.offset + e.size]) or e.size > 20000
    shard = (out / "experts-0000.coli").read_bytes()
    seen = set()
    for r in reports["experts-0000.coli"].records:
        seen.add((r.layer, r.expert))
        assert r.offset % 16384 == 0 and r.size % 16384 == 0
        for part, p in zip(("gate", "up", "down"), r.parts, strict=True):
            t = tensors[f"blk.{r.layer}.ffn_{part}_exps.weight"]
            raw = np.frombuffer(shard[r.offset + p.offset :][: p.size], np.uint8)
            assert unpack_rows(p.type_id, raw, p.rows, p.cols).tobytes() == t.data[r.expert].tobytes()
    assert seen == {(i, e) for i in range(2) for e in range(4)}
    assert not [n for n in tensors if "exps" not in n]
    assert run("verify", "-q", out) == 0


def test_the_header_is_the_documented_one(tmp_path: Path) -> None:
    source, out = make(tmp_path / "m.gguf"), tmp_path / "m.coli"
    assert run("convert", "-q", source, "-o", out) == 0
    doc = json.loads((out / "manifest.json").read_text())
    digests = b""
    for name, kind in (("dense.coli", 2), ("experts-0000.coli", 3), ("tokenizer.coli", 1)):
        raw = (out / name).read_bytes()
        assert raw[:4] == b"COLI"
        version, got_kind, index, entries, directory, payload, size = struct.unpack_from("<HHIIQQQ", raw, 4)
        assert (version, got_kind, index, directory) == (1, kind, 0, 64)
        assert payload + size == len(raw)
        assert raw[40:56].hex() == doc["model_id"]
        entry = {1: 32, 2: 96, 3: 128}[kind]
        assert struct.unpack_from("<I", raw, 56)[0] == crc32c_by_bits(raw[64 : 64 + entries * entry])
        assert struct.unpack_from("<I", raw, 60)[0] == crc32c_by_bits(raw[:60])
        digests += hashlib.sha256(raw[payload:]).digest()
        fact = next(f for f in doc["files"] if f["name"] == name)
        assert fact == {"name": name, "bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    assert doc["model_id"] == hashlib.sha256(digests).digest()[:16].hex()
    assert doc["source"] == {"file": "m.gguf", "sha256": hashlib.sha256(source.read_bytes()).hexdigest()}
    assert doc["tokenizer"] == {"eog": [258, 260], "add_bos": False, "bos": 258, "eos": 260}
    assert len(doc["golden"]["sha256"]) == 64


def test_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    source = make(tmp_path / "m.gguf", "qwen2moe", d=256, ff=256)
    for i, threads in ((1, 1), (2, 2)):
        out = tmp_path / f"{i}.coli"
        assert run("convert", "-q", "--quant", "q4_k_m", "--threads", threads, source, "-o", out) == 0
    files = sorted(p.name for p in (tmp_path / "1.coli").iterdir())
    for name in files:
        assert (tmp_path / "1.coli" / name).read_bytes() == (tmp_path / "2.coli" / name).read_bytes(), name


def test_shards_stay_below_64_mib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(box, "SHARD_BYTES", 200_000)
    source, out = make(tmp_path / "m.gguf"), tmp_path / "m.coli"
    assert run("convert", "-q", source, "-o", out) == 0
    shards = sorted(out.glob("experts-*.coli"))
    assert len(shards) > 1 and all(p.stat().st_size <= 200_000 for p in shards)
    assert run("verify", "-q", out) == 0


def test_an_existing_output_is_replaced_only_by_force(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = make(tmp_path / "m.gguf"), tmp_path / "m.coli"
    assert run("convert", "-q", source, "-o", out) == 0
    before = (out / "manifest.json").read_bytes()
    assert run("convert", "-q", source, "-o", out, "--name", "other") == 6
    assert "exists" in capsys.readouterr().err
    assert (out / "manifest.json").read_bytes() == before
    assert run("convert", "-q", source, "-o", out, "--name", "other", "--force") == 0
    assert json.loads((out / "manifest.json").read_text())["name"] == "other"
    precious = tmp_path / "photos.coli"
    precious.mkdir()
    (precious / "a.jpg").write_bytes(b"x")
    assert run("convert", "-q", source, "-o", precious, "--force") == 6
    assert (precious / "a.jpg").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.coli", "m.gguf", "photos.coli"]


def test_dry_run_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = make(tmp_path / "m.gguf", "qwen2moe"), tmp_path / "m.coli"
    assert run("convert", "--dry-run", "--json", "--quant", "q8_0", source, "-o", out) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["dry_run"] and data["geometry"]["n_expert"] == 4
    row = next(t for t in data["tensors"] if t["name"] == "blk.0.experts.down")
    assert (row["from"], row["to"], row["bytes"]) == ("F32", "Q8_0", 4 * 64 * 2 * 34)
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]
    assert run("convert", "--quant", "q8_0", "--json", source, "-o", out) == 0
    written = sum(p.stat().st_size for p in out.iterdir() if p.name != "manifest.json")
    assert abs(written - data["disk_bytes"]) < 4096


def test_no_space_is_found_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 1000))
    source = make(tmp_path / "m.gguf")
    assert run("convert", "-q", source, "-o", tmp_path / "m.coli") == 6
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]


def test_a_disk_that_fills_up_leaves_nothing(tmp_path: Path) -> None:
    """The system refuses a write half-way: here a limit on the size of files."""
    source = make(tmp_path / "m.gguf", d=256, ff=256)
    code = (
        "import resource, sys; from colibri_kit.cli import main; "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, 1 << 19)); main(sys.argv[1:])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "convert", str(source), "-o", str(tmp_path / "m.coli")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 7 and "Traceback" not in done.stderr, done.stderr
    assert "File too large" in done.stderr and "state: unchanged" in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]


def test_a_failing_golden_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from colibri_kit.convert import job
    from colibri_kit.errors import EngineError

    def broken(*_: object, **__: object) -> str:
        raise EngineError("no")

    monkeypatch.setattr(job, "compute_golden", broken)
    source = make(tmp_path / "m.gguf")
    assert run("convert", "-q", source, "-o", tmp_path / "m.coli") == 13
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]


def test_memory_is_checked_before_writing(tmp_path: Path) -> None:
    from colibri_kit.convert.job import check_memory
    from colibri_kit.errors import PreflightError

    check_memory(1 << 20)
    if Path("/proc/meminfo").exists():
        with pytest.raises(PreflightError, match=str(1 << 60)):
            check_memory(1 << 60)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_interrupting_removes_the_partial_folder(tmp_path: Path, how: signal.Signals) -> None:
    source = make(tmp_path / "m.gguf", "llama", d=512, ff=1024, n_expert=32)
    child = subprocess.Popen(
        [sys.executable, "-m", "colibri_kit", "convert", str(source), "-o", str(tmp_path / "m.coli"),
         "--quant", "q6_k", "--threads", "1"],
        stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    limit = time.monotonic() + 30
    while not list(tmp_path.glob("m.coli.partial-*/dense.coli")) and time.monotonic() < limit:
        time.sleep(0.005)
    os.kill(child.pid, how)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 130, err
    assert "removed m.coli.partial-" in err and "Traceback" not in err
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]


def test_inspect_shows_both_kinds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = make(tmp_path / "m.gguf", keys={"general.name": "evil\x1b[2J"}), tmp_path / "m.coli"
    assert run("inspect", "--json", source) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["convertible"] and data["types"] == {"F32": 23}
    assert data["keys"]["tokenizer.ggml.tokens"]["length"] == 264
    assert run("inspect", source) == 0
    assert "\x1b" not in capsys.readouterr().out
    assert run("convert", "-q", source, "-o", out) == 0
    capsys.readouterr()
    assert run("inspect", "--json", out) == 0
    data = json.loads(capsys.readouterr().out)
    assert len(data["experts"]) == 8 and data["features"]["rope"] == "norm"
    assert run("inspect", "--tensors", out) == 0
    assert "blk.1.router" in capsys.readouterr().out
