"""Package sets, unpacked once into the cache and used again: QEMU, kernels, guests' programs."""

from __future__ import annotations

import contextlib
import fcntl
import fnmatch
import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colibri_kit import resources
from colibri_kit.errors import PreflightError, TransferError, VerifyError
from colibri_kit.vboard.apt import MIRROR_VARIABLE, Debian, PrivateApt, find_debian, machine_sources

_MANIFEST = ".packages.json"
Note = Callable[[str], None]


@dataclass(frozen=True)
class PackageSet:
    """What belongs together.

    Attributes:
        names: asked for; what they need comes along.
        only: patterns of packages to keep of all that; empty = all. drop: to leave out.
        host: run on this machine: only what it lacks is fetched. arch: Debian's name.
    """

    key: str
    arch: str
    names: tuple[str, ...]
    only: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    backports: bool = False
    host: bool = False


_NO_PERL = ("perl*", "libperl*", "lib*-perl", "usrmerge", "debconf", "ucf", "adduser", "runit-helper")

_BASE = ("openssh-server", "openssh-sftp-server", "busybox-static", "dropbear-bin", "iproute2", "netbase")
_SYSTEMD = (
    "systemd", "systemd-sysv", "udev", "dbus", "kmod", "coreutils", "dash", "bash", "grep", "sed",
    "findutils", "gzip", "hostname", "login", "passwd", "mount", "util-linux", "procps", "base-files",
    "base-passwd", "libc-bin", "mawk", "tar", "iproute2", "openssh-server", "openssh-sftp-server",
    "busybox-static",
)  # fmt: skip


def small(arch: str) -> PackageSet:
    """busybox, OpenSSH, dropbear: the guest without an init system."""
    return PackageSet(f"small-{arch}", arch, _BASE, drop=_NO_PERL)


def systemd(arch: str) -> PackageSet:
    """A small Debian with systemd as init."""
    return PackageSet(f"systemd-{arch}", arch, _SYSTEMD, drop=_NO_PERL)


def kernel(arch: str, flavour: str) -> PackageSet:
    """The newest kernel image: ``cloud`` (virtual machines only) or ``full`` (Raspberry Pi too)."""
    name = f"linux-image-cloud-{arch}" if flavour == "cloud" else f"linux-image-{arch}"
    return PackageSet(f"kernel-{flavour}-{arch}", arch, (name,), only=("linux-image-[0-9]*",))


def qemu_set(binary: str, *, backports: bool) -> PackageSet:
    """QEMU for this machine; its user-mode packages stay out."""
    name = {"qemu-system-aarch64": "qemu-system-arm", "qemu-system-x86_64": "qemu-system-x86"}[binary]
    arch = _host_arch()
    drop = ("qemu-user*", "ipxe-qemu", "qemu-system-gui")
    key = f"{name}-{'backports' if backports else 'suite'}"
    return PackageSet(key, arch, (name,), drop=drop, backports=backports, host=True)


def tool_set(name: str) -> PackageSet:
    """One program for this machine, with the libraries that it lacks."""
    return PackageSet(f"tool-{name}", _host_arch(), (name,), host=True)


def _host_arch() -> str:
    machine = os.uname().machine
    return {"x86_64": "amd64", "aarch64": "arm64"}.get(machine, machine)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One process at a time in ``folder``; waits for the other."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


