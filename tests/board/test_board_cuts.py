"""Power and links that go away in the middle of a transfer. (At every moment of a deployment with a
service: test_board_power.py.)"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from virtual import board, command, good, inside, kit

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))
import parcel_maker

pytestmark = pytest.mark.timeout(600)  # an emulated board on a busy machine is slow


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


def test_power_cut_in_a_transfer(cut: dict[str, Any], large: Path, standin: Path) -> None:
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
    # 4 MiB were written out; ext4 may have left zeros behind them, which are found and sent anew.
    assert 4 << 20 <= done["sent"]["bytes_resumed"] <= status["partial_bytes"]
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
