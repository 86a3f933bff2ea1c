"""The appliance's initramfs: busybox, dropbear, e2fsck, kernel modules, our scripts, the engine."""

from __future__ import annotations

from pathlib import Path

from colibri_kit import resources
from colibri_kit.appliance.filesystems import EPOCH
from colibri_kit.appliance.pieces import Pieces
from colibri_kit.appliance.platforms import Platform
from colibri_kit.errors import VerifyError
from colibri_kit.vboard.cpio import Cpio
from colibri_kit.vboard.guest import modules, needed

#: native/appliance/NAME -> its place. ``slot`` is a command for people too.
_SCRIPTS = {
    "boot": "lib/colibri/boot", "network": "lib/colibri/network", "dhcp": "lib/colibri/dhcp",
    "sshd": "lib/colibri/sshd", "console": "lib/colibri/console", "prompt": "lib/colibri/prompt",
    "stop": "lib/colibri/stop", "slot": "usr/sbin/slot", "init": "init",
}  # fmt: skip
_TEXTS = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/sh\n",
    "etc/group": "root:x:0:\n",
    "etc/shadow": "root:*:19000:0:99999:7:::\n",
    "etc/shells": "/bin/sh\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nshadow: files\n",
}


def make(pieces: Pieces, platform: Platform, engine: bytes) -> bytes:
    """The compressed archive. The same inputs give the same bytes.

    Raises:
        VerifyError: a package lacks what is needed.
    """
    cpio = Cpio()
    for path in ("proc", "sys", "dev", "run", "boot", "weights", "state", "sbin", "usr/bin"):
        cpio.folder(path)
    cpio.folder("tmp", 0o1777)
    cpio.folder("root", 0o700)
    cpio.file("bin/busybox", _read(pieces.programs, "bin/busybox", "usr/bin/busybox"), 0o755)
    cpio.link("bin/sh", "busybox")
    cpio.file("usr/bin/colibri", engine, 0o755)
    cpio.file("sbin/e2fsck", _read(pieces.programs, "sbin/e2fsck.static", "usr/sbin/e2fsck.static"), 0o755)
    _program(cpio, pieces.programs, "usr/sbin/dropbear")
    names = []
    for name, data in modules(pieces.kernel, platform.modules):
        cpio.file(f"lib/modules/{name}.ko", data)
        names.append(name)
    if "ext4" not in names:
        raise VerifyError("the kernel package has no ext4 module", hint="try again with --refresh")
    cpio.file("lib/modules/list", ("\n".join(names) + "\n").encode())
    scripts = resources.native_dir() / "appliance"
    for name, path in _SCRIPTS.items():
        cpio.file(path, (scripts / name).read_bytes(), 0o755)
    cpio.file("lib/colibri/functions", (scripts / "functions").read_bytes())
    cpio.file("lib/colibri/epoch", f"{EPOCH}\n".encode())
    cpio.file("etc/inittab", (scripts / "inittab").read_bytes())
    for path, text in _TEXTS.items():
        cpio.file(path, text.encode(), 0o600 if path == "etc/shadow" else 0o644)
    return cpio.pack()


def _read(root: Path, *names: str) -> bytes:
    for name in names:
        if (root / name).is_file():
            return (root / name).read_bytes()
    raise VerifyError(f"the Debian packages lack {names[0]}", hint="try again with --refresh")


def _program(cpio: Cpio, root: Path, path: str) -> None:
    """A dynamic program, its interpreter, and its libraries, each once."""
    cpio.file(path, _read(root, path), 0o755)
    todo, seen = [root / path], set[str]()
    while todo:
        names, interpreter = needed(todo.pop())
        if interpreter:
            cpio.file(interpreter.lstrip("/"), _library(root, Path(interpreter).name).read_bytes(), 0o755)
            seen.add(Path(interpreter).name)
        for name in names:
            if name not in seen:
                seen.add(name)
                found = _library(root, name)
                cpio.file(f"usr/lib/aarch64-linux-gnu/{name}", found.read_bytes(), 0o755)
                todo.append(found)


def _library(root: Path, name: str) -> Path:
    for pattern in (f"lib/aarch64-linux-gnu/{name}", f"usr/lib/aarch64-linux-gnu/{name}"):
        if (root / pattern).exists():
            return (root / pattern).resolve()
    raise VerifyError(f"the Debian packages lack {name}", hint="try again with --refresh")
