"""Faults on purpose: each answer is right or says that it is not; nothing hangs, nothing leaks."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from colibri_kit.convert.check import read_directories
from colibri_kit.errors import FormatError, KitError
from colibri_kit.native import Engine
from tests.memory import proc
from tests.memory.models import ids, olmoe

N_VOCAB, LAYERS, EXPERTS = 512, 3, 16
TOKENS = ids(40, N_VOCAB, 11)
Hook = Callable[[int, int, int], int]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return olmoe(tmp_path_factory, "tiny")


@pytest.fixture
def model(whole: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(whole, tmp_path / "m.coli"))


@pytest.fixture(scope="module")
def reference(whole: Path) -> tuple[np.ndarray, np.ndarray]:
    """Logits [T][vocab] and experts [layer][T][used] of TOKENS, everything resident."""
    with Engine(whole, ctx=128) as engine:
        logits, experts = engine.eval(TOKENS)
    assert logits is not None and experts is not None
    return logits, experts


def place(model: Path, layer: int, expert: int) -> tuple[Path, int, int]:
    """(shard, offset, size) of a record."""
    for shard in sorted(model.glob("experts-*.coli")):
        for r in read_directories(shard)[2]:
            if (r.layer, r.expert) == (layer, expert):
                return shard, r.offset, r.size
    raise AssertionError("no such record")


def victim(reference: tuple[np.ndarray, np.ndarray]) -> tuple[int, int, int]:
    """(token, layer, expert): chosen there for the first time, and not among those filled at start."""
    seen: set[tuple[int, int]] = set()
    for t in range(len(TOKENS)):
        for il in range(LAYERS):
            for e in reference[1][il, t]:
                if t > 5 and e >= 4 and (il, int(e)) not in seen:
                    return t, il, int(e)
                seen.add((il, int(e)))
    raise AssertionError("every expert is used at once")


def flip(model: Path, layer: int, expert: int) -> None:
    shard, offset, size = place(model, layer, expert)
    with shard.open("r+b") as f:
        f.seek(offset + size // 3)
        byte = f.read(1)[0]
        f.seek(offset + size // 3)
        f.write(bytes([byte ^ 16]))
        os.fsync(f.fileno())


def run(engine: Engine, tokens: list[int]) -> np.ndarray:
    return np.stack([engine.eval([t], want_experts=False)[0][0] for t in tokens])  # type: ignore[index]


STREAM: dict[str, Any] = {"ctx": 128, "cache_experts": 6, "lookahead": False}
MMAP: dict[str, Any] = {"ctx": 128, "weights": "mmap"}
LAZY: dict[str, Any] = {"ctx": 128, "weights": "lazy", "lazy_block_mib": 1}


@pytest.mark.parametrize("mode", [STREAM, MMAP, LAZY], ids=str)
def test_a_flipped_byte_fails_the_request_and_names_the_expert(
    model: Path, reference: tuple[np.ndarray, np.ndarray], mode: dict[str, Any]
) -> None:
    t, layer, expert = victim(reference)
    with Engine(model, **mode) as engine:
        flip(model, layer, expert)
        assert np.array_equal(run(engine, TOKENS[:t]), reference[0][:t])
        with pytest.raises(KitError, match=f"layer {layer}, expert {expert}") as caught:
            engine.eval([TOKENS[t]])
        assert caught.value.code == "CK-ENGINE-EXPERT"
        counters = engine.counters()
        assert (counters["unhealthy"], counters["retries"], counters["degraded"]) == (1, 1, 0)
        engine.reset()  # the process lives, and answers what it can answer, rightly
        assert np.array_equal(run(engine, TOKENS[:t]), reference[0][:t])
        with pytest.raises(KitError, match="unhealthy"):
            engine.eval([TOKENS[t]])


@pytest.mark.parametrize("mode", [STREAM, MMAP], ids=str)
def test_on_bad_next_answers_and_says_degraded(
    model: Path, reference: tuple[np.ndarray, np.ndarray], mode: dict[str, Any]
) -> None:
    t, layer, expert = victim(reference)
    with Engine(model, on_bad="next", **mode) as engine:
        flip(model, layer, expert)
        assert np.array_equal(run(engine, TOKENS[:t]), reference[0][:t])
        assert engine.counters()["degraded"] == 0
        logits, experts = engine.eval([TOKENS[t]])
        assert experts is not None and logits is not None
        assert expert not in experts[layer, 0] and len(set(experts[layer, 0].tolist())) == 4
        assert set(reference[1][layer, t].tolist()) - {expert} < set(experts[layer, 0].tolist())
        assert np.isfinite(logits).all() and not np.array_equal(logits[0], reference[0][t])
        assert engine.counters()["degraded"] == 1 and engine.counters()["unhealthy"] == 1
        engine.reset()
        _, _, facts = engine.generate(TOKENS[: t + 1], 2)
        assert facts["degraded"] >= 1


@pytest.mark.parametrize(
    "mode",
    [STREAM, MMAP, LAZY],
    ids=str,
)
def test_a_shard_truncated_while_running(
    model: Path, reference: tuple[np.ndarray, np.ndarray], mode: dict[str, Any]
) -> None:
    """Short reads, and SIGBUS in the mapped modes, are the expert's fault and not the process's end."""
    with Engine(model, **mode) as engine:
        assert np.array_equal(run(engine, TOKENS[:2]), reference[0][:2])
        for shard in model.glob("experts-*.coli"):
            os.truncate(shard, 16384)
        with pytest.raises(KitError, match=r"layer .*expert") as caught:
            for t in TOKENS[2:]:
                engine.eval([t])
        assert caught.value.code == "CK-ENGINE-EXPERT"
        assert engine.counters()["unhealthy"] >= 1
        assert engine.encode("he")  # alive


def test_one_io_error_is_read_again(whole: Path, reference: tuple[np.ndarray, np.ndarray]) -> None:
    _, layer, expert = victim(reference)
    _, offset, _ = place(whole, layer, expert)
    failed: list[int] = []

    def hook(_shard: int, at: int, _n: int) -> int:
        if at == offset and not failed:
            failed.append(at)
            return errno.EIO
        return 0

    with Engine(whole, io_hook=hook, **STREAM) as engine:
        assert np.array_equal(run(engine, TOKENS), reference[0])
        counters = engine.counters()
    assert failed and (counters["retries"], counters["unhealthy"]) == (1, 0)


def test_lasting_io_errors_name_expert_and_cause(
    whole: Path, reference: tuple[np.ndarray, np.ndarray]
) -> None:
    t, layer, expert = victim(reference)
    _, offset, _ = place(whole, layer, expert)
    hook: Hook = lambda _s, at, _n: errno.EIO if at == offset else 0  # noqa: E731
    with Engine(whole, io_hook=hook, **STREAM) as engine:
        run(engine, TOKENS[:t])
        with pytest.raises(KitError, match=f"layer {layer}, expert {expert}.*{os.strerror(errno.EIO)}"):
            engine.eval([TOKENS[t]])


def test_a_second_fault_during_recovery(whole: Path, reference: tuple[np.ndarray, np.ndarray]) -> None:
    """The replacement is unreadable too: the one after it answers; both are counted, none is used."""
    t, layer, expert = victim(reference)
    bad = {place(whole, layer, expert)[1]: expert}
    with Engine(whole, on_bad="next", io_hook=lambda _s, at, _n: 5 if at in bad else 0, **STREAM) as engine:
        run(engine, TOKENS[:t])
        _, experts = engine.eval([TOKENS[t]])
        assert experts is not None
        second = (set(experts[layer, 0].tolist()) - set(reference[1][layer, t].tolist())).pop()
    bad[place(whole, layer, second)[1]] = second
    with Engine(whole, on_bad="next", io_hook=lambda _s, at, _n: 5 if at in bad else 0, **STREAM) as engine:
        for token in TOKENS[:t]:
            engine.eval([token])
        before = engine.counters()
        _, experts = engine.eval([TOKENS[t]])
        after = engine.counters()
        assert experts is not None
        assert not {expert, second} & set(experts[layer, 0].tolist())
        assert after["unhealthy"] == 2 and after["degraded"] > before["degraded"]


def test_every_expert_of_a_layer_lost(whole: Path) -> None:
    """Fewer are left than a token needs: an error, not a loop."""
    offsets = {place(whole, 1, e)[1] for e in range(EXPERTS)}
    broken: list[int] = []
    hook: Hook = lambda _s, at, _n: 5 if broken and at in offsets else 0  # noqa: E731
    with Engine(whole, on_bad="next", io_hook=hook, **STREAM) as engine:
        broken.append(1)
        with pytest.raises(KitError, match="layer 1"):
            for token in TOKENS:
                engine.eval([token])
        assert engine.counters()["unhealthy"] > EXPERTS - 4


def test_a_deleted_shard(model: Path, reference: tuple[np.ndarray, np.ndarray]) -> None:
    """An open engine keeps its files; a new one says what is missing."""
    with Engine(model, **STREAM) as engine:
        for shard in model.glob("experts-*.coli"):
            shard.unlink()
        assert np.array_equal(run(engine, TOKENS), reference[0])
    with pytest.raises(KitError, match=r"experts-0000\.coli"):
        Engine(model, **STREAM)


def test_slow_storage_changes_nothing_and_the_watchdog_sees_it(
    whole: Path, reference: tuple[np.ndarray, np.ndarray]
) -> None:
    stuck: list[tuple[int, int, int]] = []
    slow = threading.Event()

    def hook(_shard: int, _at: int, _n: int) -> int:
        if slow.is_set():
            time.sleep(0.03)
        return 0

    with Engine(
        whole, io_hook=hook, token_deadline_ms=25, on_stuck=lambda *a: stuck.append(a), readers=1, **STREAM
    ) as engine:
        slow.set()
        assert np.array_equal(run(engine, TOKENS[:8]), reference[0][:8])
        counters = engine.counters()
    assert counters["stuck"] == len(stuck) > 0
    assert all(0 <= layer < LAYERS and -1 <= expert < EXPERTS and ms >= 25 for layer, expert, ms in stuck)
    assert any(expert >= 0 for _, expert, _ in stuck)


def test_zeros_on_a_miss_are_counted(whole: Path, reference: tuple[np.ndarray, np.ndarray]) -> None:
    with Engine(whole, ctx=128, cache_experts=12, on_miss="zeros") as engine:
        _, _, facts = engine.generate(TOKENS[:4], 12)
        assert facts["zeros"] == engine.counters()["zeros"] > 0
    with Engine(whole, ctx=128, on_miss="zeros") as engine:  # nothing misses: nothing is lost
        assert np.array_equal(run(engine, TOKENS), reference[0])
        assert engine.counters()["zeros"] == 0


# ---- hot swap -----------------------------------------------------------------


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return olmoe(tmp_path_factory, "tiny", seed=2)


@pytest.mark.parametrize("mode", [STREAM, MMAP, LAZY], ids=str)
def test_a_thousand_hot_swaps(
    whole: Path, other: Path, reference: tuple[np.ndarray, np.ndarray], mode: dict[str, Any]
) -> None:
    """Each answer is the right model's; memory, files and threads end where they began."""
    n = 1000 if mode is STREAM else 60
    with Engine(other, ctx=128) as engine:
        second = run(engine, TOKENS[:3])
    want = (reference[0][:3], second)
    with Engine(whole, hot_swap=True, threads=2, **mode) as engine:
        for i in range(1, 11):  # both models' tables and pools are warm
            engine.swap((whole, other)[i % 2])
        run(engine, TOKENS[:3])
        before = proc.state()
        for i in range(1, n + 1):
            engine.swap((whole, other)[i % 2])
            if i % 50 < 2:
                assert np.array_equal(run(engine, TOKENS[:3]), want[i % 2]), i
        after = proc.state()
        assert engine.counters()["swaps"] == n + 10
    assert abs(after.rss_anon - before.rss_anon) <= 64 << 10
    assert (after.fds, after.threads, after.locked) == (before.fds, before.threads, before.locked)


