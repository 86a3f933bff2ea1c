"""``colibri-kit board``: virtual boards, up and down, and ways in."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from colibri_kit.cli import ui_options
from colibri_kit.commands.sizes import Size
from colibri_kit.errors import KitError, PreflightError, UsageError
from colibri_kit.ui import Ui

if TYPE_CHECKING:
    from colibri_kit.vboard.runtime import Place, Running


@click.group(short_help="Bring virtual boards up and down.")
def command() -> None:
    """Bring virtual boards up and down.

    A virtual board is a QEMU guest with a real Linux kernel, made from Debian
    packages without root. Everything that works on a board over SSH works on it.
    """


@command.command("up")
@click.argument("profile", metavar="NAME")
@click.option("--as", "name", metavar="OTHER", help="Call it this: several of one kind at once.")
@click.option("--ram", type=Size(), default=0, metavar="SIZE", help="Memory of the guest: a true limit.")
@click.option("--disk", type=Size(), default=0, metavar="SIZE", help="Size of a new data disk.")
@click.option(
    "--data",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    metavar="DIR",
    help="Files that a new data disk begins with, in /data.",
)
@click.option("--cpus", type=click.IntRange(1, 8), default=1, show_default=True, help="Processors.")
@click.option("--init", type=click.Choice(["none", "systemd"]), default="none", show_default=True)
@click.option("--ssh", type=click.Choice(["openssh", "dropbear"]), default="openssh", show_default=True)
@click.option("--deterministic", is_flag=True, help="Time counts instructions: the same on every machine.")
@click.option("--pty", is_flag=True, help="The serial console on a pty instead of a socket.")
@click.option("--fresh", is_flag=True, help="Forget the board's disks and keys first.")
@click.option("--refresh", is_flag=True, help="Look for newer Debian packages.")
@click.option("--timeout", type=click.FloatRange(1), default=180.0, show_default=True, help="Seconds to SSH.")
@ui_options
def up(ui: Ui, profile: str, name: str | None, **flags: Any) -> None:
    """Start a virtual board and wait until it answers."""
    from colibri_kit.config import load_board
    from colibri_kit.vboard import act

    board = load_board(profile)
    place, run, new = act.up(board, name or board.name, act.Options(**flags), ui.note)
    if not new:
        _same(run, board.name, flags)
    ui.result(_data(place, run, new), _told(place, run, new))


def _same(run: Running, board: str, flags: dict[str, Any]) -> None:
    """A board that is up is not changed: refuses options that ask for another one."""
    asked = {
        "board": (board, run.board),
        "--ram": (flags["ram"] or run.ram, run.ram),
        "--init": (flags["init"], run.init),
        "--ssh": (flags["ssh"], run.ssh),
        "--deterministic": (flags["deterministic"], run.deterministic),
    }
    differ = [key for key, (wanted, have) in asked.items() if wanted != have]
    differ += ["--data"] if flags["data"] else []
    if differ or flags["fresh"]:
        raise PreflightError(
            f"{run.name} is up already, and was started otherwise ({', '.join(differ) or '--fresh'})",
            hint=f"colibri-kit board down {run.name}, or another name: --as OTHER",
            state="it goes on as it is",
            code="CK-VBOARD-UP",
        )


def _data(place: Place, run: Running, new: bool) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        **asdict(run),
        "started": new,
        "target": f"@{run.name}",
        "ssh_config": str(place.ssh_config),
        "known_hosts": str(place.known_hosts),
        "identity": str(place.identity),
        "console_log": str(place.console_log),
    }


def _told(place: Place, run: Running, new: bool) -> str:
    from colibri_kit.config.scalars import format_size

    word = f"up after {run.boot_seconds:.1f} s" if new else "up already"
    clock = ", time by instructions" if run.deterministic else ""
    rows = [
        (run.name, f"{word}: {run.machine}, {run.cpu}, {format_size(run.ram)}, Linux {run.kernel}{clock}"),
        ("deploy", f"colibri-kit deploy --board {run.board} @{run.name} MODEL.coli"),
        ("shell", f"colibri-kit board ssh {run.name}"),
        ("ssh", f"ssh -F {place.ssh_config} {run.name}"),
        ("console", f"colibri-kit board console {run.name}   ({run.console})"),
        ("end", f"colibri-kit board down {run.name}"),
    ]
    width = max(len(k) for k, _ in rows)
    return "\n".join(f"{k:<{width}}  {v}" for k, v in rows)


@command.command("down")
@click.argument("names", metavar="NAME…", nargs=-1)
@click.option("--all", "everyone", is_flag=True, help="Every board that is up.")
@click.option("--power-cut", is_flag=True, help="No farewell: as when the plug is pulled.")
@click.option("--purge", is_flag=True, help="Remove its disks and keys too.")
@ui_options
def down(ui: Ui, names: tuple[str, ...], everyone: bool, power_cut: bool, purge: bool) -> None:
    """Switch virtual boards off. Disks and keys stay for the next start."""
    from colibri_kit.vboard import act, runtime

    if everyone:
        names = tuple(name for name, run in runtime.all_boards() if run is not None)
    elif not names:
        raise UsageError("name a board, or give --all")
    ended = {}
    for name in names:
        place = runtime.Place(name)
        ended[name] = act.down(place, power_cut=power_cut)
        if purge:
            act.purge(place)
    ui.result({"ended": ended}, "\n".join(f"{name}: {how}" for name, how in ended.items()) or "none is up")


@command.command("list")
@ui_options
def list_boards(ui: Ui) -> None:
    """List virtual boards: those that are up, and what could be."""
    from colibri_kit.config import find_boards, load_board
    from colibri_kit.config.scalars import format_size
    from colibri_kit.vboard import runtime

    known = dict(runtime.all_boards())
    profiles = {}
    for name, path in find_boards().items():
        try:
            board = load_board(str(path))
        except KitError:
            continue
        if board.vm is not None:
            profiles[name] = board
    rows, data = [], []
    for name in sorted({*known, *profiles}):
        run = known.get(name)
        state = "up" if run else ("down" if name in known else "never started")
        title = profiles[name].title if name in profiles else (run.board if run else "")
        seen = (run.port, format_size(run.ram), run.pid) if run else ("-", "-", "-")
        rows.append((name, state, *seen, title))
        entry = {"name": name, "state": state, "title": title}
        data.append({**entry, **(_data(runtime.Place(name), run, False) if run else {})})
    head = ("board", "state", "port", "ram", "pid", "what")
    ui.result({"boards": data}, ui.table(head, rows))


@command.command("ssh", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("name")
@click.argument("words", metavar="[CMD…]", nargs=-1, type=click.UNPROCESSED)
def ssh(name: str, words: tuple[str, ...]) -> None:
    """Open a shell on a virtual board, or run a command there. root@NAME logs in as root."""
    import os
    import shutil

    from colibri_kit.vboard.runtime import must_run

    user, _, board = name.rpartition("@")
    place, run = must_run(board)
    program = shutil.which("ssh")
    if program is None:
        raise PreflightError("there is no ssh here", hint="apt install openssh-client")
    target = f"{user}@{run.name}" if user else run.name
    os.execv(program, ["ssh", "-F", str(place.ssh_config), target, *words])


@command.command("console")
@click.argument("name")
@ui_options
def console(ui: Ui, name: str) -> None:
    """Show a virtual board's serial console. Ctrl-] leaves it."""
    from colibri_kit.vboard import console as serial
    from colibri_kit.vboard.runtime import must_run

    _, run = must_run(name)
    ui.note(f"console of {name}; Ctrl-] leaves it")
    serial.attach(run, ui.stream)
