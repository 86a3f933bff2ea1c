"""core/sample.c and core/emit.c: the choice of tokens, and text that is fit to show."""

from __future__ import annotations

import ctypes as ct
import itertools
import math
from collections import Counter
from typing import Any

import engine_build as eb
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

EINVAL, ENUMERIC, EUTF8 = -1, -6, -7


class Err(ct.Structure):
    _fields_ = [("code", ct.c_int), ("msg", ct.c_char * 256)]


class Sampling(ct.Structure):
    _fields_ = [
        ("temperature", ct.c_float), ("top_k", ct.c_uint32), ("top_p", ct.c_float), ("min_p", ct.c_float),
        ("repeat_penalty", ct.c_float), ("repeat_last_n", ct.c_uint32), ("seed", ct.c_uint64),
    ]  # fmt: skip


def lib() -> ct.CDLL:
    out = eb.library("core/sample.c", "core/emit.c", *eb.TEXT_UNITS, *eb.KERNEL_UNITS)
    out.cb_uniform.restype = ct.c_double
    out.cb_uniform.argtypes = [ct.c_uint64, ct.c_uint64]
    out.cb_expf.restype, out.cb_expf.argtypes = ct.c_float, [ct.c_float]
    return out


def options(**kw: Any) -> Sampling:
    """Everything off unless named."""
    base = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0,
            "repeat_last_n": 64, "seed": 0}  # fmt: skip
    return Sampling(**{**base, **kw})


def sample(
    logits: npt.ArrayLike, s: Sampling, n: int = 0, recent: list[int] | None = None
) -> tuple[int, int, str]:
    """(return code, token, message)."""
    x = np.ascontiguousarray(logits, np.float32)
    keep = x.copy()
    weight, index = np.zeros(x.size, np.float32), np.zeros(x.size, np.int32)
    prior = np.array(recent or [], np.int32)
    token, err = ct.c_int32(-1), Err()
    rc = lib().cb_sample_core(
        ct.c_void_p(weight.ctypes.data), ct.c_void_p(index.ctypes.data), ct.c_void_p(x.ctypes.data),
        ct.c_uint32(x.size), ct.byref(s), ct.c_uint64(n), ct.c_void_p(prior.ctypes.data),
        ct.c_uint32(prior.size), ct.byref(token), ct.byref(err),
    )  # fmt: skip
    assert np.array_equal(x, keep, equal_nan=True), "the logits must stay as they are"
    return rc, token.value, err.msg.decode()


def kept(logits: npt.NDArray[np.float32], s: Sampling) -> dict[int, float]:
    """Token -> probability after the filters: the same rules written with numpy in float64."""
    x = logits.astype(np.float64) / s.temperature
    p = np.exp(x - x.max())
    order = sorted(range(p.size), key=lambda i: (-p[i], i))
    if s.top_k:
        order = order[: s.top_k]
    order = [i for i in order if p[i] >= s.min_p * p.max()]
    total = sum(p[i] for i in order)
    out, running = [], 0.0
    for i in order:
        if out and running >= s.top_p * total:
            break
        out.append(i)
        running += p[i]
    return {i: p[i] / running for i in out}


# Random123 1.14, tests/kat_vectors, rows "philox4x32 10": counter, key, output
KAT = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@pytest.mark.parametrize(("counter", "key", "want"), KAT)
def test_philox_known_answers(counter: str, key: str, want: str) -> None:
    def words(text: str) -> npt.NDArray[np.uint32]:
        return np.array([int(w, 16) for w in text.split()], np.uint32)

    c, k, out = words(counter), words(key), np.zeros(4, np.uint32)
    lib().cb_philox4x32(*(ct.c_void_p(a.ctypes.data) for a in (c, k, out)))
    assert out.tolist() == words(want).tolist()


