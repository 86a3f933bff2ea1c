"""Ids against llama.cpp's and the tokenizers library's; bytes in = bytes out; limits."""

from __future__ import annotations

import codecs
import ctypes as ct
import functools
import time
import unicodedata
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_lib import (
    CB_ECONTEXT,
    CB_EINVAL,
    CB_EUTF8,
    NAMES,
    Text,
    TextError,
    file_of,
    lib,
    lines,
    metadata,
    opened,
    reference_ids,
    small,
)

CONTROL, USER = 3, 4

# ---- llama.cpp ---------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_same_ids_as_llama_cpp(name: str) -> None:
    text, want = lines(), reference_ids(name)
    assert len(text) == len(want) == 1500
    t = opened(name)
    different = [i for i in range(1500) if t.encode(text[i]) != want[i]]
    assert different == []


@pytest.mark.parametrize("name", NAMES)
def test_decoding_gives_the_bytes_back(name: str) -> None:
    t = opened(name)
    for line in lines():
        assert t.decode(t.encode(line)) == line
        assert t.decode(t.encode(line, special=False)) == line


# ---- the tokenizers library ----------------------------------------------------

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SHORT = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = SHORT + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + TAIL
QWEN2 = LLAMA3.replace("{1,3}", "")
QWEN35 = SHORT + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + TAIL
UPPER, LOWER = r"((?=[\p{L}])([^a-z]))", r"((?=[\p{L}])([^A-Z]))"
CASED = (
    r"[^\r\n\p{L}\p{N}]?UPPER*LOWER+END|[^\r\n\p{L}\p{N}]?UPPER+LOWER*END"
    r"|\p{N}MANY| ?[^\s\p{L}\p{N}]+[\r\n/]*|"
)
CASED = CASED.replace("UPPER", UPPER).replace("LOWER", LOWER) + TAIL
STAGES = {
    "default": [r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"],
    "gpt-2": [GPT2],
    "smollm": [r"\p{N}", GPT2],
    "llama3": [LLAMA3],
    "qwen2": [QWEN2],
    "qwen35": [QWEN35],
    "gpt-4o": [CASED.replace("END", SHORT + "?").replace("MANY", "{1,3}")],
    "tekken": [CASED.replace("END", "").replace("MANY", "")],
    "falcon": [r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"],
}


@functools.cache
def oracle(pre: str) -> Any:
    """qwen2's vocabulary (it has every byte) in the tokenizers library, behind a pre-tokenizer."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    kv = metadata("qwen2")
    whole = pre in ("llama3", "tekken")
    merges = [tuple(m.split(" ", 1)) for m in kv["tokenizer.ggml.merges"]]
    vocab = {t: i for i, t in enumerate(kv["tokenizer.ggml.tokens"])}
    t = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=whole))
    cuts = [pre_tokenizers.Split(Regex(r), "isolated") for r in STAGES[pre]]
    t.pre_tokenizer = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return t


WORDS = ["'s", "'LL", "'ve", "’t", "123", "４５", "²", "Ⅷ", "١٢", "a", "The", " the", "ABCdef", "dEF", "über"]
WORDS += [
    "ÉÉ",
    "Ünï",
    "é",
    "\u0301",
    "हिन्दी",
    "ไทย",
    "漢字",
    "日本",
    "🙂",
    "👩\u200d💻",
    "ǅ",
    "ʰ",
    "\ufeff",
    "ـ",
]
WORDS += ["  ", "\t", "\r\n", "\n\n ", "\u3000", "\u0085", "\u00a0", "\u200b", "\0", "\x1c"]
WORDS += ["---", "/", "//\n", "$+<=>^~|`", "_"]
PIECES = st.sampled_from(WORDS)
ANY = st.characters(exclude_categories=("Cn", "Cs", "Co"))
TEXT = st.lists(st.one_of(PIECES, PIECES, st.text(ANY, max_size=4)), max_size=12).map("".join)


@pytest.mark.parametrize("pre", sorted(STAGES))
@settings(max_examples=150, deadline=None)
@given(text=TEXT)
def test_same_ids_as_the_tokenizers_library(pre: str, text: str) -> None:
    got = opened("qwen2", pre).encode(text.encode(), special=False)
    assert got == oracle(pre).encode(text).ids


@settings(max_examples=60, deadline=None)
@given(text=st.text(st.sampled_from("abеaб e"), min_size=40, max_size=400))
def test_long_words_merge_like_short_ones(text: str) -> None:
    """Words above the size from which a tree finds the next merge."""
    word = text.replace(" ", "")
    assert opened("qwen2").encode(word.encode()) == oracle("qwen2").encode(word).ids


# ---- special tokens -------------------------------------------------------------


def test_special_tokens_only_when_asked() -> None:
    t = opened("smollm2")
    text = b"<|im_start|>user\nhi<|im_end|>"
    ids = t.encode(text)
    assert (ids[0], ids[-1]) == (1, 2)
    plain = t.encode(text, special=False)
    assert not {1, 2} & set(plain)
    assert t.decode(plain) == text
    assert t.decode(ids, special=False) == b"user\nhi"


def test_longest_special_token_wins_over_an_earlier_one() -> None:
    t = Text(file_of(small([("ab", USER), ("bcd", USER), ("<c>", CONTROL)])))
    assert t.encode(b"abcd") == [97, 257]
    assert t.encode(b"abcabab<c>bcdab") == [256, 99, 256, 256, 258, 257, 256]
    assert t.encode(b"ab<c>", special=False) == [256, *b"<c>"]  # user-defined ones always count


def test_prefixes_among_special_tokens() -> None:
    runs = [(" " * n, USER) for n in range(2, 25)]
    t = Text(file_of(small(runs)))
    for n in range(1, 60):
        ids = t.encode(b" " * n)
        assert t.decode(ids) == b" " * n
        longest = [len(t.token(i)) for i in ids]
        assert longest == [24] * (n // 24) + ([n % 24] if n % 24 else [])


def test_white_space_after_a_stripping_token_vanishes() -> None:
    extra = [("<|user|>", CONTROL), ("<|endoftext|>", CONTROL)]
    t = Text(file_of(small(extra, general__name="Phi-3 small")))
    assert t.encode(b"a <|user|> \n b") == [97, 32, 256, 98]
    assert t.encode(b"a<|endoftext|> b") == [97, 257, 32, 98]


# ---- merges ----------------------------------------------------------------------


def test_lowest_rank_first_then_leftmost() -> None:
    t = Text(file_of(small([("bc", 1), ("ab", 1), ("aa", 1)], ["b c", "a b", "a a"])))
    assert t.encode(b"abc") == [97, 256]
    assert t.encode(b"aaab") == [258, 257]  # "ab" first, although "aa" stands before it
    assert t.encode(b"aaa") == [258, 97]
    assert t.encode(b"a" * 101) == [258] * 50 + [97]


def test_a_merge_may_name_strings_that_are_no_token() -> None:
    t = Text(file_of(small([("abc", 1)], ["a b", "ab c"])))
    assert t.encode(b"abc") == [256]
    assert t.encode(b"ab") == [97, 98]  # "ab" is no token: its bytes


# ---- UTF-8 -----------------------------------------------------------------------


@settings(max_examples=400)
@given(st.one_of(st.binary(max_size=40), st.text(max_size=20).map(str.encode)), st.binary(max_size=3))
def test_utf8_check_finds_what_python_finds(head: bytes, tail: bytes) -> None:
    data = head + tail
    try:
        data.decode()
        want = len(data)
    except UnicodeDecodeError as e:
        want = e.start
    assert lib().cb_utf8_check(data, len(data)) == want


@given(st.text(max_size=12), st.integers(0, 60))
def test_utf8_complete_holds_back_an_unfinished_end(text: str, cut: int) -> None:
    data = text.encode("utf-8", "ignore")[:cut]
    shown = codecs.getincrementaldecoder("utf-8")().decode(data)
    assert lib().cb_utf8_complete(data, len(data)) == len(shown.encode())


@pytest.mark.parametrize(
    "end", [b"\xff", b"\x80", b"a\x80\x80\x80\x80", b"\xc0", b"\xe2\x28", b"\xed\xa0", b"\xf5"]
)
def test_utf8_complete_lets_hopeless_bytes_through(end: bytes) -> None:
    assert lib().cb_utf8_complete(b"x" + end, 1 + len(end)) == 1 + len(end)


def test_strict_names_the_first_bad_byte() -> None:
    with pytest.raises(TextError, match="byte 5 ") as e:
        opened("qwen2").encode("né: ".encode() + b"\xed\xa0\x80")
    assert e.value.code == CB_EUTF8


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=64))
def test_stray_bytes_become_byte_tokens(data: bytes) -> None:
    t = opened("qwen2")
    ids = t.encode(data, strict=False)
    assert t.decode(ids) == data
    if lib().cb_utf8_check(data, len(data)) == 0 and data:
        assert t.token(ids[0]) == data[:1]


# ---- limits ----------------------------------------------------------------------


def test_empty_text() -> None:
    assert opened("smollm2").encode(b"") == []


def test_too_many_tokens() -> None:
    t, text = opened("smollm2"), b"one two three<|im_end|>"
    ids = t.encode(text)
    assert t.encode(text, cap=len(ids)) == ids
    for cap in range(len(ids)):
        with pytest.raises(TextError, match=f"more than {cap} tokens") as e:
            t.encode(text, cap=cap)
        assert e.value.code == CB_ECONTEXT


def test_too_little_scratch() -> None:
    with pytest.raises(TextError, match="scratch") as e:
        opened("smollm2").encode(b"x" * 100, scratch=int(lib().cb_text_scratch_bytes(99)))
    assert e.value.code == CB_EINVAL


@pytest.mark.parametrize("unit", [b"a", b" ", b"ab", "€".encode(), b"<", b"\n", b"<|im_end|>", b"1"])
@pytest.mark.parametrize("name", ["qwen2", "gpt-neox"])
def test_a_megabyte_of_one_thing_in_under_a_second(name: str, unit: bytes) -> None:
    text = unit * ((1 << 20) // len(unit))
    t = opened(name)
    began = time.process_time()
    ids = t.encode(text)
    assert time.process_time() - began < 1.0
    assert t.decode(ids) == text


def test_ids_out_of_range_have_no_bytes() -> None:
    t = opened("smollm2")
    assert [t.token(i) for i in (-1, 49152, 2**31 - 1, -(2**31))] == [b""] * 4
    assert t.is_eog(2) and not t.is_eog(1) and not t.is_eog(-1)


# ---- Unicode ---------------------------------------------------------------------


def test_classes_agree_with_pythons_database() -> None:
    """Code points that Python's (maybe older or newer) database also assigns."""
    index = (ct.c_uint8 * 8704).in_dll(lib(), "cb_uc_index")
    blocks = (ct.c_uint8 * (64 * (max(index) + 1))).in_dll(lib(), "cb_uc_blocks")
    number = {"L": 1, "N": 2, "M": 3, "P": 4, "S": 5}
    differ, n_space = [], 0
    for cp in range(0x110000):
        two = blocks[64 * index[cp >> 7] + ((cp & 127) >> 1)]
        got = two >> 4 if cp & 1 else two & 15
        char = chr(cp)
        if got == 6:
            n_space += 1
            assert char.isspace()
            continue
        category = unicodedata.category(char)
        if category != "Cn" and got not in (0, number.get(category[0], 0)):
            differ.append(cp)
        if category[0] in number and got != number[category[0]]:
            differ.append(cp)
    assert n_space == 25
    assert len(differ) == 0 or unicodedata.unidata_version > "15.1.0"
