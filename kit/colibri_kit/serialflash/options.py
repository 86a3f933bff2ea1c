"""What a serial flash can be told, and the command-line options for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from colibri_kit.serialflash.plan import MAX_HOURS
from colibri_kit.transport.serial_port import DEFAULT_BAUD

if TYPE_CHECKING:
    from colibri_kit.transport.serial_line import Line


@dataclass(frozen=True)
class SerialOptions:
    """All have defaults; sizes in bytes.

    Attributes:
        baud, max_baud: the console's rate; the rate to try to switch to for the transfer.
        txdelay: seconds after each byte, for boards that lose bytes.
        to: at a U-Boot prompt the place, ``mmc 0:1`` or ``mmc 0@0x8000``; None = the only one.
        engine: binary to send instead of building one.
        extra: (file here, name on the medium): a kernel, an initramfs, a device tree.
        bootcmd: U-Boot's boot command; None = made from a kernel among ``extra``, else kept.
        bootargs: the kernel's command line for a made boot command.
        boot: boot at the end.
        user, password_file: the login at a Linux console.
        prefix, budget, ctx, threads, service, keep: as for ``deploy``, at a Linux console.
        method: ``auto``, ``rx`` or ``base64``, at a Linux console.
        max_hours: longest transfer that is begun.
        wait: seconds to wait for a prompt (a board that boots).
    """

    baud: int = DEFAULT_BAUD
    max_baud: int | None = None
    txdelay: float = 0.0
    to: str | None = None
    engine: Path | None = None
    extra: tuple[tuple[Path, str], ...] = ()
    bootcmd: str | None = None
    bootargs: str | None = None
    boot: bool = False
    user: str = "root"
    password_file: Path | None = None
    prefix: str | None = None
    budget: int | None = None
    ctx: int | None = None
    threads: int | None = None
    service: bool = False
    keep: int = 3
    method: str = "auto"
    max_hours: float = MAX_HOURS
    wait: float = 20.0
    dry_run: bool = False

    def password(self) -> str | None:
        """From the file, ``$COLIBRI_SERIAL_PASSWORD`` or the terminal; None = there is none."""
        from colibri_kit.transport.options import secret

        return secret(self.password_file, "COLIBRI_SERIAL_PASSWORD", "password on the board's console: ")

    def open(self, device: str) -> Line:
        """The port, for us alone. Raises what :func:`open_line` does."""
        from colibri_kit.transport.serial_port import open_line

        return open_line(device, self.baud, txdelay=self.txdelay)
