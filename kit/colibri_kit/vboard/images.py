"""Disk images without root or mounts: ext4 by mke2fs, files copied with their holes."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from colibri_kit.errors import PreflightError, TransferError
from colibri_kit.vboard.packages import Program

MIN_DISK = 16 << 20


def make_ext4(
    mke2fs: Program, path: Path, size: int, label: str, source: Path | None = None, *, owner: int = 0
) -> None:
    """A new sparse image of ``size`` bytes with one ext4 file system, from ``source``'s files if given.

    Args:
        owner: uid and gid of the root folder.

    Raises:
        PreflightError: no room. TransferError: mke2fs failed.
    """
    if size < MIN_DISK:
        raise PreflightError(
            f"a disk of {size} bytes is too small; at least 16 MiB", state="nothing was changed"
        )
    free = shutil.disk_usage(path.parent).free
    if free < 64 << 20:
        raise PreflightError(f"{path.parent} has only {free >> 20} MiB free", state="nothing was changed")
    temp = path.with_name(path.name + ".new")
    temp.unlink(missing_ok=True)
    with temp.open("wb") as image:
        image.truncate(size)
    argv = [*mke2fs.argv, "-q", "-F", "-t", "ext4", "-L", label, "-m", "0"]
    argv += ["-E", f"root_owner={owner}:{owner},lazy_itable_init=1"]
    if source is not None:
        argv += ["-d", str(source)]
    done = subprocess.run(
        [*argv, str(temp)], env=mke2fs.environment, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        temp.unlink()
        raise TransferError(
            f"mke2fs failed: {done.stderr.strip() or done.returncode}",
            hint="do the files fit? give the disk a larger --disk" if source is not None else None,
        )
    temp.replace(path)


def own_by_root(debugfs: Program, image: Path, owned: dict[str, int]) -> None:
    """Makes every file root's: mke2fs copies our own uid from files that we unpacked.

    Args:
        owned: path -> uid and gid of those that are not root's.
    """
    commands = "".join(f"sif {p} {field} {n}\n" for p, n in owned.items() for field in ("uid", "gid"))
    done = subprocess.run(
        [*debugfs.argv, "-w", "-f", "-", str(image)],
        input=commands, env=debugfs.environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise TransferError(f"debugfs failed: {done.stderr.strip() or done.returncode}")


def copy_sparse(source: Path, target: Path) -> None:
    """Copies a file, holes as holes."""
    temp = target.with_name(target.name + ".new")
    with source.open("rb") as src, temp.open("wb") as dst:
        size = os.fstat(src.fileno()).st_size
        dst.truncate(size)
        at = 0
        while at < size:
            try:
                start = os.lseek(src.fileno(), at, os.SEEK_DATA)
            except OSError:
                break  # only a hole is left
            end = os.lseek(src.fileno(), start, os.SEEK_HOLE)
            src.seek(start)
            dst.seek(start)
            left = end - start
            while left:
                piece = src.read(min(left, 1 << 20))
                dst.write(piece)
                left -= len(piece)
            at = end
    temp.replace(target)


def next_power_of_two(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()
