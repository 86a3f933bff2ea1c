"""``colibri-kit rollback``: an earlier release becomes current again."""

from __future__ import annotations

from dataclasses import replace

import click

from colibri_kit.cli import ui_options
from colibri_kit.deploy.target import Place, existing_prefix, opened, place_options
from colibri_kit.ui import Ui


@click.command(short_help="Go back to the previous release on a board.")
@click.argument("host", required=False)
@place_options
@click.option("--to", "wanted", metavar="RELEASE", help="This one; see them with: colibri-kit status.")
@click.option("--break-lock", is_flag=True, help="Take over the lock of a dead deployment.")
@click.option(
    "--health-timeout", type=click.FloatRange(1), default=600.0, show_default=True, help="Seconds a check."
)
@click.option("--dry-run", is_flag=True, help="Say what would become current; change nothing.")
@ui_options
def command(
    ui: Ui, where: Place, wanted: str | None, break_lock: bool, health_timeout: float, dry_run: bool
) -> None:
    """Go back to the previous release on a board.

    The release is checked first (golden, then one token): one that is unwell
    does not become current.
    """
    from colibri_kit.deploy import act, health, release, state, store
    from colibri_kit.errors import HealthError, PreflightError

    with opened(where, ui) as transport:
        prefix = existing_prefix(transport, where)
        held = store.stored(transport, prefix)
        remembered = state.load(transport, prefix)
        target = wanted or remembered.previous
        stays = act.stays(held.current)
        if target is None:
            raise PreflightError(
                "there is no earlier release to go back to",
                hint=f"releases there: {', '.join(held.releases) or 'none'}; name one with --to",
                state=stays,
                code="CK-ROLLBACK-NONE",
            )
        if target not in held.releases:
            raise PreflightError(
                f"there is no release {target} under {prefix}",
                hint=f"releases there: {', '.join(held.releases) or 'none'}",
                state=stays,
                code="CK-ROLLBACK-NONE",
            )
        data = {"target": transport.describe(), "prefix": prefix, "from": held.current, "to": target}
        if dry_run:
            ui.result({"dry_run": True, **data}, f"would check {target} and make it current; {stays}")
            return
        with state.Lock(transport, prefix, break_lock):
            settings = act.settings_of(release.read(transport, prefix, target))
            well = health.check(transport, f"{prefix}/releases/{target}", settings, health_timeout)
            if not well.ok:
                raise HealthError(
                    f"{target} is unwell: {well.reason}",
                    hint="name another release with --to, or deploy again",
                    state=stays,
                )
            release.switch(transport, prefix, target)
            # What is left behind was not proved bad: it may be deployed again.
            after = remembered.with_good(target, held.current, state.utc_now())
            state.save(transport, prefix, replace(after, pending=None))
            state.log(transport, prefix, "rollback", release=target, previous=held.current)
    ui.result(
        {**data, "golden": well.golden},
        f"rolled back from {held.current} to {target} (golden ok {well.golden[:12]})",
    )
