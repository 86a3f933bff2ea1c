"""tokenizer.coli as hostile input, and what the export makes of odd metadata."""

from __future__ import annotations

import random
import struct
import time
from typing import Any

import numpy as np
import pytest
from text_lib import CB_EFORMAT, CB_EUNSUPPORTED, Text, TextError, crc, file_of, lib, metadata, opened, small

from colibri_kit.convert.container import parse_header
from colibri_kit.convert.tokenizer import PRE_TOKENIZERS, byte_alphabet, export_tokenizer
from colibri_kit.errors import FormatError

SECTIONS = ("params", "offsets", "bytes", "types", "byte_ids", "pairs", "special", "words", "eog")


def a_file() -> bytes:
    """A small file in which no section is empty."""
    kv = small([("ab", 4), ("abc", 3), ("</s>", 3), ("bc", 1)], ["b c"], tokenizer__ggml__bos_token_id=258)
    return file_of(kv | {"tokenizer.ggml.pre": "llama3"})


def mended(file: bytearray) -> bytes:
    """The file with all CRCs made right, so that only the checks of meaning are left."""
    for k in range(9):
        e = 64 + 32 * k
        at, size = struct.unpack_from("<QQ", file, e + 8)
        struct.pack_into("<I", file, e + 24, crc(file[at : at + size]))
    struct.pack_into("<I", file, 56, crc(file[64 : 64 + 288]))
    struct.pack_into("<I", file, 60, crc(file[:60]))
    return bytes(file)


def section(file: bytes, name: str) -> tuple[int, int]:
    at, size = struct.unpack_from("<QQ", file, 64 + 32 * SECTIONS.index(name) + 8)
    return at, size


def poke(name: str, index: int, value: int) -> bytes:
    """The small file with u32 ``index`` of a section replaced."""
    file = bytearray(a_file())
    at, size = section(file, name)
    assert 4 * index < size
    struct.pack_into("<I", file, at + 4 * index, value)
    return mended(file)


def refused(file: bytes, code: int = CB_EFORMAT) -> str:
    with pytest.raises(TextError) as e:
        Text(file)
    assert e.value.code == code
    return str(e.value)


# ---- hostile files ----------------------------------------------------------------


def test_the_header_is_the_common_one() -> None:
    file = a_file()
    head = parse_header(file, "tokenizer.coli", len(file), crc=crc)
    assert (head.kind, head.entries, head.model_id) == (1, 9, bytes(range(16)))
    Text(file)


def test_every_truncation_is_refused() -> None:
    file = a_file()
    for n in [*range(400), *range(400, len(file), 97)]:
        refused(file[:n])
    refused(file + b"\0")


def test_every_flipped_bit_that_matters_is_found() -> None:
    file = a_file()
    used = [range(40), range(56, 64 + 288)]  # all but the model id
    used += [range(at, at + size) for at, size in (section(file, s) for s in SECTIONS)]
    rng = random.Random(5)
    for i in [i for r in used for i in r]:
        bad = bytearray(file)
        bad[i] ^= 1 << rng.randrange(8)
        refused(bytes(bad))


def test_swapped_bytes_are_named() -> None:
    file = a_file()
    assert "ILOC" in refused(b"ILOC" + file[4:])


@pytest.mark.parametrize(
    ("name", "index", "value", "message"),
    [
        ("params", 0, 2, "kind of tokenizer 2"),
        ("params", 1, 9, "unknown pre-tokenizer 9"),
        ("params", 2, 4, "unknown flags"),
        ("params", 3, 0, "0 tokens"),
        ("params", 3, 261, "261 tokens, 260 pieces"),
        ("params", 3, 259, "do not agree"),
        ("params", 4, 1 << 30, "pieces"),
        ("params", 6, 5000, "bos 5000"),
        ("params", 9, 1 << 31, "do not agree"),
        ("params", 10, 300, "do not agree"),
        ("params", 10, 0x7FFFFFFF, "do not agree"),
        ("params", 11, 0, "do not agree"),
        ("offsets", 0, 1, "offsets"),
        ("offsets", 3, 0x7FFFFFFF, "offsets"),
        ("offsets", 260, 0xFFFFFFFF, "offsets"),
        ("types", 0, 0x01010100, "token type"),
        ("types", 0, 0x07010101, "token type"),
        ("byte_ids", 65, 66, "byte's piece"),
        ("byte_ids", 255, 1 << 20, "no piece"),
        ("special", 0, 1 << 20, "special token"),
        ("special", 1, 0, "out of order"),
        ("special", 9, 0xFFFFFFFF, "out of order"),
        ("special", 2, 8, "special token"),
        ("eog", 0, 1 << 20, "end-of-generation"),
    ],
)
def test_wrong_values_with_right_crcs(name: str, index: int, value: int, message: str) -> None:
    code = CB_EUNSUPPORTED if message.startswith(("kind", "unknown")) else CB_EFORMAT
    assert message in refused(poke(name, index, value), code)


