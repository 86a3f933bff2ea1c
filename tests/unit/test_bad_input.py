"""Files that are wrong: each gets an error that names file and place, and changes nothing."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_maker import make
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from colibri_kit import cli, native
from colibri_kit.convert import check
from colibri_kit.convert import manifest as mf
from colibri_kit.convert.adapters import map_model
from colibri_kit.convert.model import Window
from colibri_kit.convert.plan import make_plan
from colibri_kit.convert.tokenizer import export_tokenizer
from colibri_kit.convert.tokenizer_keys import check_tokenizer_keys
from colibri_kit.errors import FormatError, KitError
from colibri_kit.gguf.reader import GgufFile


def run(*argv: object) -> int:
    try:
        cli.main([str(a) for a in argv])
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """a.coli and b.coli: two models of the same shape, several shards each."""
    from colibri_kit.convert import container as box

    folder = tmp_path_factory.mktemp("models")
    with pytest.MonkeyPatch.context() as m:
        m.setattr(box, "SHARD_BYTES", 200_000)
        for name, seed in (("a", 1), ("b", 2)):
            make(folder / f"{name}.gguf", ff=72, seed=seed)  # 72: records end with padding
            assert run("convert", "-q", folder / f"{name}.gguf", "-o", folder / f"{name}.coli") == 0
    return folder


@pytest.fixture
def model(models: Path, tmp_path: Path) -> Path:
    """A copy of a.coli to damage."""
    return shutil.copytree(models / "a.coli", tmp_path / "a.coli")


def patch(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as f:
        f.seek(at)
        f.write(data)


def flip(path: Path, at: int) -> None:
    patch(path, at, bytes([path.read_bytes()[at] ^ 0x10]))


def reseal(path: Path, at: int, data: bytes) -> None:
    """Changes header or directory and makes their CRCs right again, as an attacker would."""
    raw = bytearray(path.read_bytes())
    raw[at : at + len(data)] = data
    kind, entries = struct.unpack_from("<H", raw, 6)[0], struct.unpack_from("<I", raw, 12)[0]
    size = {1: 32, 2: 96, 3: 128}.get(kind, 0) * min(entries, 4096)
    raw[56:60] = struct.pack("<I", native.crc32c(bytes(raw[64 : 64 + size])))
    raw[60:64] = struct.pack("<I", native.crc32c(bytes(raw[:60])))
    path.write_bytes(raw)


def edit(model: Path, change: Callable[[dict[str, Any]], object]) -> None:
    doc = json.loads((model / "manifest.json").read_text())
    change(doc)
    (model / "manifest.json").write_text(json.dumps(doc))


def record(model: Path, shard: str, k: int) -> tuple[int, list[tuple[int, int]]]:
    """(record offset, [(part offset, size)]) of record k, from the directory's bytes."""
    raw = (model / shard).read_bytes()
    base = 64 + 128 * k
    parts = [struct.unpack_from("<QQ", raw, base + 32 + 32 * p + 16) for p in range(3)]
    return struct.unpack_from("<Q", raw, base + 8)[0], [(int(o), int(s)) for o, s in parts]


def flip_in_up(m: Path) -> None:
    at, parts = record(m, "experts-0001.coli", 1)
    flip(m / "experts-0001.coli", at + parts[1][0] + 100)


def flip_between(m: Path) -> None:
    at, parts = record(m, "experts-0000.coli", 0)
    flip(m / "experts-0000.coli", at + parts[2][0] + parts[2][1] + 8)


def swap_words(m: Path) -> None:
    raw = np.frombuffer((m / "dense.coli").read_bytes(), "<u4")
    (m / "dense.coli").write_bytes(raw.byteswap().tobytes())


def swap_shards(m: Path) -> None:
    a, b = m / "experts-0000.coli", m / "experts-0001.coli"
    a.rename(m / "t")
    b.rename(a)
    (m / "t").rename(b)


