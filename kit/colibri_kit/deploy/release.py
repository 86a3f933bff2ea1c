"""Releases on a board: made beside, switched by rename, pruned, read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from colibri_kit.deploy import state as states
from colibri_kit.deploy.model import Part
from colibri_kit.deploy.store import RELEASE
from colibri_kit.errors import RollbackError, TransferError
from colibri_kit.transport.base import Transport, script

#: In every prefix: tells our folders from others.
MARK = ".colibri-kit"

_MAKE_PREFIX = """
umask 022
mkdir -p "$1" && cd "$1" && mkdir -p blobs releases log || exit 1
[ -f "$2" ] || echo '{"layout": 1}' > "$2" || exit 1
printf '#!/bin/sh\\nexit 0\\n' > .exec-test && chmod 755 .exec-test || exit 1
./.exec-test; rc=$?
rm -f .exec-test
[ $rc = 0 ] || exit 46
"""

# $1 prefix, $2 release, then pairs: path in the release, blob.
_MAKE_RELEASE = """
umask 022
cd "$1" || exit 1
new=releases/.new-$2
rm -rf "$new" && mkdir -p "$new/model.coli" || exit 1
shift 2
while [ $# -gt 1 ]; do
  case $1 in */*) up=../../../ ;; *) up=../../ ;; esac
  ln -s "${up}blobs/$2" "$new/$1" || exit 1
  shift 2
done
"""

# mv -T renames over the old link at once. Where mv lacks -T, ln -sfn removes and
# makes: a moment without `current`, and the only way left.
_SWITCH = """
cd "$1" || exit 1
sync 2>/dev/null
rm -f .current.new
ln -s "releases/$2" .current.new || exit 1
if mv -fT .current.new current 2>/dev/null; then :
else rm -f .current.new; ln -sfn "releases/$2" current || exit 1
fi
[ "$(ls -l current | sed 's/.* -> //')" = "releases/$2" ] || exit 1
sync 2>/dev/null; exit 0
"""

# A release on trial: `trial` points at the one to go back to, `trial.boot` says in which boot.
# Service definitions start with BOOT_GUARD: in a later boot the trial was cut off.
_TRIAL = """
cd "$1" || exit 1
cat /proc/sys/kernel/random/boot_id > trial.boot && ln -sfn "releases/$2" trial && sync
"""

#: For sh, $1 = prefix. One line without single quotes, as it has to stand in a unit file too.
#: Needs root: the links are not the service's.
BOOT_GUARD = (
    '[ ! -L "$1/trial" ] || '
    '[ "$(cat "$1/trial.boot" 2>/dev/null)" = "$(cat /proc/sys/kernel/random/boot_id)" ] || { '
    'echo "a deployment was cut off before its release had passed: back to $(readlink "$1/trial")"; '
    'mv -fT "$1/trial" "$1/current" || '
    '{ ln -sfn "$(readlink "$1/trial")" "$1/current" && rm -f "$1/trial"; }; '
    'rm -f "$1/trial.boot"; sync; } || :'
)

_LINKS = 'cd "$1/releases" && ls -lR . 2>/dev/null | sed -n "s/.* -> .*blobs\\///p"'


def make_prefix(transport: Transport, prefix: str) -> None:
    """Creates the folders and the mark; shows that programs run from there.

    Raises:
        TransferError: they cannot be made. PreflightError: nothing can be executed there.
    """
    done = transport.run(script(_MAKE_PREFIX, prefix, MARK))
    if done.rc == 46:
        from colibri_kit.errors import PreflightError

        raise PreflightError(
            f"{transport.describe()} does not execute programs in {prefix}: {done.why}",
            hint="is it mounted noexec? Name a folder on another file system with --prefix",
            state="only empty folders were made",
            code="CK-PREFLIGHT-NOEXEC",
        )
    if done.rc != 0:
        raise TransferError(f"cannot make {prefix}: {done.why}")


def make(
    transport: Transport,
    prefix: str,
    release: str,
    engine: Part,
    parts: Sequence[Part],
    doc: dict[str, Any],
    beside: Sequence[Part] = (),
) -> None:
    """Makes ``releases/RELEASE`` whole or not at all; links into the blobs.

    Args:
        beside: files that stand beside the engine, such as its options.
    """
    pairs = ["colibri", engine.sha256]
    for part in beside:
        pairs += [part.name, part.sha256]
    for part in parts:
        pairs += [f"model.coli/{part.name}", part.sha256]
    done = transport.run(script(_MAKE_RELEASE, prefix, release, *pairs))
    if done.rc != 0:
        raise TransferError(f"cannot make releases/{release}: {done.why}")
    new = f"{prefix}/releases/.new-{release}"
    states.write_file(transport, f"{new}/release.json", json.dumps(doc, indent=1).encode() + b"\n")
    done = transport.run(["mv", new, f"{prefix}/releases/{release}"])
    if done.rc != 0:
        raise TransferError(f"cannot make releases/{release}: {done.why}")


def read(transport: Transport, prefix: str, release: str) -> dict[str, Any]:
    """release.json, or {} when it is missing or damaged."""
    raw = transport.read(f"{prefix}/releases/{release}/release.json")
    try:
        doc = json.loads(raw or b"{}")
    except ValueError:
        return {}
    return doc if isinstance(doc, dict) else {}


def switch(transport: Transport, prefix: str, release: str) -> None:
    """Points ``current`` at a release, atomically where the board's mv can."""
    done = transport.run(script(_SWITCH, prefix, release))
    if done.rc != 0:
        raise TransferError(f"cannot switch current to {release}: {done.why}")


def begin_trial(transport: Transport, prefix: str, before: str) -> None:
    """Before a switch: should the board lose power before :func:`end_trial`, it boots into ``before``."""
    done = transport.run(script(_TRIAL, prefix, before))
    if done.rc != 0:
        raise TransferError(f"cannot note {before} as the release to go back to: {done.why}")


def end_trial(transport: Transport, prefix: str) -> None:
    """What is current stays so."""
    done = transport.run(["rm", "-f", f"{prefix}/trial", f"{prefix}/trial.boot"])
    if done.rc != 0:
        raise TransferError(f"cannot remove {prefix}/trial: {done.why}")


def unset(transport: Transport, prefix: str) -> None:
    """Takes ``current`` away: the first release was bad and there is none to go back to."""
    done = transport.run(["rm", "-f", f"{prefix}/current"])
    if done.rc != 0:
        raise RollbackError(f"cannot remove {prefix}/current: {done.why}")


def remove(transport: Transport, prefix: str, release: str) -> None:
    if RELEASE.fullmatch(release):
        transport.run(["rm", "-rf", f"{prefix}/releases/{release}", f"{prefix}/releases/.new-{release}"])


def doomed(releases: Sequence[str], keep: int, current: str | None, previous: str | None) -> list[str]:
    """Which releases to remove: all but the newest ``keep``, never current or previous. Pure."""
    safe = {current, previous, *sorted(releases)[-max(1, keep) :]}
    return [r for r in sorted(releases) if r not in safe]


def prune(transport: Transport, prefix: str, names: Sequence[str]) -> int:
    """Removes releases, then every blob and partial blob no release links to. Returns blobs removed."""
    from colibri_kit.deploy import store

    for name in names:
        remove(transport, prefix, name)
    done = transport.run(script(_LINKS, prefix))
    if done.rc != 0:
        return 0
    used = set(done.text.split())
    now = store.stored(transport, prefix)
    waste = [name for name in now.blobs if name not in used] + [f"{name}.part" for name in now.partial]
    for at in range(0, len(waste), 64):
        transport.run(["rm", "-f", *(f"{prefix}/blobs/{name}" for name in waste[at : at + 64])])
    return len(waste)
