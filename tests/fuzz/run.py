"""Builds a target and runs it for a while from its kept seeds, inside fixed memory.

libFuzzer measures memory with getrusage(), and Linux hands the peak of the process that
called exec() on to the new program: started from a large pytest, a fuzzer would find its
limit passed before the first input. Therefore it is started by a small shell, whose
child inherits nothing.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz.targets import NATIVE, ROOT, Target

CACHE = ROOT / "build" / "test-objects"
#: of the whole fuzzer: corpus, sanitizer's shadow and quarantine included
RSS_LIMIT_MB = 512
INPUT_S = 10  # one input may take that long
FLAGS = (
    "-std=c11", "-g", "-O1", "-fsanitize=fuzzer,address,undefined", "-fno-sanitize-recover=all",
    "-D_POSIX_C_SOURCE=200809L", "-I.", "-Iinclude",
)  # fmt: skip
_SMALL = ("sh", "-c", '"$@"; exit $?', "sh")  # see above; the exit keeps the shell alive


class FuzzError(Exception):
    """A target cannot be built or run here."""


@dataclass(frozen=True)
class Result:
    """What a run found.

    Attributes:
        runs: inputs tried.
        edges: of the code, covered by the corpus.
        rss_mb: the peak.
        finding: the end of the fuzzer's words when an input failed, else empty.
    """

    target: str
    runs: int
    edges: int
    rss_mb: int
    finding: str

    def __str__(self) -> str:
        end = f"FINDING\n{self.finding}" if self.finding else "no finding"
        return f"{self.target:9} {self.runs:>10} inputs, {self.edges:>5} edges, {self.rss_mb:>4} MB: {end}"


def clang() -> str:
    """clang with libFuzzer; tests/system_packages.py installs it."""
    for name in ("clang", "clang-14", "clang-16", "clang-19"):
        if found := shutil.which(name):
            return found
    raise FuzzError("clang is missing: apt-get install clang libclang-rt-14-dev")


def build(target: Target) -> Path:
    """The target's program, kept by content."""
    sources = [
        p
        for pattern in target.sources
        for p in ([Path(pattern)] if pattern.startswith("/") else sorted(NATIVE.glob(pattern)))
    ]
    if not sources:
        raise FuzzError(f"{target.name} has no sources")
    digest = hashlib.sha256(repr((clang(), FLAGS, target.defines)).encode())
    for path in [*sources, *sorted(NATIVE.rglob("*.h")), *sorted(NATIVE.rglob("*.inc"))]:
        digest.update(path.name.encode() + path.read_bytes())
    out = CACHE / f"fuzz-{target.name}-{digest.hexdigest()[:32]}"
    if not out.is_file():
        CACHE.mkdir(parents=True, exist_ok=True)
        handle, temp = tempfile.mkstemp(dir=CACHE)
        os.close(handle)
        words = [clang(), *FLAGS, *(f"-D{d}" for d in target.defines), *map(str, sources), "-lm", "-o", temp]
        done = subprocess.run(words, cwd=NATIVE, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise FuzzError(f"{target.name} does not build:\n{done.stderr[-2000:]}")
        Path(temp).chmod(0o755)
        Path(temp).replace(out)
    return out


def program(target: Target, folder: Path) -> Path:
    """What is run. libFuzzer starts its own name again to merge, so Python gets one that can be."""
    if target.sources:
        return build(target)
    script = folder / "fuzz-gguf"
    words = shlex.join([sys.executable, "-m", "tests.fuzz.gguf"])
    script.write_text(f'#!/bin/sh\nFUZZ_SELF="$0" exec {words} "$@"\n')
    script.chmod(0o755)
    return script


def start(target: Target, *words: str, folder: Path, timeout: float) -> subprocess.CompletedProcess[str]:
    """The target's program with libFuzzer's options, at work in ``folder``."""
    env = {
        **os.environ,
        "ASAN_OPTIONS": "quarantine_size_mb=16:allocator_may_return_null=1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kit")]),
    }
    limits = [f"-rss_limit_mb={RSS_LIMIT_MB}", f"-timeout={INPUT_S}", f"-max_len={target.max_len}"]
    return subprocess.run(
        [*_SMALL, str(program(target, folder)), *limits, *words],
        cwd=folder, env=env, capture_output=True, text=True, errors="replace", check=False, timeout=timeout,
    )  # fmt: skip


def fuzz(target: Target, seconds: float, folder: Path) -> Result:
    """Runs from the kept seeds; new inputs and a failing one lie in ``folder`` afterwards."""
    corpus = folder / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    words = [
        f"-max_total_time={max(int(seconds), 1)}",
        "-print_final_stats=1",
        str(corpus),
        str(target.seeds),
    ]
    done = start(target, *words, folder=folder, timeout=2 * seconds + 240)
    figures = dict(re.findall(r"^stat::(\w+):\s+(\d+)", done.stderr, re.M))
    edges = [int(n) for n in re.findall(r" cov: (\d+) ", done.stderr)]
    failed = done.returncode != 0 or "Done " not in done.stderr
    return Result(
        target.name,
        int(figures.get("number_of_executed_units", 0)),
        max(edges, default=0),
        int(figures.get("peak_rss_mb", 0)),
        f"status {done.returncode}, {folder}\n{done.stderr[-4000:]}" if failed else "",
    )


#: of one target's kept seeds
SEED_FILES, SEED_BYTES, SEED_EACH = 100, 60_000, 6000


def keep(target: Target, folder: Path) -> int:
    """Adds a smallest set of ``folder``'s corpus that covers as much to the kept seeds."""
    small = folder / "small"
    small.mkdir()
    done = start(
        target, "-set_cover_merge=1", str(small), str(target.seeds), str(folder / "corpus"),
        folder=folder, timeout=600,
    )  # fmt: skip
    if done.returncode != 0:
        raise FuzzError(f"{target.name}: the corpora do not merge:\n{done.stderr[-2000:]}")
    have = {p.read_bytes() for p in target.seeds.iterdir()}
    total, added = sum(map(len, have)), 0
    for path in sorted(small.iterdir(), key=lambda p: p.stat().st_size):
        data = path.read_bytes()
        if data in have or len(data) > SEED_EACH:
            continue
        if len(have) + added >= SEED_FILES or total + len(data) > SEED_BYTES:
            break
        (target.seeds / hashlib.sha256(data).hexdigest()[:12]).write_bytes(data)
        total, added = total + len(data), added + 1
    return added
