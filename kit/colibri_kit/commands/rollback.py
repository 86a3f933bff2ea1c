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
    does not become current. Where a service runs, it is restarted with the
    release and asked; when that fails, the one before runs again.
    """
    from colibri_kit.deploy import act, back, health, keeper, release, root, serving, state, store
    from colibri_kit.deploy.record import check_of, settings_of
    from colibri_kit.errors import HealthError, KitError, PreflightError, RollbackError

    with opened(where, ui) as transport:
        prefix = existing_prefix(transport, where)
        held = store.stored(transport, prefix)
        remembered = state.load(transport, prefix)
        target = wanted or remembered.back(held.current)
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
            doc = release.read(transport, prefix, target)
            now = release.read(transport, prefix, held.current) if held.current else {}
            then, runs = serving.of_release(doc), serving.of_release(now)
            if then is None and runs is None:
                path = f"{prefix}/releases/{target}"
                well = health.check(transport, path, settings_of(doc), health_timeout, check_of(doc))
            else:
                root.need(transport, f"restarting the service of {transport.describe()}", state=stays)
                well = health.Health(True, "", keeper.golden_of(doc))
                try:
                    back.go_back(transport, prefix, target, health_timeout, runs.kind if runs else None)
                except RollbackError as err:
                    well = health.Health(False, err.message)
                    leaving = then.kind if then else None
                    try:
                        back.go_back(transport, prefix, held.current, health_timeout, leaving)
                    except KitError as worse:
                        raise RollbackError(
                            f"{err.message}; and back on {held.current}: {worse.message}",
                            hint="see: colibri-kit status, colibri-kit logs",
                            state=worse.state or f"uncertain: current may be {target} or {held.current}",
                        ) from worse
            if not well.ok:
                raise HealthError(
                    well.reason if well.reason.startswith(target) else f"{target} is unwell: {well.reason}",
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
