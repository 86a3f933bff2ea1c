"""Small GET requests over one connection, whatever it is: a socket or a channel to a board."""

from __future__ import annotations

import http.client
import io
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from colibri_kit.errors import UnreachableError

#: More than any answer of the service; what is longer comes from something else.
ANSWER_BYTES = 4 << 20


class Connection(Protocol):
    def settimeout(self, seconds: float | None, /) -> None: ...
    def recv(self, size: int, /) -> bytes: ...
    def sendall(self, data: bytes, /) -> object: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Answer:
    status: int
    body: bytes


class NoAnswer(UnreachableError):
    """A connection was taken, and what came over it is no whole HTTP answer. ``sent`` tells
    whether anything came."""

    default_code = "CK-SERVICE-ANSWER"

    def __init__(self, message: str, *, sent: bool) -> None:
        super().__init__(message, state="nothing was changed")
        self.sent = sent


def ask(to: Connection, paths: Sequence[str], *, token: str | None, timeout: float) -> list[Answer]:
    """GETs the paths in one go and closes the connection.

    Fewer answers than paths when the other side closes early (as after a refusal).

    Raises:
        NoAnswer: within ``timeout`` seconds nothing, or something that is not HTTP.
    """
    head = "Host: localhost\r\n" + (f"Authorization: Bearer {token}\r\n" if token else "")
    text = "".join(
        f"GET {path} HTTP/1.1\r\n{head}Connection: {'close' if path is paths[-1] else 'keep-alive'}\r\n\r\n"
        for path in paths
    )
    try:
        return _parse(_exchange(to, text.encode("ascii"), timeout), len(paths))
    finally:
        to.close()


def _exchange(to: Connection, request: bytes, timeout: float) -> bytes:
    end = time.monotonic() + timeout
    got = bytearray()
    try:
        to.settimeout(timeout)
        to.sendall(request)
        while len(got) <= ANSWER_BYTES:
            left = end - time.monotonic()
            if left <= 0:
                raise TimeoutError
            to.settimeout(left)
            piece = to.recv(1 << 16)
            if not piece:
                return bytes(got)
            got += piece
    except TimeoutError as err:
        raise NoAnswer(f"no whole answer within {timeout:.0f} s", sent=bool(got)) from err
    except (OSError, EOFError) as err:
        if not got:
            raise NoAnswer(f"the connection broke off: {err or type(err).__name__}", sent=False) from err
        return bytes(got)
    raise NoAnswer(f"an answer of more than {ANSWER_BYTES >> 20} MiB", sent=True)


class _Bytes(io.BytesIO):
    """The bytes of several answers: each reader's close leaves the rest to the next."""

    def makefile(self, mode: str) -> _Bytes:
        del mode
        return self

    def close(self) -> None:
        return


def _parse(data: bytes, most: int) -> list[Answer]:
    source: Any = _Bytes(data)
    answers: list[Answer] = []
    while len(answers) < most and source.tell() < len(data):
        response = http.client.HTTPResponse(source, method="GET")
        try:
            response.begin()
            answers.append(Answer(response.status, response.read()))
        except (http.client.HTTPException, ValueError, OSError) as err:
            raise NoAnswer(f"what answers is no HTTP server: {type(err).__name__}", sent=True) from err
    if not answers:
        raise NoAnswer("the connection was closed without an answer", sent=False)
    return answers
