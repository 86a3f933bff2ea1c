"""Which board, over which transport, under which prefix: what all verbs have in common."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from colibri_kit.errors import KitError, PreflightError, UsageError
from colibri_kit.transport.options import SshOptions, ssh_options

if TYPE_CHECKING:
    from colibri_kit.config.board import Board
    from colibri_kit.transport.base import Transport
    from colibri_kit.ui import Ui

F = TypeVar("F", bound=Callable[..., Any])

#: Where releases go when neither --prefix nor the board says otherwise, in order.
DEFAULT_PREFIXES = ("/opt/colibri", "~/colibri")


@dataclass(frozen=True)
class Place:
    """A place on the command line: HOST, --board, --prefix, --root and the SSH options."""

    host: str | None
    board: Board | None
    prefix: str | None
    ssh: SshOptions

    @property
    def local(self) -> bool:
        return self.host is None


def place(
    host: str | None, board_name: str | None, prefix: str | None, root: Path | None, ssh: SshOptions
) -> Place:
    """Sorts out what was given.

    Raises:
        UsageError: it is contradictory, or there is no board to talk to.
        ConfigError: the board's profile is unknown or wrong.
    """
    board: Board | None = None
    if board_name is not None:
        from colibri_kit.config import load_board

        board = load_board(board_name)
    if root is not None:
        if host is not None or prefix is not None:
            raise UsageError("--root is for a board that is a folder on this machine: no HOST, no --prefix")
        prefix = str(root.expanduser().resolve())
    if host is None:
        if board is not None and board.transport not in ("local", "none") and root is None:
            raise UsageError(
                f"board {board.name} is reached over {board.transport}: name its HOST",
                hint=f"colibri-kit … --board {board.name} user@host",
            )
        if board is None and root is None:
            raise UsageError("name a HOST ([user@]host[:port]), or --board host for this machine")
    if board is not None and board.transport == "none":
        raise UsageError(f"nothing can be deployed to board {board.name}: its profile has no transport")
    return Place(host, board, prefix, ssh)


@contextmanager
def opened(where: Place, ui: Ui) -> Iterator[Transport]:
    """The transport, closed at the end. Errors from inside get hints that can be typed as they are."""
    from colibri_kit.transport import open_transport

    transport = open_transport(where.host, where.ssh, ui.note)
    try:
        yield transport
    except KitError as err:
        if err.hint:
            err.hint = naming(err.hint, where)
        raise
    finally:
        transport.close()


def naming(hint: str, where: Place) -> str:
    """A hint whose `colibri-kit logs` and the like name the place as the user did. Pure."""
    if where.local:
        words = (
            f"--root {where.prefix}"
            if where.prefix
            else f"--board {where.board.name if where.board else 'host'}"
        )
    else:
        words = f"{where.host} --prefix {where.prefix}" if where.prefix else str(where.host)
    return re.sub(r"colibri-kit (?:logs|status|rollback)(?=[;,\n]|$)", lambda m: f"{m[0]} {words}", hint)


def candidates(where: Place) -> tuple[str, ...]:
    """Prefixes to try, best first. Pure."""
    if where.prefix is not None:
        return (where.prefix,)
    own = (where.board.prefix,) if where.board is not None and where.board.prefix else ()
    if where.local:
        return own
    return tuple(dict.fromkeys((*own, *DEFAULT_PREFIXES)))


def absolute(transport: Transport, prefix: str) -> str:
    """``~/x`` with the board's home; refuses paths that would be a danger."""
    from colibri_kit.deploy import facts

    if prefix.startswith("~/"):
        prefix = f"{facts.home(transport)}/{prefix[2:]}"
    prefix = prefix.rstrip("/")
    if not prefix.startswith("/") or ".." in prefix.split("/") or "\n" in prefix or prefix.count("/") < 1:
        raise UsageError(
            f"--prefix {prefix or '/'} must be an absolute path (or ~/…) without '..', not / itself"
        )
    return prefix


def new_prefix(transport: Transport, where: Place, ui: Ui) -> str:
    """Where to deploy to: the first candidate that is ours or can be made."""
    from colibri_kit.deploy import facts

    paths = [absolute(transport, p) for p in candidates(where)]
    if len(paths) > 1:
        seen = [facts.gather(transport, p) for p in paths]
        for fact in seen:
            if fact.ours:
                return fact.prefix
        for fact in seen:
            if fact.writable and "ro" not in fact.mount_options:
                if fact.prefix != paths[0]:
                    ui.note(f"{paths[0]} is not writable for {fact.user}: using {fact.prefix}")
                return fact.prefix
    return paths[0]


def existing_prefix(transport: Transport, where: Place) -> str:
    """The first candidate that the kit made.

    Raises:
        PreflightError: nothing was deployed there.
    """
    from colibri_kit.deploy import release
    from colibri_kit.transport.base import script

    paths = [absolute(transport, p) for p in candidates(where)]
    for path in paths:
        if transport.run(script('[ -f "$1/$2" ]', path, release.MARK)).rc == 0:
            return path
    raise PreflightError(
        f"nothing is deployed on {transport.describe()} under {' or '.join(paths)}",
        hint="deploy first, or name the folder with --prefix",
        state="nothing was changed",
        code="CK-NOT-DEPLOYED",
    )


def place_options(func: F) -> F:
    """``--board``, ``--prefix``, ``--root`` and the SSH options; a verb gets ``where: Place``.

    The verb's own HOST argument must be called ``host``.
    """

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        where = place(
            kwargs.pop("host"),
            kwargs.pop("board"),
            kwargs.pop("prefix"),
            kwargs.pop("root"),
            kwargs.pop("ssh"),
        )
        return func(*args, where=where, **kwargs)

    wrapper.__name__, wrapper.__doc__ = func.__name__, func.__doc__
    wrapper.__click_params__ = list(getattr(func, "__click_params__", []))  # type: ignore[attr-defined]
    return place_flags(wrapper)  # type: ignore[return-value]


def place_flags(func: F) -> F:
    """Only the flags, as they are: for verbs that sort out HOST themselves."""
    func = ssh_options(func)
    for option in reversed(
        [
            click.option(
                "--board", metavar="NAME", help="A name of `colibri-kit boards`, or a profile's path."
            ),
            click.option("--prefix", metavar="DIR", help="Folder on the board (default: the profile's)."),
            click.option(
                "--root",
                type=click.Path(path_type=Path, file_okay=False),
                help="The board is this folder on this machine.",
            ),
        ]
    ):
        func = option(func)
    return func
