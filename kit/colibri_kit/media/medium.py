"""What is written to: a block device opened for us alone, or a file. Tests put faulty ones in its place."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
from pathlib import Path
from typing import Protocol

from colibri_kit.errors import PreflightError, TransferError
from colibri_kit.media import disks, safety

#: O_DIRECT wants memory, offsets and lengths aligned to the logical block; 4096 serves every medium.
ALIGN = 4096


class Medium(Protocol):
    """Bytes at offsets. ``size`` in bytes; a write may be short, as the system call's may."""

    name: str
    size: int

    def write(self, data: bytes | memoryview, offset: int) -> int: ...

    def flush(self) -> None:
        """Everything written is on the medium, not in a cache."""
        ...

    def read_back(self, length: int, offset: int) -> bytes:
        """Bytes as the medium has them, past the page cache where the system can."""
        ...

    def close(self) -> None: ...


class FdMedium:
    """A Medium on a descriptor. ``direct`` says whether reading back bypasses the page cache."""

    def __init__(self, path: Path, fd: int, size: int) -> None:
        self.name, self.size, self._fd = str(path), size, fd
        self._reader = _direct(path)
        self.direct = self._reader is not None

    def write(self, data: bytes | memoryview, offset: int) -> int:
        return os.pwrite(self._fd, data, offset)

    def flush(self) -> None:
        os.fsync(self._fd)

    def read_back(self, length: int, offset: int) -> bytes:
        if self._reader is None:
            os.posix_fadvise(self._fd, offset, length, os.POSIX_FADV_DONTNEED)
            return _read(self._fd, length, offset)
        start = offset // ALIGN * ALIGN
        span = -(-(offset + length - start) // ALIGN) * ALIGN
        with mmap.mmap(-1, max(span, ALIGN)) as buffer:  # anonymous maps are page-aligned
            got = 0
            while got < span:
                with memoryview(buffer) as whole, whole[got:span] as rest:
                    n = os.preadv(self._reader, [rest], start + got)
                got += n
                if n == 0 or n % ALIGN:
                    break
            return buffer[offset - start : min(got, offset - start + length)]

    def close(self) -> None:
        for fd in (self._fd, self._reader):
            if fd is not None:
                os.close(fd)
        self._reader = None


def _direct(path: Path) -> int | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return None  # tmpfs and some others do not know O_DIRECT
    try:
        with mmap.mmap(-1, ALIGN) as probe:
            os.preadv(fd, [probe], 0)
    except OSError:
        os.close(fd)
        return None
    return fd


def _read(fd: int, length: int, offset: int) -> bytes:
    out = bytearray()
    while len(out) < length:
        piece = os.pread(fd, length - len(out), offset + len(out))
        if not piece:
            break
        out += piece
    return bytes(out)


def open_disk(path: Path, judged: disks.Disk) -> FdMedium:
    """Opens the disk for us alone and looks again whether it is the one that was judged.

    O_EXCL fails while the kernel or a mount (of any namespace) holds the device; flock keeps
    udev from probing a half-written table.

    Raises:
        PreflightError: busy, not permitted, or another medium by now; nothing was written.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_EXCL | os.O_CLOEXEC)
    except OSError as err:
        raise _refused(path, err) from err
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        size = os.lseek(fd, 0, os.SEEK_END)
        now = disks.look(path)
        number = os.fstat(fd).st_rdev
        if (
            not stat.S_ISBLK(os.fstat(fd).st_mode)
            or (os.major(number), os.minor(number)) != judged.node.number
            or size != judged.size
            or not safety.same(judged, now)
        ):
            raise PreflightError(
                f"{path} is not the medium that was looked at a moment ago",
                hint="was the card changed? Repeat the command",
                state="nothing was changed",
                code="CK-FLASH-CHANGED",
            )
        return FdMedium(path, fd, size)
    except BlockingIOError as err:
        os.close(fd)
        raise _refused(path, OSError(errno.EBUSY, os.strerror(errno.EBUSY))) from err
    except BaseException:
        os.close(fd)
        raise


def _refused(path: Path, err: OSError) -> PreflightError:
    hints = {
        errno.EBUSY: "something holds it: unmount it, close the program that uses it",
        errno.EACCES: "repeat with sudo, or join the group that owns it (often disk)",
        errno.EPERM: "repeat with sudo, or join the group that owns it (often disk)",
        errno.EROFS: "the medium is write-protected: slide the card's lock",
        errno.ENOMEDIUM: "insert the card",
    }
    return PreflightError(
        f"cannot open {path} for writing: {err.strerror}",
        hint=hints.get(err.errno or 0),
        state="nothing was changed",
        code="CK-FLASH-OPEN",
    )


def open_file(path: Path, size: int) -> FdMedium:
    """A new file of ``size`` bytes (sparse), for --image.

    Raises:
        TransferError: it cannot be made.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        os.ftruncate(fd, size)
    except OSError as err:
        raise TransferError(
            f"cannot write {path}: {err.strerror}", state="no image was made", code="CK-FLASH-WRITE"
        ) from err
    return FdMedium(path, fd, size)
