"""Power and links that go away in the middle of a deployment; services under a real systemd."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from virtual import board, command, compile_standin, good, inside, kit

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))
import parcel_maker

pytestmark = pytest.mark.timeout(600)  # an emulated board on a busy machine is slow

BOOT_ID = "cat /proc/sys/kernel/random/boot_id"

#: Power cuts at random moments: three here, more by hand.
CUTS = int(os.environ.get("COLIBRI_POWER_CUTS", "3"))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return parcel_maker.write(tmp_path_factory.mktemp("m") / "small.coli")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 MiB in one shard: seconds to send."""
    return parcel_maker.write(
        tmp_path_factory.mktemp("m") / "large.coli", seed=2, shards=1, shard_bytes=24 << 20
    )


@pytest.fixture(scope="module")
def cut(board_dir: Path, small: Path, standin: Path) -> Iterator[dict[str, Any]]:
    """A board of its own with a release on it."""
    with board("virt-a72", "cut", "--ram", "256MiB") as told:
        told["release"] = good("deploy", "--board", "virt-a72", "@cut", small, "--engine", standin)["release"]
        yield told


def start(large: Path, standin: Path, *more: object) -> subprocess.Popen[bytes]:
    argv = command("deploy", "--board", "virt-a72", "@cut", large, "--engine", standin, "--json", *more)
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


def until_partly_sent(child: subprocess.Popen[bytes], least: int) -> None:
    """Until a partial file of ``least`` bytes lies on the board's disk, written out."""
    words = (
        "for i in $(seq 1200); do set -- $(du -ck /opt/colibri/blobs/*.part 2>/dev/null | tail -n 1); "
        f"[ ${{1:-0}} -ge {least >> 10} ] && sync && exit; sleep 0.2; done; exit 1"
    )
    ran = kit("board", "ssh", "cut", words, timeout=260)
    assert ran.rc == 0, f"no partial file; deploy ended with {child.poll()}"


def finish(child: subprocess.Popen[bytes], seconds: float) -> tuple[int, bytes]:
    try:
        out, _ = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
        raise
    return child.returncode, out


def test_power_cut_in_a_transfer_then_resumed(cut: dict[str, Any], large: Path, standin: Path) -> None:
    child = start(large, standin)
    until_partly_sent(child, 4 << 20)
    assert good("board", "down", "cut", "--power-cut")["ended"] == {"cut": "killed"}
    rc, out = finish(child, 240)
    assert rc == 7, out
    good("board", "up", "virt-a72", "--as", "cut", "--ram", "256MiB")
    status = good("status", "@cut", "--check")
    assert (status["current"], status["health"]) == (cut["release"], "ok")
    assert status["partial_bytes"] >= 4 << 20
    done = good("deploy", "--board", "virt-a72", "@cut", large, "--engine", standin)
    assert done["sent"]["bytes_resumed"] >= 4 << 20
    assert done["sent"]["bytes_sent"] + done["sent"]["bytes_resumed"] >= 24 << 20
    assert good("rollback", "@cut")["to"] == cut["release"]


def test_link_cut_in_a_transfer(cut: dict[str, Any], board_dir: Path, large: Path, standin: Path) -> None:
    """QEMU's network cable pulled: an error within the stall limit, then the rest is sent."""
    from colibri_kit.vboard.runtime import Place, Qmp

    inside("cut", "rm -rf /opt/colibri/* /opt/colibri/.colibri-kit")
    child = start(large, standin, "--stall-timeout", 4)
    until_partly_sent(child, 4 << 20)
    qmp = Qmp(Place("cut").qmp)
    begin = time.monotonic()
    qmp.call("set_link", name="nic0", up=False)
    try:
        rc, out = finish(child, 120)
    finally:
        qmp.call("set_link", name="nic0", up=True)
        qmp.close()
    assert rc == 7, out
    assert time.monotonic() - begin < 60
    done = good("deploy", "--board", "virt-a72", "@cut", large, "--engine", standin, "--break-lock")
    assert done["sent"]["bytes_resumed"] >= 4 << 20


