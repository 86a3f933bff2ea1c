"""Streaming: one hash whatever the mode, memory inside the budget, no need of the page cache."""

from __future__ import annotations

import hashlib
import itertools
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from colibri_kit.native import Engine
from tests.memory import make_olmoe, proc
from tests.memory.models import ids, olmoe

MIB = 1 << 20

#: (weights, other settings): every mode, size, policy, look-ahead, reader and I/O kind appears
ARENA = [
    {"weights": "arena", "cache_experts": n, "cache_policy": p, "lookahead": a}
    for n, p, a in itertools.product((0, 7, 20, None), ("slru", "lru", "lfu"), (True, False))
]
OTHERS: list[dict[str, Any]] = [
    {"weights": "mmap"},
    {"weights": "lazy", "lazy_block_mib": 1},
    {"weights": "lazy"},
    {"weights": "preload"},
    {"weights": "arena", "cache_experts": 9, "readers": 1},
    {"weights": "arena", "cache_experts": 9, "readers": 8},
    {"weights": "arena", "cache_experts": 9, "buffered": True},
    {"weights": "arena", "cache_experts": 9, "hot_swap": True},
]


def digest(model: Path, n_vocab: int, **settings: Any) -> str:
    """sha256 of logits and experts of a prompt in uneven calls, and of 24 single tokens."""
    sha = hashlib.sha256()
    with Engine(model, ctx=256, **settings) as engine:
        for n in (19, 1, 33):
            logits, _ = engine.eval(ids(n, n_vocab, n), want_experts=False)
            sha.update(logits.tobytes())  # type: ignore[union-attr]
        for token in ids(24, n_vocab, 5):
            logits, experts = engine.eval([token])
            sha.update(logits.tobytes() + experts.tobytes())  # type: ignore[union-attr]
    return sha.hexdigest()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return olmoe(tmp_path_factory, "tiny")


@pytest.fixture(scope="module")
def resident(tiny: Path) -> str:
    return digest(tiny, 512, weights="preload", threads=1, batch=32)


@pytest.mark.parametrize("settings", ARENA + OTHERS, ids=str)
def test_one_hash(tiny: Path, resident: str, settings: dict[str, Any]) -> None:
    for threads, batch in ((1, 32), (2, 5), (3, 32), (4, 1)):
        assert digest(tiny, 512, threads=threads, batch=batch, **settings) == resident, (threads, batch)


def test_one_hash_where_nearly_all_misses(tmp_path_factory: pytest.TempPathFactory) -> None:
    """110 MB of experts, two sizes of record, through 9 slots."""
    model = olmoe(tmp_path_factory, "small")
    whole = digest(model, 2048, weights="preload")
    assert digest(model, 2048, cache_experts=9) == whole
    assert digest(model, 2048, weights="lazy", lazy_block_mib=2, budget=48 * MIB, threads=2) == whole


@pytest.mark.parametrize(("weights", "budget"), [("arena", 36 * MIB), ("lazy", 48 * MIB)])
def test_memory_stays_inside_the_budget(
    tmp_path_factory: pytest.TempPathFactory, weights: str, budget: int
) -> None:
    """Sampled after each of 500 tokens: what the engine added is at most the budget, to the page the same."""
    model = olmoe(tmp_path_factory, "small")
    shards = sorted(model.glob("experts-*.coli"))
    assert sum(s.stat().st_size for s in shards) > 2 * budget
    for shard in shards:
        proc.drop_cached(shard)
    before = proc.state()
    with Engine(model, budget=budget, ctx=544, threads=2, weights=weights, lazy_block_mib=2) as engine:
        assert engine.ledger()["total"] <= budget
        engine.eval(ids(32, 2048), want_all=False, want_experts=False)
        samples = []
        for token in ids(500, 2048, 7):
            engine.eval([token], want_all=False, want_experts=False)
            samples.append(proc.state())
        counters = engine.counters()
    anon = [s.rss_anon + s.locked - before.rss_anon - before.locked for s in samples]
    assert max(anon) <= budget
    assert max(anon) - min(anon) <= 64 << 10  # Python's own lists
    assert {s.threads for s in samples} == {samples[0].threads}
    assert {s.fds for s in samples} == {samples[0].fds}
    if weights == "arena":
        assert counters["misses"] > 1000
        assert sum(map(proc.cached_bytes, shards)) < 1 * MIB  # O_DIRECT: the page cache is not used


def test_each_distinct_expert_is_read_once_a_chunk(tiny: Path) -> None:
    """Prefill is expert-major: look-ups are distinct experts, however many tokens share them."""
    with Engine(tiny, ctx=64, batch=32, cache_experts=0, lookahead=False) as engine:
        start = engine.counters()["bytes_read"]
        _, experts = engine.eval(ids(32, 512), want_all=False)
        got = engine.counters()
        assert experts is not None
        distinct = sum(len(np.unique(experts[il])) for il in range(3))
        assert got["hits"] + got["misses"] == distinct
        record = engine.ledger()["slot_bytes"]
        assert (got["bytes_read"] - start) <= got["misses"] * record


def test_lookahead_saves_reads_or_stops(tiny: Path) -> None:
    """It counts what it wastes, and turns itself off when that is more than it saves."""
    with Engine(tiny, ctx=2048, cache_experts=14) as engine:
        for token in ids(700, 512, 3):
            engine.eval([token], want_all=False, want_experts=False)
        one = engine.counters()
        for token in ids(300, 512, 9):
            engine.eval([token], want_all=False, want_experts=False)
        two = engine.counters()
    assert one["ahead_issued"] > 0
    assert one["ahead_useful"] + one["ahead_wasted"] <= one["ahead_issued"]
    if one["ahead_issued"] >= 512 and one["ahead_wasted"] > 2 * one["ahead_useful"]:
        assert two["ahead_issued"] - one["ahead_issued"] <= 256


def test_generator_makes_sane_weights(tmp_path: Path) -> None:
    """As the gguf package reads them: mean 0, the deviation that was meant, the same bytes for a seed."""
    a = make_olmoe.write(tmp_path / "a.gguf", "tiny", 3)
    assert a.read_bytes() == make_olmoe.write(tmp_path / "b.gguf", "tiny", 3).read_bytes()
    kinds = set()
    for t in gguf.GGUFReader(a).tensors:
        if len(t.shape) < 2:
            continue
        x = gguf.quants.dequantize(t.data, t.tensor_type)
        kinds.add(t.tensor_type.name)
        assert np.isfinite(x).all()
        gain = {"token_embd.weight": 9.0}.get(
            t.name, 0.7 if "_output." in t.name or "down" in t.name else 1.0
        )
        assert float(x.std()) == pytest.approx(gain / math.sqrt(int(t.shape[0])), rel=0.1), t.name
        assert abs(float(x.mean())) < 0.05 * float(x.std()), t.name
    assert kinds == {"Q4_K", "Q6_K", "F32"}
