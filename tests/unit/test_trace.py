"""Trace files, the cache simulator against an independent LRU and the real engine, the verb."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
from tests.memory.models import ids, olmoe

from colibri_kit.errors import FormatError, KitError
from colibri_kit.native import Engine
from colibri_kit.trace import curves, file, simulate

IDENTITY = bytes(range(16))


def choices(n_token: int, layers: int = 3, n_expert: int = 16, used: int = 4, seed: int = 1) -> np.ndarray:
    """Distinct experts, int [layers][n_token][used]."""
    rng = np.random.default_rng(seed)
    return np.argsort(rng.random((layers, n_token, n_expert)), axis=2)[:, :, :used]


def verb(*args: object) -> subprocess.CompletedProcess[str]:
    cmd = [sys.executable, "-m", "colibri_kit", "trace", *map(str, args)]
    return subprocess.run(cmd, capture_output=True, text=True, timeout=60, check=False)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    first, second = choices(5), choices(1, seed=2)
    file.write(tmp_path / "t", [first, second], 16, 2, IDENTITY)
    trace = file.read(tmp_path / "t")
    assert (trace.n_token, trace.n_layer, trace.n_used, trace.first_layer) == (6, 3, 4, 2)
    assert trace.model_id == IDENTITY
    assert np.array_equal(trace.experts[:5], first.swapaxes(0, 1))
    assert np.array_equal(trace.experts[5:], second.swapaxes(0, 1))
    assert trace.starts.tolist() == [True, False, False, False, False, True]
    got = list(trace.chunks())
    assert got[0] == [sorted(set(first[il].ravel().tolist())) for il in range(3)]
    assert got[1] == [sorted(second[il, 0].tolist()) for il in range(3)]
    assert trace.counts().sum() == 6 * 3 * 4


def test_layout_by_hand(tmp_path: Path) -> None:
    """The bytes that docs/streaming.md describes, without the writer; no marks: each token a chunk."""
    head = file.pack_head(1, 8, 2, 0, IDENTITY, 0)
    assert len(head) == 64 and head[:4] == b"COLT"
    path = tmp_path / "t"
    path.write_bytes(head + bytes([3, 0, 5, 0, 7, 0, 0xFF, 0xFF]) + b"\1")
    trace = file.read(path)
    assert list(trace.chunks()) == [[[3, 5]], [[7]]]


@pytest.mark.parametrize(
    ("at", "value", "word"),
    [(0, 0x43 ^ 1, "COLT"), (4, 9, "version 9"), (8, 77, "CRC32C"), (66, 16, "expert 16 of 16")],
)
def test_damage_is_named(tmp_path: Path, at: int, value: int, word: str) -> None:
    path = tmp_path / "t"
    file.write(path, [choices(2)], 16, 0, IDENTITY)
    data = bytearray(path.read_bytes())
    data[at] = value
    path.write_bytes(data)
    with pytest.raises(FormatError, match=word):
        file.read(path)


def test_no_token_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_bytes(file.pack_head(1, 8, 2, 0, IDENTITY, 0) + b"\1\0")
    with pytest.raises(FormatError, match="no token"):
        file.read(path)


@pytest.mark.parametrize("slots", [1, 3, 10, 31, 32])
def test_lru_equals_a_plain_lru(slots: int) -> None:
    """One expert a look-up, one layer, empty at first: the textbook case."""
    rng = np.random.default_rng(slots)
    asked = rng.zipf(1.3, 3000) % 32
    plain: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for e in asked.tolist():
        if e in plain:
            hits += 1
            plain.move_to_end(e)
        else:
            if len(plain) == slots:
                plain.popitem(last=False)
            plain[e] = None
    cache = simulate.Cache(1, 32, 1, slots, "lru", floor=0, fill=False)
    got = simulate.replay([[[int(e)]] for e in asked], cache)
    assert (got.hits, got.misses) == (hits, 3000 - hits)


def test_a_pinned_expert_stays() -> None:
    cache = simulate.Cache(2, 8, 1, 4, "lru", pinned=[5])
    for e in (0, 1, 2, 3, 4, 6, 7, 5):
        cache.layer(0, [e])
    before = cache.hits
    cache.layer(0, [5])
    assert cache.hits == before + 1 and cache.rate().evictions > 0


def record(model: Path, path: Path, batch: int, slots: int, policy: str) -> tuple[dict[str, int], int]:
    """Runs 32 tokens in chunks and 60 single ones; returns counters and slots."""
    with Engine(
        model, ctx=256, batch=batch, lookahead=False, cache_policy=policy, cache_experts=slots
    ) as engine:
        info = engine.info()
        prompt = ids(32, info["n_vocab"])
        parts = [prompt[at : at + batch] for at in range(0, 32, batch)]
        parts += [[t] for t in ids(60, info["n_vocab"], 99)]
        chunks = [engine.eval(p, want_all=False)[1] for p in parts]
        file.write(path, chunks, info["n_expert"], 0, bytes.fromhex(info["model_id"]))
        return engine.counters(), engine.ledger()["slots"]


@pytest.mark.parametrize("policy", simulate.POLICIES)
@pytest.mark.parametrize(("batch", "slots"), [(1, 30), (2, 20), (4, 20), (16, 20), (16, 33), (16, 4)])
def test_counts_equal_the_engines(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, policy: str, batch: int, slots: int
) -> None:
    path = tmp_path / "t"
    counters, n_slot = record(olmoe(tmp_path_factory, "tiny"), path, batch, slots, policy)
    trace = file.read(path)
    cache = simulate.Cache(trace.n_layer, trace.n_expert, trace.n_used, n_slot, policy)
    got = simulate.replay(trace.chunks(), cache)
    want = tuple(counters[k] for k in ("hits", "misses", "evictions"))
    assert (got.hits, got.misses, got.evictions) == want
    assert got.misses > 0


def test_pins_and_curves(tmp_path: Path) -> None:
    file.write(tmp_path / "t", [choices(40)[:, i : i + 1] for i in range(40)], 16, 5, IDENTITY)
    trace = file.read(tmp_path / "t")
    pairs = curves.pins(trace, 6)
    counts = trace.counts()
    used = [counts[il - 5, e] for il, e in pairs]
    assert len(set(pairs)) == 6 and used == sorted(used, reverse=True)
    assert min(used) >= sorted(counts.ravel())[-6]
    points = curves.curves(trace, ["slru", "lru"], curves.sizes(trace))
    for policy in ("slru", "lru"):
        rates = [p.rate.hit_rate for p in points if p.policy == policy]
        assert rates[-1] == 1.0 and rates[0] < 0.4


def test_verb(tmp_path: Path) -> None:
    path, out, page = tmp_path / "t", tmp_path / "pins.txt", tmp_path / "r.html"
    file.write(path, [choices(40)[:, i : i + 1] for i in range(40)], 16, 5, IDENTITY)
    done = verb(
        path, "--slots", "16,48", "--policy", "lru", "--pin", 3, "-o", out, "--report", page, "--json"
    )
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert [(c["policy"], c["slots"]) for c in data["curves"]] == [("lru", 16), ("lru", 48)]
    assert data["curves"][1]["hit_rate"] == 1.0 and data["model_id"] == IDENTITY.hex()
    lines = out.read_text().splitlines()
    assert lines[0].startswith("#") and [list(map(int, s.split())) for s in lines[1:]] == data["pinned"]
    assert "<svg" in page.read_text() and "slots" in verb(path).stdout
    assert verb(path, "--slots", "49").returncode == 2
    assert verb(path, "--pin", 3).returncode == 2
    assert verb(out).returncode == 8


def test_the_engine_holds_what_the_pin_file_names(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Its counts are the simulator's with the same pins, and not those without."""
    model, path = olmoe(tmp_path_factory, "tiny"), tmp_path / "pins"
    path.write_text("# layer expert\n0 3\n1 0\n2 15\n")
    chunks = []
    with Engine(
        model, ctx=128, cache_experts=12, pin_file=path, cache_policy="lru", lookahead=False
    ) as engine:
        chunks = [engine.eval([t], want_all=False)[1] for t in ids(60, 512)]
        counters = engine.counters()
    file.write(tmp_path / "t", chunks, 16, 0, IDENTITY)
    recorded = list(file.read(tmp_path / "t").chunks())
    pinned = simulate.replay(recorded, simulate.Cache(3, 16, 4, 12, "lru", pinned=[3, 16, 47]))
    free = simulate.replay(recorded, simulate.Cache(3, 16, 4, 12, "lru"))
    assert (pinned.hits, pinned.misses) == (counters["hits"], counters["misses"])
    assert pinned.hits != free.hits


@pytest.mark.parametrize(
    ("text", "word"),
    [("0 16\n", "0 16"), ("x\n", "x"), ("".join(f"0 {e}\n" for e in range(9)), "9 experts are pinned")],
)
def test_bad_pins_are_refused(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, text: str, word: str
) -> None:
    path = tmp_path / "pins"
    path.write_text(text)
    with pytest.raises(KitError, match=word):
        Engine(olmoe(tmp_path_factory, "tiny"), ctx=64, cache_experts=12, pin_file=path)
