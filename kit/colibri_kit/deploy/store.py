"""The blobs on a board: content-addressed files under PREFIX/blobs, named by sha256.

A file is sent to ``SHA.part``, resumed there after a cut, verified by the board's own
sha256sum, and only then renamed. A finished blob that no longer hashes to its name was
tampered with or rotted, and is sent again.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import BinaryIO

from colibri_kit.deploy.model import Part
from colibri_kit.deploy.plan import Stored
from colibri_kit.errors import TransferError, VerifyError
from colibri_kit.transport.base import PutFailed, Reader, Transport, script

RELEASE = re.compile(r"r[0-9]{8}-[0-9]{6}-[0-9a-f]{6}")
_SHA = re.compile(r"[0-9a-f]{64}")
#: Slowest sha256sum worth waiting for, bytes a second (an SD card and a small core).
_HASH_RATE = 4e6

_LIST = r"""
cd "$1" 2>/dev/null || exit 0
if [ -d blobs ]; then
  cd blobs && for f in *; do [ -f "$f" ] && echo "blob $(wc -c <"$f") $f"; done; cd ..
fi
if [ -d releases ]; then
  for r in releases/*; do [ -d "$r" ] && echo "release ${r#releases/}"; done
fi
if [ -L current ]; then echo "current $(ls -l current | sed 's/.* -> //')"; fi
exit 0
"""


def stored(transport: Transport, prefix: str) -> Stored:
    """Names and sizes of what the prefix holds. Only reads."""
    done = transport.run(script(_LIST, prefix))
    if done.rc != 0:
        raise TransferError(f"cannot list {prefix}: {done.why}")
    blobs: dict[str, int] = {}
    partial: dict[str, int] = {}
    releases: list[str] = []
    current: str | None = None
    for line in done.text.splitlines():
        kind, _, rest = line.partition(" ")
        if kind == "blob":
            size, _, name = rest.strip().partition(" ")
            if _SHA.fullmatch(name):
                blobs[name] = int(size)
            elif name.endswith(".part") and _SHA.fullmatch(name[:-5]):
                partial[name[:-5]] = int(size)
        elif kind == "release" and RELEASE.fullmatch(rest):
            releases.append(rest)
        elif kind == "current":
            name = rest.rstrip("/").rsplit("/", 1)[-1]
            current = name if RELEASE.fullmatch(name) else None
    return Stored(blobs, partial, tuple(sorted(releases)), current)


def board_sha256(transport: Transport, path: str, size: int) -> str:
    """The board's own idea of a file's sha256."""
    done = transport.run(script('sha256sum <"$1"', path), timeout=60 + size / _HASH_RATE)
    digest = done.text.split(" ", 1)[0]
    if done.rc != 0 or not _SHA.fullmatch(digest):
        raise VerifyError(f"{transport.describe()} cannot hash {path}: {done.why}")
    return digest


class _Hashed:
    """A reader that hashes what passes through it."""

    def __init__(self, inner: Reader, digest: hashlib._Hash) -> None:
        self._inner, self.digest = inner, digest

    def read(self, size: int = -1, /) -> bytes:
        piece = self._inner.read(size)
        self.digest.update(piece)
        return piece


@dataclass
class Sent:
    """What :meth:`Store.ensure` did, bytes and file counts."""

    bytes_sent: int = 0
    files_sent: int = 0
    bytes_resumed: int = 0
    repaired: int = 0


class Store:
    """Puts blobs under ``prefix/blobs``; the folder must exist and be locked by us."""

    def __init__(self, transport: Transport, prefix: str, note: Callable[[str], None]) -> None:
        self._transport, self._folder, self._note = transport, f"{prefix}/blobs", note
        self.sent = Sent()

    def intact(self, part: Part) -> bool:
        """Does the board's blob still hash to its name?"""
        return board_sha256(self._transport, f"{self._folder}/{part.sha256}", part.size) == part.sha256

    def drop(self, part: Part) -> None:
        self._transport.run(["rm", "-f", f"{self._folder}/{part.sha256}"])

    def put(self, part: Part, partial: int, progress: Callable[[int], None]) -> None:
        """Sends one file, beginning after what is already there, and verifies it there.

        Args:
            partial: bytes of ``SHA.part`` on the board, 0 = none.

        Raises:
            TransferError: the link was cut (what came is kept) or the disk is full (it is not).
            VerifyError: this machine's file is not what the manifest says, or the board
                stores something else than it was sent.
        """
        if self._send(part, partial, progress):
            return
        # A resumed file may carry the tail of an earlier connection: once more, whole.
        if partial and self._send(part, 0, lambda n: None):
            return
        raise VerifyError(
            f"{part.name} arrived at {self._transport.describe()} with another sha256 than it was sent with",
            hint="check the board's storage and memory (badblocks, memtester), then deploy again",
            code="CK-DEPLOY-SHA256",
        )

    def _send(self, part: Part, partial: int, progress: Callable[[int], None]) -> bool:
        path = f"{self._folder}/{part.sha256}.part"
        with part.path.open("rb") as source:
            offset, digest = self._resume_at(part, path, partial, source)
            progress(offset)
            reader = _Hashed(source, digest)
            try:
                self._transport.put_stream(
                    reader,
                    part.size - offset,
                    path,
                    mode=part.mode,
                    offset=offset,
                    progress=self._count(progress),
                )
            except PutFailed as err:
                if not err.no_space:
                    raise
                self._transport.run(["rm", "-f", path])
                raise TransferError(
                    f"the disk of {self._transport.describe()} filled up while {part.name} was sent",
                    hint="free some space there, or use another --prefix; then deploy again",
                    code="CK-DEPLOY-FULL",
                ) from err
        if digest.hexdigest() != part.sha256:
            self._transport.run(["rm", "-f", path])
            raise VerifyError(
                f"{part.path} is not the file its manifest names: sha256 {digest.hexdigest()[:12]}…, "
                f"the manifest says {part.sha256[:12]}…",
                hint=f"see what is damaged: colibri-kit verify {part.path.parent}; then convert again",
                code="CK-DEPLOY-SOURCE",
            )
        if board_sha256(self._transport, path, part.size) != part.sha256:
            self._transport.run(["rm", "-f", path])
            return False
        done = self._transport.run(["mv", "-f", path, path.removesuffix(".part")])
        if done.rc != 0:
            raise TransferError(f"cannot rename {path}: {done.why}")
        self.sent.files_sent += 1
        self.sent.bytes_resumed += offset
        return True

    def _count(self, progress: Callable[[int], None]) -> Callable[[int], None]:
        def counted(n: int) -> None:
            self.sent.bytes_sent += n
            progress(n)

        return counted

    def _resume_at(self, part: Part, path: str, partial: int, source: BinaryIO) -> tuple[int, hashlib._Hash]:
        """Where to go on: after the partial file if it is a true beginning of ours, else 0.

        Returns the offset, with ``source`` standing there, and the hash of what is before it.
        """
        digest = hashlib.sha256()
        if not 0 < partial <= part.size:
            return 0, digest
        left = partial
        while left and (piece := source.read(min(1 << 20, left))):
            digest.update(piece)
            left -= len(piece)
        if left == 0 and board_sha256(self._transport, path, partial) == digest.hexdigest():
            self._note(f"{part.name}: goes on after {partial} bytes")
            # Writable again: it may have been cut after its mode was set.
            self._transport.run(["chmod", "644", path])
            return partial, digest
        self._transport.run(["rm", "-f", path])
        source.seek(0)
        return 0, hashlib.sha256()
