"""Puts the appliance's image together.

MBR, then three partitions, each aligned to 4 MiB:

1. FAT32 ``COLIBRI``: Raspberry Pi firmware, config.txt, slot-a/ and slot-b/ (kernel, device
   trees, initramfs with the engine), colibri/ (settings and keys), notices/
2. ext4 without journal ``weights``: model.coli/, mounted read-only
3. ext4 ``state``: logs, clock, boot attempts; the only one written to in daily use
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from colibri_kit.appliance import boot, filesystems, initramfs
from colibri_kit.appliance.filesystems import Entry, Tools
from colibri_kit.appliance.identity import HostKey
from colibri_kit.appliance.pieces import Pieces
from colibri_kit.appliance.platforms import Platform
from colibri_kit.appliance.settings import Settings
from colibri_kit.deploy.model import Parcel
from colibri_kit.errors import VerifyError
from colibri_kit.media.partitions import FAT32_LBA, LINUX, Partition, make_mbr

_ALIGN = 4 << 20
_STATE_BYTES = 64 << 20
_BOOT_LEAST = 256 << 20


@dataclass(frozen=True)
class Recipe:
    """All that decides the image's bytes."""

    board: str
    platform: Platform
    pieces: Pieces
    engine: bytes
    parcel: Parcel
    settings: Settings
    host_key: HostKey
    uboot: bool = False

    @property
    def identity(self) -> bytes:
        """sha256 over the inputs: seeds the disk signature and the file systems' UUIDs."""
        parts = [
            self.board, self.settings.render(), self.host_key.line, self.parcel.model_id,
            hashlib.sha256(self.engine).hexdigest(), json.dumps(self.pieces.versions), str(self.uboot),
            *self.settings.authorized_keys,
        ]  # fmt: skip
        return hashlib.sha256("\0".join(parts).encode()).digest()


@dataclass(frozen=True)
class Layout:
    """Partitions of an image of ``size`` bytes."""

    signature: int
    partitions: tuple[Partition, ...]
    size: int


