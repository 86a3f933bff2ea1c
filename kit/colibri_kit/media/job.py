"""Puts an image on a disk or into a file: the part that every kind of image shares."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from colibri_kit.deploy.plan import size_text
from colibri_kit.errors import PreflightError, TransferError, UsageError
from colibri_kit.media import disks, medium, safety, usedmap, write
from colibri_kit.media.partitions import read_table
from colibri_kit.ui import Ui


@dataclass(frozen=True)
class Target:
    """A disk (``device``) or a new file (``image``), and what was said to be sure of the disk."""

    device: Path | None
    image: Path | None
    serial_number: str | None = None
    yes: bool = False


def look(target: Target, need_bytes: int) -> safety.Verdict | None:
    """Judges the disk; None for a file. Nothing is opened for writing.

    Raises:
        PreflightError: the disk may not be erased, or is too small.
        UsageError: --yes without its serial number.
    """
    if target.device is None:
        assert target.image is not None
        if target.image.exists() and not target.image.is_file():
            raise UsageError(
                f"{target.image} is not an ordinary file; --image makes one",
                hint="to write a disk: --to DEVICE",
            )
        return None
    verdict = safety.judge(disks.look(target.device), need_bytes, target.serial_number)
    if target.yes and target.serial_number is None:
        raise UsageError(
            "--yes needs --serial-number: device letters move, a medium's serial number does not",
            hint=f"that of {verdict.disk.path} is {verdict.disk.identity}",
        )
    return verdict


def plan_rows(verdict: safety.Verdict | None, target: Target) -> list[tuple[str, str]]:
    """What is about to be erased, for people."""
    if verdict is None:
        return [("target", f"{target.image} (a file)")]
    disk = verdict.disk
    kind = "removable" if disk.removable else "not removable"
    rows = [
        ("target", f"{disk.path}  {disk.model or disk.node.kind}  {size_text(disk.size)}  {kind}"),
        ("serial", disk.identity),
    ]
    return rows + [("erased", line) for line in verdict.lost]


def confirm(ui: Ui, verdict: safety.Verdict, target: Target) -> None:
    """Asks for the text that shows the user means this disk. With --yes the serial number has shown it.

    Raises:
        PreflightError: something else was typed, or nobody is there to type.
    """
    if target.yes:
        return
    if ui.as_json or not sys.stdin.isatty():
        raise PreflightError(
            f"nobody is here to confirm that {verdict.disk.path} is to be erased",
            hint=f"repeat with: --yes --serial-number {verdict.disk.identity}",
            state="nothing was changed",
            code="CK-FLASH-CONFIRM",
        )
    what = "the medium's serial number" if verdict.needs_serial else "the device's name"
    ui.note(f"Everything on {verdict.disk.path} will be lost. Type {what} ({verdict.confirm}) to go on:")
    if sys.stdin.readline().strip() != verdict.confirm:
        raise PreflightError(
            "that is something else",
            hint="repeat the command",
            state="nothing was changed",
            code="CK-FLASH-CONFIRM",
        )


def put(ui: Ui, image: Path, target: Target, verdict: safety.Verdict | None) -> dict[str, object]:
    """Writes ``image`` to the disk and verifies it, or moves it to the file's place.

    Returns:
        The figures for the report.

    Raises:
        TransferError, VerifyError: the state says what the medium is left in.
    """
    size = image.stat().st_size
    if verdict is None:
        assert target.image is not None
        try:
            image.chmod(0o600)  # it holds the board's private host key
            image.replace(target.image)
        except OSError as err:
            raise TransferError(
                f"cannot write {target.image}: {err.strerror}",
                state="no image was made",
                code="CK-FLASH-WRITE",
            ) from err
        return {"image": str(target.image), "size_bytes": size, "stored_bytes": _stored(target.image)}
    with image.open("rb") as source:
        ranges = usedmap.used_ranges(source, size, read_table(source, size))
        total = sum(b - a for a, b in ranges)
        disk = medium.open_disk(Path(verdict.disk.path), verdict.disk)
        try:
            with ui.progress("write and verify", 2 * total) as bar:
                done = write.write_image(
                    source, size, ranges, disk, on_write=bar.advance, on_verify=bar.advance
                )
        except KeyboardInterrupt:
            ui.note(f"interrupted; {write.UNSEALED}")
            raise
        finally:
            disk.close()
    _reread(verdict.disk.path)
    return {
        "device": verdict.disk.path,
        "serial_number": verdict.disk.identity,
        "size_bytes": size,
        "written_bytes": done.written_bytes,
        "skipped_bytes": done.skipped_bytes,
        "verified_bytes": done.verified_bytes,
        "verified_past_cache": done.direct,
        "sha256_written": done.sha256,
    }


def _stored(path: Path) -> int:
    return path.stat().st_blocks * 512


def _reread(path: str) -> None:
    """Asks the kernel to look at the new table; a busy one will at the next plug-in."""
    import contextlib
    import fcntl

    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.ioctl(fd, 0x125F)  # BLKRRPART
        finally:
            os.close(fd)
