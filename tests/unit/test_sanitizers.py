"""The engine under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer.

The arena poisons a gap behind every item in such a build, so that an overrun inside it is seen.
The engine's SIGSEGV and SIGBUS handler stays in place (handle_segv=0): weight mode `lazy` needs it.
"""

from __future__ import annotations

import functools
import itertools
import json
import random
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engine_build as eb
import hostile as h
import pytest
from gguf_maker import make

RACE = """
#include <pthread.h>
#include <stdlib.h>
static int shared;
static void *run(void *p) { for (int i = 0; i < 10000; i++) shared++; return p; }
int main(int n, char **v)
{
    char *heap = malloc(8);
    pthread_t t;
    pthread_create(&t, NULL, run, NULL);
    run(NULL);
    pthread_join(t, NULL);
    heap[n + 7 + (v == NULL)] = 1;
    return heap[0] == 77;
}
"""


@functools.cache
def available(kind: str) -> str:
    """Why a sanitizer cannot be used here, or an empty string; it must see a bug that is there."""
    folder = eb.CACHE / f"probe-{kind}"
    folder.mkdir(parents=True, exist_ok=True)
    source, out = folder / "race.c", folder / "race"
    source.write_text(RACE)
    build = [*eb.compiler(), "-g", f"-fsanitize={kind}", str(source), "-o", str(out), "-lpthread"]
    if subprocess.run(build, capture_output=True, check=False).returncode != 0:
        return f"the compiler has no -fsanitize={kind}"
    done = subprocess.run([out], capture_output=True, text=True, check=False)
    word = {"address": "heap-buffer-overflow", "thread": "data race"}[kind]
    return "" if word in done.stderr else f"-fsanitize={kind} does not work here: {done.stderr[:100]}"


def need(kind: str) -> None:
    why = available(kind)
    if why:
        pytest.skip(why)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return h.sample_model(tmp_path_factory)


def tour(model: Path, *options: object, sanitizer: str, reads: str = "slow=1") -> dict[str, str]:
    """Everything an engine does: prefill, decode, text, hot swap, golden, faults, close."""
    return h.drive(
        f"model={model}", "hot=1", "block=1", "deadline=5", *options, reads, "plan", "open", "eval=20",
        "step=3", "gen=4", "counters", f"swap={model}", "golden", "eval=20", "slow=0", "eio=1:5", "reset",
        "eval=20", "step=2", "counters", "close", sanitizer=sanitizer, timeout=200,
    )  # fmt: skip


MODES = {"arena": 0, "mmap": 1, "lazy": 2, "preload": 3}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("threads", [1, 4])
def test_no_overrun_in_any_mode(model: Path, mode: str, threads: int) -> None:
    need("address")
    seen = set()
    for batch, isa in itertools.product((1, 7, 40), ("isa=scalar", "noahead=0")):
        out = tour(model, f"weights={MODES[mode]}", f"threads={threads}", f"batch={batch}", isa,
                   "cache=5", "onbad=1", f"kv={batch % 3}", sanitizer="address")  # fmt: skip
        assert "right" in out["golden"]
        seen.add((batch % 3, re.findall("sha=[0-9a-f]+", out["step=3"])[0]))
    assert len(seen) == len({kv for kv, _ in seen})  # one hash a cache type, whatever batch and ISA


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("threads", [3])
def test_no_race_in_any_mode(model: Path, mode: str, threads: int) -> None:
    need("thread")
    for extra in (("cache=3", "onbad=1", "readers=4"), ("cache=4", "onmiss=1", "extra=100")):
        tour(model, f"weights={MODES[mode]}", f"threads={threads}", "batch=7", *extra, sanitizer="thread")


