"""Builds C pieces of the engine with gcc for the tests: a library of units, or the whole tool.

Objects are kept in build/test-objects by content, so that a second run starts at once.
"""

from __future__ import annotations

import ctypes as ct
import functools
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
NATIVE = ROOT / "native"
CACHE = ROOT / "build" / "test-objects"
FLAGS = [
    "-std=c11", "-O2", "-g", "-Wall", "-Wextra", "-Wshadow", "-Wconversion", "-Werror", "-ffp-contract=off",
    "-fno-strict-aliasing", "-fPIC", "-Iinclude", "-I.",
]  # fmt: skip
X86 = os.uname().machine == "x86_64"
ISA_FLAGS = {"sse41": ["-msse4.1"], "avx2": ["-mavx2", "-mfma", "-mf16c"], "neon": []}
ISAS = ("sse41", "avx2") if X86 else ("neon",)


def compiler() -> list[str]:
    """gcc where there is one, else the kit's own compiler."""
    gcc = shutil.which("gcc")
    return [gcc] if gcc else [sys.executable, "-m", "ziglang", "cc"]


@functools.cache
def _headers() -> bytes:
    digest = hashlib.sha256()
    for path in sorted(p for p in NATIVE.rglob("*") if p.suffix in (".h", ".inc")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.digest()


def _object(source: str, extra: tuple[str, ...]) -> Path:
    """The compiled object of native/``source``, or of an absolute path."""
    path = Path(source) if source.startswith("/") else NATIVE / source
    isa = source.split("/")[1] if source.startswith("kernels/") and source.count("/") == 2 else ""
    flags = [*FLAGS, *extra, *ISA_FLAGS.get(isa, [])]
    key = hashlib.sha256(repr((compiler(), flags)).encode() + _headers() + path.read_bytes()).hexdigest()
    out = CACHE / f"{path.stem}-{key[:32]}.o"
    if not out.is_file():
        CACHE.mkdir(parents=True, exist_ok=True)
        handle, temp = tempfile.mkstemp(suffix=".o", dir=CACHE)
        os.close(handle)
        subprocess.run([*compiler(), *flags, "-c", str(path), "-o", temp], cwd=NATIVE, check=True)
        Path(temp).replace(out)
    return out


def _isas() -> list[str]:
    """Kernel folders for this CPU that have sources."""
    return [isa for isa in ISAS if list((NATIVE / "kernels" / isa).glob("*.c"))]


def _macros() -> tuple[str, ...]:
    return tuple(f"-DCB_HAVE_{isa.upper()}=1" for isa in _isas())


def engine_sources() -> list[str]:
    """Every C file of the engine proper, relative to native/."""
    out = []
    for folder in ("core", "model", "router", "expert", "kernels", "text", "quant", "serve", "offload"):
        for path in sorted((NATIVE / folder).rglob("*.c")):
            rel = path.relative_to(NATIVE).as_posix()
            isa = rel.split("/")[1] if rel.startswith("kernels/") and rel.count("/") == 2 else "scalar"
            if isa == "scalar" or isa in _isas():
                out.append(rel)
    return out


def cli_sources() -> list[str]:
    checkkern = [p for p in sorted((NATIVE / "tests/checkkern").glob("*.c")) if p.name != "main.c"]
    return [p.relative_to(NATIVE).as_posix() for p in [*sorted((NATIVE / "cli").glob("*.c")), *checkkern]]


def _link(sources: list[str], extra: tuple[str, ...], link: tuple[str, ...], name: str) -> Path:
    objects = [_object(s, extra) for s in sources]
    key = hashlib.sha256(repr((link, [o.name for o in objects])).encode()).hexdigest()[:32]
    out = CACHE / f"{name}-{key}"
    if not out.is_file():
        handle, temp = tempfile.mkstemp(dir=CACHE)
        os.close(handle)
        subprocess.run([*compiler(), *link, "-o", temp, *map(str, objects), "-lpthread", "-lm"], check=True)
        Path(temp).chmod(0o755)
        Path(temp).replace(out)
    return out


@functools.cache
def library(*sources: str) -> ct.CDLL:
    """Some sources (relative to native/, or absolute) as a loaded shared library."""
    return ct.CDLL(str(_link(list(sources), (), ("-shared", "-Wl,-z,defs"), "lib.so")))


@functools.cache
def tool() -> Path:
    """The whole `colibri` tool, built for this machine."""
    return _link([*engine_sources(), *cli_sources()], _macros(), (), "colibri")


def program(source: str, *link: str) -> Path:
    """One C program (an absolute path) linked with the engine."""
    return _link([*engine_sources(), source], _macros(), tuple(link), Path(source).stem)


#: What sampling and text assembly need beside themselves.
TEXT_UNITS = ("core/err.c", "text/utf8.c")
KERNEL_UNITS = tuple(
    p.relative_to(NATIVE).as_posix()
    for p in sorted([*(NATIVE / "kernels").glob("*.c"), *(NATIVE / "kernels/scalar").glob("*.c")])
)

Done = subprocess.CompletedProcess


def colibri(*args: str | Path, stdin: bytes = b"") -> Done[bytes]:
    """Runs the tool; a minute and more is a failure."""
    return subprocess.run(
        [tool(), *map(str, args)], input=stdin, capture_output=True, timeout=100, check=False
    )


def ok(*args: str | Path, stdin: bytes = b"") -> Done[bytes]:
    done = colibri(*args, stdin=stdin)
    assert done.returncode == 0, done.stderr
    return done


def ok_json(*args: str | Path, stdin: bytes = b"") -> Any:
    return json.loads(ok(*args, "--json", stdin=stdin).stdout)
