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

#: At most so many blocks of a damaged partial file are hashed one by one.
_BLOCKS = 64

_HASH_BLOCKS = r"""
i=0
while [ "$i" -lt "$3" ]; do
  dd if="$1" bs=1048576 skip=$((i * $2)) count="$2" 2>/dev/null | sha256sum || exit
  i=$((i + 1))
done
"""
# Writable again: it may have been cut after its mode was set. dd cuts at `seek` where it copies nothing.
_TRUNCATE = 'chmod 644 "$1" && dd if=/dev/null of="$1" bs=1048576 seek="$2" count=0 2>/dev/null'

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
        """Where to go on: after the partial file, or after as much of it as is ours, else at 0.

        A board that lost its power may have a partial file with a tail that never reached
        the disk: zeros, or another file's bytes. It is cut off there.

        Returns the offset, with ``source`` standing there, and the hash of what is before it.
        """
        if not 0 < partial <= part.size:
            return 0, hashlib.sha256()
        digest = _hash_of(source, partial)
        if board_sha256(self._transport, path, partial) == digest.hexdigest():
            self._note(f"{part.name}: goes on after {partial} bytes")
            # Writable again: it may have been cut after its mode was set.
            self._transport.run(["chmod", "644", path])
            return partial, digest
        good = self._good_bytes(path, partial, source)
        source.seek(0)
        if good and self._transport.run(script(_TRUNCATE, path, str(good >> 20))).rc == 0:
            self._note(f"{part.name}: {partial - good} damaged bytes cut off, goes on after {good}")
            return good, _hash_of(source, good)
        self._transport.run(["rm", "-f", path])
        return 0, hashlib.sha256()

    def _good_bytes(self, path: str, partial: int, source: BinaryIO) -> int:
        """How much of a partial file is ours: whole MiB, found by one question to the board."""
        step = max(1, -(-partial // (_BLOCKS << 20)))  # MiB a block
        count = partial // (step << 20)
        if not count:
            return 0
        done = self._transport.run(
            script(_HASH_BLOCKS, path, str(step), str(count)), timeout=60 + partial / _HASH_RATE
        )
        source.seek(0)
        for index, line in enumerate(done.text.splitlines()[:count]):
            if _hash_of(source, step << 20).hexdigest() != line.split(" ", 1)[0]:
                return index * step << 20
        return min(len(done.text.splitlines()), count) * step << 20


def _hash_of(source: BinaryIO, size: int) -> hashlib._Hash:
    """The hash of the next ``size`` bytes, or of what there is."""
    digest = hashlib.sha256()
    while size and (piece := source.read(min(1 << 20, size))):
        digest.update(piece)
        size -= len(piece)
    return digest