def cut(path: Path, n: int) -> None:
    with path.open("r+b") as f:
        f.truncate(path.stat().st_size - n)


def cut_and_list(m: Path) -> None:
    cut(m / "dense.coli", 64)
    edit(m, lambda d: d["files"][0].update(bytes=d["files"][0]["bytes"] - 64))


def alien(m: Path, models: Path) -> None:
    shutil.copy(models / "b.coli" / "experts-0001.coli", m)


FAULTS: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "swapped magic": (swap_words, ["dense.coli", "byte 0", "swapped the bytes"]),
    "wrong magic": (lambda m: patch(m / "dense.coli", 0, b"ELF\0"), ["dense.coli", "byte 0", "not a .coli"]),
    "wrong version": (
        lambda m: patch(m / "dense.coli", 4, b"\x02"), ["dense.coli", "byte 4", "format version 2"]
    ),
    "header flip": (lambda m: flip(m / "dense.coli", 33), ["dense.coli", "byte 60", "header"]),
    "directory flip": (lambda m: flip(m / "dense.coli", 64 + 50), ["dense.coli", "byte 64", "directory"]),
    "flip in an expert": (flip_in_up, ["experts-0001.coli", "layer ", "expert ", "up (CRC32C)"]),
    "flip between parts": (flip_between, ["experts-0000.coli", "layer 0 expert 0", "between its parts"]),
    "flip in a tensor": (
        lambda m: flip(m / "dense.coli", (m / "dense.coli").stat().st_size - 3000),
        ["dense.coli", "tensor blk."],
    ),
    "flip in the tokenizer": (
        lambda m: flip(m / "tokenizer.coli", (m / "tokenizer.coli").stat().st_size // 2),
        ["tokenizer.coli", "section"],
    ),
    "missing shard": (
        lambda m: (m / "experts-0001.coli").unlink(), ["experts-0001.coli is missing", "manifest.json lists"]
    ),
    "missing manifest": (lambda m: (m / "manifest.json").unlink(), ["no manifest.json"]),
    "extra shard": (
        lambda m: shutil.copy(m / "experts-0000.coli", m / "experts-0099.coli"),
        ["experts-0099.coli does not belong"],
    ),
    "exchanged shards": (swap_shards, ["experts-0000.coli"]),
    "truncated": (lambda m: cut(m / "dense.coli", 1), ["dense.coli", "bytes; manifest.json says"]),
    "truncated, listed so": (cut_and_list, ["dense.coli", "truncated"]),
    "manifest is cut": (lambda m: cut(m / "manifest.json", 10), ["manifest.json", "at byte", "not JSON"]),
    "manifest not UTF-8": (lambda m: patch(m / "manifest.json", 30, b"\xff"), ["manifest.json", "not UTF-8"]),
    "manifest twice": (
        lambda m: (m / "manifest.json").write_text('{"format": 1, "format": 1}'), ["'format' appears twice"]
    ),
    "manifest nested": (lambda m: (m / "manifest.json").write_text("[" * 100_000), ["manifest.json"]),
    "manifest 2 MiB": (lambda m: (m / "manifest.json").write_text(" " * (2 << 20)), ["larger than 1048576"]),
    "format 2": (lambda m: edit(m, lambda d: d.update(format=2)), ["format 2"]),
    "unknown feature": (lambda m: edit(m, lambda d: d["features"].update(warp=1)), ["features.warp"]),
    "window of 0": (
        lambda m: edit(m, lambda d: d["features"].update(window=0, window_layers="wf")),
        ["features.window is 0", "1 to 1073741824"],
    ),
    "window past the engine's": (
        lambda m: edit(m, lambda d: d["features"].update(window=(1 << 30) + 1, window_layers="wf")),
        ["features.window is 1073741825"],
    ),
    "window of truth": (
        lambda m: edit(m, lambda d: d["features"].update(window=True, window_layers="wf")),
        ["features.window is True"],
    ),
    "window without layers": (
        lambda m: edit(m, lambda d: d["features"].update(window=5)), ["window_layers needs 2 letters w or f"]
    ),
    "layers without window": (
        lambda m: edit(m, lambda d: d["features"].update(window_layers="wf")), ["features.window is None"]
    ),
    "too few window layers": (
        lambda m: edit(m, lambda d: d["features"].update(window=5, window_layers="w")), ["needs 2 letters"]
    ),
    "another letter": (
        lambda m: edit(m, lambda d: d["features"].update(window=5, window_layers="wx")), ["needs 2 letters"]
    ),
    "path in files": (
        lambda m: edit(m, lambda d: d["files"][0].update(name="../dense.coli")), ["files[0].name"]
    ),
    "geometry of text": (
        lambda m: edit(m, lambda d: d["geometry"].update(n_layer="2")), ["geometry.n_layer"]
    ),
    "geometry of NaN": (
        lambda m: edit(m, lambda d: d["geometry"].update(n_layer=float("nan"))), ["geometry.n_layer"]
    ),
    "another layer count": (
        lambda m: edit(m, lambda d: d["geometry"].update(n_layer=3)), ["layer 2 expert 0 is in no shard"]
    ),
    "another width": (
        lambda m: edit(m, lambda d: d["geometry"].update(n_ff=7, n_expert_ff=7)), ["its shape"]
    ),
    "another vocabulary": (
        lambda m: edit(m, lambda d: d["geometry"].update(n_vocab=265)), ["token_embd is 264 × 64", "265 × 64"]
    ),
    "another model id": (
        lambda m: edit(m, lambda d: d.update(model_id="00" * 16)), ["belongs to another model"]
    ),
    "another sha256": (
        lambda m: edit(m, lambda d: d["files"][0].update(sha256="00" * 32)), ["dense.coli", "sha256"]
    ),
    "another golden": (
        lambda m: edit(m, lambda d: d["golden"].update(sha256="00" * 32)), ["golden", "promises 0000"]
    ),
    "no golden": (lambda m: edit(m, lambda d: d.pop("golden")), ["no golden"]),
}  # fmt: skip


