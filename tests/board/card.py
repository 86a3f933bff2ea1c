"""Boots a card image's own kernel, initramfs and partitions in QEMU, and talks to its serial console."""

from __future__ import annotations

import os
import re
import select
import socket
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

from colibri_kit.appliance.pieces import Pieces
from colibri_kit.media.partitions import read_table
from colibri_kit.vboard import devicetree
from colibri_kit.vboard.images import copy_sparse, next_power_of_two
from colibri_kit.vboard.packages import Program, Store, find_qemu, find_tool


def boot_offset(image: Path) -> int:
    with image.open("rb") as file:
        return read_table(file, image.stat().st_size).partitions[0].start


def from_card(image: Path, name: str) -> bytes:
    """A file of the boot partition, read by mtools."""
    drive = f"{image}@@{boot_offset(image)}"
    done = subprocess.run(
        ["mtype", "-i", drive, f"::{name}"],
        capture_output=True,
        check=True,
        env={**os.environ, "MTOOLSRC": "/dev/null"},
    )
    return done.stdout


def sd_copy(image: Path, target: Path) -> Path:
    """QEMU's SD cards have sizes that are powers of two."""
    copy_sparse(image, target)
    os.truncate(target, next_power_of_two(target.stat().st_size))
    return target


def device_tree(machine: str, pieces: Pieces, folder: Path) -> Path:
    """Debian's device tree; for raspi4b without what QEMU has not."""
    if machine == "raspi3b":
        return pieces.dtb("broadcom/bcm2837-rpi-3-b.dtb")
    store = Store(print)
    out = folder / "raspi4b.dtb"
    tools = [find_tool(store, name, "device-tree-compiler") for name in ("fdtput", "fdtget")]
    devicetree.raspi4b(pieces.dtb("broadcom/bcm2711-rpi-4-b.dtb"), out, *tools)
    return out


@dataclass
class Console:
    """A QEMU and one of its serial ports."""

    process: subprocess.Popen[bytes]
    line: socket.socket
    text: str = ""
    started: float = field(default_factory=time.monotonic)

    def until(self, pattern: str, seconds: float) -> re.Match[str]:
        """Reads until the pattern shows; fails with the end of the log. Returns the match."""
        end = time.monotonic() + seconds
        while True:
            found = re.search(pattern, self.text)
            if found:
                self.text = self.text[found.end() :]
                return found
            left = end - time.monotonic()
            assert left > 0, (
                f"{pattern!r} not seen within {seconds} s; the console ends:\n{self.text[-3000:]}"
            )
            if select.select([self.line], [], [], min(left, 1.0))[0]:
                data = self.line.recv(65536)
                assert data, f"QEMU ended before {pattern!r}; the console ends:\n{self.text[-3000:]}"
                self.text += data.decode("utf-8", "replace").replace("\r", "")

    def send(self, text: str) -> None:
        """Types a line slowly enough for an emulated UART of 16 bytes."""
        for at in range(0, len(text), 8):
            self.line.sendall(text[at : at + 8].encode())
            time.sleep(0.02)
        self.line.sendall(b"\r")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.line.close()


def start(
    machine: str, folder: Path, card: Path, kernel: Path, dtb: Path, *more: str, uart: int = 1
) -> Console:
    """Starts QEMU with the card in its slot; the console is serial port ``uart``."""
    program: Program = find_qemu(Store(print), "qemu-system-aarch64", machine)
    where = folder / f"serial-{time.monotonic_ns()}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(where))
        listener.listen(1)
        listener.settimeout(30)
        serial = ["-serial", "null"] * uart + ["-serial", f"unix:{where}"]
        process = subprocess.Popen(
            [
                *program.argv, "-M", machine, "-kernel", str(kernel), "-dtb", str(dtb),
                "-drive", f"if=sd,file={card},format=raw,cache=unsafe", "-display", "none", "-nodefaults",
                "-monitor", "none", *serial, *more,
            ],
            env=program.environment, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            line, _ = listener.accept()
        except OSError:
            process.kill()
            raise
    return Console(process, line)


def boot_slot(machine: str, folder: Path, image: Path, pieces: Pieces, slot: str, *more: str) -> Console:
    """What the Pi's firmware does with a slot: its kernel, its initramfs, its command line, from the card."""
    card = sd_copy(image, folder / "sd.img")
    for name in ("vmlinuz", "initrd.gz"):
        (folder / name).write_bytes(from_card(image, f"slot-{slot}/{name}"))
    line = from_card(image, f"slot-{slot}/cmdline.txt").decode().strip()
    # QEMU resets as soon as the Pi's watchdog is started: it has no timer behind the register.
    line += " colibri.watchdog=off"
    uart = 1
    if machine == "raspi4b":
        line, uart = line.replace("ttyS1", "ttyAMA0"), 0
    return start(
        machine, folder, card, folder / "vmlinuz", device_tree(machine, pieces, folder),
        "-initrd", str(folder / "initrd.gz"), "-append", line, "-no-reboot", *more, uart=uart,
    )  # fmt: skip
