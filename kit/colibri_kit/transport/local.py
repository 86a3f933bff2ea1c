"""The board is this machine: the same interface over subprocess (board ``host``)."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence

from colibri_kit.errors import PreflightError
from colibri_kit.transport.base import (
    WRITE_BYTES,
    CommandTimeout,
    Completed,
    ConnectionLost,
    Reader,
    Sink,
    TransportBase,
)


class LocalTransport(TransportBase):
    """Runs programs here. Needs a POSIX system."""

    def __init__(self) -> None:
        if os.name != "posix":
            raise PreflightError(
                "board `host` needs a POSIX system",
                hint="deploy to a board over SSH instead",
                state="nothing was changed",
            )

    def describe(self) -> str:
        return "this machine"

    def close(self) -> None:
        return

    def _spawn(self, argv: Sequence[str], *, stdin: bool) -> subprocess.Popen[bytes]:
        try:
            return subprocess.Popen(
                list(argv),
                stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except FileNotFoundError as err:
            raise _NotFound(str(err)) from err
        except OSError as err:
            raise _NotRunnable(str(err)) from err

    def run(self, argv: Sequence[str], *, stdin: bytes | None = None, timeout: float = 60.0) -> Completed:
        out: list[bytes] = []
        return self._run(argv, stdin, out.append, None, timeout, out)

    def stream(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes | None = None,
        on_out: Sink,
        on_err: Sink | None = None,
        timeout: float | None = None,
    ) -> Completed:
        return self._run(argv, stdin, on_out, on_err, timeout, [])

    def _run(
        self,
        argv: Sequence[str],
        stdin: bytes | None,
        on_out: Sink,
        on_err: Sink | None,
        timeout: float | None,
        out: list[bytes],
    ) -> Completed:
        try:
            child = self._spawn(argv, stdin=stdin is not None)
        except _SpawnError as err:
            return Completed(err.rc, b"", str(err).encode())
        err_parts: list[bytes] = []

        def drain_err() -> None:
            assert child.stderr is not None
            while piece := os.read(child.stderr.fileno(), 65536):
                err_parts.append(piece)
                if on_err is not None:
                    on_err(piece)

        def feed() -> None:
            assert child.stdin is not None
            with contextlib.suppress(BrokenPipeError), child.stdin:
                child.stdin.write(stdin or b"")

        threads = [threading.Thread(target=drain_err, daemon=True)]
        if stdin is not None:
            threads.append(threading.Thread(target=feed, daemon=True))
        late = threading.Event()

        def expire() -> None:
            late.set()
            _kill(child)

        timer = threading.Timer(timeout, expire) if timeout is not None else None
        try:
            for thread in threads:
                thread.start()
            if timer is not None:
                timer.daemon = True
                timer.start()
            assert child.stdout is not None
            while piece := os.read(child.stdout.fileno(), 65536):
                on_out(piece)
            rc = child.wait()
        except BaseException:
            _kill(child, signal.SIGINT)
            raise
        finally:
            if timer is not None:
                timer.cancel()
            for thread in threads:
                thread.join(5)
            for pipe in (child.stdout, child.stderr):
                if pipe is not None:
                    pipe.close()
        if late.is_set():
            raise CommandTimeout(f"{argv[0]} did not end within {timeout:.0f} s on this machine")
        return Completed(_shell_rc(rc), b"".join(out), b"".join(err_parts))

    def pipe(
        self,
        argv: Sequence[str],
        reader: Reader,
        size: int,
        *,
        progress: Callable[[int], None] | None = None,
    ) -> Completed:
        try:
            child = self._spawn(argv, stdin=True)
        except _SpawnError as err:
            return Completed(err.rc, b"", str(err).encode())
        assert child.stdin is not None and child.stdout is not None and child.stderr is not None
        left = size
        try:
            while left:
                piece = reader.read(min(WRITE_BYTES, left))
                if not piece:
                    raise ConnectionLost(f"the source ended {left} bytes early")
                child.stdin.write(piece)
                left -= len(piece)
                if progress is not None:
                    progress(len(piece))
        except BrokenPipeError:
            pass
        except BaseException:
            _kill(child)
            raise
        with contextlib.suppress(BrokenPipeError):
            child.stdin.close()
        child.stdin = None
        out, err_out = child.communicate()
        rc = _shell_rc(child.returncode)
        return Completed(rc if rc or not left else 1, out, err_out)


class _SpawnError(Exception):
    rc = 126


class _NotFound(_SpawnError):
    rc = 127


class _NotRunnable(_SpawnError):
    rc = 126


def _shell_rc(rc: int) -> int:
    return 128 - rc if rc < 0 else rc


def _kill(child: subprocess.Popen[bytes], sig: int = signal.SIGKILL) -> None:
    """Ends the child and what it started; after an interrupt waits a little, then insists."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, sig)
    try:
        child.wait(2)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
