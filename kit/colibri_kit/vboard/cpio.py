"""A newc cpio archive (the kernel's initramfs format) in memory: every file root's, no root needed."""

from __future__ import annotations

import gzip
import stat
from pathlib import PurePosixPath


class Cpio:
    """Files to be; parents come by themselves. Paths have no leading slash."""

    def __init__(self) -> None:
        self._entries: dict[str, tuple[int, bytes, int, int]] = {}

    def __contains__(self, path: str) -> bool:
        return path in self._entries

    def folder(self, path: str, mode: int = 0o755, owner: int = 0) -> None:
        self._parents(path)
        self._entries[path] = (stat.S_IFDIR | mode, b"", owner, owner)

    def file(self, path: str, data: bytes, mode: int = 0o644, owner: int = 0) -> None:
        self._parents(path)
        self._entries[path] = (stat.S_IFREG | mode, data, owner, owner)

    def link(self, path: str, target: str) -> None:
        self._parents(path)
        self._entries[path] = (stat.S_IFLNK | 0o777, target.encode(), 0, 0)

    def _parents(self, path: str) -> None:
        for parent in reversed(PurePosixPath(path).parents):
            if str(parent) != ".":
                self._entries.setdefault(str(parent), (stat.S_IFDIR | 0o755, b"", 0, 0))

    def pack(self, *, compress: bool = True) -> bytes:
        """The archive; the same files give the same bytes. A multiple of four bytes unless compressed."""
        out = bytearray()
        for inode, path in enumerate(sorted(self._entries), 1):
            _append(out, inode, path, *self._entries[path])
        _append(out, 0, "TRAILER!!!", 0, b"", 0, 0)
        return gzip.compress(bytes(out), 6, mtime=0) if compress else bytes(out)


def _append(out: bytearray, inode: int, path: str, mode: int, data: bytes, uid: int, gid: int) -> None:
    if len(data) >= 1 << 32:
        raise ValueError(f"{path} is too large for cpio")
    name = path.encode() + b"\0"
    numbers = (inode, mode, uid, gid, 1, 0, len(data), 0, 0, 0, 0, len(name), 0)
    for piece in (b"070701" + b"".join(b"%08x" % n for n in numbers) + name, data):
        out += piece
        out += bytes(-len(out) % 4)