@pytest.mark.parametrize(
    ("word", "value"), [(0, 300), (1, 0), (2, 1), (3, 256), (3, 1 << 28), (0, 97), (0, 0xFFFFFFFE)]
)
def test_a_wrong_merge_is_refused(word: int, value: int) -> None:
    file = a_file()
    at, size = section(file, "pairs")
    slots = np.frombuffer(file[at : at + size], dtype="<u4").reshape(-1, 4)
    used = int(np.flatnonzero(slots[:, 0] != 0xFFFFFFFF)[0])
    assert list(slots[used]) == [98, 99, 0, 259]
    assert "merge" in refused(poke("pairs", 4 * used + word, value))


def test_sections_may_not_leave_the_file() -> None:
    for k in range(9):
        for field, value in ((8, 1 << 40), (8, 64), (8, 385), (16, 1 << 60), (4, 1 << 31), (0, 77), (28, 1)):
            file = bytearray(a_file())
            struct.pack_into("<Q" if field in (8, 16) else "<I", file, 64 + 32 * k + field, value)
            struct.pack_into("<I", file, 56, crc(file[64 : 64 + 288]))
            struct.pack_into("<I", file, 60, crc(file[:60]))
            refused(bytes(file))


def test_random_damage_with_right_crcs_never_breaks_encoding() -> None:
    rng, good = random.Random(11), a_file()
    opened_anyway = 0
    for _ in range(1500):
        file = bytearray(good)
        for _ in range(rng.randrange(1, 4)):
            file[rng.randrange(384, len(file))] = rng.randrange(256)
        try:
            t = Text(mended(file))
        except TextError:
            continue
        opened_anyway += 1
        ids = t.encode(b"abcd </s>abc ab", strict=False)
        assert all(0 <= i < 260 for i in ids)
    assert opened_anyway > 10  # some damage only changes what tokens mean


# ---- export -------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["llama", "gemma4", "bert", "t5", "rwkv", "no-such"])
def test_other_tokenizers_are_refused_by_name(model: str) -> None:
    with pytest.raises(FormatError, match=repr(model)) as e:
        export_tokenizer({"tokenizer.ggml.model": model}, crc=crc)
    assert e.value.hint


def test_unknown_pre_tokenizer_is_refused_by_name() -> None:
    with pytest.raises(FormatError, match="'kimi-k2'") as e:
        export_tokenizer(small([], tokenizer__ggml__pre="kimi-k2"), crc=crc)
    assert e.value.hint and "qwen2" in e.value.hint


def test_every_known_pre_tokenizer_opens() -> None:
    for name in PRE_TOKENIZERS:
        t = Text(file_of(small([], tokenizer__ggml__pre=name)))
        assert t.decode(t.encode(b"It's 12345 o'clock\n\n  ok")) == b"It's 12345 o'clock\n\n  ok"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.tokens": None}, "tokens is missing"),
        ({"tokenizer.ggml.tokens": "abc"}, "not a list"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "expected a string"),
        ({"tokenizer.ggml.tokens": ["a", "b", "a"]}, "'a' appears twice"),
        ({"tokenizer.ggml.tokens": []}, "0 tokens"),
        ({"tokenizer.ggml.token_type": [1] * 9}, "9 token types"),
        ({"tokenizer.ggml.merges": None}, "merges is missing"),
        ({"tokenizer.ggml.merges": ["ab"]}, "two parts"),
        ({"tokenizer.ggml.bos_token_id": 256}, "bos_token_id is 256"),
        ({"tokenizer.ggml.eot_token_id": -1}, "eot_token_id is -1"),
    ],
)
def test_contradictions_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        export_tokenizer(small([]) | change, crc=crc)


