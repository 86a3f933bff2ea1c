"""What every transport can do, and the parts they share.

A transport runs POSIX programs on a board and streams bytes into files there. It
needs ``sh``, ``cat`` and ``chmod`` on the other side, never sftp. Arguments travel
as lists; the one place that turns a list into a shell command is :func:`sh_join`.
"""

from __future__ import annotations

import io
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from colibri_kit.errors import TransferError

#: Bytes read from the source at a time.
WRITE_BYTES = 1 << 20

Sink = Callable[[bytes], None]


@runtime_checkable
class Reader(Protocol):
    """The one method of a binary file that uploads need."""

    def read(self, size: int = -1, /) -> bytes: ...


@dataclass(frozen=True)
class Completed:
    """How a program ended: exit status, stdout, stderr (bytes)."""

    rc: int
    out: bytes = b""
    err: bytes = b""

    @property
    def text(self) -> str:
        return self.out.decode("utf-8", "replace").strip()

    @property
    def err_text(self) -> str:
        return self.err.decode("utf-8", "replace").strip()

    @property
    def why(self) -> str:
        """The last words of a program that failed, for an error message."""
        words = self.err_text or self.text
        return words.splitlines()[-1] if words else f"exit status {self.rc}"


class ConnectionLost(TransferError):
    """The link went away while it was in use."""

    default_code = "CK-SSH-LOST"


class CommandTimeout(TransferError):
    """The link lives but a program did not end in time."""

    default_code = "CK-SSH-TIMEOUT"


class PutFailed(TransferError):
    """The board refused the bytes: ``no_space`` tells a full disk from the rest."""

    default_code = "CK-PUT"

    def __init__(self, message: str, *, no_space: bool) -> None:
        super().__init__(message)
        self.no_space = no_space


class Transport(Protocol):
    """One open way to a board."""

    def run(self, argv: Sequence[str], *, stdin: bytes | None = None, timeout: float = 60.0) -> Completed:
        """Runs a program to its end. Raises ConnectionLost or CommandTimeout."""
        ...

    def stream(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes | None = None,
        on_out: Sink,
        on_err: Sink | None = None,
        timeout: float | None = None,
    ) -> Completed:
        """As :meth:`run`, handing over output as it comes; Ctrl-C ends the program there too."""
        ...

    def pipe(
        self,
        argv: Sequence[str],
        reader: Reader,
        size: int,
        *,
        progress: Callable[[int], None] | None = None,
    ) -> Completed:
        """Runs a program with exactly ``size`` bytes of ``reader`` as its stdin."""
        ...

    def put_stream(
        self,
        reader: Reader,
        size: int,
        remote_path: str,
        *,
        mode: int = 0o644,
        offset: int = 0,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """Writes ``size`` bytes to a file; with ``offset`` appends to one that has that many."""
        ...

    def read(self, path: str, *, limit: int = 1 << 20) -> bytes | None:
        """A small file's bytes, or None when there is no such file."""
        ...

    def describe(self) -> str: ...

    def close(self) -> None: ...


def sh_join(argv: Sequence[str]) -> str:
    """One POSIX shell command that runs exactly ``argv``: nothing in it is expanded."""
    if not argv:
        raise ValueError("empty command")
    for arg in argv:
        if "\0" in arg:
            raise ValueError("an argument holds a NUL byte")
    return shlex.join(argv)


def script(text: str, *args: str) -> list[str]:
    """``sh -c text`` with ``args`` as ``$1``…: values never become part of the script."""
    return ["sh", "-c", text, "sh", *args]


def is_no_space(words: str) -> bool:
    low = words.lower()
    return "no space left" in low or "enospc" in low or "quota exceeded" in low


class TransportBase:
    """``put_stream`` and ``read`` in terms of ``run`` and ``pipe``."""

    def run(self, argv: Sequence[str], *, stdin: bytes | None = None, timeout: float = 60.0) -> Completed:
        raise NotImplementedError

    def pipe(
        self,
        argv: Sequence[str],
        reader: Reader,
        size: int,
        *,
        progress: Callable[[int], None] | None = None,
    ) -> Completed:
        raise NotImplementedError

    def describe(self) -> str:
        raise NotImplementedError

    def put_stream(
        self,
        reader: Reader,
        size: int,
        remote_path: str,
        *,
        mode: int = 0o644,
        offset: int = 0,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        redirect = 'cat >> "$1"' if offset else 'cat > "$1"'
        done = self.pipe(
            script(f'{redirect} && chmod "$2" "$1"', remote_path, f"{mode:o}"),
            reader,
            size,
            progress=progress,
        )
        if done.rc != 0:
            raise PutFailed(
                f"{self.describe()} could not write {remote_path}: {done.why}",
                no_space=is_no_space(done.err_text),
            )

    def read(self, path: str, *, limit: int = 1 << 20) -> bytes | None:
        done = self.run(script('[ -f "$1" ] || exit 44; head -c "$2" "$1"', path, str(limit)))
        if done.rc == 44:
            return None
        if done.rc != 0:
            raise TransferError(f"{self.describe()} could not read {path}: {done.why}")
        return done.out


class Chain(io.RawIOBase):
    """A reader that gives ``head`` first and then another reader's bytes."""

    def __init__(self, head: bytes, tail: Reader) -> None:
        super().__init__()
        self._head, self._tail = head, tail

    def read(self, size: int = -1, /) -> bytes:
        if self._head:
            cut = len(self._head) if size < 0 else size
            piece, self._head = self._head[:cut], self._head[cut:]
            return piece
        return self._tail.read(size)
