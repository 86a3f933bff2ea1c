"""Half a minute of every fuzzer, two at a time; the long form is python -m tests.fuzz."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fuzz.run import Result, fuzz, start
from tests.fuzz.targets import NATIVE, ROOT, TARGETS

SECONDS = float(os.environ.get("FUZZ_SECONDS", "30"))
HERE = [name for name in TARGETS if name != "frame"]  # that one: tests/offload/test_fuzz.py


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Result]]]:
    with ThreadPoolExecutor(2) as pool:
        yield {n: pool.submit(fuzz, TARGETS[n], SECONDS, tmp_path_factory.mktemp(n)) for n in HERE}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", HERE)
def test_no_finding(runs: dict[str, Future[Result]], name: str) -> None:
    result = runs[name].result()
    assert result.finding == "", result.finding
    assert result.runs > 100 * SECONDS, result  # a harness that hardly runs proves nothing
    assert 0 < result.rss_mb <= 512


LARGE = """
import sys
from pathlib import Path
big = bytearray(900 << 20)
for i in range(0, len(big), 4096):
    big[i] = 1
del big
from tests.fuzz.run import fuzz
from tests.fuzz.targets import TARGETS
print(fuzz(TARGETS["json"], 2, Path(sys.argv[1])).finding or "fine")
"""


def test_a_large_parent_is_no_finding(tmp_path: Path) -> None:
    """Its peak of memory is not the fuzzer's: see run.py."""
    done = subprocess.run(
        [sys.executable, "-c", LARGE, tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=200,
    )
    assert done.stdout == "fine\n"


def test_a_fault_is_a_finding(tmp_path: Path) -> None:
    """The same harness over a parser that takes a second Host."""
    right = (NATIVE / "serve/http.c").read_text()
    wrong = right.replace("if (h->n_host++ > 0)", "if (h->n_host++ > 1)")
    assert wrong != right
    (tmp_path / "http.c").write_text(wrong)
    sources = [str(tmp_path / "http.c") if s == "serve/http.c" else s for s in TARGETS["http"].sources]
    result = fuzz(replace(TARGETS["http"], sources=tuple(sources)), 5, tmp_path)
    assert "deadly signal" in result.finding
    assert len(list(tmp_path.glob("crash-*"))) == 1


@pytest.mark.parametrize("name", HERE)
def test_the_seeds_are_small_and_pass(name: str, tmp_path: Path) -> None:
    target = TARGETS[name]
    seeds = sorted(target.seeds.iterdir())
    assert 3 <= len(seeds) <= 200
    assert sum(p.stat().st_size for p in seeds) <= 150_000
    done = start(target, *map(str, seeds), folder=tmp_path, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stderr.count("Executed ") == len(seeds)
