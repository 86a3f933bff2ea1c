"""The boot partition's small files: firmware configuration, kernel command lines, U-Boot's script.

Raspberry Pi firmware (documentation: "config.txt", "os_prefix", "Fail-safe OS updates"):
config.txt names the slot by ``os_prefix``, under which the firmware looks for kernel,
initramfs, device tree and cmdline.txt. tryboot.txt, the same for the other slot, is read
instead of config.txt for one boot when the one-shot tryboot flag is set. Each is exactly
one sector, so that choosing another slot is one sector written in place.

U-Boot (``--boot-loader uboot``) runs boot.scr: it counts a boot before it starts it and
takes the other slot after three that the board did not report as good.
"""

from __future__ import annotations

import struct
import zlib

from colibri_kit.appliance.platforms import Platform
from colibri_kit.media.partitions import SECTOR

SLOTS = ("a", "b")
TRIES = 3


def config_txt(platform: Platform, slot: str, *, uboot: bool) -> bytes:
    """config.txt for a slot: 512 bytes."""
    other = "b" if slot == "a" else "a"
    rows = [
        f"# Slot {slot}. The other one: config-{other}.txt, copied over config.txt in place.",
        "arm_64bit=1",
        "enable_uart=1",
        "disable_splash=1",
    ]
    if uboot:
        rows += ["kernel=u-boot.bin"]
    else:
        rows += [f"os_prefix=slot-{slot}/", "kernel=vmlinuz", "initramfs initrd.gz followkernel"]
    rows += [f"[{platform.section}]"]
    if uboot:
        rows += [f"device_tree=slot-{slot}/{platform.dtbs[0].rpartition('/')[2]}"]
    rows += ["[all]", ""]
    text = "\n".join(rows).encode()
    assert len(text) <= SECTOR
    return text + b"#" * (SECTOR - len(text) - 1) + b"\n" if len(text) < SECTOR else text


def cmdline(platform: Platform, slot: str, signature: int, *, loader: str) -> str:
    """The kernel's command line, without a newline. ``colibri.disk`` is the card's MBR signature."""
    return (
        f"console={platform.console} panic=10 loglevel=4 colibri.slot={slot} "
        f"colibri.disk={signature:08x} colibri.loader={loader}"
    )


def slot_env(slot: str, tries: int) -> bytes:
    """What U-Boot reads and writes: the slot to boot, and how often it was tried since it was last good."""
    return f"slot={slot}\ntries={tries}\n".encode()


def uboot_script() -> str:
    """boot.scr's text. ``test`` compares numbers as decimal and setexpr counts in hex: both stay below 10."""
    return f"""\
setenv slot a
setenv tries 0
if load mmc 0:1 ${{scriptaddr}} slot.env; then env import -t ${{scriptaddr}} ${{filesize}} slot tries; fi
if test ${{tries}} -ge {TRIES}; then
  echo "slot ${{slot}} did not come up {TRIES} times"
  if test ${{slot}} = a; then setenv slot b; else setenv slot a; fi
  setenv tries 0
fi
setexpr tries ${{tries}} + 1
env export -t ${{scriptaddr}} slot tries
fatwrite mmc 0:1 ${{scriptaddr}} slot.env ${{filesize}}
echo "colibri: slot ${{slot}}, try ${{tries}}"
load mmc 0:1 ${{scriptaddr}} slot-${{slot}}/uboot.env
env import -t ${{scriptaddr}} ${{filesize}} bootargs
if load mmc 0:1 ${{ramdisk_addr_r}} slot-${{slot}}/initrd.gz; then
  setenv initrd_size ${{filesize}}
  if load mmc 0:1 ${{kernel_addr_r}} slot-${{slot}}/vmlinuz; then
    booti ${{kernel_addr_r}} ${{ramdisk_addr_r}}:${{initrd_size}} ${{fdt_addr}}
  fi
fi
echo "slot ${{slot}} cannot be loaded"
reset
"""


def uboot_image(script: str) -> bytes:
    """The script in U-Boot's legacy image format, as ``mkimage -T script`` makes it."""
    text = script.encode()
    body = struct.pack(">II", len(text), 0) + text

    def header(crc: int) -> bytes:
        return struct.pack(
            ">7I4B32s", 0x27051956, crc, 0, len(body), 0, 0, zlib.crc32(body),
            5, 22, 6, 0, b"colibri slots",  # Linux, arm64, script, not compressed
        )  # fmt: skip

    return header(zlib.crc32(header(0))) + body
