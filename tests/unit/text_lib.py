"""The tokenizer of native/text behind ctypes, and the vocabularies of tests/data/tokenizer."""

from __future__ import annotations

import ctypes as ct
import functools
import gzip
import json
import lzma
from pathlib import Path
from typing import Any

from engine_build import library

from colibri_kit.convert.tokenizer import byte_alphabet, export_tokenizer

DATA = Path(__file__).resolve().parents[1] / "data" / "tokenizer"
NAMES = ("smollm2", "qwen2", "gpt-neox", "refact", "llama-bpe")
UNITS = (
    "text/utf8.c", "text/bpe.c", "text/special.c", "text/pretok.c", "text/unicode_tables.c", "text/text.c",
    "core/err.c", "core/container.c", "core/os_posix.c", "kernels/crc32c.c", "kernels/types.c",
)  # fmt: skip
CB_EINVAL, CB_EFORMAT, CB_EUTF8, CB_ECONTEXT, CB_EUNSUPPORTED = -1, -3, -7, -8, -9


class Err(ct.Structure):
    _fields_ = (("code", ct.c_int), ("msg", ct.c_char * 256))


class TextError(Exception):
    def __init__(self, err: Err) -> None:
        super().__init__(err.msg.decode())
        self.code = err.code


@functools.cache
def lib() -> ct.CDLL:
    out = library(*UNITS)
    size, void, text = ct.c_size_t, ct.c_void_p, ct.c_char_p
    out.cb_crc32c.restype, out.cb_crc32c.argtypes = ct.c_uint32, [ct.c_uint32, text, size]
    out.cb_text_scratch_bytes.restype, out.cb_text_scratch_bytes.argtypes = size, [size]
    out.cb_utf8_check.restype, out.cb_utf8_check.argtypes = size, [text, size]
    out.cb_utf8_complete.restype, out.cb_utf8_complete.argtypes = size, [text, size]
    out.cb_text_open.argtypes = [void, text, size, void]
    out.cb_text_encode.argtypes = [void, text, size, ct.c_int, ct.c_int, void, size, void, size, void]
    out.cb_text_token.restype = void
    out.cb_text_token.argtypes = [void, ct.c_int32, ct.c_int, ct.POINTER(size)]
    out.cb_text_is_eog.argtypes = [void, ct.c_int32]
    return out


def crc(data: Any, seed: int = 0) -> int:
    return int(lib().cb_crc32c(seed, bytes(data), len(data)))


class Text:
    """An opened tokenizer.coli."""

    def __init__(self, file: bytes) -> None:
        self.file = file  # struct cb_text points into it
        self.t = ct.create_string_buffer(1024)
        err = Err()
        if lib().cb_text_open(self.t, file, len(file), ct.byref(err)) != 0:
            raise TextError(err)

    def encode(
        self,
        text: bytes,
        *,
        special: bool = True,
        strict: bool = True,
        cap: int | None = None,
        scratch: int = 0,
    ) -> list[int]:
        cap = len(text) + 1 if cap is None else cap
        ids = (ct.c_int32 * (cap + 1))(*[0] * cap, 12345)  # one beyond: must not be written
        need = scratch or lib().cb_text_scratch_bytes(len(text))
        work = ct.create_string_buffer(need)
        err = Err()
        n = lib().cb_text_encode(
            self.t, text, len(text), special, strict, ids, cap, work, need, ct.byref(err)
        )
        assert ids[cap] == 12345
        if n < 0:
            raise TextError(err)
        return list(ids[:n])

    def token(self, token: int, *, special: bool = True) -> bytes:
        n = ct.c_size_t()
        at = lib().cb_text_token(self.t, token, special, ct.byref(n))
        return ct.string_at(at, n.value)

    def decode(self, ids: list[int], *, special: bool = True) -> bytes:
        return b"".join(self.token(i, special=special) for i in ids)

    def is_eog(self, token: int) -> bool:
        return bool(lib().cb_text_is_eog(self.t, token))


@functools.cache
def metadata(name: str) -> dict[str, Any]:
    """GGUF metadata of a vocabulary, as tests/data keeps it."""
    kv = json.loads(lzma.decompress((DATA / f"{name}.vocab.json.xz").read_bytes()))
    kv["tokenizer.ggml.token_type"] = [t for t, n in kv.pop("token_type_runs") for _ in range(n)]
    return dict(kv)


def file_of(kv: dict[str, Any]) -> bytes:
    return export_tokenizer(kv, crc=crc).file_bytes(bytes(range(16)), crc=crc)


@functools.cache
def opened(name: str, pre: str | None = None) -> Text:
    """A vocabulary of tests/data, if asked with another pre-tokenizer."""
    return Text(file_of(metadata(name) | ({"tokenizer.ggml.pre": pre} if pre else {})))


def lines() -> list[bytes]:
    return lzma.decompress((DATA / "lines.bin.xz").read_bytes()).split(b"\0")


def reference_ids(name: str) -> list[list[int]]:
    """What llama.cpp made of the lines, special tokens parsed, none added."""
    text = gzip.decompress((DATA / f"{name}.ids.gz").read_bytes()).decode()
    return [json.loads(row) for row in text.splitlines()]


def small(extra: list[tuple[str, int]], merges: list[str] | None = None, **kv: Any) -> dict[str, Any]:
    """Metadata of a vocabulary with the 256 bytes (ids 0…255), then ``extra`` (text, type)."""
    tokens = [(c, 1) for c in byte_alphabet()] + extra
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [t for t, _ in tokens],
        "tokenizer.ggml.token_type": [k for _, k in tokens],
        "tokenizer.ggml.merges": merges or [],
    } | {k.replace("__", "."): v for k, v in kv.items()}
