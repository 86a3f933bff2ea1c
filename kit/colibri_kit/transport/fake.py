"""Test doubles: a scripted transport, and a wrapper that makes a real one fail on cue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from colibri_kit.transport.base import (
    WRITE_BYTES,
    Completed,
    ConnectionLost,
    Reader,
    Sink,
    Transport,
    TransportBase,
)

Answer = Completed | Callable[[list[str], bytes], Completed]


@dataclass
class FakeTransport(TransportBase):
    """Answers from a script and records what it was asked.

    ``answers`` maps a word to an answer; the first whose word occurs in one of the
    arguments wins. An unexpected command is an AssertionError: nothing passes by luck.
    """

    answers: dict[str, Answer] = field(default_factory=dict)
    calls: list[list[str]] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    closed: bool = False

    def describe(self) -> str:
        return "fake board"

    def close(self) -> None:
        self.closed = True

    def run(self, argv: Sequence[str], *, stdin: bytes | None = None, timeout: float = 60.0) -> Completed:
        del timeout
        call = list(argv)
        self.calls.append(call)
        for word, answer in self.answers.items():
            if any(word in arg for arg in call):
                return answer if isinstance(answer, Completed) else answer(call, stdin or b"")
        raise AssertionError(f"unexpected command: {call}")

    def stream(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes | None = None,
        on_out: Sink,
        on_err: Sink | None = None,
        timeout: float | None = None,
    ) -> Completed:
        del timeout
        done = self.run(argv, stdin=stdin)
        on_out(done.out)
        if on_err is not None and done.err:
            on_err(done.err)
        return Completed(done.rc, b"", done.err)

    def pipe(
        self,
        argv: Sequence[str],
        reader: Reader,
        size: int,
        *,
        progress: Callable[[int], None] | None = None,
    ) -> Completed:
        data = b""
        while len(data) < size and (piece := reader.read(min(WRITE_BYTES, size - len(data)))):
            data += piece
            if progress is not None:
                progress(len(piece))
        return self.run(argv, stdin=data)

    def read(self, path: str, *, limit: int = 1 << 20) -> bytes | None:
        data = self.files.get(path)
        return None if data is None else data[:limit]


@dataclass
class FaultyTransport(TransportBase):
    """Passes everything to ``inner`` until its cue.

    Args:
        inner: a real transport.
        cut_after: the link dies for good once this many uploaded bytes have passed.
        before: called with each argv first; may change the world or raise.
    """

    inner: Transport
    cut_after: int | None = None
    before: Callable[[list[str]], None] | None = None
    sent: int = 0
    dead: bool = False

    def describe(self) -> str:
        return self.inner.describe()

    def close(self) -> None:
        self.inner.close()

    def _cue(self, argv: Sequence[str]) -> None:
        if self.dead:
            raise ConnectionLost("the connection was cut")
        if self.before is not None:
            self.before(list(argv))

    def run(self, argv: Sequence[str], *, stdin: bytes | None = None, timeout: float = 60.0) -> Completed:
        self._cue(argv)
        return self.inner.run(argv, stdin=stdin, timeout=timeout)

    def stream(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes | None = None,
        on_out: Sink,
        on_err: Sink | None = None,
        timeout: float | None = None,
    ) -> Completed:
        self._cue(argv)
        return self.inner.stream(argv, stdin=stdin, on_out=on_out, on_err=on_err, timeout=timeout)

    def pipe(
        self,
        argv: Sequence[str],
        reader: Reader,
        size: int,
        *,
        progress: Callable[[int], None] | None = None,
    ) -> Completed:
        self._cue(argv)
        if self.cut_after is None or self.sent + size <= self.cut_after:
            self.sent += size
            return self.inner.pipe(argv, reader, size, progress=progress)
        self.dead = True
        keep = self.cut_after - self.sent
        self.inner.pipe(argv, reader, keep, progress=progress)
        self.sent += keep
        raise ConnectionLost("the connection was cut")
