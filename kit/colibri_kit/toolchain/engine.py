"""Builds the engine for a board: one static binary, scanned, stripped, the same everywhere.

The identity of a build is a hash of everything that goes in: compiler version,
flags, sources. It is the object cache's key, the cache of finished binaries'
key and the ELF build id. Two builds with one identity are byte for byte equal.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from colibri_kit import resources
from colibri_kit.config.board import Board
from colibri_kit.errors import BuildError
from colibri_kit.toolchain import elf, pe, scan
from colibri_kit.toolchain.objects import compile_units, publish, scratch
from colibri_kit.toolchain.sources import CLI, ENGINE, Unit, plan_units, present_kernels
from colibri_kit.toolchain.zig import link, zig_version

#: Above this an aarch64 binary gets a warning: it must fit beside a model on small flash.
#: 400 KB was the aim before the HTTP service and the offload link were in the binary.
SIZE_AIM_BYTES = 460_000

#: The C library's objects bring unwind tables; nothing in the engine unwinds. Saves 16 KB.
LINK_SCRIPT = "SECTIONS { /DISCARD/ : { *(.eh_frame) *(.eh_frame_hdr) } } INSERT AFTER .text;\n"


@dataclass(frozen=True)
class EnginePlan:
    """What will be compiled; made without running anything."""

    board: Board
    native: Path
    units: tuple[Unit, ...]
    link_flags: tuple[str, ...]
    build_id: str  # 40 hex digits

    @property
    def file_name(self) -> str:
        return f"colibri-{self.board.name}" + (".exe" if self.board.os == "windows" else "")


@dataclass(frozen=True)
class BuildResult:
    """A finished binary. Sizes are bytes; paths are absolute."""

    board: str
    path: str
    debug: str
    size_bytes: int
    sha256: str
    build_id: str
    target: str
    mcpu: str
    kernels: tuple[str, ...]
    code_bytes_scanned: int
    cached: bool
    warnings: tuple[str, ...]


def plan_engine(board: Board, native: Path | None = None) -> EnginePlan:
    """Lists the compilations for a board.

    Raises:
        BuildError: the compiler or the sources are missing.
    """
    native = (native or resources.native_dir()).resolve()
    version = zig_version()
    units = plan_units(
        native,
        ENGINE + CLI,
        target=board.target,
        mcpu=board.mcpu,
        kernels=present_kernels(native, board.kernels),
        extra=(),
        version=version,
    )
    flags = ("-target", board.target, f"-mcpu={board.mcpu}", "-O3", "-static", "-Wl,--gc-sections")
    digest = hashlib.sha256()
    for part in (version, *flags, LINK_SCRIPT, *sorted(board.isa), *(u.key for u in units)):
        digest.update(part.encode() + b"\0")
    return EnginePlan(board, native, tuple(units), flags, digest.hexdigest()[:40])


def build_engine(
    board: Board,
    output: Path | None = None,
    *,
    native: Path | None = None,
    advance: Callable[[int], None] = lambda _n: None,
) -> BuildResult:
    """Compiles, links, scans, strips; writes output and output.debug by rename.

    Args:
        output: where the binary goes; None = it stays in the cache and its path there is returned.
        native: the sources, default the kit's own.
        advance: called with 1 for each compiled file.

    Raises:
        BuildError: the compiler refused, or an instruction is outside the board's ISA.
    """
    plan = plan_engine(board, native)
    store = resources.cache_dir() / "engines" / plan.build_id
    name = plan.file_name
    cached = _complete(store)
    if not cached:
        _make(plan, store, advance)
    facts = json.loads((store / "info.json").read_text())
    if output is not None:
        _copy(store / "engine.debug", _debug_name(output))
        _copy(store / "engine", output)
    path = output if output is not None else store / "engine"
    warnings = []
    if board.arch == "aarch64" and facts["size_bytes"] > SIZE_AIM_BYTES:
        warnings.append(f"{name} is {facts['size_bytes']} bytes, above the aim of {SIZE_AIM_BYTES}")
    return BuildResult(
        board=board.name,
        path=str(path.resolve()),
        debug=str(_debug_name(path).resolve()),
        build_id=plan.build_id,
        target=board.target,
        mcpu=board.mcpu,
        kernels=("scalar", *present_kernels(plan.native, board.kernels)),
        cached=cached,
        warnings=tuple(warnings),
        **facts,
    )


def as_json(result: BuildResult) -> dict[str, object]:
    """The object that ``build --json`` prints."""
    return asdict(result)


def _debug_name(path: Path) -> Path:
    return path.with_name(path.name + ".debug")


def _complete(store: Path) -> bool:
    """Whether the cache has this build and its bytes are still the ones recorded."""
    try:
        facts = json.loads((store / "info.json").read_text())
        digest = hashlib.sha256((store / "engine").read_bytes()).hexdigest()
        return (store / "engine.debug").is_file() and facts["sha256"] == digest
    except (OSError, ValueError, KeyError):
        return False


def _copy(source: Path, target: Path) -> None:
    try:
        temporary = scratch(target)
        try:
            shutil.copyfile(source, temporary)
            temporary.chmod(0o755)
            publish(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as err:
        raise BuildError(f"cannot write {target}: {err.strerror}", code="CK-BUILD-OUTPUT") from err


def _make(plan: EnginePlan, store: Path, advance: Callable[[int], None]) -> None:
    """Fills the cache entry; info.json comes last and marks it complete."""
    objects = compile_units(plan.native, list(plan.units), advance)
    store.mkdir(parents=True, exist_ok=True)
    full, stripped = scratch(store / "engine.debug"), scratch(store / "engine")
    try:
        if plan.board.os == "windows":
            scanned = _link_windows(plan, objects, full, stripped)
        else:
            scanned = _link_linux(plan, objects, full, stripped)
        data = stripped.read_bytes()
        facts = {
            "size_bytes": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
            "code_bytes_scanned": scanned,
        }
        for path in (full, stripped):
            path.chmod(0o755)
        publish(full, store / "engine.debug")
        publish(stripped, store / "engine")
        info = scratch(store / "info.json")
        info.write_text(json.dumps(facts))
        publish(info, store / "info.json")
    finally:
        full.unlink(missing_ok=True)
        stripped.unlink(missing_ok=True)


def _object_list(plan: EnginePlan) -> Path:
    return resources.cache_dir() / "engines" / plan.build_id / "objects.list"


def _link_linux(plan: EnginePlan, objects: list[Path], full: Path, stripped: Path) -> int:
    board = plan.board
    script = _object_list(plan).with_name("link.ld")
    written = scratch(script)
    written.write_text(LINK_SCRIPT)
    publish(written, script)
    flags = [*plan.link_flags, f"-Wl,-T,{script}", "-g", f"-Wl,--build-id=0x{plan.build_id}"]
    link(flags, objects, full, _object_list(plan))
    if not elf.is_static(full):
        raise BuildError("the linked binary is not static", code="CK-BUILD-LINK")
    scanned = scan.check(full, board=board.name, mcpu=board.mcpu, isa=board.isa)
    try:
        elf.strip(full, stripped)
    except ValueError as err:
        raise BuildError(f"cannot strip the binary: {err}", code="CK-BUILD-LINK") from err
    if elf.alloc_sections(full) != elf.alloc_sections(stripped):
        raise BuildError("stripping changed loaded bytes", code="CK-BUILD-LINK")
    return scanned


def _link_windows(plan: EnginePlan, objects: list[Path], full: Path, stripped: Path) -> int:
    """Links without symbols; the debug file is the build with them (and its PDB inside zig's folder).

    zig keeps debug information of PE files only in a PDB, whose name the linker derives from the
    output's; it is moved over ``full``.
    """
    link([*plan.link_flags, "-s"], objects, stripped, _object_list(plan))
    exe = full.with_name(full.name + ".exe")
    pdb = exe.with_suffix(".pdb")
    try:
        link([*plan.link_flags, "-g"], objects, exe, _object_list(plan))
        (pdb if pdb.is_file() else exe).replace(full)
    finally:
        for path in (exe, pdb, stripped.with_suffix(".pdb")):
            path.unlink(missing_ok=True)
    try:
        pe.check(stripped)
    except ValueError as err:
        raise BuildError(f"the linked executable is malformed: {err}", code="CK-BUILD-LINK") from err
    return 0