def test_uniform_is_a_function_of_seed_and_counter() -> None:
    # From the first known answer: words 1 and 0 make the 64 bits, of which 53 are used.
    assert lib().cb_uniform(0, 0) == (0xE169C58D6627E8D5 >> 11) / 2**53
    draws = [lib().cb_uniform(7, i) for i in range(20000)]
    assert draws[:5] == [lib().cb_uniform(7, i) for i in range(5)]
    assert draws[0] != lib().cb_uniform(8, 0)
    assert all(0 <= u < 1 for u in draws)
    # 20,000 uniforms: the mean's sigma is 1/sqrt(12 * 20000) = 0.00204
    assert abs(np.mean(draws) - 0.5) < 4 * 0.00204
    counts, _ = np.histogram(draws, 16, (0, 1))
    assert ((counts - 1250) ** 2 / 1250).sum() < 45  # chi-square, 15 degrees: p < 1e-4


def test_greedy_takes_the_lowest_of_equals() -> None:
    assert sample([1, 5, 5, 5, 2], options())[:2] == (0, 1)
    assert sample([-0.0, 0.0], options())[:2] == (0, 0)
    assert sample([-3.0], options())[:2] == (0, 0)
    assert sample([-math.inf, -2.0], options())[:2] == (0, 1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("logits", "words"),
    [
        ([1.0, math.nan, 2.0], "token 1 is NaN"),
        ([1.0, 2.0, math.inf], "token 2 is infinite"),
        ([-math.inf, -math.inf], "every logit"),
    ],
)
def test_not_a_number_is_an_error(temperature: float, logits: list[float], words: str) -> None:
    rc, _, msg = sample(logits, options(temperature=temperature))
    assert rc == ENUMERIC
    assert words in msg


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", math.nan), ("top_p", 1.5), ("top_p", -0.1), ("min_p", 2.0), ("min_p", math.nan),
     ("repeat_penalty", 0.0), ("repeat_penalty", math.inf), ("repeat_last_n", 1025)],
)  # fmt: skip
def test_senseless_options_are_named(name: str, value: float) -> None:
    rc, _, msg = sample([1, 2], options(**{name: value}))
    assert rc == EINVAL
    assert name.replace("_", "-") in msg


def test_penalty_once_per_distinct_token_and_by_sign() -> None:
    # 6/1.5 = 4 < 5; were it applied twice for the repeated token, 2.67
    logits = [6.0, 5.0, 3.9, -1.0]
    assert sample(logits, options(repeat_penalty=1.5), recent=[0, 0])[1] == 1
    assert sample([6.0, 3.9], options(repeat_penalty=1.5), recent=[0, 0, 0])[1] == 0
    # a negative logit is multiplied: -1 * 2 = -2 falls behind -1.5; divided it would win
    assert sample([-1.0, -1.5], options(repeat_penalty=2.0), recent=[0])[1] == 1
    # only the last n count, ids outside the vocabulary are passed over
    assert sample([6.0, 5.0], options(repeat_penalty=1.5, repeat_last_n=1), recent=[0, 1])[1] == 0
    assert sample([6.0, 5.0], options(repeat_penalty=1.5), recent=[-1, 2, 99])[1] == 0


CASES = [
    options(temperature=1.0),
    options(temperature=0.7, top_k=5),
    options(temperature=1.3, top_p=0.8),
    options(temperature=1.0, min_p=0.2),
    options(temperature=0.9, top_k=12, top_p=0.7, min_p=0.02),
    options(temperature=2.0, top_k=40, top_p=0.95, min_p=0.05),
    options(temperature=1.0, top_p=0.0),
    options(temperature=1.0, top_k=1),
]


