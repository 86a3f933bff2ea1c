"""Serial ports and USB devices as sysfs shows them. Nothing is opened.

The folder layout is the kernel's Documentation/ABI/testing/sysfs-bus-usb and sysfs-class-tty.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

#: USB ids of what boards and adapters show themselves as, from linux/drivers/usb and vendors.
KNOWN_USB = {
    "0403:6001": "FTDI FT232R serial adapter",
    "0403:6010": "FTDI FT2232 two serial ports",
    "0403:6011": "FTDI FT4232 four serial ports",
    "0403:6015": "FTDI FT230X serial adapter",
    "067b:2303": "Prolific PL2303 serial adapter",
    "10c4:ea60": "Silicon Labs CP210x serial adapter",
    "1a86:7523": "WCH CH340 serial adapter",
    "1a86:55d4": "WCH CH9102 serial adapter",
    "0a5c:2711": "Raspberry Pi 4 in USB boot mode",
    "0a5c:2712": "Raspberry Pi 5 in USB boot mode",
    "0a5c:2764": "Raspberry Pi Zero 2/3 in USB boot mode",
    "1fc9:0134": "NXP i.MX8M Mini in serial download mode",
    "2207:330c": "Rockchip RK3399 in mask ROM mode",
    "2207:350b": "Rockchip RK3588 in mask ROM mode",
    "2207:320c": "Rockchip RK3328 in mask ROM mode",
    "2e8a:000c": "Raspberry Pi Debug Probe",
    "1d6b:0104": "Linux USB gadget (a board as a USB device)",
    "0525:a4a7": "Linux USB gadget, serial",
    "1209:0001": "colibri offload link, or another device under pid.codes' test id",
}


@dataclass(frozen=True)
class UsbDevice:
    """``id`` is vendor:product in hex; ``serial`` may be empty."""

    id: str
    name: str
    serial: str
    known: str | None


@dataclass(frozen=True)
class Port:
    """A serial port; ``answers`` only after it was probed.

    Attributes:
        ours: an end of our USB gadget (docs/offload.md).
        link: who speaks the offload protocol there, ``discover.Peer.role``; None = not asked.
        link_words: the module's model, the board's engine, or why it could not be opened.
    """

    device: str
    driver: str
    usb: UsbDevice | None
    permitted: bool
    answers: str | None = None
    words: str = ""
    ours: bool = False
    link: str | None = None
    link_words: str = ""


def text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _usb(folder: Path) -> UsbDevice | None:
    vendor, product = text(folder / "idVendor"), text(folder / "idProduct")
    if not re.fullmatch(r"[0-9a-f]{4}", vendor) or not re.fullmatch(r"[0-9a-f]{4}", product):
        return None
    name = " ".join(t for t in (text(folder / "manufacturer"), text(folder / "product")) if t)
    both = f"{vendor}:{product}"
    return UsbDevice(both, name, text(folder / "serial"), KNOWN_USB.get(both))


def usb_devices(sysfs: Path) -> list[UsbDevice]:
    """Devices on the USB buses; hubs are left out."""
    found = []
    for folder in sorted((sysfs / "bus/usb/devices").glob("*")):
        # Interfaces (1-1:1.0) are no devices; class 09 is a hub.
        if ":" in folder.name or text(folder / "bDeviceClass") == "09":
            continue
        device = _usb(folder)
        if device:
            found.append(device)
    return found


def serial_ports(sysfs: Path, dev: Path) -> list[Port]:
    """Serial ports with hardware behind them; the kernel's placeholder ttyS ports are left out.

    A ttyGS is this machine's own end of a USB gadget.
    """
    import os

    found = []
    for folder in sorted((sysfs / "class/tty").glob("*")):
        device = folder / "device"
        if re.match(r"ttyGS\d+$", folder.name):  # has no device: nobody but configfs knows its gadget
            node = dev / folder.name
            found.append(Port(str(node), "g_serial", None, os.access(node, os.R_OK | os.W_OK)))
            continue
        if not device.exists() or not re.match(r"tty(S|USB|ACM|AMA|mxc|PS|SAC|O|LP|THS)\d+$", folder.name):
            continue
        driver = (device / "driver").resolve().name if (device / "driver").exists() else ""
        # serial8250 lists four ttyS whether they exist or not; type 0 (unknown) means not.
        if driver in ("serial8250", "") and text(folder / "type") in ("", "0"):
            continue
        node = dev / folder.name
        found.append(Port(str(node), driver, _parent_usb(device), os.access(node, os.R_OK | os.W_OK)))
    return found


def _parent_usb(device: Path) -> UsbDevice | None:
    """The USB device that a tty belongs to: some levels up."""
    at = device.resolve()
    for _ in range(5):
        usb = _usb(at)
        if usb:
            return usb
        at = at.parent
    return None