ODD: dict[str, dict[str, Any]] = {
    "all experts": dict(n_expert=3, used=3),
    "FFN of one row": dict(ff=1),
    "odd sizes": dict(d=24, ff=13, n_expert=5, used=3),
    "heads of 2": dict(d=8, ff=9, n_expert=2, used=1),
    "1024 experts": dict(d=8, ff=8, n_layer=1, n_expert=1024, used=64),
    "dense": dict(n_expert=0, ff=33),
    "40 layers": dict(d=8, ff=8, n_layer=40, n_expert=2, used=1),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_shapes(tmp_path: Path, name: str) -> None:
    need("address")
    make(tmp_path / "m.gguf", "qwen2moe" if ODD[name].get("n_expert", 4) else "llama", **ODD[name])
    cmd = [sys.executable, "-m", "colibri_kit", "convert", "-q", str(tmp_path / "m.gguf"), "-o"]
    subprocess.run([*cmd, str(tmp_path / "m.coli")], check=True, timeout=100, capture_output=True)
    for mode, threads in ((0, 2), (2, 3)):
        out = tour(tmp_path / "m.coli", f"weights={mode}", f"threads={threads}", "batch=9", "onbad=1",
                   "extra=9", sanitizer="address", reads="slow=0")  # fmt: skip
        assert "right" in out["golden"], out


def test_a_matrix_of_one_row(tmp_path: Path) -> None:
    """Stored like a vector, unpadded, which no converter writes; products read groups of 8 rows."""
    need("address")
    make(tmp_path / "m.gguf", "llama", n_expert=0, ff=8)
    cmd = [sys.executable, "-m", "colibri_kit", "convert", "-q", str(tmp_path / "m.gguf"), "-o"]
    subprocess.run([*cmd, str(tmp_path / "m.coli")], check=True, timeout=100, capture_output=True)

    def edit(entries: dict[str, list[Any]], data: bytearray) -> None:
        for name, rows, cols in (("ffn_gate", 1, 64), ("ffn_up", 1, 64), ("ffn_down", 64, 1)):
            for layer in range(2):
                e = entries[f"blk.{layer}.{name}"]
                e[2:4], e[6] = [rows, cols], 4 * rows * cols
                e[4] = h.box.crc32c(bytes(data[e[5] : e[5] + e[6]]), 0)

    h.manifest("geometry", n_ff=1)(tmp_path / "m.coli")
    h.dense(edit)(tmp_path / "m.coli")
    out = h.drive(f"model={tmp_path / 'm.coli'}", "batch=9", "open", "eval=20", "step=3", sanitizer="address")
    assert h.code(out["open"]) == h.code(out["eval=20"]) == h.code(out["step=3"]) == 0


# ---- random lies ------------------------------------------------------------

NUMBERS = [0, 1, 2, 3, 7, 8, 9, 31, 32, 33, 64, 255, 256, 257, 512, 1024, 1025, 4096, 65535, 1 << 20, 1 << 24,
           (1 << 31) - 1, 1 << 31, (1 << 32) - 1]  # fmt: skip
WIDE = [*NUMBERS, 1 << 32, 1 << 40, 1 << 62, 1 << 63, (1 << 64) - 1, (1 << 64) - 64, (1 << 64) - 16384, 16384]
WORDS = [
    b"\0\0\xc0\x7f",
    b"\0\0\x80\x7f",
    b"\xff\xff\xff\xff",
    b"\0\x7c\0\x7c",
    b"\xff\xff\x7f\x7f",
    b"\1\0\0\0",
]


def other(rng: random.Random, value: int, bits: int) -> int:
    return rng.choice(
        [value * 2, value // 2, value + 1, max(value - 1, 0), *(WIDE if bits > 32 else NUMBERS)]
    ) % (1 << bits)


def lie_manifest(rng: random.Random) -> h.Change:
    def change(folder: Path) -> None:
        m = json.loads((folder / "manifest.json").read_text())
        section = rng.choice(["geometry", "geometry", "features"])
        key = rng.choice(sorted(m[section]))
        old = m[section][key]
        new: Any = (
            other(rng, old, 32) if section == "geometry" else rng.choice([0, -1, 1e-6, 0.5, 1e6, 1e300])
        )
        if isinstance(old, str):
            new = rng.choice(["none", "norm", "neox", "head", "row", "softmax", "softmax_topk"])
        h.manifest(section, **{key: new})(folder)

    return change


def lie_dense(rng: random.Random) -> h.Change:
    def edit(entries: dict[str, list[Any]], data: bytearray) -> None:
        e = rng.choice(list(entries.values()))
        at = rng.choice([0, 1, 2, 3, 5, 6, 7])
        e[at] = (
            rng.choice(list(entries.values()))[0]
            if at == 0
            else other(rng, e[at], 64 if at in (5, 6) else 32)
        )
        if rng.random() < 0.5:
            e[6] = min(h.box.tensor_bytes(e[1], e[2], e[3]), (1 << 64) - 1)

    return h.dense(edit)


def lie_record(rng: random.Random) -> h.Change:
    def edit(all_: list[list[list[int]]], data: bytearray) -> None:
        r = rng.choice(all_)
        part, at = rng.randrange(4), rng.randrange(6)
        r[part][at] = other(rng, r[part][at], 64 if at in ((2, 3) if part == 0 else (4, 5)) else 32)

    return h.records(edit)


def lie_data(rng: random.Random) -> h.Change:
    """NaN, infinities and noise in weights, their CRCs right."""

    def spoil(data: bytearray, at: int, size: int) -> int:
        if at + size > len(data):
            return 0
        for _ in range(rng.choice([1, 8, 64])):
            where = at + rng.randrange(max(size // 4, 1)) * 4
            data[where : where + 4] = rng.choice(WORDS)
        return h.box.crc32c(bytes(data[at : at + size]), 0)

    def in_dense(entries: dict[str, list[Any]], data: bytearray) -> None:
        e = rng.choice(list(entries.values()))
        e[4] = spoil(data, e[5], e[6])

    def in_record(all_: list[list[list[int]]], data: bytearray) -> None:
        r = rng.choice(all_)[0]
        r[4] = spoil(data, r[2], r[3])

    return h.dense(in_dense) if rng.random() < 0.5 else h.records(in_record)


def lie_header(rng: random.Random) -> h.Change:
    def change(folder: Path) -> None:
        name = rng.choice(["dense.coli", "experts-0000.coli", "tokenizer.coli"])
        field = rng.choice(["kind", "index", "count", "payload_offset", "payload_size"])
        at, form = dict(kind=(6, "<H"), index=(8, "<I"), count=(12, "<I"), payload_offset=(24, "<Q"),
                        payload_size=(32, "<Q"))[field]  # fmt: skip
        old = struct.unpack_from(form, (folder / name).read_bytes(), at)[0]
        h.header(name, **{field: other(rng, old, 8 * struct.calcsize(form))})(folder)

    return change


LIES: list[Callable[[random.Random], h.Change]] = [lie_manifest, lie_dense, lie_record, lie_data, lie_header]


@pytest.mark.parametrize("seed", range(8))
def test_random_lies(model: Path, tmp_path: Path, seed: int) -> None:
    """Whatever the files say: an error with a code, or an engine that runs inside its memory."""
    need("address")
    rng = random.Random(seed)
    for i in range(12):
        folder = h.copy(model, tmp_path / str(i))
        for _ in range(rng.choice([1, 1, 2])):
            rng.choice(LIES)(rng)(folder)
        out = h.drive(
            f"model={folder}", f"weights={rng.randrange(4)}", f"threads={rng.choice([1, 2])}",
            f"batch={rng.choice([1, 7, 40])}", f"ctx={rng.choice([0, 16, 48])}", f"kv={rng.randrange(3)}",
            f"cache={rng.choice([0, 3, 9])}", f"onbad={rng.randrange(2)}", "block=1", "budget=300000000",
            "plan", "open", "eval=9", "step=2", "gen=3", "golden", "close", sanitizer="address",
        )  # fmt: skip
        assert h.code(out["open"]) in range(-11, 1)
        assert out["left"].startswith("fds=0 ")
        shutil.rmtree(folder)
