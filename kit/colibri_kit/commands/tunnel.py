"""``colibri-kit tunnel``: a board's service at a port of this machine."""

from __future__ import annotations

import click

from colibri_kit.cli import ui_options
from colibri_kit.transport.options import SshOptions, ssh_options
from colibri_kit.ui import Ui


@click.command(short_help="Bring a board's service to a port of this machine.")
@click.argument("host")
@click.option("--local", type=click.IntRange(1, 65535), help="Port here; default: 8080, else a free one.")
@click.option(
    "--remote", metavar="ADDRESS", help="HOST:PORT or socket path there; default: the installed service's."
)
@click.option("--no-reconnect", is_flag=True, help="End when the link is lost.")
@ssh_options
@ui_options
def command(
    ui: Ui, host: str, local: int | None, remote: str | None, no_reconnect: bool, ssh: SshOptions
) -> None:
    """Bring a board's service to a port of this machine, over SSH.

    Only this machine can use the port. The service is asked before the tunnel
    counts as open; a lost link is opened again. Ctrl-C closes it.
    """
    from colibri_kit.errors import UsageError
    from colibri_kit.live import forward, tunnel
    from colibri_kit.live.stop import ended_by_signals
    from colibri_kit.transport.sshforward import parse_endpoint

    if ssh.sudo:
        raise UsageError("a tunnel goes by the login, not by root: leave --sudo out")
    to = parse_endpoint(remote) if remote is not None else None
    listener = forward.listen(local)
    try:
        first, again = tunnel.connector(host, ssh, ui.note)
        transport, opened = tunnel.open_link(first, to, host)
    except BaseException:
        listener.close()
        raise
    held = tunnel.Tunnel(
        listener,
        transport,
        opened.remote,
        again=None if no_reconnect else again,
        say=ui.note,
        beat_seconds=min(tunnel.BEAT_SECONDS, ssh.stall_timeout),
    )
    port = held.forward.port
    try:
        with ended_by_signals():
            if local is None and port != forward.USUAL_PORT:
                ui.note(f"port {forward.USUAL_PORT} is in use here: taking {port}")
            if opened.health.status != "ok":
                ui.warn(f"the service says {opened.health.status}")
            url = f"http://127.0.0.1:{port}"
            data = {
                "url": url, "local": port, "remote": str(opened.remote), "target": opened.target,
                "model": opened.health.model, "health": opened.health.status,
            }  # fmt: skip
            ui.result(data, f"open: {url} is {opened.health.model} on {opened.target} ({opened.remote})")
            ui.note("Ctrl-C closes it")
            held.run()
    except KeyboardInterrupt:
        ui.note(f"closed: {held.forward.carried} connection(s) were carried, {held.forward.active} cut off")
    finally:
        held.close()
