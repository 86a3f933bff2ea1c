"""This machine's disks, from lsblk and /proc. Facts only; safety.py judges them."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colibri_kit.errors import PreflightError

_COLUMNS = "NAME,PATH,TYPE,SIZE,MODEL,VENDOR,SERIAL,RM,HOTPLUG,RO,TRAN,FSTYPE,LABEL,MOUNTPOINTS,MAJ:MIN"


@dataclass(frozen=True)
class Node:
    """A disk or something on it (partition, RAID, LVM, crypt). size in bytes."""

    path: str
    kind: str
    size: int
    fstype: str
    label: str
    mounts: tuple[str, ...]
    number: tuple[int, int]
    children: tuple[Node, ...] = ()

    def walk(self) -> list[Node]:
        return [self, *(n for c in self.children for n in c.walk())]


@dataclass(frozen=True)
class Disk:
    """A whole disk. ``identity`` tells this medium from others: its serial number where it has one.

    Attributes:
        removable: the kernel calls the medium removable or the device hot-pluggable.
        used_by_system: what of it backs swap or a mount, from /proc, by path.
    """

    node: Node
    model: str
    serial: str
    removable: bool
    read_only: bool
    transport: str
    swaps: tuple[str, ...] = ()
    mounts: tuple[tuple[str, str], ...] = ()

    @property
    def path(self) -> str:
        return self.node.path

    @property
    def size(self) -> int:
        return self.node.size

    @property
    def identity(self) -> str:
        """The serial number; without one, model and size in bytes."""
        return self.serial or f"{self.model or self.node.kind}-{self.size}".replace(" ", "-")

    def as_json(self) -> dict[str, object]:
        return {
            "path": self.path,
            "kind": self.node.kind,
            "model": self.model,
            "serial_number": self.identity,
            "size_bytes": self.size,
            "removable": self.removable,
            "read_only": self.read_only,
            "transport": self.transport,
            "contents": [_content(n) for n in self.node.walk()[1:]] or [_content(self.node)],
        }


def _content(node: Node) -> dict[str, object]:
    return {
        "path": node.path,
        "size_bytes": node.size,
        "fstype": node.fstype or None,
        "label": node.label or None,
        "mounted_at": list(node.mounts),
    }


def parse_lsblk(text: str) -> list[dict[str, Any]]:
    """The ``blockdevices`` of lsblk's JSON.

    Raises:
        PreflightError: it is something else.
    """
    try:
        found = json.loads(text)["blockdevices"]
    except (ValueError, KeyError, TypeError) as err:
        raise PreflightError(
            f"lsblk's answer cannot be read: {err}", state="nothing was changed", code="CK-FLASH-LSBLK"
        ) from err
    return [d for d in found if isinstance(d, dict)]


def _node(raw: dict[str, Any]) -> Node:
    major, _, minor = str(raw.get("maj:min") or "0:0").partition(":")
    mounts = raw.get("mountpoints") or [raw.get("mountpoint")]
    return Node(
        path=str(raw.get("path") or f"/dev/{raw.get('name')}"),
        kind=str(raw.get("type") or ""),
        size=int(raw.get("size") or 0),
        fstype=str(raw.get("fstype") or ""),
        label=str(raw.get("label") or ""),
        mounts=tuple(str(m) for m in mounts if m),
        number=(int(major), int(minor or 0)),
        children=tuple(_node(c) for c in raw.get("children") or ()),
    )


def disk_of(raw: dict[str, Any], swaps: str, mountinfo: str, backing: str = "") -> Disk:
    """One disk from lsblk's row, /proc/swaps and /proc/self/mountinfo. Pure.

    Args:
        backing: for a loop device, the file behind it: it stands for the serial number.
    """
    node = _node(raw)
    numbers = {f"{a}:{b}" for n in node.walk() for a, b in [n.number]}
    paths = {n.path for n in node.walk()}
    used = tuple(w for line in swaps.splitlines()[1:] for w in line.split()[:1] if w in paths)
    mounted = []
    for line in mountinfo.splitlines():
        fields = line.split()
        if len(fields) > 4 and (fields[2] in numbers or _source(fields) in paths):
            mounted.append((_source(fields), _unescape(fields[4])))
    model = " ".join(str(raw.get(k) or "").strip() for k in ("vendor", "model")).strip()
    return Disk(
        node=node,
        model=model,
        serial=backing or str(raw.get("serial") or "").strip(),
        removable=bool(raw.get("rm")) or bool(raw.get("hotplug")),
        read_only=bool(raw.get("ro")),
        transport=str(raw.get("tran") or ""),
        swaps=used,
        mounts=tuple(mounted),
    )


def _source(fields: list[str]) -> str:
    """mountinfo's device: the second field after the lone dash."""
    at = fields.index("-") if "-" in fields else len(fields)
    return _unescape(fields[at + 2]) if at + 2 < len(fields) else ""


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda m: chr(int(m.group(1), 8)), text)


