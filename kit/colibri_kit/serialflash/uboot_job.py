"""Flashing at a U-Boot prompt: into memory, compared, onto the medium, read back, compared."""

from __future__ import annotations

import re
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from colibri_kit.deploy.plan import size_text
from colibri_kit.errors import PreflightError, TransferError, VerifyError
from colibri_kit.serialflash import plan
from colibri_kit.serialflash.bootscript import boot_commands, script_image
from colibri_kit.serialflash.medium import Ext4Files, Medium, Sectors, choose
from colibri_kit.serialflash.options import SerialOptions
from colibri_kit.serialflash.plan import Item
from colibri_kit.serialflash.uboot import LINE_MAX, UBoot
from colibri_kit.transport.serial_line import Line
from colibri_kit.ui import Ui

#: Bytes of the first measuring transfer.
_SAMPLE = 2 * 1024
#: What shows that the board left U-Boot behind.
_BOOTED = re.compile(rb"Starting kernel|Linux version|login: ?$|colibri|Booting Linux")


@dataclass
class Flashed:
    """What came of it; sizes in bytes, rate in bytes a second."""

    place: str
    files: list[dict[str, Any]] = field(default_factory=list)
    sent_bytes: int = 0
    kept_bytes: int = 0
    rate_bytes_s: float = 0.0
    repeats: int = 0
    retyped: int = 0
    bootcmd: str | None = None
    environment: str = "unchanged"
    booted: bool | None = None


