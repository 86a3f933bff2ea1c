"""The engine's base: JSON against Python's json, SHA-256 against hashlib, the pool, the ledger's arena."""

from __future__ import annotations

import ctypes
import hashlib
import json
import random
import subprocess
from pathlib import Path

import pytest

NATIVE = Path(__file__).resolve().parents[2] / "native"

HARNESS = r"""
#include <string.h>
#include "core/arena.h"
#include "core/json.h"
#include "core/os.h"
#include "core/pool.h"
#include "core/sha256.h"

int t_json(const char *text, size_t n, struct cb_json_tok *tok, unsigned cap, char *msg)
{
    struct cb_json j;
    struct cb_err err;
    int rc = cb_json_parse(&j, text, n, tok, cap, &err);
    if (rc != 0)
        strcpy(msg, err.msg);
    return rc;
}
/* Member `key` of the top object, unescaped / as a number. */
int t_str(const char *text, size_t n, const char *key, char *out, size_t cap)
{
    static struct cb_json_tok tok[4096];
    struct cb_json j;
    if (cb_json_parse(&j, text, n, tok, 4096, NULL) != 0)
        return -1;
    return cb_json_str(&j, cb_json_get(&j, 0, key), key, out, cap, NULL);
}
int t_f64(const char *text, size_t n, const char *key, double *out)
{
    static struct cb_json_tok tok[4096];
    struct cb_json j;
    if (cb_json_parse(&j, text, n, tok, 4096, NULL) != 0)
        return -1;
    return cb_json_f64(&j, cb_json_get(&j, 0, key), key, out, NULL);
}
void t_sha(const void *p, size_t n, size_t cut, char *hex)
{
    struct cb_sha256 s;
    cb_sha256_init(&s);
    cb_sha256_add(&s, p, cut);
    cb_sha256_add(&s, (const char *)p + cut, n - cut);
    cb_sha256_hex(&s, hex);
}
static void mark(void *arg, uint32_t i, uint32_t n)
{
    unsigned *count = arg;
    uint64_t lo, hi;
    cb_share(1000, i, n, &lo, &hi);
    for (uint64_t k = lo; k < hi; k++)
        count[k]++;
}
/* Each of 1000 items is to be done exactly once a run; returns wrong items. */
int t_pool(unsigned threads, int runs)
{
    static struct cb_pool p;
    static unsigned count[1000];
    memset(count, 0, sizeof count);
    if (cb_pool_open(&p, threads, NULL) != 0)
        return -1;
    for (int i = 0; i < runs; i++)
        cb_pool_run(&p, mark, count);
    cb_pool_close(&p);
    int wrong = 0;
    for (int i = 0; i < 1000; i++)
        wrong += count[i] != (unsigned)runs;
    return wrong;
}
/* Takes the same items counting and for real; 0 when they agree. */
int t_arena(unsigned n, const unsigned long long *items)
{
    static unsigned char block[1 << 16];
    struct cb_arena c = {0}, r = {0};
    for (unsigned i = 0; i < n; i++)
        cb_arena_take(&c, (int)(i % CB_L_COUNT), items[i], 1);
    r.base = block;
    r.size = c.used;
    unsigned char *end = block;
    for (unsigned i = 0; i < n; i++) {
        unsigned char *p = cb_arena_take(&r, (int)(i % CB_L_COUNT), items[i], 1);
        if (p < end || (p - block) % 64 != 0)
            return 1;
        end = p + items[i];
    }
    return r.used != c.used || r.overflow || memcmp(r.line, c.line, sizeof r.line) != 0 ||
           cb_arena_take(&r, 0, 1, 1) != NULL || !r.overflow;
}
int t_arena_wrap(void)
{
    struct cb_arena c = {0};
    cb_arena_take(&c, 0, UINT64_MAX / 2, 3);
    int a = c.overflow;
    c.overflow = 0;
    cb_arena_take(&c, 0, UINT64_MAX / 8, 1);
    cb_arena_take(&c, 0, UINT64_MAX / 8, 1);
    cb_arena_take(&c, 0, UINT64_MAX / 8, 1);
    return a && c.overflow;
}
"""


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("core")
    source = folder / "harness.c"
    source.write_text(HARNESS)
    lib = folder / "core.so"
    names = ["err", "json", "sha256", "pool", "arena", "os_posix"]
    sources = [source, *(NATIVE / "core" / f"{n}.c" for n in names)]
    flags = ["-std=c11", "-O1", "-g", "-shared", "-fPIC", "-pthread", f"-I{NATIVE}", f"-I{NATIVE}/include"]
    subprocess.run(["gcc", *flags, "-o", str(lib), *map(str, sources)], check=True)
    return ctypes.CDLL(str(lib))


class Tok(ctypes.Structure):
    _fields_ = [(n, ctypes.c_uint32) for n in ("kind", "at", "len", "size", "next")]


def parse(core: ctypes.CDLL, text: bytes, cap: int = 4096) -> tuple[int, str]:
    toks = (Tok * cap)()
    msg = ctypes.create_string_buffer(256)
    rc = core.t_json(text, ctypes.c_size_t(len(text)), toks, cap, msg)
    return rc, msg.value.decode("utf-8", "replace")


