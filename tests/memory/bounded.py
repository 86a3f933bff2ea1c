"""A model larger than its memory gives the bits of the resident run: a true limit, page cache included.

``python -m tests.memory.bounded --scale full --budget 1228 --tokens 500`` takes 10 GB of disk and
some minutes: OLMoE's geometry, 4.2 GB, in a memory cgroup of budget + 64 MiB. ``--guest`` uses a
QEMU guest with that little RAM instead (slow: emulated).
"""

from __future__ import annotations

import argparse
import hashlib
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from colibri_kit.bench import guest
from colibri_kit.bench.limit import memory_limit
from colibri_kit.config import load_board
from colibri_kit.toolchain.engine import build_engine
from tests.memory import make_olmoe
from tests.memory.models import convert, ids

#: besides the budget: code, kernel memory, a few pages of files
ROOM = 48 << 20


@dataclass(frozen=True)
class Run:
    """sha256 of the logits, and RssAnon + VmLck of every sample in bytes."""

    sha256: str
    samples: tuple[int, ...]
    peak: int | None


def command(
    engine: Path | str, model: Path | str, tokens: Path | str, out: Path | str, ctx: int
) -> list[str]:
    """One token at a time."""
    return [str(engine), "logits", "--model", str(model), "--tokens", str(tokens), "--output", str(out),
            "--batch", "1", "--ctx", str(ctx)]  # fmt: skip


def _held(pid: int) -> int | None:
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    found = [int(s.split()[1]) * 1024 for s in text.splitlines() if s.startswith(("RssAnon", "VmLck"))]
    return sum(found) if found else None


def run(argv: list[str], out: Path, limit: int) -> Run:
    """Runs under a cgroup of ``limit`` bytes, 0 = none, and samples every 20 ms."""
    if limit:
        with memory_limit(limit) as group:
            samples = _sample(group.wrap(argv))
            peak = group.peak()
    else:
        samples, peak = _sample(argv), None
    return Run(hashlib.sha256(out.read_bytes()).hexdigest(), samples, peak)


def _sample(argv: list[str]) -> tuple[int, ...]:
    child = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    samples = []
    while child.poll() is None:
        held = _held(child.pid)
        if held:
            samples.append(held)
        time.sleep(0.02)
    assert child.stderr is not None
    assert child.returncode == 0, child.stderr.read()
    return tuple(samples)


def in_guest(engine: Path, model: Path, tokens: Path, budget: int, ctx: int, work: Path) -> Run:
    """The same in a guest; BusyBox does the sampling."""
    disk = guest.make_disk({"colibri": engine, "m.coli": model, "t.npy": tokens}, work / "disk.img", _say)
    argv = [*command("/data/colibri", "/data/m.coli", "/data/t.npy", "/tmp/out.npy", ctx),
            "--budget", f"{budget >> 20}MiB"]  # fmt: skip
    script = f"""
{shlex.join(argv)} >/dev/null & p=$!
while kill -0 $p 2>/dev/null; do
  awk '/^(RssAnon|VmLck)/ {{ s += $2 }} END {{ if (s) print "held", s }}' /proc/$p/status 2>/dev/null
  sleep 0.2
done
wait $p || exit 1
echo sha $(sha256sum /tmp/out.npy)
"""
    # Half as much again: the root file system, logits included, lives in the guest's memory.
    text = guest.run(disk, script, guest.Limits(budget + budget // 2 + (96 << 20), cpus=1), _say)
    words = [line.split() for line in text.splitlines()]
    sha = next(w[1] for w in words if w[:1] == ["sha"])
    return Run(sha, tuple(int(w[1]) * 1024 for w in words if w[:1] == ["held"]), None)


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")


def check(model: Path, budget: int, n: int, work: Path, *, in_vm: bool = False) -> tuple[Run, Run]:
    """(resident, bounded); raises AssertionError when a bar is missed."""
    engine = build_engine(load_board("x86-gateway")).path
    vocab = make_olmoe.SCALES["full"].vocab if "full" in model.name else 2048
    tokens = work / "tokens.npy"
    np.save(tokens, np.array(ids(n, vocab), np.int32))
    size = sum(p.stat().st_size for p in model.iterdir())
    ctx = n + 16
    resident = run(command(engine, model, tokens, work / "a.npy", ctx), work / "a.npy", 0)
    if in_vm:
        bounded = in_guest(engine, model, tokens, budget, ctx, work)
    else:
        argv = [*command(engine, model, tokens, work / "b.npy", ctx), "--budget", f"{budget >> 20}MiB"]
        bounded = run(argv, work / "b.npy", budget + ROOM)
    assert size > 1.2 * (budget + ROOM), "the model fits: nothing is shown"
    assert bounded.sha256 == resident.sha256, "other bits than the resident run"
    assert len(bounded.samples) > 5
    assert max(bounded.samples) <= budget, f"{max(bounded.samples)} bytes were held, {budget} promised"
    return resident, bounded


def main() -> int:
    parser = argparse.ArgumentParser(description="Bits and memory under a true limit.")
    parser.add_argument("--scale", choices=("small", "full"), default="full")
    parser.add_argument("--model", type=Path, help="a converted one")
    parser.add_argument("--budget", type=int, default=1228, help="MiB")
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--guest", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        model = args.model
        if model is None:
            source = make_olmoe.write(work / f"{args.scale}.gguf", args.scale)
            model = convert(source, work / f"{args.scale}.coli")
            source.unlink()
        begin = time.monotonic()
        _, got = check(model, args.budget << 20, args.tokens, work, in_vm=args.guest)
    sys.stdout.write(
        f"{args.tokens} tokens, logits equal ({got.sha256[:16]}…); RssAnon + locked at most "
        f"{max(got.samples) / 2**20:.1f} of {args.budget} MiB in {len(got.samples)} samples; "
        f"cgroup peak {(got.peak or 0) / 2**20:.0f} MiB; {time.monotonic() - begin:.0f} s\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