class Store:
    """The cache of package sets, one folder each.

    Args:
        folder: default ``~/.cache/colibri-kit/vboard`` (XDG).
        note: told what is fetched.
        refresh: look for newer packages even where a set is there.
    """

    def __init__(self, note: Note, folder: Path | None = None, *, refresh: bool = False) -> None:
        self.folder = folder or resources.cache_dir() / "vboard"
        self._note, self._refresh = note, refresh
        self._updated: set[Path] = set()
        self._debian: Debian | None = None

    @property
    def debian(self) -> Debian:
        if self._debian is None:
            self._debian = find_debian(machine_sources(), os.environ.get(MIRROR_VARIABLE))
        return self._debian

    def get(self, wanted: PackageSet) -> Path:
        """The folder with the set's files, fetched when missing or damaged.

        Raises:
            PreflightError: no apt, no mirror. TransferError: apt failed. VerifyError: bad package.
        """
        root = self.folder / "sets" / wanted.key
        with locked(self.folder):
            if not self._refresh and intact(root):
                return root
            self._make(wanted, root)
        return root

    def versions(self, wanted: PackageSet) -> dict[str, str]:
        """Package -> version of a set that :meth:`get` has made."""
        doc = json.loads((self.folder / "sets" / wanted.key / _MANIFEST).read_text())
        return {name: entry["version"] for name, entry in doc["packages"].items()}

    def _apt(self, wanted: PackageSet) -> PrivateApt:
        kind = f"{self.debian.suite}{'-backports' if wanted.backports else ''}-{wanted.arch}"
        kind += "-host" if wanted.host else ""
        folder = self.folder / "apt" / kind
        apt = PrivateApt(folder, self.debian, wanted.arch, backports=wanted.backports, host=wanted.host)
        if folder not in self._updated:
            apt.update()
            self._updated.add(folder)
        return apt

    def _make(self, wanted: PackageSet, root: Path) -> None:
        apt = self._apt(wanted)
        packages = [p for p in apt.resolve(wanted.names) if _keep(p.partition("=")[0], wanted)]
        if not packages:
            raise TransferError(
                f"apt offers nothing for {', '.join(wanted.names)}",
                hint="is it installed already, and broken?",
                code="CK-VBOARD-APT",
            )
        known = _manifest(root)
        if (
            intact(root)
            and known
            and set(packages) == {f"{n}={e['version']}" for n, e in known["packages"].items()}
        ):
            return
        self._note(f"fetching {len(packages)} Debian packages ({wanted.key})")
        root.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root.parent, prefix=f".{wanted.key}-") as temp:
            debs = apt.download(packages, Path(temp) / "debs")
            made = Path(temp) / "root"
            made.mkdir()
            entries = {}
            for deb in debs:
                name, version = _unpack(deb, made)
                entries[name] = {"version": version, "sha256": _sha256(deb)}
            doc = {"packages": entries, "files": fingerprint(made)}
            (made / _MANIFEST).write_text(json.dumps(doc, indent=1))
            if root.exists():
                old = Path(temp) / "old"
                root.rename(old)
            made.rename(root)


def _keep(name: str, wanted: PackageSet) -> bool:
    if any(fnmatch.fnmatchcase(name, p) for p in wanted.drop) and name not in wanted.names:
        return False
    return not wanted.only or any(fnmatch.fnmatchcase(name, p) for p in wanted.only)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while piece := stream.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def _unpack(deb: Path, root: Path) -> tuple[str, str]:
    """Files of one package into ``root``. Returns its name and version."""
    fields = subprocess.run(
        ["dpkg-deb", "-f", str(deb), "Package", "Version"], capture_output=True, text=True, check=False
    )
    done = subprocess.run(
        ["dpkg-deb", "-x", str(deb), str(root)], capture_output=True, text=True, check=False
    )
    if fields.returncode or done.returncode:
        why = (fields.stderr + done.stderr).strip()
        raise VerifyError(f"package {deb.name} is damaged: {why}", hint="repeat: it is fetched again")
    found = dict(line.split(": ", 1) for line in fields.stdout.splitlines())
    return found["Package"], found["Version"]


