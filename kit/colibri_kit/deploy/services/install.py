"""Puts a service definition on a board and starts it, or takes it away."""

from __future__ import annotations

import io

from colibri_kit.deploy.services import NAME, Rendered
from colibri_kit.errors import PreflightError, TransferError
from colibri_kit.transport.base import Transport, script

# $1 the user. Debian's useradd, busybox' adduser.
_MAKE_USER = """
id -u "$1" >/dev/null 2>&1 && exit 0
if command -v useradd >/dev/null 2>&1
then useradd --system --user-group --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin "$1"
else adduser -S -D -H -h /nonexistent -s /sbin/nologin "$1"
fi >/dev/null 2>&1
id -u "$1" >/dev/null 2>&1
"""

# $1 the device. Its group, when that may use it; where it is not plugged in, what Linux uses.
_DEVICE_GROUP = """
if [ -e "$1" ]; then set -- $(ls -lL "$1"); [ "$4" != root ] && echo "$4"; exit 0; fi
for name in dialout uucp; do grep -q "^$name:" /etc/group && { echo "$name"; exit 0; }; done
exit 0
"""

# may USER -r|-x PATH: 77 where neither tool can become another user (a small system, a broken PAM).
# No words after su's command: busybox takes their options for its own. The paths need no quotes.
_MAY = """
may() {
  if setpriv --reuid "$1" --regid "$(id -g "$1")" --init-groups true 2>/dev/null
  then setpriv --reuid "$1" --regid "$(id -g "$1")" --init-groups test "$2" "$3"
  elif su -s /bin/sh "$1" -c true >/dev/null 2>&1
  then su -s /bin/sh "$1" -c "test $2 $3"
  else return 77
  fi
}
"""

# $1 file, $2 user. Owner, root or not, decides nothing: can this user read it?
_READABLE = (
    _MAY
    + """
[ -f "$1" ] || exit 44
may "$2" -r "$1" && exit 0
chgrp "$(id -gn "$2")" "$1" && chmod g+r "$1" || exit 1
may "$2" -r "$1" || [ $? = 77 ]
"""
)

_RUNS = _MAY + """may "$2" -x "$1" || [ $? = 77 ]"""


def check_manager(transport: Transport, kind: str) -> None:
    """Refuses a board that is not kept by the service manager that its profile names.

    Raises:
        PreflightError: its program is not there.
    """
    tool = {"systemd": "systemctl", "openrc": "rc-service", "sysv": "start-stop-daemon"}[kind]
    if transport.run(script('command -v "$1" >/dev/null', tool)).rc != 0:
        raise PreflightError(
            f"services of this board are kept by {kind}, its profile says, "
            f"but {transport.describe()} has no {tool}",
            hint="set `service:` in the board's profile: systemd, openrc, sysv or none",
            code="CK-SERVICE-KIND",
        )


def user(transport: Transport, wanted: str = "") -> str:
    """Who runs the engine: the one asked for, else ``colibri``, made for it where it is missing,
    else ``nobody``. Never root by itself.

    Raises:
        PreflightError: the board has no such user.
    """
    if wanted and wanted != NAME:
        if transport.run(["id", "-u", wanted]).rc != 0:
            raise PreflightError(
                f"{transport.describe()} has no user {wanted}, which service.user names",
                hint="make it there, or leave the key out: deploy makes a user of its own",
                code="CK-SERVICE-USER",
            )
        return wanted
    return NAME if transport.run(script(_MAKE_USER, NAME)).rc == 0 else "nobody"


def check_runs(transport: Transport, who: str, program: str) -> None:
    """Refuses a prefix that the service's user cannot enter, such as one in a private home.

    Raises:
        PreflightError: that user may not execute the program.
    """
    if transport.run(script(_RUNS, program, who)).rc != 0:
        raise PreflightError(
            f"user {who} may not run {program} on {transport.describe()}",
            hint="use a --prefix that everybody may enter, such as /opt/colibri, or another service.user",
            code="CK-SERVICE-USER",
        )


def groups(transport: Transport, link: str) -> tuple[str, ...]:
    """The group that may use an offload link's device; none for other links."""
    device = link.removeprefix("tty:").split("@", 1)[0]
    if not device.startswith("/dev/"):
        return ()
    name = transport.run(script(_DEVICE_GROUP, device)).text
    return (name,) if name.replace("-", "").isalnum() else ()


def make_readable(transport: Transport, path: str, who: str) -> None:
    """A token file that the service's user cannot read is given to that user's group.

    Raises:
        PreflightError: it is not there, or cannot be made readable.
    """
    done = transport.run(script(_READABLE, path, who))
    if done.rc == 0:
        return
    if done.rc == 44:
        raise PreflightError(
            f"there is no token file {path} on {transport.describe()}",
            hint="on the board, as root: "
            f"(umask 077; head -c 24 /dev/urandom | od -An -tx1 | tr -d ' \\n' >{path}); "
            "deploy lets the service read it",
            code="CK-DEPLOY-TOKEN",
        )
    raise PreflightError(
        f"user {who} cannot read the token file {path} on {transport.describe()}: {done.why}",
        hint=f"let {who} read the file and enter the folders above it",
        code="CK-DEPLOY-TOKEN",
    )


def install(transport: Transport, made: Rendered) -> None:
    """Writes the definition by rename, then enables and (re)starts the service.

    Raises:
        TransferError: the file cannot be written or a command fails.
    """
    data = made.text.encode()
    transport.put_stream(io.BytesIO(data), len(data), f"{made.path}.new", mode=made.mode)
    done = transport.run(["mv", "-f", f"{made.path}.new", made.path])
    if done.rc != 0:
        raise TransferError(f"cannot write {made.path}: {done.why}")
    for command in made.install:
        done = transport.run(command, timeout=made.stop_seconds + 90)
        # Nothing has failed yet on a first installation: then there is nothing to reset.
        if done.rc != 0 and "reset-failed" not in command:
            raise TransferError(f"`{' '.join(command)}` failed: {done.why}")


def remove(transport: Transport, made: Rendered) -> bool:
    """Stops the service and removes its definition. False when there was none."""
    if transport.run(script('[ -f "$1" ]', made.path)).rc != 0:
        return False
    for command in made.remove:
        transport.run(command, timeout=made.stop_seconds + 90)
    done = transport.run(["rm", "-f", made.path])
    if done.rc != 0:
        raise TransferError(f"cannot remove {made.path}: {done.why}")
    if made.path.endswith(".service"):
        transport.run(["systemctl", "daemon-reload"], timeout=60)
    return True
