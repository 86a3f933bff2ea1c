"""File systems in a file, without root or mounts, the same bytes every time.

FAT by mkfs.vfat and mtools. ext4 by mke2fs and debugfs: ``mke2fs -d`` would copy each
source file's ctime into the image, debugfs takes its clock from E2FSPROGS_FAKE_TIME.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from colibri_kit.errors import TransferError, VerifyError
from colibri_kit.vboard.packages import Program, Store, find_tool

#: Every time stamp on a card, and the earliest that its clock can say: 2026-11-01 UTC.
EPOCH = 1793491200
_TOOLS = {
    "mcopy": "mtools", "mmd": "mtools", "mdir": "mtools", "mtype": "mtools", "mkfs.vfat": "dosfstools",
    "mke2fs": "e2fsprogs", "debugfs": "e2fsprogs", "e2fsck": "e2fsprogs", "resize2fs": "e2fsprogs",
}  # fmt: skip


@dataclass(frozen=True)
class Tools:
    """The host's programs; those that it lacks come from Debian, unpacked into the cache."""

    store: Store

    def run(
        self,
        name: str,
        *argv: str,
        stdin: str | None = None,
        cwd: Path | None = None,
        ok: tuple[int, ...] = (0,),
    ) -> str:
        """Runs a tool with a fixed clock and locale; returns stdout.

        Raises:
            TransferError: it failed; its own words follow.
        """
        done = subprocess.run(
            [*self._find(name).argv, *argv], env=self._env(name), cwd=cwd, input=stdin or "",
            capture_output=True, text=True, errors="replace", check=False,
        )  # fmt: skip
        words = [w for w in done.stderr.splitlines() if not re.match(rf"{name} \d", w)]
        if done.returncode not in ok or (name == "debugfs" and words):
            raise TransferError(
                f"{name} failed: {'; '.join(words[:3]) or done.returncode}",
                state="no image was made",
                code="CK-FLASH-MAKE",
            )
        return done.stdout

    def pipe(self, name: str, *argv: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [*self._find(name).argv, *argv], env=self._env(name), stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def _find(self, name: str) -> Program:
        return find_tool(self.store, name, _TOOLS[name])

    def _env(self, name: str) -> dict[str, str]:
        return {
            **self._find(name).environment,
            "SOURCE_DATE_EPOCH": str(EPOCH),
            "E2FSPROGS_FAKE_TIME": str(EPOCH),
            "TZ": "UTC",
            "LC_ALL": "C",
            "MTOOLSRC": "/dev/null",
            "MKE2FS_CONFIG": "/dev/null",
            "MKE2FS_SKIP_CHECK_MSG": "1",
        }


def make_fat(
    tools: Tools, image: Path, start: int, size: int, label: str, serial: int, files: Mapping[str, Path]
) -> None:
    """FAT32 at byte ``start`` of an image, holding ``files`` (path on it -> file here)."""
    tools.run(
        "mkfs.vfat", "--invariant", "-F", "32", "-s", "4", "-n", label, "-i", f"{serial:08x}",
        "--offset", str(start // 512), str(image), str(size // 1024),
    )  # fmt: skip
    drive = f"{image}@@{start}"
    folders = sorted({str(p) for name in files for p in Path(name).parents if str(p) != "."})
    if folders:
        tools.run("mmd", "-i", drive, *(f"::{f}" for f in folders))
    for name in sorted(files):
        put_fat(tools, image, start, name, files[name])


def put_fat(tools: Tools, image: Path, start: int, name: str, source: Path) -> None:
    """Writes or replaces one file. The time stamp is EPOCH."""
    with tempfile.TemporaryDirectory() as folder:
        # mcopy -m takes over the source's time; a link has none of its own, so the stamped file is a copy.
        staged = Path(folder) / "file"
        staged.write_bytes(source.read_bytes())
        os.utime(staged, (EPOCH, EPOCH))
        tools.run("mcopy", "-o", "-m", "-i", f"{image}@@{start}", str(staged), f"::{name}")


def ext4_size(files_bytes: int) -> int:
    """Bytes for a file system that only holds these files: metadata, rounded to 4 MiB."""
    return -(-(files_bytes + files_bytes // 32 + (8 << 20)) // (4 << 20)) * (4 << 20)


def make_ext4(
    tools: Tools, image: Path, start: int, size: int, label: str, uuid: str, *, journal: bool
) -> None:
    """An empty ext4 of ``size`` bytes at byte ``start``."""
    features = "^resize_inode" if journal else "^has_journal,^resize_inode"
    tools.run(
        "mke2fs", "-q", "-F", "-t", "ext4", "-b", "4096", "-I", "256", "-i", "65536", "-m", "0", "-O",
        f"extent,64bit,metadata_csum,flex_bg,sparse_super,large_file,huge_file,dir_nlink,extra_isize,{features}",
        "-L", label, "-U", uuid,
        "-E", f"offset={start},nodiscard,root_owner=0:0,hash_seed={uuid},"
        "lazy_itable_init=0,lazy_journal_init=0",
        str(image), f"{size // 1024}k",
    )  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """A file to put into an ext4: its bytes' place here, mode bits, owner."""

    source: Path
    mode: int = 0o444
    uid: int = 0
    gid: int = 0


def put_ext4(
    tools: Tools,
    image: Path,
    start: int,
    files: Mapping[str, Entry],
    folders: Mapping[str, tuple[int, int, int]] | None = None,
    links: Mapping[str, str] | None = None,
    remove: tuple[str, ...] = (),
) -> None:
    """Adds files, folders (mode, uid, gid) and symbolic links; parents must be there or be among ``folders``.

    Raises:
        TransferError: debugfs refused (no room, exists).
    """
    lines = [f"rm {_quote(path)}" for path in remove]
    with tempfile.TemporaryDirectory() as temp:
        for path, (mode, uid, gid) in sorted((folders or {}).items()):
            lines += [f"mkdir {_quote(path)}", *_owner(path, 0o40000 | mode, uid, gid)]
        for index, (path, entry) in enumerate(sorted(files.items())):
            (Path(temp) / str(index)).symlink_to(entry.source.resolve())
            # ``write`` takes a bare name, in the current folder.
            folder, _, base = f"/{path.lstrip('/')}".rpartition("/")
            lines += [f"cd {_quote(folder or '/')}", f"write {index} {_quote(base)}", "cd /"]
            lines += _owner(path, 0o100000 | entry.mode, entry.uid, entry.gid)
        for path, target in sorted((links or {}).items()):
            lines.append(f"symlink {_quote(path)} {_quote(target)}")
        script = Path(temp) / "script"
        script.write_text("\n".join(lines) + "\n")
        tools.run("debugfs", "-w", "-f", "script", f"{image}?offset={start}", cwd=Path(temp))


def _owner(path: str, mode: int, uid: int, gid: int) -> list[str]:
    name = _quote(path)
    return [f"sif {name} mode 0{mode:o}", f"sif {name} uid {uid}", f"sif {name} gid {gid}"]


def _quote(path: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._/@:+,=~-]+", path):
        raise TransferError(f"{path!r} cannot be put into the image", code="CK-FLASH-MAKE")
    return path


def read_ext4(tools: Tools, image: Path, start: int, path: str, take: Callable[[bytes], object]) -> None:
    """Passes a file's bytes to ``take``."""
    with tools.pipe("debugfs", "-R", f"cat {_quote(path)}", f"{image}?offset={start}") as child:
        assert child.stdout is not None
        while piece := child.stdout.read(1 << 20):
            take(piece)


def check_ext4(tools: Tools, image: Path, start: int) -> None:
    """e2fsck finds nothing to do.

    Raises:
        VerifyError: it does.
    """
    try:
        tools.run("e2fsck", "-fn", f"{image}?offset={start}")
    except TransferError as err:
        raise VerifyError(f"the file system made is not clean: {err.message}", code="CK-FLASH-MAKE") from err


def sha256_ext4(tools: Tools, image: Path, start: int, path: str) -> str:
    digest = hashlib.sha256()
    read_ext4(tools, image, start, path, digest.update)
    return digest.hexdigest()
