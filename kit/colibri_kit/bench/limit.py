"""A memory limit that the page cache counts against: a memory cgroup below this process's own."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from colibri_kit.errors import PreflightError

_ROOT = Path("/sys/fs/cgroup")
_ENTER = 'for g in $1; do echo $$ > "$g/cgroup.procs" || exit 125; done; shift; exec "$@"'


@dataclass(frozen=True)
class Limit:
    """A place for commands; ``folders`` is empty where systemd makes the group."""

    limit: int
    folders: tuple[Path, ...]
    properties: tuple[str, ...]

    def wrap(self, argv: Sequence[str]) -> list[str]:
        """The command line that runs ``argv`` inside."""
        if not self.folders:
            return ["systemd-run", "--quiet", "--scope", *self.properties, *argv]
        return ["sh", "-c", _ENTER, "sh", " ".join(map(str, self.folders)), *argv]

    def peak(self) -> int | None:
        """Most that was charged at once, page cache included, in bytes."""
        if not self.folders:
            return None
        return int((self.folders[0] / "memory.max_usage_in_bytes").read_text())


@contextlib.contextmanager
def memory_limit(limit: int, *, disk: Path | None = None, read_bytes_s: int = 0) -> Iterator[Limit]:
    """A group of at most ``limit`` bytes, page cache included; gone afterwards.

    Args:
        disk: a file on the disk that ``read_bytes_s`` slows down; 0 = as fast as it is.

    Raises:
        PreflightError: this machine has no such thing for us.
    """
    memory, block = _own_v1("memory"), _own_v1("blkio")
    if memory is None or (read_bytes_s and block is None):
        yield _systemd(limit, disk, read_bytes_s)
        return
    name = f"colibri-bench-{os.getpid()}-{time.monotonic_ns()}"
    folders = [memory / name]
    if read_bytes_s and block is not None:
        folders.append(block / name)
    try:
        for folder in folders:
            folder.mkdir()
        (folders[0] / "memory.limit_in_bytes").write_text(str(limit))
        with contextlib.suppress(OSError):  # kernels without swap accounting
            (folders[0] / "memory.memsw.limit_in_bytes").write_text(str(limit))
        if disk is not None and len(folders) > 1:
            (folders[1] / "blkio.throttle.read_bps_device").write_text(f"{_device(disk)} {read_bytes_s}")
        yield Limit(limit, tuple(folders), ())
    finally:
        with contextlib.suppress(OSError):
            (folders[0] / "memory.force_empty").write_text("0")
        for folder in folders:
            _remove(folder)


def _systemd(limit: int, disk: Path | None, read_bytes_s: int) -> Limit:
    if shutil.which("systemd-run") is None or os.geteuid() != 0 or not Path("/run/systemd/system").is_dir():
        raise PreflightError(
            "a memory limit needs a writable memory cgroup (version 1), or root and systemd",
            hint="run as root, or measure on a board that has as little memory",
            state="nothing was measured",
            code="CK-BENCH-LIMIT",
        )
    properties = ["-p", f"MemoryMax={limit}", "-p", "MemorySwapMax=0"]
    if disk is not None and read_bytes_s:
        properties += ["-p", f"IOReadBandwidthMax={disk} {read_bytes_s}"]
    return Limit(limit, (), tuple(properties))


def _device(file: Path) -> str:
    number = file.stat().st_dev
    return f"{os.major(number)}:{os.minor(number)}"


def _own_v1(controller: str) -> Path | None:
    """This process's cgroup of version 1, when children may be made in it."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        folder = _ROOT / controller / path.lstrip("/")
        if controller in controllers.split(",") and os.access(folder, os.W_OK):
            return folder
    return None


def _remove(folder: Path) -> None:
    """A group can go once its last process was reaped."""
    for _ in range(50):
        try:
            folder.rmdir()
            return
        except OSError:
            time.sleep(0.1)
