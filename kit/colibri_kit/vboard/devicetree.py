"""Raspberry Pi device trees as QEMU needs them: without the hardware that it does not emulate."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from colibri_kit.errors import TransferError
from colibri_kit.vboard.packages import Program


class _Tree:
    def __init__(self, fdtput: Program, fdtget: Program, path: Path) -> None:
        self._put, self._get, self.path = fdtput, fdtget, path

    def _run(self, program: Program, *argv: str) -> str:
        done = subprocess.run(
            [*program.argv, *argv], env=program.environment, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise TransferError(f"{Path(program.argv[0]).name} {' '.join(argv)}: {done.stderr.strip()}")
        return done.stdout

    def nodes(self, node: str) -> list[str]:
        return self._run(self._get, "-l", str(self.path), node).split()

    def properties(self, node: str) -> list[str]:
        return self._run(self._get, "-p", str(self.path), node).split()

    def text(self, node: str, name: str, value: str) -> None:
        self._run(self._put, "-t", "s", str(self.path), node, name, value)

    def flag(self, node: str, name: str) -> None:
        self._run(self._put, str(self.path), node, name)

    def drop(self, node: str, *names: str) -> None:
        for name in set(names) & set(self.properties(node)):
            self._run(self._put, "-d", str(self.path), node, name)

    def remove(self, parent: str, child: str) -> None:
        if child in self.nodes(parent):
            self._run(self._put, "-r", str(self.path), f"{parent}/{child}")


def raspi4b(source: Path, target: Path, fdtput: Program, fdtget: Program) -> None:
    """``target``: Debian's bcm2711-rpi-4-b.dtb for QEMU's raspi4b.

    Accesses to the 7ef00000 block (interrupts, I2C, clocks of the display) abort the
    kernel; the bluetooth node holds the first serial port; QEMU puts the SD card where
    the board has its radio.
    """
    temp = target.with_name(target.name + ".new")
    shutil.copyfile(source, temp)
    tree = _Tree(fdtput, fdtget, temp)
    for name in tree.nodes("/soc"):
        if "@7ef" in name:
            tree.text(f"/soc/{name}", "status", "disabled")
    tree.remove("/soc/serial@7e201000", "bluetooth")
    tree.remove("/soc/mmc@7e300000", "wifi@1")
    tree.drop("/soc/mmc@7e300000", "mmc-pwrseq", "non-removable")
    tree.flag("/soc/mmc@7e300000", "broken-cd")
    tree.drop("/emmc2bus/mmc@7e340000", "vmmc-supply", "vqmmc-supply")
    temp.replace(target)