def test_a_bad_release_is_refused_and_the_old_one_stays(
    model: Path, whole: Path, other: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory,
    reference: tuple[np.ndarray, np.ndarray],
) -> None:  # fmt: skip
    broken = Path(shutil.copytree(other, tmp_path / "broken.coli"))
    flip(broken, 1, 3)
    lying = Path(shutil.copytree(other, tmp_path / "lying.coli"))
    text = (lying / "manifest.json").read_text()
    golden = text.split('"sha256": "')[-1][:64]
    (lying / "manifest.json").write_text(text.replace(golden, "0" * 64))
    before = proc.state()
    with Engine(whole, hot_swap=True, **STREAM) as engine:
        for bad in (tmp_path / "none.coli", broken, lying, olmoe(tmp_path_factory, "small")):
            run(engine, TOKENS[:2])
            with pytest.raises(KitError):
                engine.swap(bad)
            engine.reset()
            assert np.array_equal(run(engine, TOKENS), reference[0]), bad
        engine.swap(other)
        assert engine.info()["model_id"] in (other / "manifest.json").read_text()
    assert proc.state().fds == before.fds


def test_swap_needs_its_room(whole: Path, other: Path) -> None:
    with Engine(whole, **STREAM) as engine, pytest.raises(KitError):
        engine.swap(other)


def test_damage_at_start_is_refused(model: Path) -> None:
    """With every expert resident nothing is left to chance: open fails."""
    flip(model, 2, 15)
    before = proc.state()
    for weights in ("arena", "preload"):
        with pytest.raises(FormatError, match="layer 2, expert 15"):
            Engine(model, ctx=64, weights=weights)
    after = proc.state()
    assert (after.fds, after.threads) == (before.fds, before.threads)
