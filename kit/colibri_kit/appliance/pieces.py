"""What an appliance is made of, from Debian, fetched when an image is made and never kept in the project.

The Raspberry Pi firmware is in Debian's non-free-firmware: it may be passed on in binary
form with its notice, and only for use with a Raspberry Pi. It gets a package store of its
own, so that nothing else ever sees that component.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from colibri_kit import resources
from colibri_kit.errors import VerifyError
from colibri_kit.vboard import packages
from colibri_kit.vboard.apt import Debian

PROGRAMS = packages.PackageSet(
    "appliance-arm64",
    "arm64",
    ("busybox-static", "dropbear-bin", "e2fsck-static"),
    drop=("perl*", "libperl*", "debconf*", "e2fsprogs", "logsave", "gcc-*-base", "libgcc*"),
)
FIRMWARE = packages.PackageSet("raspi-firmware", "arm64", ("raspi-firmware",), only=("raspi-firmware",))
UBOOT = packages.PackageSet("u-boot-rpi-arm64", "arm64", ("u-boot-rpi",), only=("u-boot-rpi",))
KERNEL = packages.kernel("arm64", "full")


class _WithFirmware(Debian):
    """The same mirror, with the component that holds the firmware."""

    def lines(self, *, backports: bool = False) -> str:
        return "".join(
            f"{line} non-free-firmware\n" for line in super().lines(backports=backports).splitlines()
        )


class _FirmwareStore(packages.Store):
    @property
    def debian(self) -> Debian:
        d = super().debian
        return _WithFirmware(d.suite, d.uri, d.security_uri, d.signed_by)


@dataclass(frozen=True)
class Pieces:
    """Folders with unpacked packages. ``versions``: package -> version of everything used."""

    kernel: Path
    programs: Path
    firmware: Path
    uboot: Path | None
    versions: dict[str, str]

    @property
    def vmlinuz(self) -> Path:
        return _one(self.kernel, "boot/vmlinuz-*")

    def dtb(self, name: str) -> Path:
        return _one(self.kernel, f"usr/lib/linux-image-*/{name}")

    def notices(self) -> dict[str, Path]:
        """Package -> copyright file of everything whose bytes are on the card."""
        out = {}
        for root in (self.kernel, self.programs, self.firmware, self.uboot):
            for path in sorted(root.glob("usr/share/doc/*/copyright")) if root else ():
                out[path.parent.name] = path
        return out


def _one(root: Path, pattern: str) -> Path:
    found = sorted(root.glob(pattern))
    if not found:
        raise VerifyError(f"the Debian package lacks {pattern}", hint="try again with --refresh")
    return found[-1]


def fetch(note: Callable[[str], None], *, uboot: bool = False, refresh: bool = False) -> Pieces:
    """All pieces, from the cache or the machine's Debian mirror.

    Raises:
        PreflightError: no apt or no mirror. TransferError: it does not answer.
    """
    store = packages.Store(note, refresh=refresh)
    own = _FirmwareStore(note, resources.cache_dir() / "firmware", refresh=refresh)
    kernel, programs, firmware = store.get(KERNEL), store.get(PROGRAMS), own.get(FIRMWARE)
    versions = {
        **store.versions(KERNEL), **store.versions(PROGRAMS), **own.versions(FIRMWARE),
    }  # fmt: skip
    loader = None
    if uboot:
        loader = store.get(UBOOT)
        versions |= store.versions(UBOOT)
    return Pieces(kernel, programs, firmware, loader, dict(sorted(versions.items())))
