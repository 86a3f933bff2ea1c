"""The serial console of a virtual board in this terminal."""

from __future__ import annotations

import codecs
import contextlib
import os
import select
import socket
import sys
from collections.abc import Callable, Iterator

from colibri_kit.errors import UnreachableError
from colibri_kit.vboard.runtime import Running

ESCAPE = b"\x1d"  # Ctrl-]


@contextlib.contextmanager
def _raw_terminal(fd: int) -> Iterator[None]:
    if not os.isatty(fd):
        yield
        return
    import termios
    import tty

    before = termios.tcgetattr(fd)
    tty.setraw(fd)
    try:
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


@contextlib.contextmanager
def _open(run: Running) -> Iterator[int]:
    try:
        if run.console.startswith("/dev/"):
            fd = os.open(run.console, os.O_RDWR | os.O_NOCTTY)
            try:
                yield fd
            finally:
                os.close(fd)
        else:
            with socket.socket(socket.AF_UNIX) as sock:
                sock.connect(run.console)
                yield sock.fileno()
    except OSError as err:
        raise UnreachableError(f"the console of {run.name} cannot be opened: {err}") from err


def attach(run: Running, show: Callable[[str], None], *, linger: float = 2.0) -> None:
    """Joins stdin and the console until Ctrl-], or the board goes down.

    Args:
        linger: when stdin is no terminal: seconds of silence after its end, before leaving.
    """
    keyboard = sys.stdin.fileno()
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode
    with _open(run) as line, _raw_terminal(keyboard):
        ends = [line, keyboard]
        while True:
            ready, _, _ = select.select(ends, [], [], None if keyboard in ends else linger)
            if not ready:
                return
            if line in ready:
                piece = os.read(line, 65536)
                if not piece:
                    return
                show(decode(piece))
            if keyboard in ready:
                typed = os.read(keyboard, 4096)
                before, found, _ = typed.partition(ESCAPE)
                if not typed:
                    ends.remove(keyboard)
                elif before:
                    _write(line, before if os.isatty(keyboard) else before.replace(b"\n", b"\r"))
                if found:
                    return


def _write(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]
