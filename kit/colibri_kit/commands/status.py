"""``colibri-kit status``: which release a board runs and how it is."""

from __future__ import annotations

from typing import Any

import click

from colibri_kit.cli import ui_options
from colibri_kit.deploy.target import Place, existing_prefix, naming, opened, place_options
from colibri_kit.ui import Ui


@click.command(short_help="Show which release a board runs and how it is.")
@click.argument("host", required=False)
@place_options
@click.option("--check", is_flag=True, help="Golden and one token now; of the service, where there is one.")
@ui_options
def command(ui: Ui, where: Place, check: bool) -> None:
    """Show which release a board runs and how it is."""
    from dataclasses import asdict

    from colibri_kit.deploy import health, keeper, release, serving, state, store
    from colibri_kit.deploy.record import check_of, settings_of

    with opened(where, ui) as transport:
        prefix = existing_prefix(transport, where)
        held = store.stored(transport, prefix)
        remembered = state.load(transport, prefix)
        lock = state.holder(transport, prefix)
        busy = lock.who if lock is not None and not lock.stale else None
        doc = release.read(transport, prefix, held.current) if held.current else {}
        data: dict[str, Any] = {
            "target": transport.describe(),
            "prefix": prefix,
            "current": held.current,
            "since": doc.get("created"),
            "previous": remembered.back(held.current),
            "pending": remembered.pending,
            "health": remembered.health if held.current else None,
            "checked": remembered.checked,
            "model": doc.get("model", {}).get("name"),
            "releases": list(held.releases),
            "bad": [asdict(b) for b in remembered.bad],
            "service": None,
            "bytes": sum(held.blobs.values()) + sum(held.partial.values()),
            "partial_bytes": sum(held.partial.values()),
            "busy": busy,
        }
        if held.current:
            path = f"{prefix}/releases/{held.current}"
            version, why = health.version(transport, path)
            data["engine"] = version or None
            spec = serving.of_release(doc)
            if spec is not None:
                kept = keeper.Keeper(transport, prefix, spec, settings_of(doc))
                data["service"] = {"kind": spec.kind, "at": " ".join(spec.options.address()), **kept.seen()}
            if why:
                data["health"] = f"the engine does not start: {why}"
            elif check:
                if spec is not None:
                    well = kept.answers(held.current, keeper.golden_of(doc), check_of(doc), 600)
                else:
                    well = health.check(transport, path, settings_of(doc), 600, check_of(doc))
                data["health"] = "ok" if well.ok else well.reason
                data["checked"] = state.utc_now()
        if (
            remembered.pending
            and remembered.pending == held.current
            and not (check and data["service"] is None)
        ):
            # What answers may be the service of the release before: only a start shows.
            data["health"] = (
                f"unknown: {busy} is at work"
                if busy
                else "unknown: the deployment was cut off before its checks; deploy again"
            )
    ui.result(data, naming(_text(data), where))


def _text(data: dict[str, Any]) -> str:
    from colibri_kit.deploy.plan import size_text

    current = data["current"]
    rows = [
        ("board", f"{data['target']}, {data['prefix']}"),
        ("release", f"{current} since {data['since']}" if current else "none is current"),
        ("model", data["model"] or "-"),
        ("engine", data.get("engine") or "-"),
        ("health", f"{data['health'] or '-'} (last check: {data['checked'] or 'never'})"),
        *((("service", _service(data["service"])),) if data["service"] else ()),
        ("previous", data["previous"] or "none"),
        ("releases", ", ".join(data["releases"]) or "none"),
        ("disk", size_text(data["bytes"])),
        *((("lock", f"{data['busy']} is at work there"),) if data["busy"] else ()),
        *(("bad", f"{b['release']}: {b['reason']}") for b in data["bad"]),
    ]
    return "\n".join(f"{name:<8} {value}" for name, value in rows)


def _service(told: dict[str, Any]) -> str:
    up = f"up {told['uptime_s']:.0f} s" if told["uptime_s"] is not None else told["why"]
    more = "" if told["uptime_s"] is not None else "; see: colibri-kit logs"
    return f"{told['kind']} {told['at']}: {up}{more}"
