"""doctor: findings from facts, the board's script on this machine, the verb's exit status."""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from colibri_kit.cli import root
from colibri_kit.config import load_board
from colibri_kit.deploy import elf
from colibri_kit.deploy.facts import Facts
from colibri_kit.detect.sysfs import Port
from colibri_kit.doctor import board, findings, host, udev
from colibri_kit.doctor.findings import Finding, fail, ok, warn
from colibri_kit.transport.local import LocalTransport

GIB = 1 << 30
FACTS = Facts(
    uname="aarch64",
    userland=elf.Kind("aarch64", 64),
    kernel="6.1.0",
    user="root",
    uid=0,
    ram=4 * GIB,
    mem_available=int(3.5 * GIB),
    cpu_flags=frozenset(["fp", "asimd", "evtstrm", "crc32", "cpuid"]),
    init="systemd",
    missing_tools=(),
    prefix="/opt/colibri",
    near="/opt",
    writable=True,
    exists=False,
    filled=False,
    ours=False,
    disk_free=9 * GIB,
    mount="/",
    fstype="ext4",
    mount_options=frozenset({"rw", "noatime"}),
    clock_skew=1.0,
)
MORE = """swap=0
memlock=unlimited
cores=4
governor=ondemand
temp=48312
temp=51000
throttled=0x0
source=/dev/mmcblk0p2
sysfs=/sys/devices/platform/emmc2bus/mmcblk0/mmcblk0p2
root=ext4 rw,noatime
read=direct 64 100.00 101.60
"""


def _by(found: list[Finding]) -> dict[str, Finding]:
    return {f.what: f for f in found}


def _judge(facts: Facts = FACTS, more: str = MORE, name: str | None = "rpi4") -> dict[str, Finding]:
    profile = load_board(name) if name else None
    return _by(board.judge(profile, facts, board.parse(more), "plc"))


def test_a_healthy_board() -> None:
    found = _judge()
    assert {f.level for f in found.values()} == {"ok"}
    assert found["read speed"].found == "42 MB/s"  # 64 MiB in 1.6 s
    assert found["temperature"].found == "51 °C"
    assert found["storage"].found.startswith("SD card or eMMC, ext4 on /, 9.0 GiB")
    assert all(f.remedy is None for f in found.values())


@pytest.mark.parametrize(
    ("facts", "more", "what", "level", "word"),
    [
        ({"userland": elf.Kind("arm", 32)}, "", "userland", "fail", "64-bit kernel"),
        ({"cpu_flags": frozenset({"fp", "asimd"})}, "", "CPU for rpi4", "fail", "crc"),
        ({"mem_available": GIB}, "", "memory", "warn", "budget"),
        ({"clock_skew": -86400.0}, "", "clock", "warn", "-86400 s"),
        ({"init": "openrc"}, "", "init", "warn", "profile says systemd"),
        ({"mount_options": frozenset({"rw", "noexec"})}, "", "/opt/colibri", "fail", "noexec"),
        ({"mount_options": frozenset({"ro"}), "writable": False}, "", "/opt/colibri", "fail", "read-only"),
        ({}, "swap=1048576", "swap", "warn", "1.0 GiB"),
        ({}, "swap=524288\nzram=536870912", "swap", "ok", "zram 512.0 MiB"),
        ({}, "memlock=64", "mlock limit", "warn", "64.0 KiB"),
        ({}, "temp=83500", "temperature", "warn", "84 °C"),
        ({}, "throttled=0x50005", "throttling", "fail", "under-voltage, throttled"),
        ({}, "throttled=0x20000", "throttling", "warn", "frequency capped"),
        ({}, "throttled=nonsense", "kernel", "ok", "6.1.0"),
        ({}, "governor=powersave", "governor", "warn", "powersave"),
        ({}, "read=direct 64 1.00 5.00", "read speed", "warn", "17 MB/s"),
        ({}, "read=cached 64 1.00 1.50", "O_DIRECT", "warn", "refused"),
        ({}, "read=direct 64 1.00 1.01", "O_DIRECT", "ok", "ext4"),
        ({}, "read=what", "O_DIRECT and read speed", "ok", "deploy first"),
    ],
)
def test_what_is_wrong_is_named(
    facts: dict[str, object], more: str, what: str, level: str, word: str
) -> None:
    found = _judge(replace(FACTS, **facts), MORE + more + "\n")[what]  # type: ignore[arg-type]
    assert (found.level, word in found.found) == (level, True), found
    assert (found.remedy is None) == (level == "ok")


def test_remedies_name_options_that_are_there() -> None:
    """Every ``--weights WORD`` in the kit is one that the option takes; doctor's mlock remedy is --lock."""
    from colibri_kit.commands.plan import command

    (weights,) = (p for p in command.params if "--weights" in p.opts)
    assert isinstance(weights.type, click.Choice)
    kit = Path(board.__file__).resolve().parents[1]
    told = {w for p in kit.rglob("*.py") for w in re.findall(r"--weights ([a-z_]+)", p.read_text())}
    assert told and told <= {*weights.type.choices}
    assert "--lock" in str(_judge(more=MORE + "memlock=\n")["mlock limit"].remedy)


