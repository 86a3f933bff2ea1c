"""The engine and llama.cpp's mmap on one model under the same memory limit, share by share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colibri_kit.bench.limit import memory_limit
from colibri_kit.errors import BuildError, EngineError

#: on top of the model's share, for both: interpreter, libraries, kernel, KV cache, activations
OVERHEAD = 192 << 20
#: what of a limit the engine may not plan with: the interpreter that drives it, and the kernel's part
_OUTSIDE = 96 << 20


@dataclass(frozen=True)
class Setting:
    """One comparison; sizes in bytes, ``read_bytes_s`` 0 = the disk as it is."""

    coli: Path
    gguf: Path
    llama: Path
    threads: int
    tokens: int
    warm: int
    ctx: int
    read_bytes_s: int
    timeout: float


@dataclass(frozen=True)
class Row:
    """One share. Rates in tokens a second; None where it failed, and then why."""

    share: float
    limit: int
    engine: dict[str, Any] | None
    llama: dict[str, Any] | None
    failed: tuple[str, ...]

    @property
    def engine_rate(self) -> float | None:
        return None if self.engine is None else self.engine["tokens"] / self.engine["seconds"]

    @property
    def llama_rate(self) -> float | None:
        return None if self.llama is None else self.llama["tokens"] / self.llama["seconds"]


def build_driver(llama: Path, into: Path) -> Path:
    """Compiles llama_decode.c against a llama.cpp tree with a shared build in build/bin.

    Raises:
        BuildError: no such tree, or it does not compile.
    """
    source, out = Path(__file__).with_name("llama_decode.c"), into / "llama_decode"
    libraries = llama / "build" / "bin"
    argv = [
        "cc", "-O2", "-o", str(out), str(source), f"-I{llama / 'include'}", f"-I{llama / 'ggml' / 'include'}",
        f"-L{libraries}", "-lllama", "-lggml", "-lggml-base", f"-Wl,-rpath,{libraries.resolve()}",
    ]  # fmt: skip
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
    except OSError as err:
        raise BuildError(f"no C compiler: {err}") from err
    if done.returncode != 0:
        raise BuildError(
            f"the llama.cpp driver does not compile:\n{done.stderr[-800:]}",
            hint="in that tree: cmake -B build -DBUILD_SHARED_LIBS=ON; cmake --build build --target llama",
        )
    return out


def forget(path: Path) -> None:
    """Drops a file or folder from the page cache, so that nothing outside the limit serves it."""
    for file in [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file()):
        with file.open("rb") as f:
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def model_bytes(coli: Path) -> int:
    return sum(p.stat().st_size for p in coli.iterdir())


def measure(setting: Setting, driver: Path, share: float) -> Row:
    """Runs both, one after the other, each in a fresh group with cold files."""
    limit = int(share * model_bytes(setting.coli)) + OVERHEAD
    s = setting
    numbers = [str(n) for n in (s.threads, s.ctx, s.warm, s.tokens)]
    engine = [sys.executable, "-m", "colibri_kit.bench.decode", str(s.coli), *numbers, str(limit - _OUTSIDE)]
    other = [str(driver), str(s.gguf), *numbers]
    failed: list[str] = []
    found: list[dict[str, Any] | None] = []
    for name, argv, file in (("engine", engine, s.coli), ("llama.cpp", other, s.gguf)):
        forget(file)
        try:
            found.append(_run(s, argv, file, limit))
        except EngineError as err:
            failed.append(f"{name}: {err.message}")
            found.append(None)
    return Row(share, limit, found[0], found[1], tuple(failed))


def _run(setting: Setting, argv: Sequence[str], file: Path, limit: int) -> dict[str, Any]:
    with memory_limit(limit, disk=file, read_bytes_s=setting.read_bytes_s) as group:
        try:
            done = subprocess.run(
                group.wrap(argv), capture_output=True, text=True, timeout=setting.timeout, check=False
            )
        except subprocess.TimeoutExpired as err:
            raise EngineError(f"not done after {setting.timeout:.0f} s") from err
        if done.returncode != 0:
            tail = done.stderr.strip().splitlines()[-1:] or [f"ended with {done.returncode}"]
            raise EngineError(tail[0])
        out: dict[str, Any] = json.loads(done.stdout)
        out["peak"] = group.peak()
        return out
