"""Model folders that lie: any field of any header, directory or manifest changed, every CRC made right again.

Also builds and runs native/tests/fuzz/drive.c, the engine under orders, plain or with sanitizers.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engine_build as eb
import pytest

from colibri_kit.convert import container as box

DATA = Path(__file__).resolve().parents[1] / "data" / "moe-refs" / "q4_k_m"
HEADER = struct.Struct("<4sHHIIQQQ16sII")
DENSE = struct.Struct("<48sIIIIQQIIII")
RECORD = struct.Struct("<IIQQII")
PART = struct.Struct("<IIIIQQ")
DRIVE = "tests/fuzz/drive.c"
SANITIZE = {
    "": ((), ()),
    "address": (
        ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-O1"),
        ("-fsanitize=address,undefined",),
    ),
    "thread": (
        ("-fsanitize=thread", "-O1", "-DCB_POOL_STACK=4194304u", "-DCB_SMALL_STACK=2097152u"),
        ("-fsanitize=thread",),
    ),
}
#: The engine's own handler serves SIGSEGV and SIGBUS: the sanitizers must leave them alone.
_LEAVE = "handle_segv=0:handle_sigbus=0:allow_user_segv_handler=1"
ENV = {
    "ASAN_OPTIONS": _LEAVE + ":detect_leaks=0",
    "TSAN_OPTIONS": _LEAVE + ":halt_on_error=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "GLIBC_TUNABLES": "glibc.pthread.stack_cache_size=0",  # a thread that ended keeps no mapping
}


def sample_model(factory: pytest.TempPathFactory, name: str = "qwen2moe") -> Path:
    """A converted model with every feature (shared expert, biases, four quantisations), once a session."""
    out = factory.getbasetemp() / f"{name}.t256.coli"
    if not out.exists():
        source = DATA / f"{name}.t256.Q4_K_M.gguf"
        cmd = [sys.executable, "-m", "colibri_kit", "convert", str(source), "-o", str(out)]
        done = subprocess.run(cmd, capture_output=True, text=True, timeout=280, check=False)
        assert done.returncode == 0, done.stderr
    return out


@functools.cache
def drive_program(sanitizer: str = "") -> Path:
    extra, link = SANITIZE[sanitizer]
    sources = [*eb.engine_sources(), DRIVE]
    built: Path = eb._link(sources, (*eb._macros(), *extra), link, "drive" + sanitizer)
    return built


def drive(*words: object, sanitizer: str = "", timeout: float = 60) -> dict[str, str]:
    """Runs the orders; returns the line of each action (of the last one of a name), without its name.

    A crash, a sanitizer's report or a hang fails the test.
    """
    cmd = [str(drive_program(sanitizer)), *map(str, words)]
    done = subprocess.run(
        cmd, capture_output=True, text=True, timeout=timeout, check=False, env={**os.environ, **ENV}
    )
    assert done.returncode == 0, f"{cmd}\n{done.stdout}\n{done.stderr[-4000:]}"
    return dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line)


def code(line: str) -> int:
    return int(re.match(r"rc=(-?\d+)", line).group(1))  # type: ignore[union-attr]


def counter(out: dict[str, str], name: str) -> int:
    return int(dict(p.split("=") for p in out["counters"].split())[name])


# ---- changing folders --------------------------------------------------------


def mend(data: bytearray, entry: int) -> bytes:
    """Directory CRC, then header CRC."""
    count = min(struct.unpack_from("<I", data, 12)[0], (len(data) - 64) // entry)
    struct.pack_into("<I", data, 56, box.crc32c(bytes(data[64 : 64 + count * entry]), 0))
    struct.pack_into("<I", data, 60, box.crc32c(bytes(data[:60]), 0))
    return bytes(data)


Change = Callable[[Path], None]


def manifest(section: str, **values: Any) -> Change:
    def change(folder: Path) -> None:
        path = folder / "manifest.json"
        m = json.loads(path.read_text())
        (m[section] if section else m).update(values)
        path.write_text(json.dumps(m))

    return change


def header(name: str, **values: int) -> Change:
    """Fields of a header: version, kind, index, count, dir_offset, payload_offset, payload_size."""
    at = dict(version=(4, "<H"), kind=(6, "<H"), index=(8, "<I"), count=(12, "<I"), dir_offset=(16, "<Q"),
              payload_offset=(24, "<Q"), payload_size=(32, "<Q"))  # fmt: skip

    def change(folder: Path) -> None:
        data = bytearray((folder / name).read_bytes())
        for key, value in values.items():
            struct.pack_into(at[key][1], data, at[key][0], value)
        (folder / name).write_bytes(mend(data, {"d": 96, "e": 128, "t": 32}[name[0]]))

    return change


def dense(edit: Callable[[dict[str, list[Any]], bytearray], None]) -> Change:
    """edit gets {name: [name, type, rows, cols, crc, offset, size, layout, 0, 0, 0]} and the file's bytes."""

    def change(folder: Path) -> None:
        data = bytearray((folder / "dense.coli").read_bytes())
        count = struct.unpack_from("<I", data, 12)[0]
        entries = [list(DENSE.unpack_from(data, 64 + 96 * i)) for i in range(count)]
        edit({e[0].rstrip(b"\0").decode(): e for e in entries}, data)
        for i, e in enumerate(entries):
            DENSE.pack_into(data, 64 + 96 * i, *e)
        (folder / "dense.coli").write_bytes(mend(data, 96))

    return change


def records(edit: Callable[[list[list[list[int]]], bytearray], None]) -> Change:
    """edit gets [[layer, expert, offset, size, crc, parts], 3 × [type, rows, cols, crc, offset, size]]."""

    def change(folder: Path) -> None:
        path = folder / "experts-0000.coli"
        data = bytearray(path.read_bytes())
        count = struct.unpack_from("<I", data, 12)[0]
        all_: list[list[list[int]]] = []
        for at in range(64, 64 + 128 * count, 128):
            parts = [list(PART.unpack_from(data, at + 32 + 32 * k)) for k in range(3)]
            all_.append([list(RECORD.unpack_from(data, at)), *parts])
        edit(all_, data)
        for i, (first, *parts) in enumerate(all_):
            RECORD.pack_into(data, 64 + 128 * i, *first)
            for k in range(3):
                PART.pack_into(data, 64 + 128 * i + 32 + 32 * k, *parts[k])
        path.write_bytes(mend(data, 128))

    return change


def copy(model: Path, to: Path) -> Path:
    return Path(shutil.copytree(model, to / "x.coli"))
