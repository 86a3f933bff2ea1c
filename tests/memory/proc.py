"""What Linux says about this process and about a file's pages."""

from __future__ import annotations

import ctypes
import mmap
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class State:
    """Anonymous and locked memory in bytes, open files, threads."""

    rss_anon: int
    locked: int
    fds: int
    threads: int


def state() -> State:
    """Of this process, now."""
    fields = dict(
        line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line
    )

    def kib(name: str) -> int:
        return int(fields[name].split()[0]) * 1024

    fds = len(list(Path("/proc/self/fd").iterdir())) - 1  # the listing's own
    return State(kib("RssAnon"), kib("VmLck"), fds, int(fields["Threads"]))


def cached_bytes(path: Path) -> int:
    """Bytes of the file that are in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    size, page = path.stat().st_size, mmap.PAGESIZE
    pages = -(-size // page)
    vector = (ctypes.c_ubyte * pages)()
    # Truthful for a mapping that its owner could write: see mincore(2), since Linux 5.2.
    with path.open("r+b") as f, mmap.mmap(f.fileno(), size) as view:
        address = ctypes.addressof(ctypes.c_char.from_buffer(view))
        if libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), vector) != 0:
            raise OSError(ctypes.get_errno(), "mincore")
    return sum(v & 1 for v in vector) * page


def drop_cached(path: Path) -> None:
    """Asks the kernel to forget the file's clean pages."""
    with path.open("rb") as f:
        os.fsync(f.fileno())
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
