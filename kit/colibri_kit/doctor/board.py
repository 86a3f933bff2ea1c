"""Checks of a board over any transport. Only reads there; nothing is written."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from colibri_kit.deploy import facts as deploy_facts
from colibri_kit.deploy.facts import Facts
from colibri_kit.deploy.plan import check_board, check_place, size_text
from colibri_kit.doctor.findings import Finding, fail, ok, warn
from colibri_kit.errors import PreflightError
from colibri_kit.transport.base import Transport, script

if TYPE_CHECKING:
    from colibri_kit.config.board import Board

#: $1 is the prefix, $2 the deepest folder of it that exists. Prints key=value lines.
_SCRIPT = r"""
export LC_ALL=C
echo "swap=$(sed -n 's/^SwapTotal: *\([0-9]*\) kB.*/\1/p' /proc/meminfo)"
for z in /sys/block/zram*/disksize; do [ -r "$z" ] && echo "zram=$(cat "$z")"; done
echo "memlock=$(ulimit -l 2>/dev/null)"
echo "cores=$(grep -c '^processor' /proc/cpuinfo)"
g=/sys/devices/system/cpu/cpu0/cpufreq
[ -r $g/scaling_governor ] && echo "governor=$(cat $g/scaling_governor)"
for t in /sys/class/thermal/thermal_zone*/temp; do [ -r "$t" ] && echo "temp=$(cat "$t" 2>/dev/null)"; done
t=/sys/devices/platform/soc/soc:firmware/get_throttled
if [ -r $t ]; then echo "throttled=$(cat $t)"
elif command -v vcgencmd >/dev/null 2>&1
then echo "throttled=$(vcgencmd get_throttled 2>/dev/null | sed 's/.*=//')"; fi
mount=$(df -Pk "$2" 2>/dev/null | sed -n '$s/.*% *//p')
while read -r from at _; do [ "$at" = "$mount" ] && source=$from; done </proc/mounts
echo "source=$source"
node=$(basename "$(readlink -f "$source" 2>/dev/null)" 2>/dev/null)
[ -e "$source" ] && echo "sysfs=$(readlink -f "/sys/class/block/$node" 2>/dev/null)"
while read -r from at type flags _; do
  [ "$at" = / ] && echo "root=$type $flags"
done </proc/mounts
big= size=0
for f in "$1"/blobs/* "$1"/current/* /bin/busybox /lib/*/libc.so.6 /usr/lib/*/libc.so.6; do
  [ -f "$f" ] && [ -r "$f" ] || continue
  [ "$(df -Pk "$f" | sed -n '$s/.*% *//p')" = "$mount" ] || continue
  n=$(wc -c <"$f"); [ "$n" -gt "$size" ] && size=$n big=$f
done
if [ -n "$big" ]; then
  count=$((size / 1048576)); [ $count -gt 64 ] && count=64
  if [ $count -gt 0 ]; then
    read -r a _ </proc/uptime
    if dd if="$big" of=/dev/null bs=1048576 count=$count iflag=direct 2>/dev/null; then how=direct
    elif dd if="$big" of=/dev/null bs=1048576 count=$count 2>/dev/null; then how=cached; else how=failed; fi
    read -r b _ </proc/uptime
    echo "read=$how $count $a $b"
  elif dd if="$big" of=/dev/null bs=4096 count=1 iflag=direct 2>/dev/null; then echo "read=direct 0 0 0"
  fi
