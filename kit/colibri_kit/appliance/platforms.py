"""What each board boots from. A board that is not here has no appliance image."""

from __future__ import annotations

from dataclasses import dataclass

from colibri_kit.config.board import Board
from colibri_kit.errors import UsageError

#: Loaded at boot, after what they depend on; the kernel loads nothing by itself here (no udev).
#: Storage first: the partitions are waited for while the rest loads.
_PI_MODULES = (
    "fixed", "gpio_regulator", "reset_raspberrypi", "bcm2835", "sdhci_iproc", "crc32c_generic", "ext4",
    "vfat", "nls_cp437", "nls_ascii", "bcm2835_wdt", "bcm2835_rng", "raspberrypi_cpufreq", "bcm2711_thermal",
    "bcm2835_thermal", "phy_generic", "dwc2", "xhci_pci", "bcm_phy_lib", "broadcom", "microchip",
    "mdio_bcm_unimac", "genet", "usbnet", "smsc95xx", "lan78xx", "cdc_ether", "rndis_host",
)  # fmt: skip


@dataclass(frozen=True)
class Platform:
    """A boot chain.

    Attributes:
        section: the firmware's filter for this model in config.txt (``pi4``).
        firmware: files of Debian's raspi-firmware that the boot partition needs.
        dtbs: device trees from the kernel package; the firmware picks the one for the model.
        uboot: folder of Debian's u-boot-rpi, for --boot-loader uboot.
        console: the kernel's name of the serial port on the header, and its speed.
    """

    section: str
    firmware: tuple[str, ...]
    dtbs: tuple[str, ...]
    uboot: str
    console: str
    modules: tuple[str, ...]


_PI4 = Platform(
    section="pi4",
    firmware=("start4.elf", "fixup4.dat"),
    dtbs=(
        "broadcom/bcm2711-rpi-4-b.dtb",
        "broadcom/bcm2711-rpi-400.dtb",
        "broadcom/bcm2711-rpi-cm4-io.dtb",
    ),
    uboot="rpi_4",
    console="ttyS1,115200",
    modules=_PI_MODULES,
)
_PI3 = Platform(
    section="pi3",
    firmware=("bootcode.bin", "start.elf", "fixup.dat"),
    dtbs=("broadcom/bcm2837-rpi-3-b.dtb", "broadcom/bcm2837-rpi-3-b-plus.dtb"),
    uboot="rpi_3",
    console="ttyS1,115200",
    modules=_PI_MODULES,
)

PLATFORMS = {"rpi4": _PI4, "qemu-rpi4": _PI4, "qemu-rpi3": _PI3}


def platform_of(board: Board) -> Platform:
    """Raises UsageError for boards without an appliance image; the hint says what there is instead."""
    found = PLATFORMS.get(board.name)
    if found is not None:
        return found
    if board.arch != "aarch64" or board.os != "linux":
        hint = f"install Linux on it, then: colibri-kit deploy --board {board.name} HOST MODEL.coli"
    else:
        hint = "add the engine to the maker's own image: --base IMAGE; or over a serial line: --serial PORT"
    raise UsageError(
        f"there is no appliance image for board {board.name}; there is for {', '.join(PLATFORMS)}", hint=hint
    )