def test_a_special_token_may_have_1024_bytes() -> None:
    long = "<" + "x" * 1022 + ">"
    t = Text(file_of(small([(long, 3)])))
    assert t.encode(b"a" + long.encode() + b"b") == [97, 256, 98]
    with pytest.raises(FormatError, match="1025 bytes"):
        export_tokenizer(small([(long + ">", 3)]), crc=crc)


def test_bytes_and_numpy_give_the_same_file() -> None:
    kv = small([("ab", 1), ("é€", 4)], ["a b"])
    as_bytes = kv | {
        "tokenizer.ggml.tokens": [t.encode() for t in kv["tokenizer.ggml.tokens"]],
        "tokenizer.ggml.merges": [b"a b"],
        "tokenizer.ggml.token_type": np.array(kv["tokenizer.ggml.token_type"], dtype=np.int32),
        "tokenizer.ggml.pre": b"gpt-2",
    }
    assert file_of(as_bytes) == file_of(kv)


def test_tokens_that_are_no_utf8_keep_their_bytes() -> None:
    kv = small([])
    kv["tokenizer.ggml.tokens"] = [*kv["tokenizer.ggml.tokens"], b"\xed\xa0\x80", b"\xff", "\ud801"]
    kv["tokenizer.ggml.token_type"] += [4, 4, 3]
    t = Text(file_of(kv))
    assert [t.token(i) for i in (256, 257, 258)] == [b"\xed\xa0\x80", b"\xff", b"\xed\xa0\x81"]
    kv["tokenizer.ggml.tokens"][258] = "\ud800"  # the first one in another guise
    with pytest.raises(FormatError, match="twice"):
        file_of(kv)


def manifest(name: str, **kv: Any) -> dict[str, Any]:
    changed = metadata(name) | {"tokenizer.ggml." + k: v for k, v in kv.items()}
    return export_tokenizer(changed, crc=crc).manifest


def test_manifest() -> None:
    assert manifest("smollm2") == {"bos": 1, "eos": 2, "eog": [0, 2, 4], "add_bos": False}
    assert manifest("llama-bpe") == {
        "bos": 128000, "eos": 128001, "eog": [128001, 128009], "add_bos": True
    }  # fmt: skip
    assert manifest("llama-bpe", add_bos_token=False)["add_bos"] is False
    assert manifest("qwen2", eot_token_id=151645)["eog"] == [128247, 151643, 151645]


def test_end_of_generation_tokens_become_control_tokens() -> None:
    t = Text(file_of(small([("<|im_end|>", 1), ("<|end|>", 4)])))
    assert t.is_eog(256) and t.is_eog(257)
    assert t.token(256, special=False) == b""
    assert t.encode(b"<|im_end|>", special=False) == list(b"<|im_end|>")


def test_harmony_ends_with_return_and_call_but_not_with_end() -> None:
    texts = ["<|return|>", "<|call|>", "<|end|>", "<|channel|>"]
    t = Text(file_of(small([(x, 3) for x in texts])))
    assert [t.is_eog(i) for i in range(256, 260)] == [True, True, False, False]
    assert t.token(259, special=False) == b"<|channel|>"


def test_unused_tokens_neither_match_nor_show() -> None:
    t = Text(file_of(small([("[PAD0]", 5)])))
    assert t.encode(b"[PAD0]") == list(b"[PAD0]")
    assert t.token(256) == b""


def test_a_byte_without_a_token_is_dropped_as_in_llama_cpp() -> None:
    t = opened("smollm2")
    missing = [
        b for b in range(256) if byte_alphabet()[b] not in metadata("smollm2")["tokenizer.ggml.tokens"]
    ]
    assert 4 in missing
    assert t.decode(t.encode(b"a\x04b")) == b"ab"


def test_150_000_tokens_export_and_open_quickly() -> None:
    kv = metadata("qwen2")
    began = time.process_time()
    file = file_of(kv)
    assert time.process_time() - began < 3.0
    began = time.process_time()
    Text(file)
    assert time.process_time() - began < 0.25
    assert lib().cb_text_n_vocab(opened("qwen2").t) == 151936
