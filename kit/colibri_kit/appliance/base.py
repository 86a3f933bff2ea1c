"""Adds engine, weights, service and keys to somebody else's image, and proves that nothing else changed.

The image is a Debian family system for 64-bit ARM or x86 with systemd (Raspberry Pi OS,
Debian): an ext4 root in an MBR or GPT. What is added is laid out as ``colibri-kit deploy``
does, so that later deployments go on from it.
"""

from __future__ import annotations

import json
import struct
import tempfile
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

from colibri_kit.appliance import extlist, filesystems
from colibri_kit.appliance.extlist import Item
from colibri_kit.appliance.filesystems import Entry, Tools
from colibri_kit.config.board import Board
from colibri_kit.deploy.model import Parcel, Part
from colibri_kit.deploy.plan import Settings, size_text
from colibri_kit.errors import FormatError, PreflightError, UsageError, VerifyError
from colibri_kit.media.partitions import Partition, Table, has_extended, make_mbr, read_table

_MACHINES = {183: "aarch64", 62: "x86_64"}
_UNIT_DIR = "/etc/systemd/system"
_PIECE = 1 << 20
_WANTS = f"{_UNIT_DIR}/multi-user.target.wants"
#: Services that replace the host keys at the first boot: a key put in now would not last.
_RENEWERS = ("regenerate_ssh_host_keys.service", "rpi-reconfigure-raspi-firmware-ssh.service")


@dataclass(frozen=True)
class Addition:
    """What goes in. ``user`` gets the keys; hostname None = left alone."""

    board: Board
    engine: Part
    parcel: Parcel
    settings: Settings
    authorized_keys: tuple[str, ...] = ()
    user: str = "root"
    hostname: str | None = None
    host_key: bytes | None = None
    host_key_public: str | None = None


@dataclass(frozen=True)
class Found:
    """The image as it came. free: bytes in the root file system."""

    table: Table
    root: Partition
    boot: Partition | None
    system: str
    files: dict[str, Item]
    free: int

    def has(self, path: str) -> bool:
        return path in self.files


def _odd(why: str) -> FormatError:
    return FormatError(
        f"this image's layout is unknown: {why}",
        hint="images of Raspberry Pi OS and Debian with an ext4 root and systemd are understood",
        state="the image was not changed",
        code="CK-IMAGE-LAYOUT",
    )


def inspect(tools: Tools, image: Path) -> Found:
    """Reads what the image is.

    Raises:
        FormatError: no image, or an unknown layout.
    """
    with image.open("rb") as file:
        table = read_table(file, image.stat().st_size)
        if table.kind == "none" or not table.partitions:
            raise _odd("it has no partition table")
        ext = [p for p in table.partitions if _at(file, p.start + 1080, 2) == b"\x53\xef"]
        fat = [p for p in table.partitions if _at(file, p.start + 82, 5) == b"FAT32"]
        for part in reversed(ext):
            files = extlist.listing(tools, image, part.start)
            if any(p in files for p in ("/etc/os-release", "/usr/lib/os-release")):
                free = _free(file, part)
                name = "/usr/lib/os-release" if "/usr/lib/os-release" in files else "/etc/os-release"
                system = _pretty(tools, image, part.start, name)
                return Found(table, part, fat[0] if fat else None, system, files, free)
    raise _odd("no ext4 partition with a Linux system in it")


def _at(file: BinaryIO, offset: int, length: int) -> bytes:
    file.seek(offset)
    return file.read(length)


def _free(file: BinaryIO, part: Partition) -> int:
    sb = _at(file, part.start + 1024, 1024)
    free: int = struct.unpack_from("<I", sb, 12)[0]
    shift: int = struct.unpack_from("<I", sb, 24)[0]
    if struct.unpack_from("<I", sb, 96)[0] & 0x80:
        free |= struct.unpack_from("<I", sb, 0x158)[0] << 32
    return free * (1024 << shift)


def _pretty(tools: Tools, image: Path, start: int, path: str) -> str:
    text = _text(tools, image, start, path)
    rows = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    return rows.get("PRETTY_NAME", "Linux").strip('"')


def _text(tools: Tools, image: Path, start: int, path: str) -> str:
    out = bytearray()
    filesystems.read_ext4(tools, image, start, path, out.extend)
    return out.decode("utf-8", "replace")


