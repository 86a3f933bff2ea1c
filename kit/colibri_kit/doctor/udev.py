"""The udev rule for serial adapters: the one that ships, and whether the installed one is it."""

from __future__ import annotations

from pathlib import Path

from colibri_kit.detect.sysfs import KNOWN_USB
from colibri_kit.doctor.findings import Finding, ok, warn

NAME = "70-colibri-kit.rules"
FOLDERS = (Path("/etc/udev/rules.d"), Path("/usr/local/lib/udev/rules.d"), Path("/usr/lib/udev/rules.d"))
_INSTALL = (
    f"colibri-kit doctor --udev-rule | sudo tee /etc/udev/rules.d/{NAME} && sudo udevadm control --reload"
)


def rule() -> str:
    """The rules file: whoever sits at this machine may open the adapters; no modem probing."""
    lines = [
        "# Serial adapters and boards in boot modes that colibri-kit knows.",
        "# uaccess: the user at the seat may open them. ModemManager must not write to them.",
        'ACTION!="add|change|bind", GOTO="colibri_end"',
    ]
    for both in sorted(KNOWN_USB):
        vendor, product = both.split(":")
        match = f'ATTRS{{idVendor}}=="{vendor}", ATTRS{{idProduct}}=="{product}"'
        lines.append(f'SUBSYSTEMS=="usb", {match}, TAG+="uaccess", ENV{{ID_MM_DEVICE_IGNORE}}="1"')
    return "\n".join([*lines, 'LABEL="colibri_end"']) + "\n"


def check(folders: tuple[Path, ...] = FOLDERS) -> Finding:
    """Is the rule installed, and is it this version's?"""
    for folder in folders:
        path = folder / NAME
        try:
            there = path.read_text(errors="replace")
        except OSError:
            continue
        if there == rule():
            return ok("udev rule", f"{path} is this version's")
        return warn("udev rule", f"{path} is not this version's", _INSTALL)
    return warn("udev rule", "not installed: adapters may need root or a group", _INSTALL)
