"""Makes a release current that is on the board already, with its service as it was."""

from __future__ import annotations

from typing import Any

from colibri_kit.deploy import health, keeper, release, serving
from colibri_kit.deploy.record import check_of, settings_of
from colibri_kit.errors import RollbackError
from colibri_kit.transport.base import Transport


def check(
    transport: Transport,
    prefix: str,
    name: str,
    doc: dict[str, Any],
    timeout: float,
    wanted: health.Check | None = None,
) -> health.Health:
    """Is a release that is current well? With a service that is started and asked, else run here and now.

    Args:
        doc: its release.json. wanted: what it has to answer; None = what was recorded.
    """
    settings, wanted = settings_of(doc), wanted or check_of(doc)
    spec = serving.of_release(doc)
    if spec is None:
        return health.check(transport, f"{prefix}/releases/{name}", settings, timeout, wanted)
    kept = keeper.Keeper(transport, prefix, spec, settings)
    return kept.bring_up(name, keeper.golden_of(doc), wanted, timeout)


def leave(transport: Transport, prefix: str, leaving: str | None, target: serving.Spec | None) -> None:
    """Takes away the service of the release that is left, when the next one has none of its kind."""
    if leaving is None or (target is not None and target.kind == leaving):
        return
    keeper.remove(transport, prefix, leaving)


def go_back(
    transport: Transport, prefix: str, target: str | None, timeout: float, leaving: str | None
) -> None:
    """Makes ``target`` current and checks it; with None takes ``current`` away.

    Args:
        leaving: kind of the service that is installed now; None = there is none.

    Raises:
        RollbackError: it is not well either; it is current all the same.
        TransferError: the board did not do it.
    """
    if target is None:
        leave(transport, prefix, leaving, None)
        release.unset(transport, prefix)
        release.end_trial(transport, prefix)
        return
    doc = release.read(transport, prefix, target)
    release.switch(transport, prefix, target)
    release.end_trial(transport, prefix)
    leave(transport, prefix, leaving, serving.of_release(doc))
    well = check(transport, prefix, target, doc, timeout)
    if not well.ok:
        raise RollbackError(
            f"{target} is unwell: {well.reason}", state=f"{target} is current, and is unwell as well"
        )