@pytest.mark.parametrize("s", CASES)
def test_draws_follow_the_filtered_distribution(s: Sampling) -> None:
    rng = np.random.default_rng(5)
    logits = (rng.standard_normal(60) * 2).astype(np.float32)
    want = kept(logits, s)
    s.seed = 11
    n = 6000
    got = Counter(sample(logits, s, n=i)[1] for i in range(n))
    assert set(got) <= set(want)
    # every token with an expectation of 12 or more has turned up
    assert {t for t, p in want.items() if p * n >= 12} <= set(got)
    big = {t: p for t, p in want.items() if p * n >= 5}
    chi = sum((got[t] - p * n) ** 2 / (p * n) for t, p in big.items())
    assert chi < len(big) + 5 * math.sqrt(2 * len(big)) + 5  # five sigma


def test_same_seed_same_draws_and_other_seed_others() -> None:
    logits = np.random.default_rng(1).standard_normal(500).astype(np.float32)
    one, two = options(temperature=1.0, seed=3), options(temperature=1.0, seed=4)
    first = [sample(logits, one, n=i)[1] for i in range(50)]
    assert first == [sample(logits, one, n=i)[1] for i in range(50)]
    assert first != [sample(logits, two, n=i)[1] for i in range(50)]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=40),
    st.integers(0, 45),
    st.floats(0, 1, width=32),
    st.floats(0, 1, width=32),
    st.integers(0, 2**64 - 1),
)
def test_choice_lies_in_the_kept_set(x: list[float], k: int, top_p: float, min_p: float, n: int) -> None:
    s = options(temperature=1.0, top_k=k, top_p=top_p, min_p=min_p)
    rc, token, _ = sample(x, s, n=n)
    assert rc == 0
    logits = np.array(x, np.float32)
    weight = np.array([lib().cb_expf(float(v - logits.max())) for v in logits], np.float32)
    assert weight[token] >= np.float32(min_p)
    better = sum(1 for i, w in enumerate(weight) if w > weight[token] or (w == weight[token] and i < token))
    if k:
        assert better < k
    ahead = [i for i, w in enumerate(weight) if w > weight[token]]
    in_race = sorted(weight[weight >= np.float32(min_p)].astype(np.float64), reverse=True)
    total = sum(in_race[:k] if k else in_race)
    assert sum(float(weight[i]) for i in ahead) <= s.top_p * total * (1 + 1e-6) + 1e-30


def test_defaults() -> None:
    s = Sampling()
    lib().cb_sampling_default(ct.byref(s))
    assert lib().cb_sampling_check(ct.byref(s), None) == 0
    assert s.temperature == 0  # greedy unless asked otherwise
    assert (s.top_k, round(s.top_p, 3), round(s.min_p, 3), s.repeat_penalty) == (40, 0.95, 0.05, 1.0)


# ---- text assembly ---------------------------------------------------------

TEXT_FN = ct.CFUNCTYPE(ct.c_int, ct.c_void_p, ct.POINTER(ct.c_char), ct.c_size_t, ct.c_int32)


class Emit:
    """struct cb_emit as an opaque block, with the pieces it showed."""

    def __init__(self, stops: list[bytes]) -> None:
        self.block = ct.create_string_buffer(4096)
        self.array = (ct.c_char_p * max(len(stops), 1))(*stops)
        self.err = Err()
        self.pieces: list[tuple[bytes, int]] = []
        self.cancel = False
        self.fn = TEXT_FN(self._take)
        self.rc = lib().cb_emit_init(self.block, self.array, ct.c_uint32(len(stops)), ct.byref(self.err))

    def _take(self, _ud: Any, text: Any, n: int, token: int) -> int:
        self.pieces.append((ct.string_at(text, n), token))
        return int(self.cancel)

    def push(self, data: bytes, token: int = 0) -> int:
        rc: int = lib().cb_emit_push(
            self.block, data, ct.c_size_t(len(data)), ct.c_int32(token), self.fn, None
        )
        return rc

    def flush(self) -> None:
        lib().cb_emit_flush(self.block, self.fn, None)

    @property
    def text(self) -> bytes:
        return b"".join(p for p, _ in self.pieces)


