"""``colibri-kit status``: which release a board runs and how it is."""

from __future__ import annotations

from typing import Any

import click

from colibri_kit.cli import ui_options
from colibri_kit.deploy.target import Place, existing_prefix, opened, place_options
from colibri_kit.ui import Ui


@click.command(short_help="Show which release a board runs and how it is.")
@click.argument("host", required=False)
@place_options
@click.option("--check", is_flag=True, help="Run the golden and one token now.")
@ui_options
def command(ui: Ui, where: Place, check: bool) -> None:
    """Show which release a board runs and how it is."""
    from dataclasses import asdict

    from colibri_kit.deploy import act, health, release, state, store

    with opened(where, ui) as transport:
        prefix = existing_prefix(transport, where)
        held = store.stored(transport, prefix)
        remembered = state.load(transport, prefix)
        doc = release.read(transport, prefix, held.current) if held.current else {}
        data: dict[str, Any] = {
            "target": transport.describe(),
            "prefix": prefix,
            "current": held.current,
            "since": doc.get("created"),
            "previous": remembered.previous,
            "pending": remembered.pending,
            "health": remembered.health if held.current else None,
            "checked": remembered.checked,
            "model": doc.get("model", {}).get("name"),
            "releases": list(held.releases),
            "bad": [asdict(b) for b in remembered.bad],
            "bytes": sum(held.blobs.values()) + sum(held.partial.values()),
            "partial_bytes": sum(held.partial.values()),
        }
        if held.current:
            path = f"{prefix}/releases/{held.current}"
            version, why = health.version(transport, path)
            data["engine"] = version or None
            if why:
                data["health"] = f"the engine does not start: {why}"
            elif check:
                well = health.check(transport, path, act.settings_of(doc), 600)
                data["health"] = "ok" if well.ok else well.reason
                data["checked"] = state.utc_now()
        if remembered.pending and remembered.pending == held.current and not check:
            data["health"] = "unknown: the deployment was cut off before its checks; deploy again, or --check"
    ui.result(data, _text(data))


def _text(data: dict[str, Any]) -> str:
    from colibri_kit.deploy.plan import size_text

    current = data["current"]
    rows = [
        ("board", f"{data['target']}, {data['prefix']}"),
        ("release", f"{current} since {data['since']}" if current else "none is current"),
        ("model", data["model"] or "-"),
        ("engine", data.get("engine") or "-"),
        ("health", f"{data['health'] or '-'} (checked {data['checked'] or 'never'})"),
        ("previous", data["previous"] or "none"),
        ("releases", ", ".join(data["releases"]) or "none"),
        ("disk", size_text(data["bytes"])),
        *(("bad", f"{b['release']}: {b['reason']}") for b in data["bad"]),
    ]
    return "\n".join(f"{name:<8} {value}" for name, value in rows)