def check(tools: Tools, image: Path, found: Found, add: Addition) -> None:
    """Refuses images that the addition does not suit.

    Raises:
        PreflightError: another architecture, no systemd, no such user, something in the way.
    """
    head = bytearray()
    filesystems.read_ext4(tools, image, found.root.start, "/bin/sh", head.extend)
    machine = struct.unpack_from("<H", head, 18)[0] if head[:4] == b"\x7fELF" else 0
    if _MACHINES.get(machine) != add.board.arch or head[4] != 2:
        what = _MACHINES.get(machine, "32-bit ARM" if machine == 40 else f"ELF machine {machine}")
        raise PreflightError(
            f"{found.system} is for {what}, board {add.board.name} is {add.board.arch}",
            hint="take the 64-bit (arm64) image" if machine == 40 else None,
            state="the image was not changed",
            code="CK-PREFLIGHT-ARCH",
        )
    if not any(found.has(p) for p in ("/usr/lib/systemd/systemd", "/lib/systemd/systemd")):
        raise _odd("it does not start with systemd")
    prefix = add.board.prefix or "/opt/colibri"
    if not prefix.startswith("/") or found.has(prefix):
        raise PreflightError(
            f"the image has something at {prefix} already",
            hint="take the image as its maker gives it",
            state="the image was not changed",
            code="CK-PREFLIGHT-FOREIGN",
        )


