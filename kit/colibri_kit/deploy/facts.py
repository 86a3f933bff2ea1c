"""What a board is, found out without changing it."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

from colibri_kit.deploy import elf
from colibri_kit.errors import PreflightError
from colibri_kit.transport.base import Transport, script

#: $1 is the prefix. Only reads. Prints key=value lines.
_SCRIPT = r"""
export LC_ALL=C
echo "uname=$(uname -m)"
echo "kernel=$(uname -r)"
echo "user=$(id -un 2>/dev/null)"
echo "uid=$(id -u)"
echo "time=$(date +%s)"
echo "mem=$(sed -n 's/^MemAvailable: *\([0-9]*\) kB.*/\1/p' /proc/meminfo 2>/dev/null)"
echo "ram=$(sed -n 's/^MemTotal: *\([0-9]*\) kB.*/\1/p' /proc/meminfo 2>/dev/null)"
echo "cpu=$(sed -n -e 's/^flags[^:]*: *//p' -e 's/^Features[^:]*: *//p' /proc/cpuinfo 2>/dev/null | sed 1q)"
if [ -d /run/systemd/system ]; then echo init=systemd
elif [ -x /sbin/openrc-run ]; then echo init=openrc
elif [ -x /sbin/procd ]; then echo init=procd
elif [ -d /etc/init.d ]; then echo init=sysv
else echo init=none; fi
for tool in sha256sum dd df ln mv chmod head tail wc; do
  command -v "$tool" >/dev/null 2>&1 || echo "missing=$tool"
done
near=$1
while [ ! -e "$near" ] && [ ! -L "$near" ]; do
  up=$(dirname "$near"); [ "$up" = "$near" ] && break; near=$up
done
echo "near=$near"
[ -d "$near" ] && [ -w "$near" ] && echo writable=1
[ "$near" = "$1" ] && echo exists=1
[ -n "$(ls -A "$1" 2>/dev/null)" ] && echo filled=1
[ -f "$1/.colibri-kit" ] && echo ours=1
echo "df=$(df -Pk "$near" 2>/dev/null | sed -n '$p')"
mount=$(df -Pk "$near" 2>/dev/null | sed -n '$s/.*% *//p')
while read -r _ at type flags _; do
  [ "$at" = "$mount" ] && found="$type $flags"
done </proc/mounts 2>/dev/null
echo "options=$found"
"""


@dataclass(frozen=True)
class Facts:
    """See the fields' names; sizes are bytes, 0 where the board does not tell.

    Attributes:
        userland: architecture of /bin/sh: a 64-bit kernel may carry a 32-bit system.
        near: the deepest existing folder on the way to the prefix.
        ours, filled: the prefix was made by the kit; it holds something.
        clock_skew: board minus host, seconds.
    """

    uname: str
    userland: elf.Kind | None
    kernel: str
    user: str
    uid: int
    ram: int
    mem_available: int
    cpu_flags: frozenset[str]
    init: str
    missing_tools: tuple[str, ...]
    prefix: str
    near: str
    writable: bool
    exists: bool
    filled: bool
    ours: bool
    disk_free: int
    mount: str
    fstype: str
    mount_options: frozenset[str]
    clock_skew: float


def parse(text: str, head: bytes, prefix: str, now: float) -> Facts:
    """Facts from the script's output and the first bytes of /bin/sh. Pure."""
    one: dict[str, str] = {}
    missing: list[str] = []
    for line in text.splitlines():
        key, _, value = line.partition("=")
        if key == "missing":
            missing.append(value)
        else:
            one[key] = value.strip()

    def number(key: str) -> int:
        value = one.get(key, "")
        return int(value) if value.isdigit() else 0

    # POSIX df -P: device, blocks, used, available, capacity, mount point.
    space = re.fullmatch(r".*\s(\d+)\s+(\d+)\s+(-?\d+)\s+\S+%\s+(/.*)", one.get("df", ""))
    fstype, _, options = one.get("options", "").partition(" ")
    return Facts(
        uname=one.get("uname", ""),
        userland=elf.identify(head),
        kernel=one.get("kernel", ""),
        user=one.get("user", ""),
        uid=number("uid"),
        ram=number("ram") * 1024,
        mem_available=number("mem") * 1024,
        cpu_flags=frozenset(one.get("cpu", "").split()),
        init=one.get("init", "none"),
        missing_tools=tuple(missing),
        prefix=prefix,
        near=one.get("near", "/"),
        writable="writable" in one,
        exists="exists" in one,
        filled="filled" in one,
        ours="ours" in one,
        disk_free=max(0, int(space.group(3))) * 1024 if space else 0,
        mount=space.group(4) if space else "?",
        fstype=fstype,
        mount_options=frozenset(options.split(",")) if options else frozenset(),
        clock_skew=number("time") - now if number("time") else 0.0,
    )


def gather(transport: Transport, prefix: str) -> Facts:
    """Asks the board. Changes nothing there.

    Raises:
        PreflightError: it has no POSIX shell.
    """
    done = transport.run(script(_SCRIPT, prefix))
    if done.rc != 0 and not done.out:
        raise PreflightError(
            f"{transport.describe()} does not run a POSIX shell: {done.why}",
            state="nothing was changed",
            code="CK-PREFLIGHT-SHELL",
        )
    now = time.time()
    head = transport.run(["dd", "if=/bin/sh", f"bs={elf.HEAD_BYTES}", "count=1"]).out
    return parse(done.out.decode("utf-8", "replace"), head, prefix, now)


def home(transport: Transport) -> str:
    """The login's home folder on the board."""
    done = transport.run(script("cd && pwd -P"))
    if done.rc != 0 or not done.text.startswith("/"):
        raise PreflightError(
            f"{transport.describe()} gives us no home folder",
            hint="name a folder with --prefix",
            state="nothing was changed",
        )
    return done.text
