"""Which C files make the engine, and with which flags each is compiled.

A kernel folder holds one instruction set; only its files get that set's flags.
Everything else is compiled for the board's baseline.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from colibri_kit.errors import BuildError

#: Folders of the engine proper. Tests' main and fuzzers never go in.
ENGINE = ("core", "model", "router", "expert", "kernels", "text", "quant", "serve", "offload")
CLI = ("cli", "tests/checkkern")

#: What a kernel folder's files may use beyond the board's CPU, as zig features.
FOLDER_FEATURES = {
    "kernels/sse41": "+sse3+ssse3+sse4_1",
    "kernels/avx2": "+avx2+fma+f16c",
    "kernels/neon": "",
}
MACROS = {"sse41": "CB_HAVE_SSE41", "avx2": "CB_HAVE_AVX2", "neon": "CB_HAVE_NEON"}

#: Where tokens' time goes: -O3. The rest waits for people, disks and links, and small counts more.
FAST = ("kernels/neon/", "kernels/avx2/", "kernels/sse41/", "kernels/math.c", "kernels/dequant.c",
        "kernels/crc32c.c", "model/attention.c", "model/forward.c", "model/kv.c", "core/sample.c",
        "text/bpe.c", "text/pretok.c")  # fmt: skip

BASE_FLAGS = (
    "-std=c11",
    "-g",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-ffunction-sections",
    "-fdata-sections",
    # C needs no unwinding at run time; debuggers read .debug_frame instead.
    "-fno-unwind-tables",
    "-fno-asynchronous-unwind-tables",
)


@dataclass(frozen=True)
class Unit:
    """One compilation: source relative to native/, the flags, and the key of its object."""

    source: str
    flags: tuple[str, ...]
    key: str


def find_sources(native: Path, folders: tuple[str, ...], kernels: tuple[str, ...]) -> list[str]:
    """Relative paths of every C file to build, sorted; kernel folders of other ISAs left out.

    Raises:
        BuildError: there is nothing to build.
    """
    out: list[str] = []
    for folder in folders:
        for path in sorted((native / folder).rglob("*.c")):
            rel = path.relative_to(native).as_posix()
            isa = re.match(r"kernels/([^/]+)/", rel)
            if isa and isa.group(1) != "scalar" and isa.group(1) not in kernels:
                continue
            if rel == "tests/checkkern/main.c":
                continue
            out.append(rel)
    if not out:
        raise BuildError(f"no C sources under {native}", hint="reinstall colibri-kit")
    return out


def present_kernels(native: Path, kernels: tuple[str, ...]) -> tuple[str, ...]:
    """Those of the kernel folders that hold C files; a source tree may lack one."""
    return tuple(k for k in kernels if any((native / "kernels" / k).glob("*.c")))


def _headers_digest(native: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(p for p in native.rglob("*") if p.suffix in (".h", ".inc", ".def")):
        digest.update(path.relative_to(native).as_posix().encode() + b"\0")
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _content(path: Path) -> bytes:
    """The file, and every C file it includes by name."""
    text = path.read_bytes()
    for name in re.findall(rb'^\s*#\s*include\s+"([^"]+\.c)"', text, re.MULTILINE):
        other = path.parent / name.decode()
        if other.is_file():
            text += b"\0" + other.read_bytes()
    return text


def plan_units(
    native: Path,
    folders: tuple[str, ...],
    *,
    target: str,
    mcpu: str,
    kernels: tuple[str, ...],
    extra: tuple[str, ...],
    version: str,
) -> list[Unit]:
    """Every compilation of a build, in source order.

    Args:
        version: the compiler's, part of each object's key.
        extra: flags for all files (``-fPIC`` …).
    """
    headers = _headers_digest(native)
    macros = tuple(f"-D{MACROS[k]}=1" for k in kernels)
    units = []
    for source in find_sources(native, folders, kernels):
        folder = "/".join(source.split("/")[:2])
        flags = (
            "-target",
            target,
            f"-mcpu={mcpu}{FOLDER_FEATURES.get(folder, '')}",
            "-O3" if source.startswith(FAST) else "-Os",
            *BASE_FLAGS,
            *(("-mno-outline-atomics",) if target.startswith("aarch64") else ()),
            *macros,
            *extra,
            "-Iinclude",
            "-I.",
        )
        digest = hashlib.sha256()
        for part in (version, headers, source, *flags):
            digest.update(part.encode() + b"\0")
        digest.update(_content(native / source))
        units.append(Unit(source, flags, digest.hexdigest()))
    return units
