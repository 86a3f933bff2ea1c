"""What an ext4 in an image holds: every path with inode, mode, owner and size, through debugfs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from colibri_kit.appliance.filesystems import Tools
from colibri_kit.errors import FormatError

_ROW = re.compile(r"/(\d+)/([0-7]+)/(\d+)/(\d+)/(.*)/(\d*)/")
_MAX_DEPTH = 64


@dataclass(frozen=True)
class Item:
    """mode with its type bits. size in bytes; 0 for folders, whose size follows what is in them."""

    inode: int
    mode: int
    uid: int
    gid: int
    size: int

    @property
    def is_folder(self) -> bool:
        return self.mode >> 12 == 0o4


def listing(tools: Tools, image: Path, start: int) -> dict[str, Item]:
    """Path (absolute) -> item, the root included.

    Raises:
        TransferError: debugfs cannot read it. FormatError: it is not a tree.
    """
    found: dict[str, Item] = {"/": Item(2, 0o40755, 0, 0, 0)}
    level = {2: ""}
    for _ in range(_MAX_DEPTH):
        if not level:
            return found
        deeper: dict[int, str] = {}
        for parent, item, name in _folders(tools, image, start, level):
            path = f"{level[parent]}/{name}"
            found[path] = item
            if item.is_folder:
                deeper[item.inode] = path
        level = deeper
    raise FormatError("folders are nested without end", state="nothing was changed", code="CK-IMAGE-LAYOUT")


def _folders(tools: Tools, image: Path, start: int, level: dict[int, str]) -> Iterator[tuple[int, Item, str]]:
    """The entries of many folders in one run of debugfs, named by inode: so no name needs quotes."""
    import tempfile

    with tempfile.NamedTemporaryFile("w", suffix=".debugfs") as script:
        script.write("".join(f"ls -p <{inode}>\n" for inode in level))
        script.flush()
        text = tools.run("debugfs", "-f", script.name, f"{image}?offset={start}")
    parent = 0
    for line in text.splitlines():
        head = re.fullmatch(r"debugfs:\s+ls -p <(\d+)>", line)
        if head:
            parent = int(head.group(1))
            continue
        row = _ROW.fullmatch(line)
        if row and row.group(5) not in (".", "..") and int(row.group(1)):
            inode, uid, gid = int(row.group(1)), int(row.group(3)), int(row.group(4))
            yield parent, Item(inode, int(row.group(2), 8), uid, gid, int(row.group(6) or 0)), row.group(5)
