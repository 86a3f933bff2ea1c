"""``colibri-kit top``: a board's service, live."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from colibri_kit.cli import ui_options
from colibri_kit.transport.options import SshOptions, ssh_options
from colibri_kit.ui import Ui

if TYPE_CHECKING:
    from colibri_kit.live.frame import Frame
    from colibri_kit.live.watch import Lost, Source, Watch


@click.command(short_help="Watch a board's service live.")
@click.argument("host", required=False)
@click.option("--url", metavar="http://HOST:PORT", help="A service that is reached without SSH.")
@click.option(
    "--remote", metavar="ADDRESS", help="HOST:PORT or socket path there; default: the installed service's."
)
@click.option(
    "--token-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Its first line is the bearer token.",
)
@click.option(
    "--interval",
    type=click.FloatRange(0.2, 3600),
    default=2.0,
    show_default=True,
    help="Seconds between looks.",
)
@click.option("--once", is_flag=True, help="One look, then end; so is it where the output is no terminal.")
@ssh_options
@ui_options
def command(
    ui: Ui,
    host: str | None,
    url: str | None,
    remote: str | None,
    token_file: Path | None,
    interval: float,
    once: bool,
    ssh: SshOptions,
) -> None:
    """Watch a board's service live.

    HOST is reached over SSH. q or Ctrl-C leaves. With --json, one object each
    interval until Ctrl-C, or one with --once.
    """
    from colibri_kit.errors import UsageError
    from colibri_kit.live.stop import ended_by_signals
    from colibri_kit.live.watch import Watch

    if (host is None) == (url is None):
        raise UsageError("name a HOST, or a service's --url http://HOST:PORT")
    token = _token(token_file) if token_file is not None else None
    source = _source(ui, host, url, remote, ssh)
    try:
        watch = Watch(source, token)
        with ended_by_signals():
            if once or not (ui.as_json or ui.on_terminal):
                _once(ui, source, watch)
            elif ui.as_json:
                _objects(ui, source, watch, interval)
            else:
                _live(ui, source, watch, interval)
    except KeyboardInterrupt:
        pass  # the way to leave
    finally:
        source.close()


def _source(ui: Ui, host: str | None, url: str | None, remote: str | None, ssh: SshOptions) -> Source:
    from colibri_kit.errors import UsageError
    from colibri_kit.live.watch import SshSource, UrlSource

    if url is not None:
        if remote is not None:
            raise UsageError("--remote is an address on a board behind SSH; --url has its own")
        return UrlSource(url)
    from colibri_kit.live.tunnel import connector
    from colibri_kit.transport.sshforward import parse_endpoint

    if ssh.sudo:
        raise UsageError("top goes by the login, not by root: leave --sudo out")
    assert host is not None
    to = parse_endpoint(remote) if remote is not None else None
    return SshSource(host, *connector(host, ssh, ui.note), to)


def _token(file: Path) -> str:
    from colibri_kit.errors import UsageError

    try:
        token = file.expanduser().read_text("ascii").split("\n", 1)[0].strip()
    except (OSError, UnicodeDecodeError) as err:
        raise UsageError(f"cannot read the token in {file}: {type(err).__name__}") from err
    if not token or not token.isprintable() or " " in token:
        raise UsageError(f"the first line of {file} is no bearer token")
    return token


def _object(source: Source, made: Any) -> dict[str, Any]:
    from datetime import datetime, timezone

    now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"time": now, "target": source.describe(), **made}


def _once(ui: Ui, source: Source, watch: Watch) -> None:
    from colibri_kit.live.draw import ASCII, Glyphs, draw

    made = watch.look()
    if ui.as_json:
        ui.result(_object(source, made.as_json()))
        return
    width, height = ui.size()
    glyphs = Glyphs() if ui.draws_blocks else ASCII
    ui.picture(draw(made, source.describe(), width, height, glyphs=glyphs)[:-1])


def _objects(ui: Ui, source: Source, watch: Watch, interval: float) -> None:
    import time

    from colibri_kit.live.watch import Lost

    seen: Frame | Lost = watch.look()  # what is wrong at the start ends it
    while True:
        ui.result(_object(source, {"lost": seen.why} if isinstance(seen, Lost) else seen.as_json()))
        time.sleep(interval)
        seen = watch.try_look()


def _live(ui: Ui, source: Source, watch: Watch, interval: float) -> None:
    from colibri_kit.live.draw import ASCII, Glyphs, draw
    from colibri_kit.live.feed import Feed
    from colibri_kit.live.watch import Lost

    shown = watch.look()  # what is wrong at the start is said without a screen
    lost: str | None = None
    glyphs = Glyphs() if ui.draws_blocks else ASCII
    with Feed(watch, interval) as feed, ui.screen() as screen:
        while True:
            width, height = screen.size
            screen.show(draw(shown, source.describe(), width, height, lost=lost, glyphs=glyphs))
            while (seen := feed.next()) is None and screen.size == (width, height):
                if "q" in screen.keys(0.1).lower():
                    return
            if isinstance(seen, Lost):
                lost = seen.why
            elif seen is not None:
                shown, lost = seen, None
