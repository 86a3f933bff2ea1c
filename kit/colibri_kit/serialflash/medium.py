"""Where U-Boot puts the bytes: files on FAT or ext4, or bare sectors.

A place is written ``IFACE DEV:PART`` (``mmc 0:1``) for files, or ``IFACE DEV@SECTOR``
(``mmc 0@0x8000``, sectors of 512 bytes) for bare sectors.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from colibri_kit.errors import PreflightError, UsageError
from colibri_kit.serialflash.uboot import UBoot

SECTOR = 512
_IFACES = ("mmc", "virtio", "usb", "nvme", "scsi", "sata")
_PLACE = re.compile(r"([a-z]+) (\d+)(?::(\d+)|@(0x[0-9a-fA-F]+|\d+))")


@dataclass(frozen=True)
class Place:
    """One place on a board's storage; ``part`` for files or ``sector`` for bare bytes."""

    iface: str
    device: int
    part: int | None
    sector: int | None = None

    @property
    def text(self) -> str:
        return f"{self.iface} {self.device}" + (f":{self.part}" if self.part is not None else "")


def parse_place(text: str) -> Place:
    """Raises UsageError."""
    found = _PLACE.fullmatch(text.strip())
    if not found or found.group(1) not in _IFACES:
        raise UsageError(
            f"--place {text}: a place is IFACE DEV:PART, such as 'mmc 0:1', "
            f"or IFACE DEV@SECTOR; IFACE is one of {', '.join(_IFACES)}"
        )
    iface, device, part, sector = found.groups()
    if part is not None:
        return Place(iface, int(device), int(part))
    return Place(iface, int(device), None, int(sector, 0))


class Medium:
    """What the three kinds have in common: how U-Boot reads and writes a piece.

    ``piece`` is how many bytes of a file are written at once, 0 = all of it.
    """

    kind = ""
    piece = 0

    def __init__(self, uboot: UBoot, place: Place) -> None:
        self._u, self.place = uboot, place

    def prepare(self, name: str) -> None:
        """Makes the folders that ``name`` needs."""

    def size(self, name: str) -> int | None:
        """Bytes that the file has now; None = it is not there."""
        raise NotImplementedError

    def read(self, address: int, name: str, size: int, offset: int) -> bool:
        """Into memory. False when it cannot be read."""
        raise NotImplementedError

    def write(self, address: int, name: str, size: int, offset: int) -> None:
        """From memory. Raises UBootError."""
        raise NotImplementedError

    def remove(self, name: str) -> None:
        """Takes a file that must not be longer than ours away."""


class FatFiles(Medium):
    """``fatwrite`` with an offset: piece by piece."""

    kind, piece = "fat", 512 * 1024

    def prepare(self, name: str) -> None:
        folders = name.split("/")[:-1]
        for depth in range(1, len(folders) + 1):
            # Fails when it is there; a folder that is missing shows in the write that follows.
            self._u.command(f"fatmkdir {self.place.text} /{'/'.join(folders[:depth])}")

    def size(self, name: str) -> int | None:
        line = f"setenv filesize; size {self.place.text} /{name} && echo n=$filesize"
        found = self._u.value(line, r"^n=([0-9a-f]+)$")
        return int(found, 16) if found else None

    def read(self, address: int, name: str, size: int, offset: int) -> bool:
        line = f"load {self.place.text} {address:x} /{name} {size:x} {offset:x}"
        return self._u.command(line, timeout=30 + size / 2e5)[0] == 0

    def write(self, address: int, name: str, size: int, offset: int) -> None:
        line = f"fatwrite {self.place.text} {address:x} /{name} {size:x} {offset:x}"
        self._u.ask(line, timeout=60 + size / 1e5)

    def remove(self, name: str) -> None:
        self._u.command(f"fatrm {self.place.text} /{name}")


class Ext4Files(FatFiles):
    """``ext4write`` knows no offset: a file must fit the board's memory whole."""

    kind, piece = "ext4", 0

    def prepare(self, name: str) -> None:
        """ext4write makes no folders; see :meth:`~Medium.write` for the flat names."""

    def write(self, address: int, name: str, size: int, offset: int) -> None:
        del offset
        self._u.ask(f"ext4write {self.place.text} {address:x} /{name} {size:x}", timeout=60 + size / 1e5)

    def remove(self, name: str) -> None:
        """ext4write replaces the file."""


class Sectors(Medium):
    """Bare sectors from ``place.sector`` on; there are no names, so only one file."""

    kind, piece = "sectors", 512 * 1024

    def size(self, name: str) -> int | None:
        return 1 << 62

    def _run(self, verb: str, address: int, size: int, offset: int) -> str:
        assert self.place.sector is not None
        first, count = self.place.sector + offset // SECTOR, -(-size // SECTOR)
        dev = f"{self.place.iface} dev {self.place.device}"
        return f"{dev} && {self.place.iface} {verb} {address:x} {first:x} {count:x}"

    def read(self, address: int, name: str, size: int, offset: int) -> bool:
        return self._u.command(self._run("read", address, size, offset), timeout=30 + size / 2e5)[0] == 0

    def write(self, address: int, name: str, size: int, offset: int) -> None:
        self._u.ask(self._run("write", address, size, offset), timeout=60 + size / 1e5)


def choose(uboot: UBoot, wanted: str | None) -> Medium:
    """The medium that was named, or the only one with a file system U-Boot can write.

    Raises:
        PreflightError: there is none, or more than one, or this U-Boot cannot write it.
    """
    has = uboot.can("fatwrite", "ext4write", *_IFACES)
    if wanted is not None:
        place = parse_place(wanted)
        _scan(uboot, place.iface)
        if place.part is None:
            if place.iface not in has:
                raise _cannot(f"this U-Boot has no `{place.iface}` command")
            return Sectors(uboot, place)
        found = _files(uboot, place, has)
        if found is None:
            raise _cannot(f"there is no FAT or ext4 file system on {place.text} that this U-Boot can write")
        return found
    good = []
    for iface in (i for i in _IFACES if i in has):
        _scan(uboot, iface)
        for device in (0, 1):
            for part in (1, 2):
                medium = _files(uboot, Place(iface, device, part), has)
                if medium is not None:
                    good.append(medium)
    if len(good) == 1:
        return good[0]
    if good:
        names = ", ".join(f"'{m.place.text}' ({m.kind})" for m in good)
        raise _cannot(f"several places could be written: {names}", hint="name one: --place 'IFACE DEV:PART'")
    raise _cannot("U-Boot sees no FAT or ext4 file system that it can write")


def _scan(uboot: UBoot, iface: str) -> None:
    """Makes U-Boot look for devices, where the interface needs that."""
    if iface in ("virtio", "nvme", "scsi"):
        uboot.command(f"{iface} scan", timeout=20)
    elif iface == "usb":
        uboot.command("usb start", timeout=30)


def _files(uboot: UBoot, place: Place, has: frozenset[str]) -> Medium | None:
    """The file system on a partition, when it can be written."""
    if "fatwrite" in has and uboot.command(f"fatinfo {place.text}")[0] == 0:
        return FatFiles(uboot, place)
    if "ext4write" in has and uboot.command(f"ext4ls {place.text} /")[0] == 0:
        return Ext4Files(uboot, place)
    return None


def _cannot(why: str, *, hint: str | None = None) -> PreflightError:
    return PreflightError(
        why,
        hint=hint or "name a place: --place 'mmc 0:1' (files) or 'mmc 0@0x8000' (bare sectors)",
        state="nothing was written",
        code="CK-UBOOT-MEDIUM",
    )