def test_power_cuts_at_random_moments_always_leave_a_well_release(
    cut: dict[str, Any], small: Path, tmp_path: Path, standin: Path
) -> None:
    rng = random.Random(20)
    good("deploy", "--board", "virt-a72", "@cut", small, "--engine", standin, "--break-lock")
    for turn in range(CUTS):
        model = parcel_maker.write(tmp_path / f"{turn}.coli", seed=10 + turn, shards=2, shard_bytes=3 << 20)
        child = start(model, standin, "--break-lock")
        time.sleep(rng.uniform(0.5, 3.5))
        good("board", "down", "cut", "--power-cut")
        rc, out = finish(child, 240)
        assert rc in (0, 4, 7), out
        good("board", "up", "virt-a72", "--as", "cut", "--ram", "256MiB")
        status = good("status", "@cut", "--check")
        assert status["current"] and status["health"] == "ok", (turn, status)


@pytest.fixture(scope="module")
def unit_board(board_dir: Path) -> Iterator[dict[str, Any]]:
    with board("virt-a72", "unit", "--init", "systemd", "--ram", "512MiB") as told:
        yield told


def active(name: str = "unit") -> dict[str, str]:
    keys = "ActiveState,SubState,MainPID,NRestarts,MemoryMax,UnitFileState,User"
    words = inside(name, f"systemctl show colibri -p {keys}", user="root")
    return dict(line.split("=", 1) for line in words.splitlines())


def wait_active(not_pid: str = "0", seconds: float = 180) -> dict[str, str]:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        state = active()
        if state["ActiveState"] == "active" and state["MainPID"] not in ("0", not_pid):
            return state
        time.sleep(0.5)
    raise AssertionError(
        f"{state}\n{inside('unit', 'journalctl -u colibri --no-pager | tail -20', user='root')}"
    )


def test_systemd_runs_and_keeps_the_service(
    unit_board: dict[str, Any], small: Path, standin: Path, tmp_path: Path
) -> None:
    """The unit that the kit installs, under a real systemd; the engine is a stand-in that can serve."""
    assert inside("unit", "systemctl is-system-running --wait; true", user="root") == "running\n"
    deploy = ("deploy", "--board", "virt-a72", "root@@unit", small, "--service")
    good(*deploy, "--engine", standin, "--budget", "64MiB")
    first = wait_active()
    assert first["UnitFileState"] == "enabled" and first["User"] not in ("root", "")
    assert 64 << 20 < int(first["MemoryMax"]) < 128 << 20
    inside("unit", "kill -9 $(systemctl show colibri -p MainPID --value)", user="root")
    second = wait_active(not_pid=first["MainPID"])
    assert int(second["NRestarts"]) == 1
    boot = inside("unit", BOOT_ID, user="root")
    inside("unit", "systemctl --no-block reboot", user="root")
    wait_rebooted(boot)
    assert wait_active()["NRestarts"] == "0"
    greedy = compile_standin(tmp_path / "greedy", "-DGREED=(200u << 20)")
    ran = kit(*deploy, "--engine", greedy, "--budget", "64MiB", "--json")
    words = inside("unit", "journalctl -b --no-pager | grep -ciE 'oom|out of memory' ; true", user="root")
    assert int(words) > 0, ran.out + ran.err
    gone = good("undeploy", "root@@unit", "--yes")
    assert gone
    assert inside("unit", "systemctl is-enabled colibri 2>&1; true", user="root").strip() != "enabled"


def wait_rebooted(before: str, seconds: float = 240) -> None:
    """Until the guest answers with another boot's id."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        ran = kit("board", "ssh", "root@unit", BOOT_ID)
        if ran.rc == 0 and ran.out.strip() and ran.out != before:
            return
        time.sleep(0.5)
    raise AssertionError("no SSH after the reboot")
