"""``colibri-kit doctor``: checks this machine, or a board, and names remedies."""

from __future__ import annotations

from pathlib import Path

import click

from colibri_kit.cli import VERBS, ui_options
from colibri_kit.deploy.target import absolute, candidates, opened, place, place_flags
from colibri_kit.transport.options import SshOptions
from colibri_kit.ui import Ui


@click.command(short_help=VERBS["doctor"])
@click.argument("host", required=False)
@place_flags
@click.option("--strict", is_flag=True, help="Exit status 6 for warnings too.")
@click.option("--udev-rule", is_flag=True, help="Only print the udev rule for serial adapters.")
@ui_options
def command(
    ui: Ui,
    host: str | None,
    board: str | None,
    prefix: str | None,
    root: Path | None,
    ssh: SshOptions,
    strict: bool,
    udev_rule: bool,
) -> None:
    """Check this machine, or a board, and name a remedy for each fault.

    With HOST the board is asked over SSH; --board adds what its profile
    promises. Without HOST this machine is checked, and with --board the
    compiler for it. Exit status 6 when something fails.
    """
    from colibri_kit.doctor import findings, udev

    if udev_rule:
        text = udev.rule()
        ui.result({"name": udev.NAME, "text": text}, text.rstrip("\n"))
        return
    if host is None and root is None:
        from colibri_kit.config import load_board
        from colibri_kit.doctor import host as here

        target = "this machine"
        found = here.check(load_board(board) if board else None)
    else:
        from colibri_kit.doctor import board as there

        where = place(host, board, prefix, root, ssh)
        with opened(where, ui) as transport:
            target = transport.describe()
            at = absolute(transport, candidates(where)[0])
            found = there.check(transport, where.board, at, ui.detail)
    ui.result(findings.as_json(target, found), findings.text(target, found, ui.table))
    status = findings.exit_status(found, strict)
    if status:
        raise click.exceptions.Exit(status)
