"""Service definitions that keep an engine running: systemd, OpenRC, sysv.

They run the engine's ``serve`` verb through ``current``, so a release is switched
without touching them, unless its service is another.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from colibri_kit.deploy.plan import Settings
from colibri_kit.deploy.serving import OPTIONS, ServeOptions, Spec, self_check_seconds
from colibri_kit.errors import PreflightError

NAME = "colibri"

#: Of a log file that nothing rotates; systemd's journal has limits of its own.
LOG_MIB = 16

#: What a service's text may be made of: it goes into unit files and shell scripts.
_PLAIN = re.compile(r"[A-Za-z0-9._/@:+\[\]-]+")


@dataclass(frozen=True)
class Service:
    """What to run and how it is confined.

    Attributes:
        prefix: the deployment's folder; absolute.
        user: who runs it. settings: the engine's options.
        memory_max: bytes for the whole service: the budget and what the kernel needs beside.
        restart: ``always``, ``on-failure`` or ``never``.
        watchdog: seconds without progress after which it is killed; longer than one
            piece of a prompt takes on the board.
        groups: further groups, for a serial device.
        options_file: the release has a ``serve.options``; else all options stand in the command.
    """

    prefix: str
    user: str
    settings: Settings
    memory_max: int
    options: ServeOptions = field(default_factory=ServeOptions)
    restart: str = "on-failure"
    watchdog: int = 300
    groups: tuple[str, ...] = ()
    options_file: bool = False

    def __post_init__(self) -> None:
        for value in (self.prefix, self.user, *self.groups, *self.arguments):
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
        return self.options.drain + 15

    @property
    def arguments(self) -> list[str]:
        words = ["serve", "--model", f"{self.prefix}/current/model.coli", *self.options.address()]
        if self.options_file:
            return [*words, "--options", f"{self.prefix}/current/{OPTIONS}"]
        own = {"--drain": self.options.drain, "--health-interval": self_check_seconds(self.watchdog)}
        return [*words, *self.settings.flags(), *(w for k, v in own.items() for w in (k, str(v)))]

    @property
    def supervised(self) -> list[str]:
        """The same with the engine's own supervisor, for init systems that watch no progress."""
        watched = ["--supervise", "--watchdog", str(self.watchdog)] if self.restart != "never" else []
        return [*self.arguments, "--log-max", str(LOG_MIB), *watched]


@dataclass(frozen=True)
class Rendered:
    """A definition ready to install: path, file mode, text, and the commands around it.

    ``install`` and ``remove`` are run in order, after writing and before deleting the file.
    ``stop_seconds``: how long stopping the one that runs may take.
    """

    path: str
    mode: int
    text: str
    install: tuple[tuple[str, ...], ...]
    remove: tuple[tuple[str, ...], ...]
    stop_seconds: int = 45


def memory_max(budget: int) -> int:
    """The budget and a sixteenth (at least 16 MiB): page tables, the stack of the loader, sockets."""
    return budget + max(budget // 16, 16 << 20)


def of_spec(prefix: str, user: str, settings: Settings, spec: Spec, groups: tuple[str, ...] = ()) -> Service:
    """The service that a release's record describes, for a user that the board has."""
    return Service(
        prefix=prefix,
        user=user,
        settings=settings,
        memory_max=spec.memory_max or memory_max(settings.budget),
        options=spec.options,
        restart=spec.restart,
        watchdog=spec.watchdog,
        groups=groups,
        options_file=spec.options_file,
    )


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
