"""Checks of this machine: compiler, tools, permissions, keys, space."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from colibri_kit.detect.sysfs import Port, serial_ports
from colibri_kit.doctor import udev
from colibri_kit.doctor.findings import Finding, fail, ok, warn
from colibri_kit.errors import KitError

if TYPE_CHECKING:
    from colibri_kit.config.board import Board

_GIB = 1 << 30
#: Space for caches and an image, bytes: below the first builds fail, below the second cards.
_SPACE_FAIL, _SPACE_WARN = _GIB // 2, 4 * _GIB
#: program -> (package, what for); asked only when it can be needed.
TOOLS = {
    "mcopy": ("mtools", "making SD images"),
    "mkfs.vfat": ("dosfstools", "making SD images"),
    "mke2fs": ("e2fsprogs", "making SD images"),
    "lsblk": ("util-linux", "finding SD cards"),
    "ssh": ("openssh-client", "reading ~/.ssh/config and jump hosts"),
}
_HELLO = "int main(void) { return 42; }\n"


def python() -> Finding:
    return ok("Python", f"{platform.python_version()} in {sys.prefix}")


def tools(which: Callable[[str], str | None] = shutil.which) -> Iterable[Finding]:
    """Programs outside Python. Without them the kit fetches its own or does without: only warnings."""
    for name, (package, use) in TOOLS.items():
        path = which(name) or next(
            (p for p in (f"/usr/sbin/{name}", f"/sbin/{name}") if Path(p).exists()), None
        )
        if path:
            yield ok(name, path)
        else:
            yield warn(name, f"missing; {use} needs it or fetches its own", f"sudo apt install {package}")


def compiler(board: Board) -> Iterable[Finding]:
    """Does the compiler make a program for the board, and does that run here?"""
    from colibri_kit.toolchain.zig import cc, zig_version

    what = f"compiler for {board.name}"
    try:
        version = zig_version()
        with tempfile.TemporaryDirectory(prefix="colibri-doctor-") as temp:
            folder = Path(temp)
            (folder / "hello.c").write_text(_HELLO)
            flags = [
                "-target",
                board.target,
                f"-mcpu={board.mcpu}",
                "-O2",
                "-static",
                "hello.c",
                "-o",
                "hello",
            ]
            cc(flags, folder)
            yield ok(what, f"ziglang {version}: {board.target}, {board.mcpu}")
            yield _runs(board, folder / "hello")
    except KitError as err:
        yield fail(what, err.message.splitlines()[0], err.hint or "pip install --force-reinstall colibri-kit")


def _runs(board: Board, program: Path) -> Finding:
    what = f"programs for {board.name} run here"
    if board.os != "linux" or os.name != "posix":
        return ok(what, f"not tried: a {board.os} program")
    argv = [str(program)]
    if board.arch != platform.machine():
        emulator = shutil.which(f"qemu-{board.arch}") or shutil.which(f"qemu-{board.arch}-static")
        if emulator is None:
            return warn(
                what, f"no qemu-{board.arch}", "sudo apt install qemu-user (only for trying engines here)"
            )
        argv = [emulator, *argv]
    try:
        status = subprocess.run(argv, check=False, timeout=60, stdin=subprocess.DEVNULL).returncode
    except (OSError, subprocess.TimeoutExpired) as err:
        return warn(what, str(err), "sudo apt install qemu-user")
    if status != 42:
        return warn(what, f"a test program ended with {status}, not 42", "reinstall qemu-user")
    return ok(what, argv[0] if len(argv) > 1 else "natively")


def serial(ports: Iterable[Port], groups: Callable[[str], str | None]) -> Iterable[Finding]:
    """May we open the serial ports that are there?

    Args:
        groups: a port's group name when we are not in it, else None.
    """
    for port in ports:
        if port.permitted:
            yield ok(port.device, "may be opened")
            continue
        group = groups(port.device)
        remedy = f"sudo usermod -aG {group} $USER, then log in again" if group else "install the udev rule"
        yield fail(port.device, "permission denied", remedy)


def _foreign_group(device: str) -> str | None:
    """The group that would open a port; says so too when only a new login is missing."""
    try:
        import grp

        entry = grp.getgrgid(os.stat(device).st_gid)  # noqa: PTH116
    except (ImportError, OSError, KeyError):
        return None
    return None if entry.gr_gid in os.getgroups() or entry.gr_name == "root" else entry.gr_name


def keys(home: Path, agent: str | None) -> Finding:
    """Is there an SSH key to log in with?"""
    found = sorted(p.name for p in (home / ".ssh").glob("id_*") if p.suffix != ".pub" and p.is_file())
    loose = [n for n in found if (home / ".ssh" / n).stat().st_mode & 0o077]
    if loose and os.name == "posix":
        return warn("SSH keys", f"{', '.join(loose)}: others may read them", f"chmod 600 ~/.ssh/{loose[0]}")
    if found:
        return ok("SSH keys", ", ".join(found))
    if agent and Path(agent).exists():
        return ok("SSH keys", "an agent")
    return warn("SSH keys", "no key and no agent", "ssh-keygen -t ed25519, or log in with a password")


def space(path: Path, free: int) -> Finding:
    """Room for caches; free in bytes."""
    from colibri_kit.deploy.plan import size_text

    found = f"{size_text(free)} free for caches in {path}"
    remedy = f"free some, or name another place: XDG_CACHE_HOME (remove {path} to start afresh)"
    if free < _SPACE_FAIL:
        return fail("disk", found, remedy)
    return warn("disk", found, remedy) if free < _SPACE_WARN else ok("disk", found)


def check(board: Board | None) -> list[Finding]:
    """Everything about this machine; for ``board`` its compiler too."""
    from colibri_kit import resources

    out = [python(), *tools()]
    try:
        cache = resources.cache_dir()
        out.append(space(cache, shutil.disk_usage(cache).free))
    except KitError as err:
        out.append(fail("caches", err.message, err.hint or "set XDG_CACHE_HOME"))
    if board is not None:
        out += compiler(board)
    out.append(keys(Path.home(), os.environ.get("SSH_AUTH_SOCK")))
    if sys.platform == "linux":
        ports = serial_ports(Path("/sys"), Path("/dev"))
        out += serial(ports, _foreign_group)
        out.append(udev.check())
    return out
