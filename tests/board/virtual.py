"""Virtual boards for tests: the kit's command line against guests that always come down again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
REFS = HERE.parent / "data" / "moe-refs" / "f32"


@dataclass(frozen=True)
class Ran:
    rc: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        doc: dict[str, Any] = json.loads(self.out)
        return doc


def command(*args: object) -> list[str]:
    return [sys.executable, "-m", "colibri_kit", *map(str, args)]


def kit(*args: object, timeout: float = 400, stdin: bytes = b"") -> Ran:
    """``colibri-kit ARGS`` in a process of its own."""
    done = subprocess.run(command(*args), input=stdin, capture_output=True, timeout=timeout, check=False)
    return Ran(
        done.returncode, done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace")
    )


def good(*args: object, timeout: float = 400) -> dict[str, Any]:
    """The JSON of a verb that must succeed."""
    ran = kit(*args, "--json", timeout=timeout)
    assert ran.rc == 0, f"{args}: {ran.rc}\n{ran.err}\n{ran.out}"
    return ran.json


@contextmanager
def board(profile: str, name: str, *options: object) -> Iterator[dict[str, Any]]:
    """A guest that is up inside the block; killed at its end, whatever happened."""
    try:
        yield good("board", "up", profile, "--as", name, "--fresh", *options)
    finally:
        kit("board", "down", name, "--power-cut", "--purge")


def inside(name: str, words: str, *, user: str = "board") -> str:
    """What a shell command on the board prints; it must succeed."""
    ran = kit("board", "ssh", f"{user}@{name}", words, timeout=240)
    assert ran.rc == 0, f"{words}: {ran.rc}\n{ran.err}{ran.out}"
    return ran.out


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def tiny_models(folder: Path, count: int) -> list[Path]:
    """Models of one geometry, 6 MB each, that differ in every shard."""
    from tests.memory import make_olmoe

    made = []
    for seed in range(count):
        source = make_olmoe.write(folder / f"{seed}.gguf", "tiny", seed)
        made.append(folder / f"{seed}.coli")
        ran = kit("convert", source, "-o", made[-1])
        assert ran.rc == 0, ran.err
        source.unlink()
    return made


def compile_standin(out: Path, *flags: str) -> Path:
    """The stand-in engine with `serve`, for a 64-bit ARM board."""
    subprocess.run(
        [sys.executable, "-m", "ziglang", "cc", "-target", "aarch64-linux-musl", "-mcpu=cortex_a53", "-Os",
         "-static", "-s", *flags, str(HERE / "serving.c"), "-o", str(out)],
        check=True, env={**os.environ, **zig_cache()},
    )  # fmt: skip
    return out


def zig_cache() -> dict[str, str]:
    from colibri_kit import resources

    cache = str(resources.cache_dir() / "zig")
    return {"ZIG_GLOBAL_CACHE_DIR": cache, "ZIG_LOCAL_CACHE_DIR": cache}
