"""Hours of generation with random prompts and hot swaps: ``python -m tests.memory.soak --minutes 60``.

After a warm-up anonymous memory, open files and threads must not change, and the same
prompt with the same seed must always give the same text from the same release.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from colibri_kit.native import Engine
from tests.memory import make_olmoe, proc

#: bytes that Python's own heap may wander; a leak of 1 KiB a round passes it within minutes
SLACK = 256 << 10
_WARM = 12  # rounds before the state counts
_KEPT = 16  # answers to compare with
_UNCOUNTED = 2 * _KEPT + _WARM  # until every answer was kept once
_LEAST = _UNCOUNTED + 30  # rounds, however short the time


@dataclass(frozen=True)
class Outcome:
    """What a soak saw; problems is empty when all is well."""

    rounds: int
    tokens: int
    swaps: int
    first: proc.State
    last: proc.State
    anon_spread: int
    problems: tuple[str, ...]


def _prompts(seed: int, n_vocab: int) -> Iterator[tuple[list[int], dict[str, Any]]]:
    rng = np.random.default_rng(seed)
    while True:
        n = int(rng.integers(1, 60))
        prompt = [int(t) for t in rng.integers(0, n_vocab, n)]
        yield (
            prompt,
            {
                "max_new": int(rng.integers(1, 60)),
                "temperature": float(rng.choice([0.0, 0.7, 1.2])),
                "top_k": int(rng.choice([0, 40])),
                "seed": int(rng.integers(1 << 32)),
            },
        )


def soak(models: tuple[Path, Path], seconds: float, *, seed: int = 1, **settings: Any) -> Outcome:
    """Runs until ``seconds`` are over, at least 74 rounds, changing the release every third round."""
    problems: list[str] = []
    kept: dict[tuple[int, int], tuple[list[int], dict[str, Any], list[int]]] = {}
    anon: list[int] = []
    first: proc.State | None = None
    rounds = tokens = 0
    start = time.monotonic()
    with Engine(models[0], hot_swap=True, ctx=128, **settings) as engine:
        prompts = _prompts(seed, engine.info()["n_vocab"])
        last = proc.state()
        while rounds < _LEAST or time.monotonic() - start < seconds:
            if rounds % 3 == 2:
                engine.swap(models[engine.counters()["swaps"] % 2 ^ 1])
            release = engine.counters()["swaps"] % 2
            again = kept.get((release, rounds % _KEPT))
            prompt, how, want = again if again else (*next(prompts), [])
            engine.reset()
            got, _, facts = engine.generate(prompt, **how)
            tokens += facts["n_gen"]
            if again and got != want:
                problems.append(f"round {rounds}: release {release} answered otherwise than before")
            kept.setdefault((release, rounds % _KEPT), (prompt, how, got))
            rounds += 1
            if rounds <= _UNCOUNTED:
                first = last = proc.state()
                continue
            last = proc.state()
            anon.append(last.rss_anon)
        swaps, bad = engine.counters()["swaps"], engine.counters()["unhealthy"]
    assert first is not None
    spread = max(anon, default=first.rss_anon) - min(anon, default=first.rss_anon)
    if spread > SLACK:
        problems.append(f"anonymous memory moved by {spread} bytes")
    if (last.fds, last.threads, last.locked) != (first.fds, first.threads, first.locked):
        problems.append(f"open files, threads or locked memory changed: {first} became {last}")
    if bad:
        problems.append(f"{bad} experts became unhealthy")
    return Outcome(rounds, tokens, swaps, first, last, spread, tuple(problems))


def main() -> int:
    parser = argparse.ArgumentParser(description="Generates for a long time and watches memory.")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--scale", choices=make_olmoe.SCALES, default="small")
    parser.add_argument("--budget", type=int, default=48, help="MiB")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    from tests.memory.models import convert

    with tempfile.TemporaryDirectory() as name:
        made = []
        for seed in (1, 2):
            source = make_olmoe.write(Path(name) / f"{seed}.gguf", args.scale, seed)
            made.append(convert(source, source.with_suffix(".coli")))
            source.unlink()
        got = soak(
            (made[0], made[1]), args.minutes * 60, seed=args.seed, budget=args.budget << 20,
            threads=args.threads,
        )  # fmt: skip
    sys.stdout.write(
        f"{got.rounds} rounds, {got.tokens} tokens, {got.swaps} hot swaps; RssAnon {got.last.rss_anon >> 10} "
        f"KiB, moved by {got.anon_spread >> 10} KiB; {got.last.fds} files, {got.last.threads} threads\n"
    )
    for problem in got.problems:
        sys.stdout.write(f"FAILED: {problem}\n")
    return 1 if got.problems else 0


if __name__ == "__main__":
    sys.exit(main())