def _lsblk(*argv: str) -> list[dict[str, Any]]:
    if shutil.which("lsblk") is None:
        raise PreflightError(
            "lsblk is not here, and without it no disk can be told from another",
            hint="apt install util-linux, or write a file: --image card.img",
            state="nothing was changed",
            code="CK-FLASH-LSBLK",
        )
    done = subprocess.run(
        ["lsblk", "--json", "--bytes", "--output", _COLUMNS, *argv],
        capture_output=True,
        text=True,
        check=False,
    )
    return parse_lsblk(done.stdout) if done.returncode == 0 else []


def look(path: Path) -> Disk:
    """The whole disk at ``path``.

    Raises:
        PreflightError: not there, not a block device, or a partition.
    """
    try:
        real = path.resolve(strict=True)
        mode = real.stat().st_mode
    except OSError as err:
        raise PreflightError(
            f"{path}: {err.strerror}",
            hint="see the disks with: lsblk; to write a file: --image FILE",
            state="nothing was changed",
            code="CK-FLASH-NO-DEVICE",
        ) from err
    if not stat.S_ISBLK(mode):
        raise PreflightError(
            f"{path} is not a block device, and --to writes only those",
            hint="to write a file: --image FILE",
            state="nothing was changed",
            code="CK-FLASH-NOT-BLOCK",
        )
    rows = _lsblk(str(real))
    if not rows:
        raise PreflightError(
            f"lsblk does not know {real}", state="nothing was changed", code="CK-FLASH-NO-DEVICE"
        )
    name = real.name
    backing = _read(f"/sys/block/{name}/loop/backing_file")
    disk = disk_of(rows[0], _read("/proc/swaps"), _read("/proc/self/mountinfo"), backing)
    if Path(f"/sys/class/block/{name}/partition").exists() or disk.node.kind == "part":
        raise PreflightError(
            f"{real} is a partition; an image has its own partition table and goes on a whole disk",
            hint=f"name the disk: {parent(name)}",
            state="nothing was changed",
            code="CK-FLASH-PARTITION",
        )
    return disk


def parent(name: str) -> str:
    """The whole disk's path for a partition's kernel name. Pure: mmcblk0p1 -> /dev/mmcblk0."""
    found = re.fullmatch(r"(.*\d)p\d+|([a-z]+)\d+", name)
    return "/dev/" + ((found.group(1) or found.group(2)) if found else name)


def _read(path: str) -> str:
    try:
        return Path(path).read_text("utf-8", "replace").strip()
    except OSError:
        return ""


def everything() -> list[Disk]:
    """Every disk of this machine, for "which one did you mean"."""
    swaps, mounts = _read("/proc/swaps"), _read("/proc/self/mountinfo")
    out = []
    for row in _lsblk():
        if str(row.get("type")) in ("disk", "loop") and int(row.get("size") or 0) > 0:
            name = os.path.basename(str(row.get("path") or ""))  # noqa: PTH119  (a kernel name, no path)
            out.append(disk_of(row, swaps, mounts, _read(f"/sys/block/{name}/loop/backing_file")))
    return out
