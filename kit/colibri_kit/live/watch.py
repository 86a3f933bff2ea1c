"""Takes samples of a service again and again, over SSH or directly, and keeps the history."""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

from colibri_kit.errors import AuthError, TransferError, UnreachableError, UsageError
from colibri_kit.live import frame, sample
from colibri_kit.live.ask import Connection, ask

if TYPE_CHECKING:
    from colibri_kit.live.service import Installed
    from colibri_kit.transport.ssh import SshTransport
    from colibri_kit.transport.sshforward import Endpoint

#: How far back "lately" goes, and how many speeds the curve may have.
WINDOW_SECONDS = 60.0
SPEEDS = 400
ANSWER_SECONDS = 10.0
#: Seconds between two looks at what only the board itself knows.
EXTRA_SECONDS = 10.0

_EXTRA = r"""
readlink "$1/current" 2>/dev/null | sed 's/^/release=/'
t=/sys/devices/platform/soc/soc:firmware/get_throttled
[ -r $t ] && echo "throttled=$(cat $t)"
exit 0
"""


@dataclass(frozen=True)
class Lost:
    """No figures this time, and why."""

    why: str


class Source(Protocol):
    """Where samples come from."""

    release: str | None
    throttled: tuple[str, ...] | None

    def connect(self) -> Connection:
        """A fresh connection to the service. Raises UnreachableError, TransferError, AuthError."""
        ...

    def describe(self) -> str: ...

    def close(self) -> None: ...


class UrlSource:
    """``http://HOST:PORT``, reached directly."""

    release: str | None = None
    throttled: tuple[str, ...] | None = None

    def __init__(self, url: str) -> None:
        try:
            parts = urlsplit(url if "//" in url else f"//{url}")
            host, port = parts.hostname, parts.port or 80
        except ValueError as err:
            raise UsageError(f"--url {url} is no address: {err}") from err
        if (
            parts.scheme not in ("", "http")
            or not host
            or parts.path.strip("/")
            or parts.query
            or parts.username
        ):
            raise UsageError(f"--url {url}: give http://HOST:PORT, nothing more")
        self._at = (host, port)

    def describe(self) -> str:
        return f"{self._at[0]}:{self._at[1]}"

    def connect(self) -> Connection:
        try:
            return socket.create_connection(self._at, ANSWER_SECONDS)
        except OSError as err:
            raise UnreachableError(
                f"{self.describe()} cannot be reached: {err.strerror or err}",
                hint="is the service running? over SSH: colibri-kit top HOST",
                state="nothing was changed",
                code="CK-SERVICE-DOWN",
            ) from err

    def close(self) -> None:
        return


class SshSource:
    """A board's service over SSH; a lost link is opened anew by the next :meth:`connect`."""

    release: str | None = None
    throttled: tuple[str, ...] | None = None

    def __init__(
        self,
        host: str,
        first: Callable[[], SshTransport],
        again: Callable[[], SshTransport],
        remote: Endpoint | None,
    ) -> None:
        from colibri_kit.live.service import installed

        self._host, self._again, self._remote = host, again, remote
        self._transport = first()
        self._found: Installed = installed(self._transport)
        self._looked = float("-inf")

    def describe(self) -> str:
        return self._transport.describe()

    def connect(self) -> Connection:
        from colibri_kit.live.service import explain, installed
        from colibri_kit.transport.sshforward import ForwardRefused

        if not self._transport.is_up:
            self._transport.close()
            self._transport = self._again()
        try:
            connection: Connection = self._transport.dial(self._remote or self._found.at)
        except ForwardRefused as refused:
            self._found = installed(self._transport)
            raise explain(refused, self._found, self._host, self._remote) from refused
        self._extra()
        return connection

    def _extra(self) -> None:
        """The release that is current, and what the Raspberry Pi's firmware says."""
        from colibri_kit.doctor.board import THROTTLE_BITS
        from colibri_kit.transport.base import script

        if time.monotonic() - self._looked < EXTRA_SECONDS:
            return
        self._looked = time.monotonic()
        done = self._transport.run(script(_EXTRA, self._found.prefix or "/nonexistent"), timeout=20)
        one = dict(line.partition("=")[::2] for line in done.text.splitlines())
        self.release = one.get("release", "").rpartition("/")[2] or None
        try:
            bits = int(one["throttled"].removeprefix("0x"), 16)
        except (KeyError, ValueError):
            self.throttled = None
        else:
            self.throttled = tuple(name for bit, name in THROTTLE_BITS.items() if bits >> bit & 1)

    def close(self) -> None:
        self._transport.close()


class Watch:
    """One :meth:`look` after another at a source."""

    def __init__(
        self, source: Source, token: str | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._source, self._token, self._clock = source, token, clock
        self._past: deque[sample.Sample] = deque()
        self._speeds: deque[float] = deque(maxlen=SPEEDS)

    def look(self) -> frame.Frame:
        """Takes a sample and makes its frame.

        Raises:
            AuthError: the service wants a token, or another one; or the board refuses us.
            UnreachableError, TransferError: no service, no link, or not what we know.
        """
        now = self._take()
        if self._past and frame.restarted(self._past[-1], now):
            self._past.clear()
        while self._past and now.at - self._past[0].at > WINDOW_SECONDS:
            self._past.popleft()
        made = frame.make(
            now,
            self._past[-1] if self._past else None,
            self._past[0] if self._past else None,
            speeds=tuple(self._speeds),
            release=self._source.release,
            throttled=self._source.throttled,
        )
        self._speeds.append(made.tokens_per_s)
        self._past.append(now)
        return made

    def try_look(self) -> frame.Frame | Lost:
        """As :meth:`look`, with what may mend by itself as :class:`Lost`."""
        try:
            return self.look()
        except (UnreachableError, TransferError) as err:
            return Lost(err.message)

    def _take(self) -> sample.Sample:
        answers = ask(self._source.connect(), sample.PATHS, token=self._token, timeout=ANSWER_SECONDS)
        if any(a.status in (401, 403) for a in answers):
            raise AuthError(
                f"the service at {self._source.describe()} "
                + ("refuses this bearer token" if self._token else "wants a bearer token"),
                hint="--token-file FILE with a line of the service's own token file",
                state="nothing was changed",
                code="CK-SERVICE-TOKEN",
            )
        if len(answers) < len(sample.PATHS) or any(a.status != 200 for a in answers[1:]):
            raise sample.Odd(f"the service answers with status {answers[-1].status}")
        return sample.read(self._clock(), *(a.body for a in answers))
