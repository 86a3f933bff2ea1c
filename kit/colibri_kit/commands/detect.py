"""``colibri-kit detect``: what is plugged in and what is near."""

from __future__ import annotations

import click

from colibri_kit.cli import VERBS, ui_options
from colibri_kit.ui import Ui


@click.command(short_help=VERBS["detect"])
@click.argument("hosts", nargs=-1, metavar="[HOST]...")
@click.option("--probe-ports", is_flag=True, help="Open each serial port and press Return.")
@click.option("--probe-links", is_flag=True, help="Ask every serial port for an offload module.")
@click.option("--baud", type=click.IntRange(300, 4000000), default=115200, show_default=True)
@click.option("--no-network", is_flag=True, help="Do not ask the local network.")
@click.option(
    "--seconds", type=click.FloatRange(0.2, 60), default=2.0, show_default=True, help="Wait for answers."
)
@ui_options
def command(
    ui: Ui,
    hosts: tuple[str, ...],
    probe_ports: bool,
    probe_links: bool,
    baud: int,
    no_network: bool,
    seconds: float,
) -> None:
    """Show removable media, serial and USB-C ports, USB devices and boards on the network.

    Changes nothing. Only the ports of colibri's own USB gadget are opened, to ask for an
    offload module; others only with --probe-ports or --probe-links. For each HOST
    ([user@]host[:port]) the SSH server's first line is shown.
    """
    from colibri_kit.detect.job import Wish, look, report
    from colibri_kit.media.disks import everything

    wish = Wish(probe_ports, baud, not no_network, seconds, hosts, probe_links=probe_links)
    sight = look(wish, everything, ui.detail)
    ui.result(sight.as_json(), report(sight, ui.table))
