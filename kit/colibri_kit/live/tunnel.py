"""A port here that is the service there, for as long as wanted.

A link that breaks is opened again, after 1, 2, 4, … 30 seconds, without end: connections
of that time are reset. What cannot mend by itself (a changed host key, a refused login)
ends the tunnel.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from colibri_kit.errors import KitError, TransferError, UnreachableError
from colibri_kit.live import service
from colibri_kit.live.forward import Far, Forward
from colibri_kit.transport.base import ConnectionLost
from colibri_kit.transport.ssh import SshTransport
from colibri_kit.transport.sshforward import Endpoint, ForwardRefused

if TYPE_CHECKING:
    from colibri_kit.transport.options import SshOptions

#: Seconds between asking a board for a sign of life, unless less silence is allowed.
BEAT_SECONDS = 10.0
BACK_OFF = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)


def connector(
    host: str, options: SshOptions, note: Callable[[str], None]
) -> tuple[Callable[[], SshTransport], Callable[[], SshTransport]]:
    """Two ways to connect: the first time, and again. Secrets are asked for once, and kept.

    Again means: a host key that is not on record is not accepted, whatever was said at first.
    """
    from colibri_kit.transport.sshconnect import connect

    spec = options.spec(host, note)
    kept: dict[str, str | None] = {}

    def once(ask: Callable[[str], str | None]) -> Callable[[str], str | None]:
        def answer(prompt: str) -> str | None:
            if prompt not in kept:
                kept[prompt] = ask(prompt)
            return kept[prompt]

        return answer

    spec = replace(spec, password=once(spec.password), passphrase=once(spec.passphrase))
    again = replace(spec, host_keys=replace(spec.host_keys, accept_new=False))
    return (lambda: connect(spec)), (lambda: connect(again))


@dataclass(frozen=True)
class Opened:
    """What was found at the board's end when the tunnel was opened."""

    target: str
    remote: Endpoint
    health: service.Health


def open_link(
    connect: Callable[[], SshTransport], remote: Endpoint | None, host: str
) -> tuple[SshTransport, Opened]:
    """Connects, finds out where the service listens (unless told), asks for its health.

    Raises:
        UnreachableError: no way there, or no service answers. AuthError.
    """
    transport = connect()
    try:
        found = service.installed(transport)
        to = remote or found.at
        try:
            well = service.health(transport, to)
        except ForwardRefused as refused:
            raise service.explain(refused, found, host, remote) from refused
        return transport, Opened(transport.describe(), to, well)
    except BaseException:
        transport.close()
        raise


class Tunnel:
    """Carries ``listener``'s connections over ``transport`` until told to stop.

    Args:
        again: connects anew; None = a lost link ends the tunnel.
        beat_seconds: between asking a board for a sign of life.
        say: told, in words for the user, when the link goes and comes.
    """

    def __init__(
        self,
        listener: socket.socket,
        transport: SshTransport,
        remote: Endpoint,
        *,
        again: Callable[[], SshTransport] | None,
        say: Callable[[str], None],
        beat_seconds: float = BEAT_SECONDS,
    ) -> None:
        self._beat_seconds = beat_seconds
        self._transport, self._remote, self._again, self._say = transport, remote, again, say
        self._stop = threading.Event()
        self.forward = Forward(listener, self._dial, self._moved)

    def _dial(self) -> Far:
        return self._transport.dial(self._remote)

    def _moved(self) -> None:
        self._transport.moved()

    def run(self) -> None:
        """Until :meth:`stop` or an exception.

        Raises:
            ConnectionLost: the link went and is not to be opened again. AuthError: it cannot be.
        """
        with self._beats():
            while not self._stop.wait(0.2):
                if not self._transport.is_up:
                    self._reopen()

    def stop(self) -> None:
        self._stop.set()

    def close(self) -> None:
        """Resets what is carried, frees the local port, leaves the board."""
        self._stop.set()
        self.forward.close()
        self._transport.close()

    @contextlib.contextmanager
    def _beats(self) -> Iterator[None]:
        """A dead link says nothing: something must ask."""

        def beat() -> None:
            while not self._stop.wait(self._beat_seconds):
                if self._transport.is_up:
                    self._transport.beat()

        threading.Thread(target=beat, name="tunnel-beat", daemon=True).start()
        try:
            yield
        finally:
            self._stop.set()

    def _reopen(self) -> None:
        self.forward.abort_all()
        target = self._transport.describe()
        self._transport.close()
        words = f"the link to {target} was lost"
        if self._again is None:
            raise ConnectionLost(words, hint="open the tunnel again", state="the board was not touched")
        self._say(f"{words}; connecting again")
        tries = 0
        while not self._stop.wait(BACK_OFF[min(tries, len(BACK_OFF) - 1)]):
            tries += 1
            try:
                transport = self._again()
            except (UnreachableError, TransferError) as err:
                wait = BACK_OFF[min(tries, len(BACK_OFF) - 1)]
                self._say(f"still lost ({err.message}); next try in {wait:.0f} s")
                continue
            self._transport = transport
            self._say(f"open again{self._state()}")
            return

    def _state(self) -> str:
        try:
            well = service.health(self._transport, self._remote)
        except KitError as err:
            return f", but the service does not answer yet: {err.message}"
        return "" if well.status == "ok" else f"; the service says {well.status}"
