"""``colibri-kit logs``: what was deployed when, and the service's own log."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from colibri_kit.cli import ui_options
from colibri_kit.deploy.target import Place, existing_prefix, opened, place_options
from colibri_kit.ui import Ui

if TYPE_CHECKING:
    from colibri_kit.live.journal import Line
    from colibri_kit.transport.base import Transport

#: How far a file is read back for --since without --lines.
_MOST_LINES = 100_000

_DEPLOYMENTS = 'f=$1/log/deploys.jsonl; [ ! -f "$f" ] || tail -n "$2" "$f"'

#: The clock; journal where systemd runs and the unit is there, else file; whether systemd keeps
#: the journal from this login (journalctl then shows nothing, and may say nothing); what tail can do.
_SOURCE = r"""
date +%s
if command -v journalctl >/dev/null 2>&1 &&
   systemctl cat "$1.service" >/dev/null 2>&1; then echo journal; else echo file; fi
case " $(id -u) $(id -Gn) " in " 0 "*|*" adm "*|*" systemd-journal "*|*" wheel "*) ;; *) echo stranger;; esac
tail --help 2>&1 | grep -q -e '-F' && echo retries
exit 0
"""


@dataclass(frozen=True)
class Log:
    """Where the service's lines are.

    Attributes:
        argv: what to run there. journal: it gives entries of systemd's journal, as JSON.
        start: since when, seconds since 1970. closed: the journal is not for this login.
    """

    argv: list[str]
    journal: bool
    start: float | None
    closed: bool = False


@click.command(short_help="Show a board's engine log.")
@click.argument("host", required=False)
@place_options
@click.option("-n", "--lines", type=click.IntRange(1, 100000), help="The last so many; default: 20.")
@click.option("--since", metavar="TIME", help="90s, 10min, 2h, 3d, or a time: 2026-11-30 12:00.")
@click.option("-f", "--follow", is_flag=True, help="Go on with new lines of the service until Ctrl-C.")
@ui_options
def command(ui: Ui, where: Place, lines: int | None, since: str | None, follow: bool) -> None:
    """Show a board's engine log.

    The deployments come first, then what the service wrote: in systemd's
    journal, else in log/engine.log. With --follow, the service's lines only;
    with --json then one object a line.
    """
    with opened(where, ui) as transport:
        prefix = existing_prefix(transport, where)
        log = _find(transport, prefix, lines, since, follow)
        if log.closed:
            ui.warn(
                f"systemd keeps the service's journal from this login on {transport.describe()}: "
                "add --sudo, or put the login into the group systemd-journal there"
            )
        if follow:
            _follow(ui, transport, log)
            return
        events = _deployments(transport, prefix, lines, log.start)
        entries = _read(transport, log)
    source = "journal" if log.journal else f"{prefix}/log/engine.log"
    data = {
        "prefix": prefix, "deployments": events, "source": source, "engine": [e.fields for e in entries],
    }  # fmt: skip
    ui.result(data, "\n".join([*map(_line, events), *(_shown(e) for e in entries)]) or "nothing yet")


def _find(transport: Transport, prefix: str, lines: int | None, since: str | None, follow: bool) -> Log:
    """Asks the board which log it has."""
    from colibri_kit.deploy.services import NAME
    from colibri_kit.live.journal import since_seconds
    from colibri_kit.transport.base import script

    clock, source, *more = transport.run(script(_SOURCE, NAME)).text.split()
    start = since_seconds(since, float(clock)) if since is not None else None
    count = lines or (20 if start is None else _MOST_LINES)
    if source == "journal":
        argv = ["journalctl", "-u", f"{NAME}.service", "-o", "json", "--no-pager", "-n", str(count)]
        argv += [f"--since=@{int(start)}"] if start is not None else []
        # Forwards, journalctl would count the lines from the time on: backwards, they are the last.
        argv += ["--follow"] if follow else ["--reverse"]
        return Log(argv, True, start, "stranger" in more)
    file = f"{prefix}/log/engine.log"
    if follow:
        return Log(["tail", "-n", str(count), "-F" if "retries" in more else "-f", file], False, start)
    return Log(script('[ ! -f "$2" ] || tail -n "$1" "$2"', str(count), file), False, start)


def _deployments(
    transport: Transport, prefix: str, lines: int | None, start: float | None
) -> list[dict[str, Any]]:
    from colibri_kit.errors import TransferError
    from colibri_kit.live.journal import kept, of_file
    from colibri_kit.transport.base import script

    done = transport.run(script(_DEPLOYMENTS, prefix, str(lines or (20 if start is None else _MOST_LINES))))
    if done.rc != 0:
        raise TransferError(f"cannot read the logs under {prefix}: {done.why}")
    text = done.out.decode("utf-8", "replace").splitlines()
    return [e.fields for e in kept(map(of_file, text), start) if "event" in e.fields]


def _read(transport: Transport, log: Log) -> list[Line]:
    """The service's lines."""
    from colibri_kit.errors import TransferError
    from colibri_kit.live.journal import kept, of_file, of_journal

    done = transport.run(log.argv, timeout=120)
    if done.rc != 0:
        raise TransferError(
            f"cannot read the service's log: {done.why}", hint="is it readable for this login? try --sudo"
        )
    text = done.out.decode("utf-8", "replace").splitlines()
    text = text[::-1] if log.journal else text
    found = [line for line in map(of_journal if log.journal else of_file, text) if line is not None]
    return kept(found, log.start)


def _follow(ui: Ui, transport: Transport, log: Log) -> None:
    """Lines as they come, until Ctrl-C."""
    from colibri_kit.errors import TransferError
    from colibri_kit.live.journal import Splitter, of_file, of_journal
    from colibri_kit.live.stop import ended_by_signals

    began = log.start is None

    def show(text: str) -> None:
        nonlocal began
        line = of_journal(text) if log.journal else of_file(text)
        if line is None:
            return
        began = began or (line.time is not None and log.start is not None and line.time >= log.start)
        if began:
            ui.result(line.fields, _shown(line))

    lines = Splitter(show)
    try:
        with ended_by_signals():
            done = transport.stream(log.argv, on_out=lines)
    except KeyboardInterrupt:
        lines.end()
        return
    raise TransferError(f"`{log.argv[0]}` ended on {transport.describe()}: {done.why}")


def _shown(line: Line) -> str:
    from colibri_kit.live.service import plain

    return plain(line.text.replace("\t", "    "))


def _line(event: dict[str, Any]) -> str:
    rest = "  ".join(f"{k}={v}" for k, v in event.items() if k not in ("time", "event") and v is not None)
    return f"{event.get('time', '?')}  {event.get('event', '?'):<15} {rest}"