fi
"""

#: Bits of the Raspberry Pi firmware's get_throttled.
THROTTLE_BITS = {0: "under-voltage", 1: "frequency capped", 2: "throttled", 3: "soft temperature limit"}


@dataclass(frozen=True)
class More:
    """What deploying does not need to know. Bytes; None where the board does not tell.

    Attributes:
        memlock: bytes a program may lock; -1 = no limit.
        read_how: ``direct``, ``cached`` or ``failed``; read_mb_s is 10^6 bytes a second.
    """

    swap: int
    zram: int
    memlock: int | None
    cores: int
    governor: str | None
    temperature: float | None
    throttled: int | None
    storage: str
    root_type: str
    root_options: frozenset[str]
    read_how: str | None
    read_mb_s: float | None


def parse(text: str) -> More:
    """From the script's output. Pure; whatever is odd counts as not told."""
    one: dict[str, str] = {}
    hottest: float | None = None
    zram = 0
    for line in text.splitlines():
        key, _, value = line.partition("=")
        value = value.strip()
        if key == "temp" and value.lstrip("-").isdigit():
            hottest = max(hottest if hottest is not None else -273.0, int(value) / 1000)
        elif key == "zram" and value.isdigit():
            zram += int(value)
        else:
            one[key] = value

    def number(key: str) -> int:
        return int(one[key]) if one.get(key, "").isdigit() else 0

    lock = one.get("memlock", "")
    raw = one.get("throttled", "").removeprefix("0x")
    try:
        throttled: int | None = int(raw, 16) if raw else None
    except ValueError:
        throttled = None
    root_type, _, options = one.get("root", "").partition(" ")
    how, speed = _speed(one.get("read", "").split())
    return More(
        swap=number("swap") * 1024,
        zram=zram,
        memlock=-1 if lock == "unlimited" else int(lock) * 1024 if lock.isdigit() else None,
        cores=number("cores"),
        governor=one.get("governor"),
        temperature=hottest,
        throttled=throttled,
        storage=_storage(one.get("source", ""), one.get("sysfs", "")),
        root_type=root_type,
        root_options=frozenset(options.split(",")) if options else frozenset(),
        read_how=how,
        read_mb_s=speed,
    )


def _speed(words: list[str]) -> tuple[str | None, float | None]:
    """``how MiB start end`` -> how, 10^6 bytes a second (None when too short to tell)."""
    if len(words) != 4:
        return None, None
    try:
        mib, took = int(words[1]), float(words[3]) - float(words[2])
    except ValueError:
        return None, None
    return words[0], mib * 1.048576 / took if mib and took >= 0.05 else None


def _storage(source: str, sysfs: str) -> str:
    """The kind of medium from the device's name and its place in sysfs."""
    name = source.rsplit("/", 1)[-1]
    if name.startswith("mmcblk"):
        return "SD card or eMMC"
    if name.startswith("nvme"):
        return "NVMe"
    if name.startswith("vd"):
        return "virtual disk"
    if name.startswith("sd"):
        return "USB disk" if "/usb" in sysfs else "SATA disk"
    return source or "unknown"


def judge(board: Board | None, facts: Facts, more: More, where: str) -> list[Finding]:
    """Findings from facts. Pure."""
    out = [ok("kernel", f"{facts.kernel}, {facts.uname}"), *_cpu(board, facts, where)]
    out += _memory(board, facts, more)
    out += _storage_findings(board, facts, more)
    out += _place(facts, where)
    out += _clock(facts)
    out += _heat(more)
    init = facts.init
    if board is not None and board.service not in ("none", init):
        out.append(warn("init", f"{init}; the profile says {board.service}", "deploy without --service"))
    else:
        out.append(ok("init", init))
    return out


def _cpu(board: Board | None, facts: Facts, where: str) -> Iterable[Finding]:
    kind = facts.userland
    if kind is None:
        yield warn("userland", "/bin/sh is no ELF file we know", "name the board with --board")
    elif facts.uname in ("aarch64", "x86_64") and kind.bits == 32:
        yield fail(
            "userland",
            f"{kind}, under a 64-bit kernel ({facts.uname})",
            "install the 64-bit system: the engine runs, but nothing else of it will fit together",
        )
    else:
        yield ok("userland", str(kind))
    if board is None:
        yield ok("CPU", " ".join(sorted(facts.cpu_flags)[:12]) or "features not told")
        return
    try:
        check_board(board, facts, where)
    except PreflightError as err:
        yield fail(f"CPU for {board.name}", err.message, err.hint or "name the right --board")
    else:
        yield ok(f"CPU for {board.name}", f"has {', '.join(board.isa)}")


