"""`colibri logits`: against llama.cpp, whatever the batch, and hostile .npy files."""

from __future__ import annotations

import ctypes as ct
import struct
from pathlib import Path

import engine_build as eb
import numpy as np
import pytest
from engine_build import colibri, ok
from tiny_model import DATA, NAME, tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory)


def test_logits_agree_with_llama_cpp(model: Path, tmp_path: Path) -> None:
    out, chosen = tmp_path / "l.npy", tmp_path / "e.npy"
    ok(
        "logits", "--model", model, "--tokens", DATA / f"{NAME}.tokens.npy", "-o", out, "--experts", chosen,
        "--kv", "f32",
    )  # fmt: skip
    want = np.load(DATA / f"{NAME}.logits.npy")
    got = np.load(out)
    assert got.dtype == np.float32
    assert got.shape == want.shape
    assert np.abs(got - want).max() < 1e-4
    experts = np.load(chosen)
    assert experts.dtype == np.int32
    assert np.array_equal(experts, np.load(DATA / f"{NAME}.experts.npy"))


def test_logits_do_not_depend_on_batch_or_threads(model: Path, tmp_path: Path) -> None:
    seen = set()
    for flags in (["--batch", "1"], ["--batch", "7"], ["--batch", "32", "--threads", "2"]):
        out, chosen = tmp_path / "l.npy", tmp_path / "e.npy"
        ok(
            "logits", "--model", model, "--tokens", DATA / f"{NAME}.tokens.npy", "-o", out, "--experts",
            chosen, *flags,
        )  # fmt: skip
        seen.add((out.read_bytes(), chosen.read_bytes()))
    assert len(seen) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["e.npy", "l.npy"]


def npy(header: str, data: bytes, version: int = 1) -> bytes:
    size = struct.pack("<H", len(header)) if version == 1 else struct.pack("<I", len(header))
    return b"\x93NUMPY" + bytes([version, 0]) + size + header.encode() + data


I4 = "{'descr': '<i4', 'fortran_order': False, 'shape': (2,), }\n"
TWO = struct.pack("<2i", 5, 9)
GOOD_NPY = {
    "v1": npy(I4, TWO),
    "v2": npy(I4, TWO, 2),
    "any key order": npy("{'shape': (2,), \"descr\": '<i4', 'fortran_order': True}", TWO),
}
BAD_NPY = {
    "empty": (b"", "not a .npy file"),
    "text": (b"1 2 3 4 5 6 7", "not a .npy file"),
    "v3": (npy(I4, TWO, 3), "format version 3"),
    "header cut": (npy(I4, TWO)[:30], "ends inside its header"),
    "big endian": (npy(I4.replace("<", ">"), TWO), "little-endian int32"),
    "int64": (npy(I4.replace("i4", "i8"), TWO * 2), "little-endian int32"),
    "float": (npy(I4.replace("i4", "f4"), TWO), "little-endian int32"),
    "no tuple": (npy(I4.replace("(2,)", "(2)"), TWO), "malformed"),
    "two dimensions": (npy(I4.replace("(2,)", "(1, 2)"), TWO), "2 dimensions"),
    "scalar": (npy(I4.replace("(2,)", "()"), TWO), "0 dimensions"),
    "no tokens": (npy(I4.replace("(2,)", "(0,)"), b""), "holds 0 token ids"),
    "2^60": (npy(I4.replace("(2,)", f"({2**60},)"), TWO), "malformed"),
    "many": (npy(I4.replace("(2,)", "(99999999,)"), TWO), "token ids; 1 to"),
    "negative": (npy(I4.replace("(2,)", "(-2,)"), TWO), "malformed"),
    "key twice": (npy(I4.replace("}", "'shape': (2,), }"), TWO), "malformed"),
    "strange key": (npy(I4.replace("}", "'x': (2,), }"), TWO), "malformed"),
    "key missing": (npy("{'descr': '<i4', 'shape': (2,), }\n", TWO), "malformed"),
    "junk": (npy(I4 + "x", TWO), "malformed"),
    "NUL": (npy(I4 + "\0", TWO), "NUL"),
    "long header": (npy(I4 + " " * 5000, TWO), "header of"),
    "short data": (npy(I4, TWO[:-1]), "does not end with"),
    "more data": (npy(I4, TWO + b"x"), "does not end with"),
    "bad id": (npy(I4, struct.pack("<2i", 5, 512)), "token 1 of"),
    "negative id": (npy(I4, struct.pack("<2i", -1, 5)), "token 0 of"),
}


@pytest.mark.parametrize("name", GOOD_NPY)
def test_npy_files_that_are_read(name: str, model: Path, tmp_path: Path) -> None:
    (tmp_path / "t.npy").write_bytes(GOOD_NPY[name])
    ok("logits", "--model", model, "--tokens", tmp_path / "t.npy", "-o", tmp_path / "l.npy")
    assert np.load(tmp_path / "l.npy").shape == (2, 512)


@pytest.mark.parametrize("name", BAD_NPY)
def test_npy_files_that_are_refused(name: str, model: Path, tmp_path: Path) -> None:
    data, words = BAD_NPY[name]
    (tmp_path / "t.npy").write_bytes(data)
    done = colibri("logits", "--model", model, "--tokens", tmp_path / "t.npy", "-o", tmp_path / "l.npy")
    assert done.returncode == 2
    assert words in done.stderr.decode()
    assert [p.name for p in tmp_path.iterdir()] == ["t.npy"]


def test_npy_cut_anywhere_is_refused(model: Path, tmp_path: Path) -> None:
    lib = eb.library("cli/npy.c", "cli/sys.c", "core/err.c")
    whole = npy(I4, TWO)
    for n in range(len(whole)):
        (tmp_path / "t.npy").write_bytes(whole[:n])
        ids, count, err = ct.c_void_p(), ct.c_uint32(), ct.create_string_buffer(300)
        assert lib.npy_read_i32(str(tmp_path / "t.npy").encode(), ct.byref(ids), ct.byref(count), err) < 0, n


def test_logits_are_not_written_where_they_cannot(model: Path, tmp_path: Path) -> None:
    done = colibri(
        "logits", "--model", model, "--tokens", DATA / f"{NAME}.tokens.npy", "-o", tmp_path / "no/l.npy"
    )
    assert done.returncode == 1
    assert b"No such file or directory" in done.stderr