def fingerprint(root: Path) -> str:
    """sha256 over paths, sizes and link targets below ``root``: finds missing and cut-off files."""
    rows = []
    for folder, subs, files in os.walk(root):
        for name in files + [s for s in subs if (Path(folder) / s).is_symlink()]:
            path = Path(folder) / name
            if name == _MANIFEST and path.parent == root:
                continue
            told = str(path.readlink()) if path.is_symlink() else str(path.stat().st_size)
            rows.append(f"{path.relative_to(root)}\0{told}")
    return hashlib.sha256("\n".join(sorted(rows)).encode("utf-8", "surrogateescape")).hexdigest()


def _manifest(root: Path) -> dict[str, Any] | None:
    try:
        doc: dict[str, Any] = json.loads((root / _MANIFEST).read_text())
    except (OSError, ValueError):
        return None
    return doc


def intact(root: Path) -> bool:
    """Is the set whole, as when it was unpacked?"""
    doc = _manifest(root)
    return doc is not None and doc.get("files") == fingerprint(root)


@dataclass(frozen=True)
class Program:
    """How to run a program of the host: argv's beginning, and what its environment needs."""

    argv: tuple[str, ...]
    env: dict[str, str]
    version: str

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, **self.env}


def find_qemu(store: Store, binary: str, machine: str) -> Program:
    """QEMU that knows ``machine``: the system's, else the suite's, else backports'.

    Raises:
        PreflightError: none of them runs here or knows the machine.
    """
    on_path = shutil.which(binary)
    if on_path:
        found = _try_qemu(Program((on_path,), {}, ""), machine)
        if found:
            return found
    choices = (True,) if machine == "raspi4b" else (False, True)
    failed: TransferError | None = None
    for backports in choices:
        try:
            root = store.get(qemu_set(binary, backports=backports))
        except TransferError as err:
            failed = err
            continue
        found = _try_qemu(_private_qemu(root, binary), machine)
        if found:
            return found
    if failed:
        raise failed
    raise PreflightError(
        f"no {binary} with machine {machine} runs here",
        hint="install a QEMU that has it (raspi4b needs version 9)",
        state="nothing was changed",
        code="CK-VBOARD-QEMU",
    )


def libraries(root: Path) -> str:
    """LD_LIBRARY_PATH for programs of an unpacked set."""
    return ":".join(
        str(p) for p in sorted({*root.glob("usr/lib/*-linux-gnu"), *root.glob("lib/*-linux-gnu")})
    )


def _private_qemu(root: Path, binary: str) -> Program:
    argv = [str(root / "usr/bin" / binary)]
    for share in ("qemu", "seabios"):
        if (root / "usr/share" / share).is_dir():
            argv += ["-L", str(root / "usr/share" / share)]
    env = {"LD_LIBRARY_PATH": libraries(root)}
    modules = list(root.glob("usr/lib/*-linux-gnu/qemu"))
    if modules:
        env["QEMU_MODULE_DIR"] = str(modules[0])
    return Program(tuple(argv), env, "")


def _try_qemu(program: Program, machine: str) -> Program | None:
    def ask(*argv: str) -> str:
        done = subprocess.run(
            [*program.argv, *argv], env=program.environment, capture_output=True, text=True, timeout=60,
            check=False,
        )  # fmt: skip
        return done.stdout

    try:
        machines, told = ask("-M", "help"), ask("--version")
    except (OSError, subprocess.TimeoutExpired):
        return None
    if not re.search(rf"(?m)^{re.escape(machine)}\s", machines):
        return None
    version = re.search(r"version (\S+)", told)
    return Program(program.argv, program.env, version.group(1) if version else "?")


def find_tool(store: Store, name: str, package: str) -> Program:
    """A small program of the host: the system's, else a private one."""
    on_path = shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")
    if on_path:
        return Program((on_path,), {}, "")
    root = store.get(tool_set(package))
    for folder in ("usr/bin", "usr/sbin", "sbin", "bin"):
        if (root / folder / name).exists():
            return Program((str(root / folder / name),), {"LD_LIBRARY_PATH": libraries(root)}, "")
    raise PreflightError(f"package {package} has no program {name}", code="CK-VBOARD-TOOL")
