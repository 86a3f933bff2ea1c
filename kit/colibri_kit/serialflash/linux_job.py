"""Flashing at a Linux shell: a deployment, over the console instead of SSH."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from colibri_kit.config.board import Board
from colibri_kit.deploy import job
from colibri_kit.deploy.act import Deployment
from colibri_kit.deploy.model import Parcel
from colibri_kit.deploy.plan import Engine, Settings
from colibri_kit.deploy.target import Place
from colibri_kit.errors import ConfigError
from colibri_kit.serialflash import plan
from colibri_kit.serialflash.options import SerialOptions
from colibri_kit.transport.options import SshOptions
from colibri_kit.transport.serial_console import Console
from colibri_kit.transport.serial_line import Line
from colibri_kit.transport.serial_shell import SEGMENT, SerialTransport
from colibri_kit.ui import Ui


def flash_linux(
    ui: Ui, line: Line, board: Board, engine: Engine, parcel: Parcel, options: SerialOptions
) -> dict[str, Any]:
    """Deploys over the console of a running Linux. What a cut leaves is found again next time.

    Raises:
        What a deployment does, and UnreachableError, AuthError for the login.
    """
    console = Console(line, ui.detail)
    console.start(options.user, options.password, options.wait)
    _switch_rate(ui, console, options)
    transport = SerialTransport(console, method=options.method, note=ui.detail)
    scratch = tempfile.TemporaryDirectory(prefix="colibri-flash-")
    try:
        where = Place(None, board, options.prefix or board.prefix, SshOptions())
        settings = Settings(options.budget or board.budget, options.ctx or 0, options.threads or 0)
        if options.service and board.service == "none":
            raise ConfigError(f"board {board.name} has no service manager")
        spec = job.service_of(board, parcel, settings, None) if options.service else None
        wish = job.Wish(engine, parcel, settings, options.service or None, spec, keep=options.keep)
        planned = job.make(ui, transport, where, wish, Path(scratch.name))
        made = planned.plan
        for warning in made.warnings:
            ui.warn(warning)
        rate = _measure(transport)
        ui.note(f"estimate: {plan.sum_text(made.send_bytes, rate)} by {transport.method}, measured")
        plan.check_time(made.send_bytes, rate, options.max_hours, "measured on this line")
        if options.dry_run:
            return {"way": "linux", "rate_bytes_s": round(rate), **made.as_json()}
        began = time.monotonic()
        outcome = Deployment(
            transport=transport,
            plan=made,
            engine=engine,
            parcel=parcel,
            settings=settings,
            board_name=board.name,
            ui=ui,
            keep=options.keep,
            service=planned.service,
        ).run()
        return {
            "way": "linux",
            "target": transport.describe(),
            "prefix": made.prefix,
            "seconds": round(time.monotonic() - began, 1),
            "rate_bytes_s": round(rate),
            "by": transport.sent_by,
            **outcome.as_json(),
        }
    finally:
        scratch.cleanup()
        transport.close()


def _switch_rate(ui: Ui, console: Console, options: SerialOptions) -> None:
    wanted = options.max_baud
    if not wanted or wanted == console.line.baud:
        return
    ok = console.set_baud(wanted)
    ui.note(plan.rate_text(wanted, ok, console.line.baud))


def _measure(transport: SerialTransport) -> float:
    """Bytes a second of half a segment, sent into the board's scratch folder."""
    sample = bytes(range(256)) * (SEGMENT // 512)
    began = time.monotonic()
    transport.stage(sample, "$T/s")
    return len(sample) / (time.monotonic() - began)
