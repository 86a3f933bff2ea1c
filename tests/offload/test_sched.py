"""Bars 3 and 4: the engine's split is as good as the best of all; slow storage makes the link pay."""

from __future__ import annotations

import ctypes as ct
import itertools
import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from colibri_kit.offload import bench
from tests.memory import models

from .conftest import eb

BINS, LEVELS = 9, 17


class Sched(ct.Structure):
    _fields_ = (
        ("here", ct.c_double * BINS), ("there", ct.c_double * BINS), ("latency", ct.c_double),
        ("byte", ct.c_double),
    )  # fmt: skip


class Layer(ct.Structure):
    _fields_ = (
        ("n", ct.c_uint32), ("rows", ct.POINTER(ct.c_uint32)), ("missing", ct.POINTER(ct.c_uint8)),
        ("shared", ct.c_double), ("shared_rows", ct.c_uint32), ("read", ct.c_double * LEVELS),
        ("row_up", ct.c_uint64), ("row_down", ct.c_uint64),
        ("token_up", ct.c_uint64), ("tokens", ct.c_uint32), ("frame", ct.c_uint64),
    )  # fmt: skip


@pytest.fixture(scope="module")
def lib() -> Any:
    library = eb.library("offload/sched.c")
    library.cb_sched_time.restype = ct.c_double
    return library


def layer(missing: list[int], read_ms: float) -> tuple[Layer, Any]:
    n = len(missing)
    rows, flags = (ct.c_uint32 * n)(*[1] * n), (ct.c_uint8 * n)(*missing)
    made = Layer(n=n, rows=rows, missing=flags, row_up=8, row_down=8192, token_up=2336, tokens=1)
    made.read[1] = read_ms * 1e6
    return made, (rows, flags)


def split(lib: Any, sched: Sched, made: Layer) -> tuple[int, list[int]]:
    order, there = (ct.c_uint32 * made.n)(), ct.c_double()
    lib.cb_sched_order(ct.byref(made), order)
    k = lib.cb_sched_split(ct.byref(sched), ct.byref(made), order, ct.byref(there))
    return k, list(order)


def true_time(sched: Sched, made: Layer, missing: list[int], away: tuple[int, ...]) -> float:
    """Written afresh, not from sched.c: reads one after the other, each computed when it is there;
    the module's work and the wire's are one after the other."""
    wire = sum(8200 for _ in away) + (2336 if away else 0)
    there = sched.latency + wire * sched.byte + len(away) * sched.there[0] if away else 0.0
    clock_io, clock_cpu = 0.0, 0.0
    stay = [x for x in range(made.n) if x not in away]
    for x in sorted(stay, key=lambda i: missing[i]):
        ready = 0.0
        if missing[x]:
            clock_io += made.read[1]
            ready = clock_io
        clock_cpu = max(clock_cpu, ready) + sched.here[0]
    return max(clock_cpu, there)


def test_within_a_tenth_of_the_best_of_all_subsets(lib: Any) -> None:
    """300 random machines, links and cache states; every subset of 8 experts is tried."""
    rng, worst = random.Random(4), 1.0
    for _ in range(300):
        sched = Sched(latency=rng.uniform(1e4, 3e6), byte=1e9 / 10 ** rng.uniform(5.5, 8.5))
        sched.here[0], sched.there[0] = 10 ** rng.uniform(4.5, 7), 10 ** rng.uniform(4.5, 7)
        missing = [int(rng.random() < 0.5) for _ in range(8)]
        made, _keep = layer(missing, 10 ** rng.uniform(-0.5, 2))
        k, order = split(lib, sched, made)
        best = min(
            true_time(sched, made, missing, away)
            for size in range(9)
            for away in itertools.combinations(range(8), size)
        )
        chosen = true_time(sched, made, missing, tuple(order[:k]))
        worst = max(worst, chosen / best)
    assert worst < 1.10


def test_missing_experts_go_first(lib: Any) -> None:
    made, _keep = layer([0, 1, 0, 1, 0], 10.0)
    sched = Sched(latency=1e5, byte=100.0)
    sched.here[0] = sched.there[0] = 1e6
    k, order = split(lib, sched, made)
    assert set(order[:2]) == {1, 3} and 2 <= k < 5


def test_a_hopeless_link_gets_nothing(lib: Any) -> None:
    made, _keep = layer([0] * 8, 0.0)
    sched = Sched(latency=5e8, byte=1e5)
    sched.here[0] = sched.there[0] = 1e5
    assert split(lib, sched, made)[0] == 0


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.olmoe(tmp_path_factory, "tiny")


@pytest.mark.parametrize(
    ("rate", "delay_ms", "storage"), [(80e3, 5.0, 6e6), (30e3, 0.0, 6e6), (40e3, 0.0, 5e6), (1e6, 40.0, 4e6)]
)
def test_chosen_split_against_all_of_them(tiny: Path, rate: float, delay_ms: float, storage: float) -> None:
    """The real engine over a throttled link, every miss read from slow storage.

    Slow enough (tens of milliseconds a layer) for sleeps to dominate. Other programs on this machine only
    ever slow a run down, so the best of each counts, over up to three rounds if they were disturbed.
    """
    setting = bench.Setting(
        tiny, eb.tool(), bytes_s=rate, delay_s=delay_ms / 1e3, storage_bytes_s=storage,
        cache_experts=0, tokens=12, threads=1, sweep=True,
    )  # fmt: skip
    runs: list[bench.Result] = []
    best = chosen = 0.0
    while len(runs) < 3 and (not runs or chosen <= 0.9 * best):
        runs.append(bench.run(setting))
        best = max(s.tok_s for r in runs for s in r.splits)
        chosen = max(r.offload_tok_s for r in runs)
    assert chosen > 0.9 * best, [(r.offload_tok_s, r.splits) for r in runs]
    assert best > 1.15 * max(r.splits[0].tok_s for r in runs)  # there was something to choose


def test_slow_storage_and_30_mb_s_at_least_double(tiny: Path) -> None:
    """Bar 4, as `colibri-kit offload bench` shows it: 20 MB/s, a quarter of the experts cached."""
    done = subprocess.run(
        [
            sys.executable, "-m", "colibri_kit", "offload", "bench", "--model", tiny, "--engine", eb.tool(),
            "--rate", "30", "--delay", "0.1", "--storage", "20", "--cache-experts", "12", "--threads", "1",
            "--tokens", "24", "--json",
        ],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    got = json.loads(done.stdout)
    assert got["speedup"] >= 2.0, got
    assert got["offload_tok_s"] / got["local_tok_s"] == pytest.approx(got["speedup"])
    assert got["remote_share"] > 0.2
    assert 0 < got["break_even_missing_bytes_s"] < 30e6


def test_break_even_is_where_the_engine_turns(tiny: Path) -> None:
    """Well below the rate that `offload bench` calls break-even nothing goes, well above it much."""
    base = bench.Setting(
        tiny,
        eb.tool(),
        bytes_s=200e3,
        delay_s=0.0,
        storage_bytes_s=6e6,
        cache_experts=0,
        tokens=12,
        threads=1,
    )
    rate = bench.run(base).break_even_missing_bytes_s
    assert rate is not None
    below, above = (bench.run(replace(base, bytes_s=rate * times)) for times in (1 / 6, 6))
    assert below.remote_share < 0.05 and below.verdict.startswith(("no: ", "hardly: ")), below
    assert above.remote_share > 0.3 and above.speedup > 1.3 and above.verdict.startswith("yes: "), above
