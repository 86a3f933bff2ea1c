"""``colibri-kit undeploy``: takes away what deploy made, and nothing else."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from colibri_kit.cli import ui_options
from colibri_kit.deploy.target import Place, existing_prefix, opened, place_options
from colibri_kit.errors import TransferError, UsageError
from colibri_kit.ui import Ui

if TYPE_CHECKING:
    from colibri_kit.transport.base import Transport

#: Only names that the kit makes; a folder that still holds something stays.
_REMOVE = """
cd "$1" && [ -f .colibri-kit ] || exit 1
rm -f current .current.new trial trial.boot state.json state.json.new .exec-test
rm -rf releases blobs log lock
rm -f .colibri-kit
cd / && rmdir "$1" 2>/dev/null || { [ -d "$1" ] && ls -A "$1"; }
exit 0
"""


@click.command(short_help="Remove the engine and its releases from a board.")
@click.argument("host", required=False)
@place_options
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--break-lock", is_flag=True, help="Take over the lock of a dead deployment.")
@click.option("--dry-run", is_flag=True, help="Say what would be removed; remove nothing.")
@ui_options
def command(ui: Ui, where: Place, yes: bool, break_lock: bool, dry_run: bool) -> None:
    """Remove the engine and its releases from a board.

    Files that colibri-kit did not make stay, and so does their folder.
    """
    from colibri_kit.deploy import release, state, store
    from colibri_kit.deploy.plan import size_text
    from colibri_kit.offload import gadget
    from colibri_kit.transport.base import script

    with opened(where, ui) as transport:
        prefix = existing_prefix(transport, where)
        held = store.stored(transport, prefix)
        size = sum(held.blobs.values()) + sum(held.partial.values())
        docs = [release.read(transport, prefix, name) for name in held.releases]
        usb, not_ours = _gadget(transport, docs)
        what = f"{prefix} on {transport.describe()}: {len(held.releases)} release(s), {size_text(size)}"
        what += f", and the USB gadget: {', '.join(usb)}" if usb else ""
        data = {
            "target": transport.describe(),
            "prefix": prefix,
            "releases": list(held.releases),
            "bytes": size,
            "gadget": list(usb),
        }
        if dry_run:
            ui.result({"dry_run": True, **data}, f"would remove {what}")
            return
        if not yes:
            if not sys.stdin.isatty() or ui.as_json:
                raise UsageError(f"would remove {what}", hint="say --yes", state="nothing was removed")
            if not click.confirm(f"remove {what}?", err=True):
                raise click.Abort
        with state.Lock(transport, prefix, break_lock):
            _stop_services(transport, prefix, docs, usb)
            gadget.remove(transport, usb)
            done = transport.run(script(_REMOVE, prefix), timeout=300)
            if done.rc != 0:
                raise TransferError(
                    f"cannot remove all of {prefix}: {done.why}", state=f"{prefix} is removed in part"
                )
    left = [*(done.text.split("\n") if done.text else []), *not_ours]
    more = f"; not ours, so left there: {', '.join(left)}" if left else ""
    ui.result({**data, "left": left}, f"removed {what}{more}")


def _gadget(transport: Transport, docs: Sequence[dict[str, Any]]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The USB gadget's files: those to remove, and those that stay.

    They stay where this login may not remove them and no release here has its link there: then
    another deployment made them.
    """
    from colibri_kit.deploy.record import settings_of
    from colibri_kit.offload import gadget

    there = gadget.found(transport)
    uses = any(gadget.DEVICE in settings_of(doc).offload for doc in docs)
    if there and not uses and transport.run(["id", "-u"]).text != "0":
        return (), there
    return there, ()


def _stop_services(
    transport: Transport, prefix: str, docs: Sequence[dict[str, Any]], usb: Sequence[str]
) -> None:
    """Takes away the service of every kind that a release here was deployed with.

    Args:
        docs: what the releases say of themselves.
        usb: files of the USB gadget, which need root as well.

    Raises:
        PreflightError: that needs root, which we are not.
    """
    from colibri_kit.deploy import keeper, root, serving

    specs = (serving.of_release(doc) for doc in docs)
    kinds = sorted({spec.kind for spec in specs if spec is not None})
    whats = [*(["service"] if kinds else []), *(["USB gadget"] if usb else [])]
    if whats:
        what = f"removing the {' and the '.join(whats)} of {transport.describe()}"
        root.need(transport, what, state="nothing was removed")
    for kind in kinds:
        keeper.remove(transport, prefix, kind)