@dataclass
class UBootFlash:
    """One run: make it with an answering U-Boot, then :meth:`run`."""

    ui: Ui
    line: Line
    options: SerialOptions
    uboot: UBoot = field(init=False)
    address: int = 0
    done: Flashed = field(init=False)

    def __post_init__(self) -> None:
        self.uboot = UBoot(self.line, self.ui.detail)

    def run(self, files: Sequence[Item]) -> Flashed:
        """Sends what the medium lacks, sets the environment, boots if asked.

        Raises:
            PreflightError, TransferError, VerifyError, ConnectionLost.
        """
        self.uboot.interrupt()
        medium = choose(self.uboot, self.options.to)
        self.done = Flashed(medium.place.text)
        self.address = self._address()
        with tempfile.TemporaryDirectory(prefix="colibri-serial-") as temp:
            if isinstance(medium, Sectors):
                files = [plan.tar(files, Path(temp) / "colibri.tar")]
            elif isinstance(medium, Ext4Files):
                files = [replace(f, name=f.name.replace("/", "-")) for f in files]
                self._check_memory(max(f.size for f in files))
            files = [*files, *self._script(medium, files, Path(temp))]
            self._measure(sum(f.size for f in files))
            if self.options.dry_run:
                return self.done
            try:
                with self.ui.progress("flash", sum(f.size for f in files)) as bar:
                    for item in files:
                        self._file(medium, item, bar.advance)
            except KeyboardInterrupt:
                self.uboot.interrupt()
                self.ui.note(
                    f"interrupted: {size_text(self.done.sent_bytes)} are written and compared; the same "
                    "command sends the rest. The boot command was not changed."
                )
                raise
        self._environment(medium)
        if self.options.boot:
            self._boot()
        self.done.rate_bytes_s = self.uboot.rate.bytes_s
        self.done.repeats, self.done.retyped = self.uboot.rate.repeats, self.line.retyped
        return self.done

    def _address(self) -> int:
        """Where U-Boot says files may be loaded."""
        for name in ("kernel_addr_r", "loadaddr"):
            value = self.uboot.variable(name)
            if value and re.fullmatch(r"(0x)?[0-9a-fA-F]+", value):
                return int(value, 16)
        raise PreflightError(
            "this U-Boot names no address to load to (kernel_addr_r, loadaddr)",
            hint="at its prompt: setenv loadaddr 0x… (inside its memory; see bdinfo)",
            state="nothing was written",
            code="CK-UBOOT-MEDIUM",
        )

    def _check_memory(self, size: int) -> None:
        """ext4write needs the whole file in memory, and U-Boot itself sits at its end."""
        start = self.uboot.value("bdinfo", r"-> start\s*= (0x[0-9a-f]+)$")
        length = self.uboot.value("bdinfo", r"-> size\s*= (0x[0-9a-f]+)$")
        if not start or not length:
            return
        room = int(start, 16) + int(length, 16) - self.address - (64 << 20)
        if size > room:
            raise PreflightError(
                f"ext4write wants a file whole in memory: {size_text(size)}, "
                f"there is room for {size_text(room)}",
                hint="use a FAT partition: --place 'IFACE DEV:PART'",
                state="nothing was written",
                code="CK-UBOOT-MEDIUM",
            )

    def _measure(self, total: int) -> None:
        """Switches the rate if asked, sends a sample, tells the time that all will take."""
        if self.options.dry_run:
            self.done.rate_bytes_s = self.line.baud / 10 * plan.YMODEM_SHARE
            return
        wanted = self.options.max_baud
        if wanted and wanted != self.line.baud:
            ok = self.uboot.set_baud(wanted)
            self.ui.note(plan.rate_text(wanted, ok, self.line.baud))
        began = time.monotonic()
        sample = bytes(range(256)) * (_SAMPLE // 256)
        self.uboot.load(self.address, sample)
        took = time.monotonic() - began
        # A transfer's fixed waits (about 5 s) are not its rate: a piece of 512 KiB has them once.
        rate = self.uboot.rate.bytes_s or _SAMPLE / took
        fixed = self.uboot.rate.fixed * (1 + total // self.uboot.piece)
        honest = total / (total / rate + fixed) if total else rate
        self.ui.note(f"estimate: {plan.sum_text(total, honest)} (measured with {_SAMPLE} bytes)")
        plan.check_time(total, honest, self.options.max_hours, "measured on this line")
        self.done.rate_bytes_s = honest

    def _file(self, medium: Medium, item: Item, advance: Callable[[int], None]) -> None:
        """One file: pieces that the medium holds already are compared there and skipped."""
        medium.prepare(item.name)
        there = medium.size(item.name)
        if there is not None and there > item.size and not isinstance(medium, Sectors):
            medium.remove(item.name)
            there = None
        size = medium.piece or item.size
        kept = sent = 0
        with item.path.open("rb") as source:
            for offset in range(0, item.size, size):
                data = _exactly(source, item, min(size, item.size - offset))
                known = there is not None and offset + len(data) <= there
                if known and self._stored(medium, item.name, data, offset):
                    kept += len(data)
                    advance(len(data))
                    continue
                self._piece(medium, item.name, data, offset, advance)
                sent += len(data)
                self.done.sent_bytes += len(data)
        self.done.kept_bytes += kept
        self.done.files.append({"name": item.name, "bytes": item.size, "sent": sent, "kept": kept})

    def _stored(self, medium: Medium, name: str, data: bytes, offset: int) -> bool:
        """Does the medium hold these bytes there?"""
        for _ in range(2):
            if medium.read(self.address, name, len(data), offset):
                return self.uboot.crc32(self.address, len(data)) == zlib.crc32(data)
        return False

    def _piece(
        self, medium: Medium, name: str, data: bytes, offset: int, advance: Callable[[int], None]
    ) -> None:
        for _ in range(3):
            self.uboot.load(self.address, data, progress=advance)
            medium.write(self.address, name, len(data), offset)
            # The memory still holds the bytes: spoil it, so that a read that does nothing shows.
            self.uboot.command(f"mw.b {self.address:x} 5a {len(data):x}", timeout=30)
            if self._stored(medium, name, data, offset):
                return
            self.ui.warn(f"{name} at {offset}: the medium gives other bytes than were written; again")
        raise VerifyError(
            f"{medium.place.text} does not keep what is written ({name} at byte {offset})",
            hint="the medium may be worn out or write-protected",
            state="the boot command was not changed",
            code="CK-UBOOT-STORED",
        )

    def _script(self, medium: Medium, files: Sequence[Item], temp: Path) -> list[Item]:
        """``boot.scr`` beside the files: distro boot finds it even where the environment is lost."""
        commands = self._commands(medium, files)
        if commands is None or isinstance(medium, Sectors):
            return []
        path = temp / "boot.scr"
        path.write_bytes(script_image("\n".join(commands) + "\n"))
        return [Item("boot.scr", path, path.stat().st_size)]

    def _commands(self, medium: Medium, files: Sequence[Item]) -> list[str] | None:
        if self.options.bootcmd is not None:
            return [c.strip() for c in self.options.bootcmd.split(";") if c.strip()]
        made = boot_commands(medium.place.text, [f.name for f in files], self.options.bootargs)
        self._made = made
        return made

    _made: list[str] | None = None

    def _environment(self, medium: Medium) -> None:
        """Sets ``bootcmd``, one variable a step because lines are short, and saves it if it can."""
        given = self.options.bootcmd
        steps = [c.strip() for c in given.split(";") if c.strip()] if given is not None else self._made
        if not steps:
            return
        for number, step in enumerate(steps, 1):
            if len(step) > LINE_MAX - 40:
                raise PreflightError(
                    f"a boot command of {len(step)} characters is too long for U-Boot's line"
                )
            self.uboot.set_variable(f"colibri_{number}", step)
        bootcmd = "; ".join(f"run colibri_{n}" for n in range(1, len(steps) + 1))
        self.uboot.set_variable("bootcmd", bootcmd)
        self.done.bootcmd = "; ".join(steps)
        status, _ = self.uboot.command("saveenv", timeout=60)
        self.done.environment = "saved" if status == 0 else "set until power-off"
        if status != 0:
            where = "boot.scr was written" if not isinstance(medium, Sectors) else "it is lost at power-off"
            self.ui.warn(f"U-Boot cannot save its environment here; {where}")

    def _boot(self) -> None:
        """Starts ``bootcmd`` and watches for a sign of life. Raises TransferError when none comes."""
        self.line.type_line("run bootcmd", kill=b"\x03")
        found, seen = self.line.wait_for(_BOOTED, 90)
        self.done.booted = found is not None
        words = seen.decode("utf-8", "replace").replace("\r", "").strip()
        self.ui.detail(words)
        if found is None:
            raise TransferError(
                f"the board was flashed but does not boot; its last words: {words[-200:]!r}",
                state="engine and weights are on the medium and were compared",
                hint="power-cycle it and look at the console",
                code="CK-UBOOT-BOOT",
            )


def _exactly(source: BinaryIO, item: Item, size: int) -> bytes:
    data = source.read(size)
    if len(data) != size:
        raise TransferError(f"{item.path} became shorter while it was read")
    return data
