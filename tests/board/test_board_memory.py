"""A model of 1.2 GiB on a board with 512 MiB: the host's bits, within the budget. The guest's RAM is
a true limit, page cache and kernel included."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.memory import make_olmoe
from tests.memory.bounded import command
from tests.memory.models import ids
from virtual import board, good, inside, kit

pytestmark = pytest.mark.timeout(900)  # an emulated board on a busy machine is slow

RAM = 512 << 20
BUDGET = 256 << 20
TOKENS = 24
CTX = 64
SAMPLED = r"""
cd /data && "$@" >said 2>&1 & p=$!
while kill -0 $p 2>/dev/null; do
  awk '/^(RssAnon|VmLck)/ { s += $2 } END { if (s) print "held", s }' /proc/$p/status 2>/dev/null
  sleep 0.3
done
wait $p || { cat /data/said; exit 1; }
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, a53_engine: Path) -> Path:
    """What the data disk begins with: the model, the board's engine, token ids."""
    out = tmp_path_factory.mktemp("wide")
    (out / "data").mkdir()
    source = make_olmoe.write(out / "wide.gguf", "wide")
    ran = kit("convert", source, "-o", out / "data" / "m.coli", timeout=800)
    assert ran.rc == 0, ran.err
    source.unlink()
    engine = out / "data" / "engine"
    engine.write_bytes(a53_engine.read_bytes())
    engine.chmod(0o755)
    np.save(out / "data" / "tokens.npy", np.array(ids(TOKENS, make_olmoe.SCALES["wide"].vocab), np.int32))
    return out / "data"


@pytest.fixture(scope="module")
def big(board_dir: Path, folder: Path) -> Iterator[dict[str, Any]]:
    with board("virt-a53", "big", "--ram", "512MiB", "--disk", "2GiB", "--data", folder) as told:
        inside("big", "chown 1000:1000 /data", user="root")
        yield told


@pytest.fixture(scope="module")
def resident(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The logits of a run on this machine that holds the whole model. Its hash."""
    work = tmp_path_factory.mktemp("host")
    good("build", "--board", "host", "-o", work / "engine")
    out = work / "logits.npy"
    argv = command(work / "engine", folder / "m.coli", folder / "tokens.npy", out, CTX)
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, timeout=600)
    assert out.stat().st_size > TOKENS * make_olmoe.SCALES["wide"].vocab * 4
    return hashlib.sha256(out.read_bytes()).hexdigest()


def held(words: str) -> list[int]:
    """Bytes of anonymous and locked memory, sample by sample."""
    return [int(line.split()[1]) << 10 for line in words.splitlines() if line.startswith("held ")]


def run(argv: list[str]) -> list[int]:
    script = SAMPLED.replace('"$@"', " ".join(argv))
    ran = kit("board", "ssh", "big", script, timeout=800)
    assert ran.rc == 0, ran.out + ran.err
    return held(ran.out)


def limited(*words: str) -> list[str]:
    return [*words, "--budget", f"{BUDGET >> 20}MiB", "--weights", "arena"]


def test_it_cannot_be_resident_there(big: dict[str, Any], folder: Path) -> None:
    size = sum(p.stat().st_size for p in (folder / "m.coli").iterdir())
    total = int(inside("big", "sed -n 's/^MemTotal: *//p' /proc/meminfo").split()[0]) << 10
    assert size > 1.2 * 2**30 and total < RAM and size > 2.4 * total
    assert inside("big", "grep -c '^SwapTotal: *0 kB' /proc/meminfo") == "1\n"


def test_the_hosts_bits_within_the_budget(big: dict[str, Any], resident: str) -> None:
    seen = run(limited(*command("./engine", "m.coli", "tokens.npy", "out.npy", CTX)))
    assert inside("big", "sha256sum </data/out.npy").split()[0] == resident
    assert len(seen) > 5 and BUDGET // 2 < max(seen) <= BUDGET


def test_golden_and_text(big: dict[str, Any], folder: Path) -> None:
    """`check` reproduces the converter's golden; `run` says what this machine says."""
    seen = run(limited("./engine", "check", "--model", "m.coli"))
    said = inside("big", "cat /data/said")
    golden = json.loads((folder / "m.coli" / "manifest.json").read_text())["golden"]["sha256"]
    assert f"golden ok {golden}" in said and max(seen) <= BUDGET
    words = ["run", "--prompt", "hehe", "-n", "6", "--temp", "0", "--ctx", str(CTX)]
    seen = run(limited("./engine", *words, "--model", "m.coli", "--json"))
    there = json.loads(inside("big", "grep '^{' /data/said"))
    here = good("run", folder / "m.coli", *words[1:])
    assert there["text"] == here["text"] and max(seen) <= BUDGET
    cache = there["cache"]
    assert cache["misses"] > 0 and cache["evictions"] > 0 and not there["lossy"]


def test_held_whole_it_is_refused_with_the_sum(big: dict[str, Any]) -> None:
    """What the board cannot hold is an error that says so, not an out-of-memory kill."""
    ran = kit(
        "board", "ssh", "big", "cd /data && ./engine check --model m.coli --weights preload", timeout=800
    )
    assert ran.rc == 4, ran.out + ran.err
    assert "experts 1370.4 (1392 of 1392)" in ran.err and "the machine has" in ran.err
    assert inside("big", "dmesg | grep -ci 'out of memory'; true", user="root") == "0\n"