@pytest.mark.parametrize("case", FAULTS)
def test_verify_finds_the_fault_and_names_it(
    model: Path, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, said = FAULTS[case]
    damage(model)
    before = {p.name: p.read_bytes() for p in model.iterdir()}
    assert run("verify", "-q", model) == 8
    err = capsys.readouterr().err
    for text in said:
        assert text in err, err
    assert "Traceback" not in err
    assert {p.name: p.read_bytes() for p in model.iterdir()} == before


def test_a_shard_of_another_model(model: Path, models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alien(model, models)
    assert run("verify", "-q", model) == 8
    assert "experts-0001.coli: at byte 40: belongs to another model" in capsys.readouterr().err


def test_a_model_with_a_window_is_read_as_the_engine_reads_it(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The golden's 16 tokens do not fill a window of 1 << 30, the longest; one of 3 they do."""
    edit(model, lambda d: d["features"].update(window=1 << 30, window_layers="fw"))
    assert run("verify", "--json", model) == 0
    assert json.loads(capsys.readouterr().out)["golden"] == "ok"
    assert mf.read(model).window == Window(1 << 30, "fw")
    edit(model, lambda d: d["features"].update(window=3))
    assert run("verify", "-q", model) == 8
    assert "golden" in capsys.readouterr().err
    tokens = tmp_path / "t.npy"
    np.save(tokens, np.arange(8, dtype=np.int32))
    assert run("logits", "--json", model, "--tokens", tokens, "-o", tmp_path / "l.npy") == 0


def test_a_good_model_passes_and_says_what_was_skipped(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("verify", "--json", model) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["golden"], data["experts"], data["tensors"]) == ("ok", 8, 17)
    assert run("verify", "--json", "--no-golden", model) == 0
    assert json.loads(capsys.readouterr().out)["golden"] == "skipped"


RESEALED: dict[str, tuple[str, int, bytes, str]] = {
    "kind": ("dense.coli", 6, b"\x09\0", "unknown kind 9"),
    "kind of another": ("dense.coli", 6, b"\x01\0", "byte"),
    "index": ("dense.coli", 8, b"\x07", "was it renamed"),
    "2^32 entries": ("dense.coli", 12, b"\xff\xff\xff\xff", "directory entries"),
    "payload offset 2^64": ("dense.coli", 24, b"\xff" * 8, "payload ends at"),
    "payload wraps": ("dense.coli", 24, struct.pack("<QQ", 1 << 63, 1 << 63), "payload ends at"),
    "tensor type": ("dense.coli", 64 + 48, b"\x4d", "type 77"),
    "tensor rows": ("dense.coli", 64 + 52, b"\xff\xff\xff\xff", "do not fit"),
    "tensor offset": ("dense.coli", 64 + 64, b"\xff" * 8, "misplaced"),
    "tensor overlap": ("dense.coli", 64 + 96 + 64, struct.pack("<Q", 64 * 40), "misplaced"),
    "tensor layout": ("dense.coli", 64 + 80, b"\x01", "layout 1"),
    "tensor name": ("dense.coli", 64, b"\xff", "bad tensor name"),
    "tensor name twice": ("dense.coli", 64 + 96, b"token_embd\0\0\0", "appears twice"),
    "tensor renamed": ("dense.coli", 64, b"token_embe", "sha256"),
    "record layer": ("experts-0000.coli", 64 + 128, struct.pack("<II", 0, 0), "not sorted"),
    "record offset": ("experts-0000.coli", 64 + 8, struct.pack("<Q", 1 << 60), "past the file's end"),
    "record size 0": ("experts-0000.coli", 64 + 16, bytes(8), "misplaced"),
    "parts": ("experts-0000.coli", 64 + 28, b"\x04", "4 parts"),
    "part offset": ("experts-0000.coli", 64 + 32 + 16, struct.pack("<Q", (1 << 64) - 64), "misplaced in"),
    "part type": ("experts-0000.coli", 64 + 32, b"\x0a", "Q2_K is not a type"),
}


@pytest.mark.parametrize("case", RESEALED)
def test_hostile_heads_with_right_checksums(
    model: Path, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name, at, data, said = RESEALED[case]
    reseal(model / name, at, data)
    assert run("verify", "-q", "--no-golden", model) == 8
    err = capsys.readouterr().err
    assert said in err and name in err and "Traceback" not in err


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(["dense.coli", "experts-0000.coli", "tokenizer.coli"]),
    st.integers(0, 1 << 30),
    st.integers(1, 255),
)
def test_any_flipped_byte_is_found(model: Path, name: str, at: int, bits: int) -> None:
    path = model / name
    whole = path.read_bytes()
    at %= len(whole)
    manifest = mf.read(model)
    try:
        patch(path, at, bytes([whole[at] ^ bits]))
        with pytest.raises(FormatError) as err:
            reports = [check.check_file(model / f.name) for f in manifest.files]
            for r in reports:
                check.check_head(r.fact.name, r.header, manifest)
            check.check_model(manifest, reports)
        assert name in err.value.message
    finally:
        path.write_bytes(whole)


@settings(max_examples=80, deadline=None)
@given(st.binary(max_size=200) | st.text(max_size=100).map(str.encode) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda c: st.lists(c, max_size=3) | st.dictionaries(
        st.sampled_from(["format", "name", "arch", "files", "geometry", "features", "model_id", "golden"]),
        c, max_size=8,
    ), max_leaves=20,
).map(lambda v: json.dumps(v).encode()))  # fmt: skip
def test_any_manifest_is_read_or_refused(data: bytes) -> None:
    with pytest.raises(FormatError):
        mf.parse(data)


# ---- convert's input through the command line --------------------------------


def test_convert_refuses_without_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = make(tmp_path / "m.gguf")
    whole = source.read_bytes()
    cases = {
        "empty": b"", "not": b"hello world", "cut": whole[:1000], "cut data": whole[:-40],
        "huge array": whole[:24] + struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, 4, 1 << 60),
    }  # fmt: skip
    for name, data in cases.items():
        bad = tmp_path / "bad.gguf"
        bad.write_bytes(data)
        assert run("convert", "-q", bad, "-o", tmp_path / "o.coli") == 8, name
        assert run("inspect", bad) == 8, name
        assert run("upcycle", "-q", bad, "-o", tmp_path / "o.gguf") == 8, name
        err = capsys.readouterr().err
        assert "bad.gguf: at byte" in err and "Traceback" not in err
    assert run("convert", tmp_path / "none.gguf", "-o", tmp_path / "o.coli") == 8
    assert run("convert", "--quant", "q9", source, "-o", tmp_path / "o.coli") == 2
    assert run("convert", "--frobnicate", source) == 2
    assert run("convert", source, "-o", tmp_path / "o.bin") == 2
    assert run("convert", source, "-o", tmp_path / "no" / "o.coli") == 6
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad.gguf", "m.gguf"]


def test_convert_names_a_nan_when_it_quantises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = make(tmp_path / "m.gguf")
    import gguf

    t = next(t for t in gguf.GGUFReader(source).tensors if t.name == "blk.1.ffn_up_exps.weight")
    patch(source, t.data_offset + 4 * (64 * 64 * 2 + 9), struct.pack("<f", float("nan")))
    assert run("convert", "-q", "--quant", "q8_0", source, "-o", tmp_path / "o.coli") == 8
    assert "blk.1.ffn_up_exps.weight expert 2: holds NaN" in capsys.readouterr().err
    assert not (tmp_path / "o.coli").exists()


def test_vocabulary_and_embedding_must_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = make(tmp_path / "m.gguf", skip=("token_embd.weight",), extra={
        "token_embd.weight": np.zeros((300, 64), np.float32)}, tied=True)  # fmt: skip
    assert run("convert", "-q", source, "-o", tmp_path / "o.coli") == 8
    assert "264 tokens in the vocabulary, but token_embd.weight has 300 rows" in capsys.readouterr().err


ODD_VALUES: list[Any] = [
    "", b"\xff", -1, 2**63, 1.5, float("nan"), float("inf"), True, 0, [], ["a"], [b"\xff"], [["a"], ["b"]],
    "x" * 10_000, np.array([1, 2, 3], "<u4"), np.array([], "<f4"), np.array([float("nan")]),
]  # fmt: skip


@pytest.mark.parametrize("arch", ["llama", "granitemoe", "qwen2moe"])
def test_no_value_of_any_key_brings_a_traceback(tmp_path: Path, arch: str) -> None:
    """Every key with every odd value: the planning parts accept it or raise FormatError."""
    keys = ("rope.scaling.type", "rope.scaling.factor", "attention.key_length", "expert_weights_norm",
            "expert_weights_scale", "rope.scaling.finetuned", "new", "attention.sliding_window")  # fmt: skip
    refused = 0
    with GgufFile(make(tmp_path / "m.gguf", arch)) as g:
        whole = dict(g.kv)
        more = ["split.count", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.fim_pad_token_id"]
        for key in [*whole, *(f"{arch}.{k}" for k in keys), *more]:
            for value in ODD_VALUES:
                g.kv = whole | {key: value}
                try:
                    make_plan(map_model(g), "q4_k_m")
                    check_tokenizer_keys(g.kv, g.name)
                    export_tokenizer(g.kv)
                except FormatError:
                    refused += 1
    assert refused > 200


def test_the_engine_finds_the_same_faults(model: Path) -> None:
    """verify reads with Python, boards with C: both must refuse."""
    with native.Engine(model, ctx=32) as engine:
        assert engine.golden() == mf.read(model).golden
    flip_in_up(model)
    with pytest.raises(KitError, match=r"expert"), native.Engine(model, ctx=32) as engine:
        engine.golden()
