"""``colibri-kit logs``: what was deployed when, and the engine's own log."""

from __future__ import annotations

import json
from typing import Any

import click

from colibri_kit.cli import ui_options
from colibri_kit.deploy.target import Place, existing_prefix, opened, place_options
from colibri_kit.ui import Ui

_SCRIPT = """
cd "$1/log" 2>/dev/null || exit 0
[ -f deploys.jsonl ] && tail -n "$2" deploys.jsonl
echo
[ -f engine.log ] && tail -n "$2" engine.log
exit 0
"""


@click.command(short_help="Show a board's engine log.")
@click.argument("host", required=False)
@place_options
@click.option("-n", "--lines", type=click.IntRange(1, 100000), default=20, show_default=True)
@ui_options
def command(ui: Ui, where: Place, lines: int) -> None:
    """Show a board's engine log, after the log of its deployments."""
    from colibri_kit.errors import TransferError
    from colibri_kit.transport.base import script

    with opened(where, ui) as transport:
        prefix = existing_prefix(transport, where)
        done = transport.run(script(_SCRIPT, prefix, str(lines)))
        if done.rc != 0:
            raise TransferError(f"cannot read the logs under {prefix}: {done.why}")
    head, _, engine = done.out.decode("utf-8", "replace").partition("\n\n")
    events = [event for line in head.splitlines() if (event := _event(line)) is not None]
    data = {"prefix": prefix, "deployments": events, "engine": engine.splitlines()}
    ui.result(data, "\n".join([*map(_line, events), *engine.splitlines()]) or "no deployments yet")


def _event(line: str) -> dict[str, Any] | None:
    try:
        doc = json.loads(line)
    except ValueError:
        return None
    return doc if isinstance(doc, dict) else None


def _line(event: dict[str, Any]) -> str:
    rest = "  ".join(f"{k}={v}" for k, v in event.items() if k not in ("time", "event") and v is not None)
    return f"{event.get('time', '?')}  {event.get('event', '?'):<15} {rest}"
