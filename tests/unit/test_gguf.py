"""The GGUF reader and writer against the ``gguf`` package, and against damaged files."""

from __future__ import annotations

import os
import struct
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf_maker import FAMILIES, make
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from colibri_kit.errors import FormatError
from colibri_kit.gguf.reader import ARRAY, STRING, U32, U64, GgufFile
from colibri_kit.gguf.types import TYPES
from colibri_kit.gguf.writer import GgufHeader, OutTensor, pad


def s(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def kv_string(key: str, value: str) -> bytes:
    return s(key) + struct.pack("<I", STRING) + s(value)


def info(name: str, dims: list[int], kind: int, offset: int) -> bytes:
    return s(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def file(
    tmp: Path, keys: list[bytes], tensors: list[bytes], data: int = 0, *, n_keys: int | None = None,
    n_tensors: int | None = None, version: int = 3, magic: bytes = b"GGUF",
) -> Path:  # fmt: skip
    """A hand-made file: counts may lie; ``data`` zero bytes follow the aligned header."""
    head = magic + struct.pack(
        "<IQQ", version, len(tensors) if n_tensors is None else n_tensors,
        len(keys) if n_keys is None else n_keys,
    )  # fmt: skip
    head += b"".join(keys) + b"".join(tensors)
    path = tmp / "x.gguf"
    path.write_bytes(head + bytes(-len(head) % 32) + bytes(data))
    return path


@pytest.mark.parametrize("arch", FAMILIES)
def test_reads_what_the_gguf_package_wrote(tmp_path: Path, arch: str) -> None:
    path = make(tmp_path / "m.gguf", arch)
    theirs = gguf.GGUFReader(path)
    with GgufFile(path) as ours:
        assert [t.name for t in theirs.tensors] == list(ours.tensors)
        for t in theirs.tensors:
            mine = ours.tensors[t.name]
            assert mine.dims == tuple(int(n) for n in t.shape)
            assert (mine.type.id, mine.offset, mine.size) == (t.tensor_type.value, t.data_offset, t.n_bytes)
            assert ours.read(mine.offset, mine.size).tobytes() == t.data.tobytes()
        keys = {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
        assert list(keys) == list(ours.kv)
        for key, want in keys.items():
            got = ours.kv[key]
            assert (got.tolist() if isinstance(got, np.ndarray) else got) == want, key


def test_the_type_table_is_the_gguf_packages() -> None:
    theirs = {k.value: (k.name, *v) for k, v in gguf.GGML_QUANT_SIZES.items()}
    for i, t in TYPES.items():
        if i in theirs and t.name != "Q8_1":  # an activation type; the package has an older size
            assert (t.name, t.block, t.block_bytes) == theirs[i]
    assert {0, 1, 2, 3, 6, 7, 8, 12, 13, 14, 30} <= set(theirs)


def test_our_writer_is_read_by_the_gguf_package(tmp_path: Path) -> None:
    source = make(tmp_path / "m.gguf")
    header = GgufHeader()
    with GgufFile(source) as g:
        for key in g.keys:
            header.copy(g, key)
        header.set("x.flag", True)
        header.set("x.count", 7)
        header.set("x.low", -7)
        header.set("x.big", 1 << 40, U64)
        header.set("x.part", 0.5)
        header.set("x.text", "grüße")
        header.set_array("x.ids", U32, [1, 2, 3])
        header.set_array("x.words", STRING, ["a", "", "ö"])
        header.tensors = [OutTensor("odd", (5,), 0), OutTensor("mat", (32, 3), 8)]
        blocks = gguf.quants.quantize(np.ones((3, 32), np.float32), gguf.GGMLQuantizationType.Q8_0)
        out = tmp_path / "o.gguf"
        with out.open("wb") as f:
            f.write(header.pack())
            for t, data in zip(header.tensors, [np.arange(5, dtype="<f4"), blocks], strict=True):
                f.write(data.tobytes())
                pad(f, t.size, header.alignment)
        theirs, before = gguf.GGUFReader(out), gguf.GGUFReader(source)
        for key, field in before.fields.items():
            if not key.startswith("GGUF."):
                assert theirs.fields[key].contents() == field.contents()
    values = {k: f.contents() for k, f in theirs.fields.items() if k.startswith("x.")}
    assert values == {
        "x.flag": True, "x.count": 7, "x.low": -7, "x.big": 1 << 40, "x.part": 0.5, "x.text": "grüße",
        "x.ids": [1, 2, 3], "x.words": ["a", "", "ö"],
    }  # fmt: skip
    assert theirs.tensors[0].data.tolist() == [0, 1, 2, 3, 4]
    assert (theirs.tensors[1].data == blocks).all()


def test_strings_that_are_not_utf8_stay_bytes(tmp_path: Path) -> None:
    key = s("a.list") + struct.pack("<IIQ", ARRAY, STRING, 2) + s(b"\xff\xfe") + s("ok")
    with GgufFile(file(tmp_path, [key], [])) as g:
        assert g.kv["a.list"] == [b"\xff\xfe", "ok"]


def test_nested_arrays_are_read_to_a_depth(tmp_path: Path) -> None:
    def nest(depth: int) -> bytes:
        head = b"".join(struct.pack("<IQ", ARRAY, 1) for _ in range(depth))
        return s("n") + struct.pack("<I", ARRAY) + head + struct.pack("<IQ2I", U32, 2, 5, 6)

    with GgufFile(file(tmp_path, [nest(2)], [])) as g:
        assert [[v.tolist() for v in inner] for inner in g.kv["n"]] == [[[5, 6]]]
    with pytest.raises(FormatError, match="nested deeper"):
        GgufFile(file(tmp_path, [nest(200)], []))


def test_a_large_vocabulary_reads_fast(tmp_path: Path) -> None:
    tokens = b"".join(s(f"token{i}") for i in range(150_000))
    merges = b"".join(s(f"tok en{i}") for i in range(150_000))
    keys = [
        s("t.tokens") + struct.pack("<IIQ", ARRAY, STRING, 150_000) + tokens,
        s("t.merges") + struct.pack("<IIQ", ARRAY, STRING, 150_000) + merges,
        s("t.types") + struct.pack("<IIQ", ARRAY, U32, 150_000) + bytes(600_000),
    ]
    path = file(tmp_path, keys, [])
    start = time.process_time()
    with GgufFile(path) as g:
        spent = time.process_time() - start
        assert g.kv["t.tokens"][149_999] == "token149999"
        assert len(g.kv["t.types"]) == 150_000
    assert spent < 1.5


# ---- hostile files ---------------------------------------------------------

F32_1 = info("a", [8], 0, 0)

HOSTILE = {
    "empty": (lambda t: empty(t), "byte 0: the file is empty"),
    "magic": (lambda t: file(t, [], [], magic=b"GGUX"), "magic is b'GGUX'"),
    "swapped magic": (lambda t: file(t, [], [], magic=b"FUGG"), "bytes are swapped"),
    "a .coli": (lambda t: file(t, [], [], magic=b"COLI"), "already converted"),
    "version 1": (lambda t: file(t, [], [], version=1), "byte 4: GGUF version 1"),
    "version 4": (lambda t: file(t, [], [], version=4), "GGUF version 4"),
    "big-endian": (lambda t: file(t, [], [], version=3 << 24), "big-endian"),
    "key count 2^60": (lambda t: file(t, [], [], n_keys=1 << 60), "keys cannot be in a file"),
    "tensor count 2^63": (lambda t: file(t, [], [], n_tensors=1 << 63), "tensors cannot be in a file"),
    "more keys than bytes": (lambda t: file(t, [kv_string("a", "b")], [], n_keys=3), "key 1 is empty"),
    "key length 2^60": (
        lambda t: file(t, [struct.pack("<Q", 1 << 60) + bytes(40)], []), "claims 1152921504606846976 bytes"
    ),
    "value length 2^64-1": (
        lambda t: file(t, [s("k") + struct.pack("<IQ", STRING, (1 << 64) - 1)], []), "claims 18446744073709"
    ),
    "array length 2^60": (
        lambda t: file(t, [s("k") + struct.pack("<IIQ", ARRAY, U32, 1 << 60)], []), "1152921504606846976"
    ),
    "string array 2^60": (
        lambda t: file(t, [s("k") + struct.pack("<IIQ", ARRAY, STRING, 1 << 60)], []), "cannot fit"
    ),
    "wrapping array 2^62 u32": (
        lambda t: file(t, [s("k") + struct.pack("<IIQ", ARRAY, U32, 1 << 62)], []), "past the end"
    ),
    "value type 99": (lambda t: file(t, [s("k") + struct.pack("<I", 99)], []), "unknown value type 99"),
    "element type 99": (
        lambda t: file(t, [s("k") + struct.pack("<IIQ", ARRAY, 99, 1)], []), "unknown element type 99"
    ),
    "bool of 2": (lambda t: file(t, [s("k") + struct.pack("<IB", 7, 2)], []), "bool of 2"),
    "empty key": (lambda t: file(t, [kv_string("", "v")], []), "empty or holds a NUL"),
    "duplicate key": (lambda t: file(t, [kv_string("k", "1"), kv_string("k", "2")], []), "'k' appears twice"),
    "duplicate tensor": (lambda t: file(t, [], [F32_1, info("a", [8], 0, 32)], 64), "'a' appears twice"),
    "overlap": (lambda t: file(t, [], [info("a", [16], 0, 0), info("b", [8], 0, 32)], 96), "overlap"),
    "past the end": (lambda t: file(t, [], [info("a", [64], 0, 0)], 32), "past the end of the file"),
    "wrapping offset": (lambda t: file(t, [], [info("a", [8], 0, (1 << 64) - 32)], 64), "past the end"),
    "odd offset": (lambda t: file(t, [], [info("a", [8], 0, 4)], 64), "not a multiple of 32"),
    "unknown type": (lambda t: file(t, [], [info("a", [8], 77, 0)], 64), "unknown type 77"),
    "removed type": (lambda t: file(t, [], [info("a", [8], 4, 0)], 64), "unknown type 4"),
    "5 dims": (lambda t: file(t, [], [info("a", [1, 1, 1, 1, 8], 0, 0)], 64), "5 dimensions"),
    "0 dims": (lambda t: file(t, [], [info("a", [], 0, 0)], 64), "0 dimensions"),
    "a dim of 0": (lambda t: file(t, [], [info("a", [8, 0], 0, 0)], 64), "zero or too many"),
    "product wraps": (lambda t: file(t, [], [info("a", [1 << 32, 1 << 32], 0, 0)], 64), "too many elements"),
    "product wraps to 8": (
        lambda t: file(t, [], [info("a", [8, (1 << 61) + 1], 0, 0)], 64), "too many elements"
    ),
    "half a block": (lambda t: file(t, [], [info("a", [48], 8, 0)], 64), "do not divide into Q8_0 blocks"),
    "alignment 0": (lambda t: file(t, [align(0)], [F32_1], 64), "general.alignment is 0"),
    "alignment 48": (lambda t: file(t, [align(48)], [F32_1], 64), "general.alignment is 48"),
    "alignment 2^31": (lambda t: file(t, [align(1 << 31)], [F32_1], 64), "general.alignment is"),
    "alignment as text": (lambda t: file(t, [kv_string("general.alignment", "32")], []), "power of two"),
    "tensor name not UTF-8": (
        lambda t: file(t, [], [s(b"\xff") + struct.pack("<IQIQ", 1, 8, 0, 0)], 64), "not UTF-8"
    ),
}  # fmt: skip


def empty(tmp: Path) -> Path:
    (tmp / "x.gguf").write_bytes(b"")
    return tmp / "x.gguf"


def align(n: int) -> bytes:
    return s("general.alignment") + struct.pack("<II", U32, n)


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_are_refused_with_the_place(tmp_path: Path, case: str) -> None:
    build, said = HOSTILE[case]
    with pytest.raises(FormatError) as err:
        GgufFile(build(tmp_path))
    assert said in err.value.message
    assert "x.gguf" in err.value.message and "at byte" in err.value.message
    assert err.value.exit_status == 8


def test_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    for bad in (tmp_path, tmp_path / "none.gguf", Path("/dev/zero")):
        with pytest.raises(FormatError):
            GgufFile(bad)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FormatError, match="not a regular file"):
        GgufFile(tmp_path / "pipe")


def test_truncation_at_every_byte_is_refused(tmp_path: Path) -> None:
    """Every prefix of the header, and every prefix that cuts the tensor data by a byte or a tensor."""
    key = s("k.list") + struct.pack("<IIQ", ARRAY, STRING, 2) + s("ab") + s("c")
    numbers = s("k.n") + struct.pack("<IIQ4I", ARRAY, U32, 4, 1, 2, 3, 4)
    whole = file(
        tmp_path, [kv_string("general.architecture", "llama"), key, numbers],
        [info("a", [8, 2], 0, 0), info("b", [32], 8, 64)], 64 + 34,
    ).read_bytes()  # fmt: skip
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole)
    GgufFile(path).close()
    for n in range(len(whole)):
        path.write_bytes(whole[:n])
        with pytest.raises(FormatError) as err:
            GgufFile(path)
        assert "at byte" in err.value.message, n


def test_truncation_of_a_real_model_is_refused(tmp_path: Path) -> None:
    whole = make(tmp_path / "m.gguf", "qwen2moe").read_bytes()
    with GgufFile(tmp_path / "m.gguf") as g:
        end = g.data_offset
    path = tmp_path / "cut.gguf"
    for n in [*range(0, 400), *range(400, end, 97), *range(end - 300, end + 1), len(whole) - 33]:
        path.write_bytes(whole[:n])
        with pytest.raises(FormatError):
            GgufFile(path)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 600), st.integers(0, 255)), min_size=1, max_size=4))
def test_flipped_bytes_never_crash_the_reader(tmp_path: Path, flips: list[tuple[int, int]]) -> None:
    """Either the file still reads, with every tensor inside it, or FormatError: nothing else."""
    source = tmp_path / "m.gguf"
    if not source.exists():
        file(
            tmp_path,
            [kv_string("general.architecture", "llama"), align(32),
             s("k") + struct.pack("<IIQ", ARRAY, STRING, 3) + s("a") + s("b") + s("cc"),
             s("n") + struct.pack("<IIQ4I", ARRAY, U32, 4, 1, 2, 3, 4)],
            [info("a", [8, 2], 0, 0), info("b", [32, 2, 2], 8, 64)], 64 + 160,
        ).rename(source)  # fmt: skip
    raw = bytearray(source.read_bytes())
    for at, value in flips:
        raw[at % len(raw)] = value
    path = tmp_path / "f.gguf"
    path.write_bytes(raw)
    try:
        with GgufFile(path) as g:
            for t in g.tensors.values():
                assert g.data_offset <= t.offset and t.offset + t.size <= len(raw)
    except FormatError:
        pass
