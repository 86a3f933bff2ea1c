"""What `colibri serve` is told on a board, and how its service is kept: the part of a release
that a recipe's ``service:`` describes. Pure."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from colibri_kit.deploy.plan import Settings

if TYPE_CHECKING:
    from colibri_kit.config.board import Board

#: The file beside the engine that `serve --options` reads.
OPTIONS = "serve.options"
#: The folder that a service gets for its Unix socket.
RUN_DIR = "/run/colibri"

_PATH = re.compile(r"/[\w./@:+-]{1,200}", re.ASCII)
_HOST = re.compile(r"[A-Za-z0-9._-]{1,255}")
_LISTEN = re.compile(r"none|[0-9A-Za-z.:\[\]]{1,60}:[0-9]{1,5}")


@dataclass(frozen=True)
class ServeOptions:
    """Options of `colibri serve` beside :class:`Settings`; 0, "" and () = its own default.

    Times are seconds, ``body`` is bytes. The names are the recipe's; the engine's have dashes.
    """

    listen: str = "127.0.0.1:8080"
    unix: str = ""
    token_file: str = ""
    allow_host: tuple[str, ...] = ()
    sequences: int = 0
    queue: int = 0
    connections: int = 0
    body: int = 0
    batch: int = 0
    io_timeout: int = 0
    idle_timeout: int = 0
    deadline: int = 0
    drain: int = 30
    health_interval: int = 30
    log: str = ""
    hot_swap: bool = False
    lock: bool = False

    def lines(self) -> list[str]:
        """``name value`` for the options file. listen and unix stand in the command itself, where
        they can be seen."""
        out = []
        for item in fields(self):
            name, value = item.name.replace("_", "-"), getattr(self, item.name)
            if item.name in ("listen", "unix") or not value:
                continue
            if isinstance(value, tuple):
                out += [f"{name} {one}" for one in value]
            else:
                out.append(name if value is True else f"{name} {value}")
        return out

    def address(self) -> list[str]:
        """The engine's options that say where it listens; `colibri health` takes the same."""
        words = ["--listen", self.listen] if self.listen else []
        return [*words, "--unix", self.unix] if self.unix else words

    def asked_at(self) -> list[str]:
        """Where to ask from the board itself: the Unix socket needs no token and no free port."""
        if self.unix:
            return ["--unix", self.unix]
        return ["--listen", self.listen, *(["--token-file", self.token_file] if self.token_file else [])]

    @property
    def outside(self) -> bool:
        """Can it be reached from another machine?"""
        host = self.listen.rsplit(":", 1)[0]
        return not (self.listen == "none" or host in ("localhost", "[::1]") or host.startswith("127."))


@dataclass(frozen=True)
class Spec:
    """The service of a release; recorded in its release.json, so that going back restores it.

    Attributes:
        kind: systemd, openrc or sysv.
        user: who runs it; "" = colibri.
        restart: always, on-failure or never.
        memory_max: bytes for the whole service.
        watchdog: seconds without progress after which it is killed.
        options_file: the release has a ``serve.options``.
    """

    kind: str
    options: ServeOptions = field(default_factory=ServeOptions)
    user: str = ""
    restart: str = "on-failure"
    memory_max: int = 0
    watchdog: int = 300
    options_file: bool = True

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def options_text(self, settings: Settings) -> str:
        """The options file: names of `colibri serve` without dashes, one a line."""
        words = settings.flags()
        rows = [f"{name[2:]} {value}" for name, value in zip(words[::2], words[1::2], strict=True)]
        head = "# Written by colibri-kit for this release; docs/service.md names the options.\n"
        return head + "".join(f"{row}\n" for row in [*rows, *self.options.lines()])


def watchdog_seconds(model_bytes: int, board: Board) -> int:
    """A watchdog that no piece of a prompt (32 tokens) outlasts on the board, rounded up to minutes.

    Such a piece may need every expert from storage once, and multiplies each of its tokens with at
    most all weights. A beat may come a third of the period late. Between 1 minute and 1 hour.
    """
    read = model_bytes / (board.storage.read_mb_s * 1e6)
    compute = 32 * model_bytes / (board.memory_bandwidth_gb_s * 1e9)
    return min(3600, max(60, 60 * -(-int(30 + 1.5 * (read + compute)) // 60)))


def self_check_seconds(watchdog: int) -> int:
    """Between the engine's own checks; three that fail take no less than the watchdog."""
    return min(3600, max(30, -(-watchdog // 3)))


def of_release(doc: dict[str, Any]) -> Spec | None:
    """The service that a release.json records; None = none, or a record that cannot be trusted.

    Everything in it goes into unit files: what does not look as we write it counts as not set.
    """
    raw = doc.get("service")
    if isinstance(raw, str):  # as the kit wrote before recipes had service options
        return Spec(raw, options_file=False) if raw in ("systemd", "openrc", "sysv") else None
    if not isinstance(raw, dict) or raw.get("kind") not in ("systemd", "openrc", "sysv"):
        return None
    user, restart = raw.get("user"), raw.get("restart")
    plain = isinstance(user, str) and re.fullmatch(r"[a-z_][a-z0-9_-]*\$?", user)
    return Spec(
        kind=raw["kind"],
        options=_options(raw.get("options")),
        user=user if plain and user else "",
        restart=restart if restart in ("always", "on-failure", "never") else "on-failure",
        memory_max=_count(raw.get("memory_max")),
        watchdog=_count(raw.get("watchdog")) or 300,
        options_file=raw.get("options_file") is not False,
    )


def _count(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _options(raw: object) -> ServeOptions:
    doc = raw if isinstance(raw, dict) else {}
    values: dict[str, Any] = {}
    for item in fields(ServeOptions):
        value = doc.get(item.name)
        if isinstance(item.default, bool):
            values[item.name] = value is True
        elif isinstance(item.default, int):
            values[item.name] = _count(value) or item.default
    hosts = doc.get("allow_host")
    if isinstance(hosts, list):
        values["allow_host"] = tuple(h for h in hosts if isinstance(h, str) and _HOST.fullmatch(h))
    for name, rule in (("listen", _LISTEN), ("unix", _PATH), ("token_file", _PATH), ("log", _HOST)):
        word = doc.get(name)
        if isinstance(word, str) and rule.fullmatch(word):
            values[name] = word
    return ServeOptions(**values)
