"""What a serial flash sends, how long that takes, and when it is refused. Pure."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from colibri_kit.deploy.model import Part
from colibri_kit.deploy.plan import size_text
from colibri_kit.errors import PreflightError

#: Part of the line's bytes that carry payload: start/stop bits are in the baud rate already;
#: blocks, acknowledgements and checksum readings cost the rest.
YMODEM_SHARE = 0.93
BASE64_SHARE = 0.70
#: Longest transfer that is begun without --max-hours, hours.
MAX_HOURS = 2.0


@dataclass(frozen=True)
class Item:
    """One file to send: its name on the board (relative), where it is here, bytes."""

    name: str
    path: Path
    size: int


def items(engine: Part, parts: Sequence[Part], folder: str, extra: Sequence[tuple[Path, str]]) -> list[Item]:
    """Engine, weights under ``folder``, and the extra files, in the order they are sent."""
    out = [Item("colibri/colibri", engine.path, engine.size)]
    out += [Item(f"colibri/{folder}/{p.name}", p.path, p.size) for p in parts]
    out += [Item(name, path, path.stat().st_size) for path, name in extra]
    return out


def seconds(size: int, baud: int, share: float) -> float:
    """Time that ``size`` bytes take: ten bits a byte, and what the protocol costs."""
    return size * 10 / baud / share


def time_text(value: float) -> str:
    """``42 s``, ``7 min``, ``1 h 50 min``, ``4.2 days``."""
    if value < 90:
        return f"{value:.0f} s"
    if value < 5400:
        return f"{value / 60:.0f} min"
    if value < 48 * 3600:
        return f"{int(value // 3600)} h {int(value % 3600 // 60)} min"
    return f"{value / 86400:.1f} days"


def sum_text(size: int, bytes_s: float) -> str:
    """The sum that an estimate is: ``4.0 GiB / 10.5 KiB/s = 4.7 days``."""
    return f"{size_text(size)} at {bytes_s / 1024:.1f} KiB/s = {time_text(size / bytes_s)}"


def rate_text(wanted: int, ok: bool, now: int) -> str:
    """What became of a change of rate."""
    return f"line at {wanted} baud" if ok else f"{wanted} baud refused: stays at {now}"


def check_time(size: int, bytes_s: float, max_hours: float, how: str) -> None:
    """Refuses what would take too long.

    Args:
        how: where the rate comes from, for the message.

    Raises:
        PreflightError: with the sum and the better way.
    """
    if size / bytes_s <= max_hours * 3600:
        return
    raise PreflightError(
        f"too slow over this line: {sum_text(size, bytes_s)} ({how}); the limit is {max_hours:g} h",
        hint="write an SD card or image (colibri-kit flash --to/--image), or bring the board onto the "
        "network and use colibri-kit deploy; a faster line: --max-baud 921600; or insist: --max-hours",
        state="nothing was sent",
        code="CK-SERIAL-SLOW",
    )


def tar(files: Sequence[Item], target: Path) -> Item:
    """The files as one uncompressed tar, the same bytes each time: for bare sectors."""
    with (
        target.open("wb") as out,
        tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as archive,
    ):
        for item in files:
            info = tarfile.TarInfo(item.name)
            info.size, info.mode = item.size, 0o755 if item.name == "colibri/colibri" else 0o644
            with item.path.open("rb") as source:
                archive.addfile(info, io.BufferedReader(source.raw))
    return Item("colibri.tar", target, target.stat().st_size)
