"""What answers on a serial line: U-Boot, a login, a shell, our engine, noise or nothing."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import Literal

from colibri_kit.transport.serial_line import Line

Kind = Literal["uboot", "login", "password", "shell", "engine", "text", "garbled", "silent"]

_AUTOBOOT = re.compile(rb"stop autoboot", re.IGNORECASE)
_LOGIN = re.compile(rb"login: ?$")
_PASSWORD = re.compile(rb"[Pp]assword: ?$")
_UBOOT = re.compile(rb"(?:^|[\r\n])(?:\w[\w .-]*)?(?:=>|U-Boot>) ?$")
_ENGINE = re.compile(rb"(?:^|[\r\n])colibri[^\r\n]*> ?$")
_SHELL = re.compile(rb"[#$%>~] ?(?:\x1b\[[0-9;?]*[A-Za-z])*$")
_ESCAPES = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(frozen=True)
class Answer:
    """``text`` is the last line seen, without escapes."""

    kind: Kind
    text: str


def classify(seen: bytes) -> Answer:
    """What the last bytes of a console mean. Pure."""
    plain = _ESCAPES.sub(b"", seen).rstrip(b"\0")
    lines = plain.replace(b"\r", b"\n").strip(b"\n").split(b"\n")
    last = lines[-1].decode("utf-8", "replace").strip() if lines else ""
    odd = sum(b >= 0x80 or (b < 0x20 and b not in (7, 8, 9, 10, 13, 27)) for b in plain)
    try:
        plain.decode("utf-8")
        valid = True
    except UnicodeDecodeError:
        valid = False
    kind: Kind
    if not plain.strip():
        kind = "silent"
    elif odd * 4 > len(plain) and not valid:
        kind = "garbled"
    elif _UBOOT.search(plain):
        kind = "uboot"
    elif _LOGIN.search(plain):
        kind = "login"
    elif _PASSWORD.search(plain):
        kind = "password"
    elif _ENGINE.search(plain):
        kind = "engine"
    elif _SHELL.search(plain):
        kind = "shell"
    else:
        kind = "text"
    return Answer(kind, last[-120:])


def identify(line: Line, wait: float, *, gentle: bool = False) -> Answer:
    """Presses Return until something known answers, for at most ``wait`` seconds.

    Args:
        gentle: press only Return. Otherwise U-Boot's countdown is stopped, and a transfer or
            a program that keeps the console from answering is cancelled.
    """
    end = time.monotonic() + wait
    pause = 0.4
    seen = line.drain(0.15, limit=1.0)
    answer = classify(seen)
    while time.monotonic() < end:
        if not gentle and _AUTOBOOT.search(seen[-200:]):
            line.write(b" ")
        line.write(b"\r")
        fresh = line.drain(pause, limit=min(3.0, max(0.5, end - time.monotonic())))
        if fresh:
            seen = (seen + fresh)[-4096:]
            # Judged by what came just now: older noise must not decide.
            answer = classify(fresh)
            if answer.kind in ("uboot", "login", "password", "shell", "engine"):
                return _certain(line, answer)
        if not gentle and not fresh.strip(b"C\x15\r\n"):
            # Silent, or the receiver of a transfer that was cut off: cancel that, and keep
            # still longer than its time-outs (2.3 s in U-Boot), which every byte restarts.
            line.write(b"\x18" * 8 + b"\b" * 8)
            seen += line.drain(2.6, limit=3.0)
            line.write(b"\x03")
            seen += line.drain(0.3, limit=1.0)
        pause = min(pause * 1.5, 2.0)
    return answer


def _certain(line: Line, answer: Answer) -> Answer:
    """A prompt like ``board#`` can be either: a shell computes, U-Boot does not."""
    if answer.kind != "shell":
        return answer
    for _ in range(4):
        line.write(b"\x03")
        line.drain(0.2, limit=1.0)  # shells drop what is typed while they handle an interrupt
        line.write(b"echo ck-$((6*7))-\r")
        said = line.drain(0.4, limit=3.0)
        if b"ck-42-" in said:
            return answer
        if re.search(rb"[\r\n]ck-\$?\(?\(?6", said):
            return Answer("uboot", answer.text)
    return Answer("text", answer.text)
