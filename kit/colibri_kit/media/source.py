"""An image as it comes (raw, .xz, .zst, .gz) as a plain file that can be changed."""

from __future__ import annotations

import contextlib
import gzip
import lzma
import shutil
import subprocess
from pathlib import Path
from typing import IO, cast

from colibri_kit.errors import FormatError, PreflightError, TransferError, UsageError

_BLOCK = 1 << 20
_KINDS = ((b"\xfd7zXZ\0", "xz"), (b"\x28\xb5\x2f\xfd", "zst"), (b"\x1f\x8b", "gz"), (b"PK\3\4", "zip"))


def kind(path: Path) -> str:
    """``raw``, ``xz``, ``zst``, ``gz`` or ``zip``, by its first bytes, not its name.

    Raises:
        UsageError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            head = file.read(6)
    except OSError as err:
        raise UsageError(f"cannot read the image {path}: {err.strerror}") from err
    return next((name for magic, name in _KINDS if head.startswith(magic)), "raw")


def unpack(path: Path, out: Path) -> int:
    """Copies or decompresses an image to ``out``, leaving holes for zeros. Returns its size in bytes.

    Raises:
        FormatError: damaged. UsageError: a zip. PreflightError: zstd is not installed.
        TransferError: no space.
    """
    how = kind(path)
    if how == "zip":
        raise UsageError(f"{path} is a zip archive", hint=f"unpack it first: unzip {path}")
    try:
        if how == "zst":
            return _zstd(path, out)
        with contextlib.ExitStack() as stack:
            plain: IO[bytes] = stack.enter_context(path.open("rb"))
            if how == "xz":
                plain = stack.enter_context(lzma.open(plain, "rb"))
            elif how == "gz":
                plain = cast("IO[bytes]", stack.enter_context(gzip.open(plain, "rb")))
            return _copy(plain, out)
    except (lzma.LZMAError, EOFError, gzip.BadGzipFile) as err:
        raise _damaged(path, str(err)) from err


def _damaged(path: Path, why: str) -> FormatError:
    return FormatError(
        f"{path} is damaged: {why or 'it ends too early'}",
        hint="fetch it again and compare its sha256",
        state="nothing was changed",
        code="CK-IMAGE-DAMAGED",
    )


def _copy(source: IO[bytes], out: Path) -> int:
    size = 0
    try:
        with out.open("wb") as file:
            while block := source.read(_BLOCK):
                if any(block):
                    file.seek(size)
                    file.write(block)
                size += len(block)
            file.truncate(size)
    except OSError as err:
        if isinstance(err, gzip.BadGzipFile):
            raise
        raise TransferError(
            f"cannot unpack to {out}: {err.strerror or err}",
            state="nothing was changed",
            code="CK-IMAGE-UNPACK",
        ) from err
    return size


def _zstd(path: Path, out: Path) -> int:
    tool = shutil.which("zstd")
    if tool is None:
        raise PreflightError(
            f"{path} is compressed with zstd, which is not here",
            hint="apt install zstd",
            state="nothing was changed",
            code="CK-FLASH-TOOLS",
        )
    with subprocess.Popen(
        [tool, "-dcq", "--", str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        assert child.stdout is not None and child.stderr is not None
        size = _copy(child.stdout, out)
        why = child.stderr.read().decode("utf-8", "replace").strip()
    if child.returncode != 0:
        raise _damaged(path, why)
    return size