def _memory(board: Board | None, facts: Facts, more: More) -> Iterable[Finding]:
    found = f"{size_text(facts.ram)}, {size_text(facts.mem_available)} available, {more.cores} cores"
    if board is not None and facts.mem_available < board.budget:
        remedy = (
            f"deploy with --budget {facts.mem_available // (1 << 20) * 3 // 4}MiB, or stop other programs"
        )
        yield warn("memory", f"{found}; the profile's budget is {size_text(board.budget)}", remedy)
    else:
        yield ok("memory", found)
    if more.swap > more.zram:
        yield warn(
            "swap",
            f"{size_text(more.swap)}, {size_text(more.zram)} of it zram",
            "swap on flash wears it and stalls tokens: sudo swapoff -a, or zram instead",
        )
    else:
        yield ok("swap", f"zram {size_text(more.zram)}" if more.zram else "none")
    if more.memlock is None:
        yield warn(
            "mlock limit", "not told", "raise `memlock` in /etc/security/limits.conf for the engine's --lock"
        )
    elif more.memlock >= 0 and more.memlock < facts.ram // 2:
        yield warn(
            "mlock limit",
            size_text(more.memlock),
            "weights cannot be locked in memory: LimitMEMLOCK=infinity in the unit, or limits.conf",
        )
    else:
        yield ok("mlock limit", "none" if more.memlock < 0 else size_text(more.memlock))


def _storage_findings(board: Board | None, facts: Facts, more: More) -> Iterable[Finding]:
    yield ok("storage", f"{more.storage}, {facts.fstype} on {facts.mount}, {size_text(facts.disk_free)} free")
    if more.read_how is None:
        yield ok("O_DIRECT and read speed", "no file there to try with: deploy first")
        return
    if more.read_how == "direct":
        yield ok("O_DIRECT", f"works on {facts.fstype}")
    else:
        yield warn(
            "O_DIRECT",
            f"refused on {facts.fstype} (or dd there cannot ask for it)",
            "experts are read through the page cache: leave memory for it, or use ext4",
        )
    if more.read_mb_s is None:
        return
    cached = "" if more.read_how == "direct" else " (through the page cache: an upper bound)"
    found = f"{more.read_mb_s:.0f} MB/s{cached}"
    if board is not None and more.read_mb_s < board.storage.read_mb_s * 0.6:
        remedy = "a faster card, USB 3 or eMMC; `colibri-kit plan --storage` shows what it costs"
        yield warn("read speed", f"{found}; the profile says {board.storage.read_mb_s:g}", remedy)
    else:
        yield ok("read speed", found)


def _place(facts: Facts, where: str) -> Iterable[Finding]:
    try:
        warnings = check_place(facts, where)
    except PreflightError as err:
        yield fail(facts.prefix, err.message, err.hint or "name another --prefix")
        return
    yield ok(facts.prefix, "holds a deployment" if facts.ours else "can be deployed to")
    for text in warnings:
        yield warn(facts.prefix, text, "choose another --prefix on a disk that lasts")


def _clock(facts: Facts) -> Iterable[Finding]:
    skew = facts.clock_skew
    found = f"{skew:+.0f} s against this machine"
    if abs(skew) > 120:
        yield warn("clock", found, "start time synchronisation there: sudo timedatectl set-ntp true")
    else:
        yield ok("clock", found)


def _heat(more: More) -> Iterable[Finding]:
    if more.temperature is not None:
        found = f"{more.temperature:.0f} °C"
        if more.temperature >= 80:
            yield warn("temperature", found, "a heat sink or a fan: most boards slow down at 80 to 85 °C")
        else:
            yield ok("temperature", found)
    if more.throttled is not None:
        now = [name for bit, name in THROTTLE_BITS.items() if more.throttled >> bit & 1]
        since = [name for bit, name in THROTTLE_BITS.items() if more.throttled >> (bit + 16) & 1]
        if now:
            yield fail(
                "throttling", f"now: {', '.join(now)}", "a better power supply or cooling; then reboot"
            )
        elif since:
            remedy = "a better power supply or cooling; figures measured meanwhile are too low"
            yield warn("throttling", f"since boot: {', '.join(since)}", remedy)
        else:
            yield ok("throttling", "never since boot")
    if more.governor is not None and more.governor in ("powersave", "conservative"):
        yield warn("governor", more.governor, "sudo cpupower frequency-set -g schedutil (or performance)")
    elif more.governor is not None:
        yield ok("governor", more.governor)


def check(
    transport: Transport, board: Board | None, prefix: str, note: Callable[[str], None]
) -> list[Finding]:
    """Asks the board and judges. Raises what the transport does."""
    note(f"asking {transport.describe()}")
    facts = deploy_facts.gather(transport, prefix)
    done = transport.run(script(_SCRIPT, prefix, facts.near), timeout=120)
    return judge(board, facts, parse(done.out.decode("utf-8", "replace")), transport.describe())