def expected(text: bytes, stops: list[bytes]) -> bytes:
    """What must be shown: up to the stop string that ends first, the longest of those."""
    for end in range(1, len(text) + 1):
        hits = [s for s in stops if text[:end].endswith(s)]
        if hits:
            return text[: end - max(map(len, hits))]
    return text


def run_emit(tokens: list[bytes], stops: list[bytes]) -> Emit:
    m = Emit(stops)
    assert m.rc == 0, m.err.msg
    for i, token in enumerate(tokens):
        m.push(token, i)
    m.flush()
    return m


def cut(text: bytes, at: list[int]) -> list[bytes]:
    marks = [0, *sorted(a % (len(text) + 1) for a in at), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(marks)]


words = st.text(alphabet="ab\nЖ€😀", max_size=30)
stop_words = st.lists(st.text(alphabet="ab\nЖ€😀", min_size=1, max_size=5), max_size=4)


@settings(max_examples=600, deadline=None)
@given(words, stop_words, st.lists(st.integers(0, 200), max_size=20))
def test_any_split_gives_the_same_text(text: str, stops: list[str], at: list[int]) -> None:
    raw, cuts = text.encode(), [s.encode() for s in stops]
    m = run_emit(cut(raw, at), cuts)
    assert m.text == expected(raw, cuts)
    for piece, _ in m.pieces:
        piece.decode()  # never a cut sequence: all of the text is well-formed


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60), stop_words, st.lists(st.integers(0, 200), max_size=20))
def test_any_bytes_come_out_whole(raw: bytes, stops: list[str], at: list[int]) -> None:
    cuts = [s.encode() for s in stops]
    m = run_emit(cut(raw, at), cuts)
    assert m.text == expected(raw, cuts)


def test_a_stop_string_is_held_back_until_it_is_not_one() -> None:
    m = Emit([b"</end>"])
    m.push(b"hello </e", 1)
    assert m.text == b"hello "
    m.push(b"nd", 2)
    assert m.text == b"hello "
    m.push(b"X", 3)
    assert m.text == b"hello </endX"
    assert [t for _, t in m.pieces] == [1, 2, 3]  # one call a token, also without text
    m.push(b" </end> never shown", 4)
    assert m.text == b"hello </endX "
    m.push(b"more", 5)
    m.flush()
    assert m.text == b"hello </endX "


def test_utf8_waits_and_broken_utf8_comes_at_the_end() -> None:
    m = Emit([])
    m.push("😀".encode()[:2])
    assert m.text == b""
    m.push("😀".encode()[2:])
    assert m.text == "😀".encode()
    m.push(b"\xe2\x82")
    assert m.text == "😀".encode()
    m.flush()
    assert m.text == "😀".encode() + b"\xe2\x82"
    assert m.pieces[-1] == (b"\xe2\x82", -1)


def test_long_tokens_pass() -> None:
    text = ("abc" * 3000).encode()
    assert run_emit([text], [b"abd"]).text == text
    assert run_emit([text + b"STOP" + text], [b"STOP"]).text == text


def test_cancel_is_passed_on() -> None:
    m = Emit([])
    m.cancel = True
    assert m.push(b"x") == 1


@pytest.mark.parametrize(
    ("stops", "code", "words"),
    [
        ([b""], EINVAL, b"empty"),
        ([b"x" * 65], EINVAL, b"65 bytes"),
        ([b"\xff"], EUTF8, b"not UTF-8"),
        ([b"a"] * 5, EINVAL, b"at most 4"),
    ],
)
def test_bad_stop_strings(stops: list[bytes], code: int, words: bytes) -> None:
    m = Emit(stops)
    assert m.rc == code
    assert words in m.err.msg


def test_the_longest_stop_string_fits() -> None:
    stop = b"y" * 63 + b"!"
    assert run_emit([b"ab" + b"y" * 70 + b"!" + b"tail"], [stop]).text == b"ab" + b"y" * 7