def layout(recipe: Recipe, boot_bytes: int) -> Layout:
    """Where everything goes. Pure.

    Args:
        boot_bytes: what the boot partition's files take; half as much again is kept free for a larger kernel.
    """
    signature = int.from_bytes(recipe.identity[:4], "little") or 1
    wanted = (
        (max(_BOOT_LEAST, boot_bytes * 3 // 2), FAT32_LBA),
        (filesystems.ext4_size(recipe.parcel.size), LINUX),
        (_STATE_BYTES, LINUX),
    )
    at, parts = _ALIGN, []
    for number, (size, kind) in enumerate(wanted, 1):
        size = -(-size // _ALIGN) * _ALIGN
        parts.append(Partition(number, at, size, kind, number == 1))
        at += size
    return Layout(signature, tuple(parts), at)


def build(
    recipe: Recipe, tools: Tools, image: Path, step: Callable[[str], None] = lambda _text: None
) -> Layout:
    """Makes the image at ``image`` (sparse) and proves what it holds.

    Raises:
        TransferError: a tool failed. VerifyError: the result is not what went in.
    """
    with tempfile.TemporaryDirectory(dir=image.parent, prefix=".colibri-image-") as temp:
        folder = Path(temp)
        step("initramfs")
        files = _boot_files(recipe, folder)
        plan = layout(recipe, sum(p.stat().st_size for p in files.values()))
        files |= _slot_files(recipe, plan.signature, folder)
        with image.open("wb") as out:
            out.truncate(plan.size)
            out.write(make_mbr(plan.signature, plan.partitions))
        fat, weights, state = plan.partitions
        step("boot partition")
        filesystems.make_fat(tools, image, fat.start, fat.size, "COLIBRI", plan.signature, files)
        step("weights")
        ids = [str(uuid.UUID(bytes=recipe.identity[a : a + 16], version=4)) for a in (0, 16)]
        filesystems.make_ext4(tools, image, weights.start, weights.size, "weights", ids[0], journal=False)
        parts = {f"model.coli/{p.name}": Entry(p.path) for p in recipe.parcel.parts}
        filesystems.put_ext4(tools, image, weights.start, parts, {"model.coli": (0o755, 0, 0)})
        filesystems.make_ext4(tools, image, state.start, state.size, "state", ids[1], journal=True)
        step("check")
        for part in (weights, state):
            filesystems.check_ext4(tools, image, part.start)
        _prove(recipe, tools, image, weights.start)
    return plan


def _prove(recipe: Recipe, tools: Tools, image: Path, start: int) -> None:
    for part in recipe.parcel.parts:
        found = filesystems.sha256_ext4(tools, image, start, f"model.coli/{part.name}")
        if found != part.sha256:
            raise VerifyError(
                f"{part.name} in the image has sha256 {found}, its manifest says {part.sha256}",
                hint="did the model change? colibri-kit verify checks every byte of it",
                state="no image was made",
                code="CK-FLASH-MAKE",
            )


def _boot_files(recipe: Recipe, folder: Path) -> dict[str, Path]:
    """What does not depend on the disk signature: path on the partition -> file here."""
    platform, pieces = recipe.platform, recipe.pieces
    firmware = pieces.firmware / "usr/lib/raspi-firmware"
    files = {name: firmware / name for name in platform.firmware}
    if recipe.uboot:
        assert pieces.uboot is not None
        files["u-boot.bin"] = pieces.uboot / "usr/lib/u-boot" / platform.uboot / "u-boot.bin"
    initrd = folder / "initrd.gz"
    initrd.write_bytes(initramfs.make(pieces, platform, recipe.engine))
    for slot in boot.SLOTS:
        files[f"slot-{slot}/vmlinuz"] = pieces.vmlinuz
        files[f"slot-{slot}/initrd.gz"] = initrd
        for name in platform.dtbs:
            files[f"slot-{slot}/{name.rpartition('/')[2]}"] = pieces.dtb(name)
    for package, path in pieces.notices().items():
        files[f"notices/{package}"] = path
    return files


def _slot_files(recipe: Recipe, signature: int, folder: Path) -> dict[str, Path]:
    """Configuration, settings, keys, U-Boot's script."""
    loader = "uboot" if recipe.uboot else "firmware"
    texts: dict[str, bytes] = {
        "boot.scr": boot.uboot_image(boot.uboot_script()),
        "slot.env": boot.slot_env("a", 0),
        "colibri/board.conf": recipe.settings.render().encode(),
        "colibri/dropbear_host_key": recipe.host_key.dropbear(),
        "colibri/authorized_keys": "".join(f"{k}\n" for k in recipe.settings.authorized_keys).encode(),
        "notices/SOURCES": _sources(recipe).encode(),
    }
    for slot in boot.SLOTS:
        texts[f"config-{slot}.txt"] = boot.config_txt(recipe.platform, slot, uboot=recipe.uboot)
        line = boot.cmdline(recipe.platform, slot, signature, loader=loader)
        texts[f"slot-{slot}/cmdline.txt"] = line.encode() + b"\n"
        # Whoever starts boot.scr is U-Boot, also where the firmware was meant to start the kernel.
        line = boot.cmdline(recipe.platform, slot, signature, loader="uboot")
        texts[f"slot-{slot}/uboot.env"] = f"bootargs={line}\n".encode()
    texts["config.txt"], texts["tryboot.txt"] = texts["config-a.txt"], texts["config-b.txt"]
    out = {}
    for index, (name, data) in enumerate(sorted(texts.items())):
        out[name] = folder / f"text-{index}"
        out[name].write_bytes(data)
    return out


def _sources(recipe: Recipe) -> str:
    rows = [f"{name} {version}" for name, version in recipe.pieces.versions.items()]
    return (
        "Debian packages on this card, with their copyright files beside this one. The source of each\n"
        "is at https://snapshot.debian.org under its name and version. The Raspberry Pi firmware\n"
        "(raspi-firmware) may only be used with a Raspberry Pi.\n\n" + "\n".join(rows) + "\n"
    )