def need(add: Addition) -> int:
    """Bytes that the additions take, with a margin for folders and rounding."""
    files = [add.engine, *add.parcel.parts]
    return sum(-(-p.size // 4096) * 4096 for p in files) + (4 << 20)


def grow(tools: Tools, image: Path, found: Found, by: int) -> Found:
    """Makes the root partition ``by`` bytes larger: the file, the table's entry, the file system.

    Raises:
        PreflightError: the root is not the last partition, or the table is not a plain MBR.
    """
    last = max(found.table.partitions, key=lambda p: p.start)
    if found.table.kind != "mbr" or has_extended(found.table) or last.number != found.root.number:
        raise PreflightError(
            f"{size_text(by)} more are needed in the image's root, and it cannot be grown here: "
            "it is not the last partition of a plain MBR",
            hint="use a smaller model, or deploy over SSH after the first boot",
            state="the image was not changed",
            code="CK-IMAGE-GROW",
        )
    by = -(-by // (4 << 20)) * (4 << 20)
    root = Partition(
        found.root.number, found.root.start, found.root.size + by, found.root.kind, found.root.bootable
    )
    with image.open("r+b") as file:
        file.truncate(max(image.stat().st_size, root.end))
        code = _at(file, 0, 440)
        slots: list[Partition] = []
        for number in range(1, 5):
            here = [p for p in found.table.partitions if p.number == number]
            slots.append(root if number == root.number else here[0] if here else Partition(number, 0, 0, 0))
        file.seek(0)
        file.write(code + make_mbr(found.table.signature, slots)[440:])
    _resize(tools, image, found.root, root)
    return inspect(tools, image)


def _resize(tools: Tools, image: Path, before: Partition, after: Partition) -> None:
    """Grows the file system in a file of its own: resize2fs would cut the image off at its size."""
    with tempfile.TemporaryDirectory(dir=image.parent, prefix=".colibri-root-") as temp:
        alone = Path(temp) / "root"
        with alone.open("wb") as out, image.open("rb") as file:
            for at in range(0, before.size, _PIECE):
                data = _at(file, before.start + at, min(_PIECE, before.size - at))
                if any(data):
                    out.seek(at)
                    out.write(data)
            out.truncate(after.size)
        tools.run("e2fsck", "-fp", str(alone), ok=(0, 1))
        tools.run("resize2fs", str(alone), f"{after.size // 512}s")
        with alone.open("rb") as source, image.open("r+b") as file:
            for at in range(0, after.size, _PIECE):
                data = source.read(min(_PIECE, after.size - at)).ljust(min(_PIECE, after.size - at), b"\0")
                if data != _at(file, after.start + at, len(data)):
                    file.seek(after.start + at)
                    file.write(data)


def add(tools: Tools, image: Path, found: Found, addition: Addition, now: datetime) -> list[str]:
    """Puts everything in and compares the file lists. Returns the paths added or replaced.

    Args:
        now: goes into the release's name.

    Raises:
        VerifyError: something else changed. TransferError: debugfs refused.
    """
    with tempfile.TemporaryDirectory(dir=image.parent, prefix=".colibri-base-") as temp:
        stage = _Stage(Path(temp), found)
        _release(stage, addition, now)
        _service(stage, addition)
        _keys(stage, tools, image, addition)
        filesystems.put_ext4(
            tools, image, found.root.start, stage.files, stage.folders, stage.links, tuple(stage.replaced)
        )
        if addition.authorized_keys and found.boot and found.has("/usr/lib/systemd/system/sshswitch.service"):
            # Raspberry Pi OS turns its SSH server on when this file lies in the boot partition.
            empty = Path(temp) / "ssh"
            empty.write_bytes(b"")
            filesystems.put_fat(tools, image, found.boot.start, "ssh", empty)
    filesystems.check_ext4(tools, image, found.root.start)
    _prove(tools, image, found, stage)
    for part, path in stage.proofs:
        if filesystems.sha256_ext4(tools, image, found.root.start, path) != part.sha256:
            raise VerifyError(f"{path} in the image is not what went in", code="CK-FLASH-MAKE")
    return sorted([*stage.files, *stage.links])


class _Stage:
    """Collects what debugfs will put in; folders that the image lacks come by themselves."""

    def __init__(self, temp: Path, found: Found) -> None:
        self._temp, self.found = temp, found
        self.files: dict[str, Entry] = {}
        self.folders: dict[str, tuple[int, int, int]] = {}
        self.links: dict[str, str] = {}
        self.replaced: list[str] = []
        self.proofs: list[tuple[Part, str]] = []

    def _parents(self, path: str, mode: int = 0o755, uid: int = 0, gid: int = 0) -> None:
        for parent in reversed(Path(path).parents):
            name = str(parent)
            if name not in self.found.files and name not in self.folders:
                self.folders[name] = (mode, uid, gid)

    def folder(self, path: str) -> None:
        self._parents(f"{path}/x")

    def text(self, path: str, text: str, mode: int = 0o644, uid: int = 0, gid: int = 0) -> None:
        self._parents(path, 0o700 if "/.ssh/" in path else 0o755, uid, gid)
        source = self._temp / f"text-{len(self.files)}"
        source.write_text(text)
        if path in self.found.files:
            self.replaced.append(path)
        self.files[path] = Entry(source, mode, uid, gid)

    def part(self, path: str, part: Part) -> None:
        self._parents(path)
        self.files[path] = Entry(part.path, part.mode)
        self.proofs.append((part, path))

    def link(self, path: str, target: str) -> None:
        self._parents(path)
        self.links[path] = target


def _release(stage: _Stage, addition: Addition, now: datetime) -> None:
    """PREFIX as docs/deploy.md describes it, with one release that is current and not yet checked."""
    from dataclasses import asdict

    from colibri_kit import __version__
    from colibri_kit.deploy.plan import content_id, release_id
    from colibri_kit.deploy.release import MARK

    prefix = addition.board.prefix or "/opt/colibri"
    content = content_id(addition.engine, addition.parcel, addition.settings)
    name = release_id(now, content)
    parcel = addition.parcel
    document = {
        "id": name,
        "content": content,
        "created": f"{now:%Y-%m-%dT%H:%M:%SZ}",
        "kit": __version__,
        "board": addition.board.name,
        "engine": {"sha256": addition.engine.sha256, "bytes": addition.engine.size},
        "model": {
            "name": parcel.name,
            "model_id": parcel.model_id,
            "golden": parcel.golden,
            "bytes": parcel.size,
            "files": [{"name": p.name, "bytes": p.size, "sha256": p.sha256} for p in parcel.parts],
        },
        "settings": asdict(addition.settings),
        "service": "systemd",
    }
    for part in (addition.engine, *parcel.parts):
        stage.part(f"{prefix}/blobs/{part.sha256}", part)
    stage.link(f"{prefix}/releases/{name}/colibri", f"../../blobs/{addition.engine.sha256}")
    for part in parcel.parts:
        stage.link(f"{prefix}/releases/{name}/model.coli/{part.name}", f"../../../blobs/{part.sha256}")
    stage.text(f"{prefix}/releases/{name}/release.json", json.dumps(document, indent=1) + "\n")
    stage.text(f"{prefix}/{MARK}", '{"layout": 1}\n')
    stage.folder(f"{prefix}/log")
    stage.link(f"{prefix}/current", f"releases/{name}")


def _service(stage: _Stage, addition: Addition) -> None:
    """The service that deploy installs, where the engine can serve; the golden at every boot otherwise."""
    from colibri_kit.deploy.services import Service, memory_max, systemd

    prefix = addition.board.prefix or "/opt/colibri"
    settings = addition.settings
    if b"\0serve\0" in addition.engine.path.read_bytes():
        made = systemd.render(Service(prefix, "nobody", settings, memory_max(settings.budget)))
        name, text = "colibri.service", made.text
    else:
        name = "colibri-check.service"
        flags = " ".join(settings.flags())
        text = (
            "[Unit]\nDescription=colibri: the model gives the bits it promised\nAfter=local-fs.target\n\n"
            f"[Service]\nType=oneshot\nExecStart={prefix}/current/colibri check "
            f"--model {prefix}/current/model.coli {flags}\n"
            "DynamicUser=yes\nNoNewPrivileges=yes\nStandardOutput=journal+console\n"
            "StandardError=journal+console\n\n[Install]\nWantedBy=multi-user.target\n"
        )
    stage.text(f"{_UNIT_DIR}/{name}", text)
    stage.link(f"{_WANTS}/{name}", f"{_UNIT_DIR}/{name}")


def _keys(stage: _Stage, tools: Tools, image: Path, addition: Addition) -> None:
    found = stage.found
    start = found.root.start
    if addition.authorized_keys:
        rows = [line.split(":") for line in _text(tools, image, start, "/etc/passwd").splitlines()]
        user = next((r for r in rows if r[0] == addition.user and len(r) >= 6), None)
        if user is None:
            raise UsageError(
                f"the image has no user {addition.user}",
                hint=f"it has: {', '.join(r[0] for r in rows if len(r) > 2 and _login(r[2]))}",
            )
        uid, gid, path = int(user[2]), int(user[3]), f"{user[5]}/.ssh/authorized_keys"
        before = _text(tools, image, start, path) if found.has(path) else ""
        text = before + ("\n" if before and not before.endswith("\n") else "")
        stage.text(path, text + "".join(f"{k}\n" for k in addition.authorized_keys), 0o600, uid, gid)
    if addition.host_key and addition.host_key_public and found.has("/etc/ssh") and not renews_keys(found):
        stage.text("/etc/ssh/ssh_host_ed25519_key", addition.host_key.decode(), 0o600)
        stage.text("/etc/ssh/ssh_host_ed25519_key.pub", addition.host_key_public + "\n")
    if addition.hostname:
        stage.text("/etc/hostname", addition.hostname + "\n")


def _login(uid: str) -> bool:
    return uid == "0" or (uid.isdigit() and 1000 <= int(uid) < 60000)


def renews_keys(found: Found) -> bool:
    """Does the system make new host keys at its first boot?"""
    return any(path.rpartition("/")[2] in _RENEWERS for path in found.files if "systemd" in path)


def _prove(tools: Tools, image: Path, before: Found, stage: _Stage) -> None:
    """Everything that was there is there as it was; everything new is ours.

    Raises:
        VerifyError: it is not so.
    """
    after = extlist.listing(tools, image, before.root.start)
    ours = {*stage.files, *stage.folders, *stage.links}
    lost = [p for p, item in before.files.items() if p not in stage.replaced and after.get(p) != item]
    more = [p for p in after if p not in before.files and p not in ours]
    missing = [p for p in ours if p not in after]
    if lost or more or missing:
        words = [f"changed: {p}" for p in lost[:3]] + [f"unexpected: {p}" for p in more[:3]]
        raise VerifyError(
            "the image is not what it should be: "
            + "; ".join(words + [f"missing: {p}" for p in missing[:3]]),
            state="the result was thrown away",
            code="CK-FLASH-MAKE",
        )