@pytest.mark.skipif(sys.platform != "linux", reason="the script reads Linux's /proc")
def test_the_script_on_this_machine(tmp_path: Path) -> None:
    """Run for real through a transport, compared with what Python knows of this machine."""
    import resource
    import shutil

    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs/x").write_bytes(os.urandom(3 << 20))
    before = sorted(p.name for p in tmp_path.rglob("*"))
    found = _by(board.check(LocalTransport(), None, str(tmp_path), lambda text: None))
    assert os.uname().release in found["kernel"].found
    assert f"{len(os.sched_getaffinity(0))} cores" in found["memory"].found or os.cpu_count() != len(
        os.sched_getaffinity(0)
    )
    assert f"{shutil.disk_usage(tmp_path).free / GIB:.0f}"[0] == found["storage"].found.split(", ")[2][0]
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    assert ("none" in found["mlock limit"].found) == (soft == resource.RLIM_INFINITY)
    assert abs(float(found["clock"].found.split()[0])) <= 2
    assert "O_DIRECT" in found
    assert sorted(p.name for p in tmp_path.rglob("*")) == before


def test_exit_status_is_the_worst() -> None:
    good, odd, bad = ok("a", "b"), warn("a", "b", "c"), fail("a", "b", "c")
    assert findings.worst([]) == "ok"
    assert [findings.exit_status(f, False) for f in ([good], [good, odd], [odd, bad, good])] == [0, 0, 6]
    assert findings.exit_status([good, odd], True) == 6


def test_udev_rule_installed_missing_and_outdated(tmp_path: Path) -> None:
    assert udev.check((tmp_path,)).level == "warn"
    (tmp_path / udev.NAME).write_text(udev.rule())
    assert udev.check((tmp_path / "none", tmp_path)).level == "ok"
    (tmp_path / udev.NAME).write_text(udev.rule() + "# mine\n")
    outdated = udev.check((tmp_path,))
    assert outdated.level == "warn" and "not this version's" in outdated.found
    assert 'ATTRS{idVendor}=="0403", ATTRS{idProduct}=="6001", TAG+="uaccess"' in udev.rule()


def test_ports_and_groups() -> None:
    ports = [Port("/dev/ttyUSB0", "ftdi_sio", None, False), Port("/dev/ttyS0", "x", None, True)]
    first, second = host.serial(ports, lambda device: "dialout")
    assert (first.level, second.level) == ("fail", "ok")
    assert first.remedy is not None and "usermod -aG dialout" in first.remedy


def test_keys_and_space(tmp_path: Path) -> None:
    assert host.keys(tmp_path, None).level == "warn"
    (tmp_path / ".ssh").mkdir()
    key = tmp_path / ".ssh/id_ed25519"
    key.write_text("x")
    key.chmod(0o600)
    assert host.keys(tmp_path, None).found == "id_ed25519"
    if os.name == "posix":
        key.chmod(0o644)
        assert "chmod 600" in str(host.keys(tmp_path, None).remedy)
    levels = [host.space(tmp_path, n).level for n in (100 << 20, 2 * GIB, 50 * GIB)]
    assert levels == ["fail", "warn", "ok"]


def test_missing_tools_are_named_with_their_package() -> None:
    found = _by(list(host.tools(lambda name: None if name == "mcopy" else f"/usr/bin/{name}")))
    assert found["lsblk"].level == "ok"
    if not Path("/usr/sbin/mcopy").exists():
        assert found["mcopy"].remedy == "sudo apt install mtools"


def test_the_compiler_makes_something_that_runs() -> None:
    made, ran = host.compiler(load_board("host"))
    assert made.level == ran.level == "ok", (made, ran)
    assert ran.found == "natively"


@pytest.mark.skipif(os.name != "posix", reason="board `host` needs POSIX")
def test_the_verb(tmp_path: Path) -> None:
    run = CliRunner().invoke
    done = run(root, ["doctor", "--board", "host", "--root", str(tmp_path / "p"), "--json"])
    doc = json.loads(done.stdout)
    assert done.exit_code == (6 if doc["worst"] == "fail" else 0)
    assert doc["target"] == "this machine" and sum(doc["count"].values()) == len(doc["findings"])
    wrong = run(root, ["doctor", "--board", "rpi4", "--root", str(tmp_path / "p")])
    if os.uname().machine == "x86_64":
        assert wrong.exit_code == 6 and "fail  CPU for rpi4" in wrong.output
    rule = run(root, ["doctor", "--udev-rule"])
    assert rule.exit_code == 0 and rule.output.rstrip("\n") == udev.rule().rstrip("\n")