def python_accepts(text: bytes) -> bool:
    def refuse(name: str) -> float:
        raise ValueError(name)

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        if len({k for k, _ in pairs}) != len(pairs):
            raise ValueError("duplicate key")
        return dict(pairs)

    try:
        json.loads(text.decode("latin-1"), parse_constant=refuse, object_pairs_hook=unique)
    except ValueError:
        return False
    return True


DOCUMENTS = [
    b'{"a":[1,2.5,-3e+7,{"b":null}],"c":"x\\u00e9\\n","d":true,"e":{}}',
    b"[[],[[]],[{}],false,0,-0,1E9]",
    b'{"model_id":"00","geometry":{"n_layer":2,"n_embd":64},"features":{"rope":"norm"}}',
    b'  "lone string"  ',
    b"12",
]


def test_json_accepts_what_python_accepts(core: ctypes.CDLL) -> None:
    """Mutated documents: our verdict equals that of the standard library."""
    rng = random.Random(1)
    alphabet = b'{}[]",:0123456789.eE+-\\u tfnalsr\n\x01'
    rejected = accepted = 0
    for doc in DOCUMENTS:
        assert parse(core, doc)[0] == 0
        for _ in range(4000):
            text = bytearray(doc)
            for _ in range(rng.randint(1, 3)):
                at = rng.randrange(len(text))
                action = rng.randrange(3)
                if action == 0:
                    text[at] = rng.choice(alphabet)
                elif action == 1:
                    text.insert(at, rng.choice(alphabet))
                elif len(text) > 1:
                    del text[at]
            ours = parse(core, bytes(text))[0] == 0
            assert ours == python_accepts(bytes(text)), bytes(text)
            accepted += ours
            rejected += not ours
    assert accepted > 500 and rejected > 5000


@pytest.mark.parametrize("doc", DOCUMENTS[:3])
def test_json_truncated_anywhere(core: ctypes.CDLL, doc: bytes) -> None:
    for n in range(len(doc)):
        rc, msg = parse(core, doc[:n])
        assert rc < 0 and "at byte" in msg


def test_json_limits(core: ctypes.CDLL) -> None:
    assert parse(core, b"[" * 1000)[0] < 0
    assert parse(core, b"[" * 31 + b"]" * 31)[0] == 0
    assert "too many" in parse(core, b"[1,2,3]", cap=2)[1]
    assert "duplicate key" in parse(core, b'{"a":1,"b":2,"a":3}')[1]


@pytest.mark.parametrize("text", ["plain", "é ∀ 🐦", 'quote " back \\ slash / \b\f\n\r\t', "\U0001f426" * 5])
def test_json_strings(core: ctypes.CDLL, text: str) -> None:
    for ascii_only in (True, False):
        doc = json.dumps({"other": [1, {"k": "z"}], "k": text}, ensure_ascii=ascii_only).encode()
        out = ctypes.create_string_buffer(256)
        assert core.t_str(doc, ctypes.c_size_t(len(doc)), b"k", out, ctypes.c_size_t(256)) == 0
        assert out.value.decode() == text
        need = len(text.encode())
        assert core.t_str(doc, ctypes.c_size_t(len(doc)), b"k", out, ctypes.c_size_t(need)) < 0


@pytest.mark.parametrize("bad", ['"\\u0000"', '"\\ud800"', '"\\ud800\\u0041"', '"\\udc00"'])
def test_json_strings_that_are_none(core: ctypes.CDLL, bad: str) -> None:
    doc = b'{"k":' + bad.encode() + b"}"
    out = ctypes.create_string_buffer(64)
    assert core.t_str(doc, ctypes.c_size_t(len(doc)), b"k", out, ctypes.c_size_t(64)) < 0


def test_json_numbers(core: ctypes.CDLL) -> None:
    rng = random.Random(2)
    for _ in range(2000):
        value = rng.uniform(-1, 1) * 10.0 ** rng.randint(-30, 30)
        doc = json.dumps({"k": value}).encode()
        out = ctypes.c_double()
        assert core.t_f64(doc, ctypes.c_size_t(len(doc)), b"k", ctypes.byref(out)) == 0
        assert out.value == value
    doc = b'{"k":1e999}'
    assert core.t_f64(doc, ctypes.c_size_t(len(doc)), b"k", ctypes.byref(out)) < 0


def test_sha256(core: ctypes.CDLL) -> None:
    rng = random.Random(3)
    for n in [*range(0, 200), 1000, 4096, 100_001]:
        data = rng.randbytes(n)
        out = ctypes.create_string_buffer(65)
        cut = rng.randint(0, n)
        core.t_sha(data, ctypes.c_size_t(n), ctypes.c_size_t(cut), out)
        assert out.value.decode() == hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_pool_does_each_item_once(core: ctypes.CDLL, threads: int) -> None:
    assert core.t_pool(threads, 2000) == 0


def test_pool_refuses_silly_counts(core: ctypes.CDLL) -> None:
    assert core.t_pool(0, 1) == -1
    assert core.t_pool(65, 1) == -1


def test_arena_counts_what_it_takes(core: ctypes.CDLL) -> None:
    items = [1, 64, 0, 65, 4096, 63, 128, 7]
    assert core.t_arena(len(items), (ctypes.c_ulonglong * len(items))(*items)) == 0
    assert core.t_arena_wrap() == 1
