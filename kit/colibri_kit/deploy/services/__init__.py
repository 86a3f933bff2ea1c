"""Service definitions that keep an engine running: systemd, OpenRC, sysv; none for a plain process.

They run the engine's ``serve`` verb through ``current``, so a release is switched
without touching them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from colibri_kit.deploy.plan import Settings
from colibri_kit.errors import PreflightError

NAME = "colibri"

#: What a service's text may be made of: it goes into unit files and shell scripts.
_PLAIN = re.compile(r"[A-Za-z0-9._/@:+-]+")


@dataclass(frozen=True)
class Service:
    """What to run and how it is confined.

    Attributes:
        prefix: the deployment's folder; absolute.
        user: who runs it. settings: the engine's options.
        memory_max: bytes for the whole service: the budget and what the kernel needs beside.
        listen: address and port.
        restart: ``always``, ``on-failure`` or ``never``.
        watchdog: seconds without progress after which it is killed; longer than one
            piece of a prompt takes on the board. drain: seconds for requests under way
            when it is stopped.
        groups: further groups, for a serial device.
    """

    prefix: str
    user: str
    settings: Settings
    memory_max: int
    listen: str = "127.0.0.1:8080"
    restart: str = "on-failure"
    watchdog: int = 300
    drain: int = 30
    groups: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for value in (self.prefix, self.user, self.listen, *self.groups):
            if not _PLAIN.fullmatch(value):
                raise PreflightError(
                    f"{value!r} cannot stand in a service definition",
                    hint="use letters, digits and . _ - / @ : + only",
                    state="nothing was sent or changed",
                    code="CK-SERVICE-NAME",
                )

    @property
    def engine(self) -> str:
        return f"{self.prefix}/current/colibri"

    @property
    def serial_link(self) -> bool:
        """Does the offload link go over a device?"""
        return self.settings.offload.removeprefix("tty:").startswith("/dev/")

    @property
    def stop_seconds(self) -> int:
        """Until it is killed: requests under way, and closing."""
        return self.drain + 15

    @property
    def health_interval(self) -> int:
        """Seconds between the engine's self-checks: three that fail are no sooner than the watchdog."""
        return max(30, -(-self.watchdog // 3))

    @property
    def arguments(self) -> list[str]:
        model = f"{self.prefix}/current/model.coli"
        own = {"--listen": self.listen, "--drain": self.drain, "--health-interval": self.health_interval}
        words = [word for name, value in own.items() for word in (name, str(value))]
        return ["serve", "--model", model, *self.settings.flags(), *words]


@dataclass(frozen=True)
class Rendered:
    """A definition ready to install: path, file mode, text, and the commands around it.

    ``install`` and ``remove`` are run in order, after writing and before deleting the file.
    """

    path: str
    mode: int
    text: str
    install: tuple[tuple[str, ...], ...]
    remove: tuple[tuple[str, ...], ...]


def memory_max(budget: int) -> int:
    """The budget and a sixteenth (at least 16 MiB): page tables, the stack of the loader, sockets."""
    return budget + max(budget // 16, 16 << 20)


def render(kind: str, service: Service) -> Rendered | None:
    """The definition for ``systemd``, ``openrc`` or ``sysv``; None for ``none``.

    Raises:
        PreflightError: no template for this kind.
    """
    from colibri_kit.deploy.services import openrc, systemd, sysv

    makers: dict[str, Callable[[Service], Rendered]] = {
        "systemd": systemd.render,
        "openrc": openrc.render,
        "sysv": sysv.render,
    }
    if kind == "none":
        return None
    if kind not in makers:
        raise PreflightError(
            f"no service template for '{kind}'",
            hint=f"known: {', '.join(makers)}, none",
            state="nothing was sent or changed",
            code="CK-SERVICE-KIND",
        )
    return makers[kind](service)
