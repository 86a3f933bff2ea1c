"""U-Boot's boot script image, and the boot command for given kernel files. Pure."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from fnmatch import fnmatch

#: include/image.h of U-Boot: magic, ih_os Linux, arch ARM64, type script, no compression.
_MAGIC, _LINUX, _ARM64, _SCRIPT, _PLAIN = 0x27051956, 5, 22, 6, 0
_HEAD = struct.Struct(">7I4B32s")


def script_image(text: str, name: str = "colibri") -> bytes:
    """``boot.scr``: the legacy image that ``source`` and distro boot take, as mkimage makes it.

    The time stamp is 0: the same text gives the same bytes.
    """
    body = text.encode()
    data = struct.pack(">II", len(body), 0) + body
    fields = (len(data), 0, 0, zlib.crc32(data), _LINUX, _ARM64, _SCRIPT, _PLAIN, name.encode())
    blank = _HEAD.pack(_MAGIC, 0, 0, *fields)
    return _HEAD.pack(_MAGIC, zlib.crc32(blank), 0, *fields) + data


def boot_commands(where: str, names: Sequence[str], bootargs: str | None) -> list[str] | None:
    """What boots the kernel among ``names`` from ``where`` (``mmc 0:1``); None without a kernel."""

    def first(*patterns: str) -> str | None:
        return next((n for n in names if any(fnmatch(n.rsplit("/", 1)[-1], p) for p in patterns)), None)

    kernel = first("Image*", "vmlinuz*")
    if kernel is None:
        return None
    initrd, tree = first("initrd*", "initramfs*"), first("*.dtb")
    out = [f"setenv bootargs '{bootargs}'"] if bootargs else []
    ramdisk, fdt = "-", "${fdtcontroladdr}"
    if initrd:
        out.append(f"load {where} ${{ramdisk_addr_r}} {initrd}")
        # The size must be kept: the next load overwrites it.
        out.append("setenv ck_rd ${ramdisk_addr_r}:${filesize}")
        ramdisk = "${ck_rd}"
    if tree:
        out.append(f"load {where} ${{fdt_addr_r}} {tree}")
        fdt = "${fdt_addr_r}"
    out.append(f"load {where} ${{kernel_addr_r}} {kernel}")
    out.append(f"booti ${{kernel_addr_r}} {ramdisk} {fdt}")
    return out
