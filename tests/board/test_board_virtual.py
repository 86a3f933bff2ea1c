"""A virtual board as a user meets it: up, deploy, check, probe, roll back, refuse, down."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import served
from virtual import alive, board, good, inside, kit


def golden(model: Path) -> str:
    return str(json.loads((model / "manifest.json").read_text())["golden"]["sha256"])


@pytest.fixture(scope="module")
def deployed(a53: dict[str, Any], olmoe: Path, a53_engine: Path) -> dict[str, Any]:
    return good("deploy", "--board", "virt-a53", "@a53", olmoe, "--engine", a53_engine)


def test_up_within_twenty_seconds_on_the_machine_asked_for(a53: dict[str, Any]) -> None:
    assert a53["boot_seconds"] < 20 and a53["started"]
    words = inside("a53", "uname -rm; cat /proc/cpuinfo /proc/meminfo; id -un; hostname")
    assert f"{a53['kernel']} aarch64" in words
    assert re.search(r"CPU part\s*: 0xd03", words)  # ARM's part number of the Cortex-A53
    total = int(re.search(r"MemTotal:\s+(\d+) kB", words).group(1)) * 1024  # type: ignore[union-attr]
    assert 400 << 20 < total < 512 << 20
    assert words.endswith("board\na53\n")


def test_memory_is_a_true_limit(a53: dict[str, Any]) -> None:
    ran = kit("board", "ssh", "a53", "dd if=/dev/zero of=/dev/null bs=600M count=1")
    assert ran.rc != 0 and ("memory" in ran.err or "Killed" in ran.err), ran.err
    assert inside("a53", "dd if=/dev/zero of=/dev/null bs=100M count=1; echo fits").endswith("fits\n")


def test_the_real_engine_passes_its_golden_under_a_real_kernel(deployed: dict[str, Any], olmoe: Path) -> None:
    assert deployed["golden"] == golden(olmoe)
    status = good("status", "@a53", "--check")
    assert status["health"] == "ok" and status["prefix"] == "/opt/colibri"
    here = good("run", olmoe, "--prompt", "grün 雪", "-n", 12)
    there = good("run", "@a53", "--prompt", "grün 雪", "-n", 12)
    assert there["text"] == here["text"] and there["golden"] == here["golden"]


def test_probe_measures_latency_there(deployed: dict[str, Any], olmoe: Path) -> None:
    probe = good("probe", "--latency", "@a53")["probe"]
    assert probe["isa"] == "neon" and probe["golden"] == {"ok": True, "sha256": golden(olmoe)}
    for name in ("token_ns", "route_ns", "first_token_ns"):
        seen = probe[name]
        assert 0 < seen["min"] <= seen["p50"] <= seen["p99"] <= seen["max"]
    assert probe["route_ns"]["p50"] < probe["token_ns"]["p50"] < probe["first_token_ns"]["p50"]


def test_rollback(deployed: dict[str, Any], granite: Path, a53_engine: Path, olmoe: Path) -> None:
    second = good("deploy", "--board", "virt-a53", "@a53", granite, "--engine", a53_engine)
    assert second["golden"] == golden(granite) != golden(olmoe)
    back = good("rollback", "@a53")
    assert back["golden"] == golden(olmoe) and back["from"] == second["release"]
    status = good("status", "@a53", "--check")
    assert (status["current"], status["health"]) == (back["to"], "ok")


def test_another_boards_engine_is_refused(deployed: dict[str, Any], olmoe: Path, a53_engine: Path) -> None:
    before = inside("a53", "ls -lR /opt/colibri")
    ran = kit("deploy", "--board", "x86-gateway", "@a53", olmoe, "--json")
    assert (ran.rc, ran.json["error"]["code"]) == (6, "CK-PREFLIGHT-ARCH"), ran.err
    ran = kit("deploy", "--board", "rpi5", "@a53", olmoe, "--engine", a53_engine, "--json")
    assert (ran.rc, ran.json["error"]["code"]) == (6, "CK-PREFLIGHT-CPU"), ran.err
    assert "dotprod" in ran.json["error"]["message"]
    assert inside("a53", "ls -lR /opt/colibri") == before


def test_host_key_is_pinned(a53: dict[str, Any]) -> None:
    """Another key in the board's known_hosts: an impostor, refused."""
    known = Path(a53["known_hosts"])
    true = known.read_text()
    stranger = Path(a53["identity"] + ".pub").read_text().split()[1]
    known.write_text(re.sub(r"ssh-ed25519 \S+", f"ssh-ed25519 {stranger}", true))
    try:
        ran = kit("status", "@a53", "--json")
    finally:
        known.write_text(true)
    assert (ran.rc, ran.json["error"]["code"]) == (5, "CK-SSH-CHANGED-KEY"), ran.err


def test_up_again_is_no_second_guest(a53: dict[str, Any]) -> None:
    again = good("board", "up", "virt-a53", "--as", "a53", "--ram", "512MiB")
    assert (again["pid"], again["started"]) == (a53["pid"], False)
    ran = kit("board", "up", "virt-a53", "--as", "a53", "--ram", "256MiB", "--json")
    assert (ran.rc, ran.json["error"]["code"]) == (6, "CK-VBOARD-UP")
    listed = {b["name"]: b for b in good("board", "list")["boards"]}
    assert listed["a53"]["pid"] == a53["pid"] and listed["virt-x86"]["state"] == "never started"


def test_console(a53: dict[str, Any]) -> None:
    ran = kit("board", "console", "a53", stdin=b"cat /proc/cmdline; echo $((6*7))\n")
    assert ran.rc == 0 and "ck.host=a53" in ran.out and "\n42" in ran.out.replace("\r", "")
    assert "board: ready" in Path(a53["console_log"]).read_text()


def test_second_board_dropbear_pty_and_a_clean_end(
    a53: dict[str, Any], olmoe: Path, a53_engine: Path
) -> None:
    with board("virt-a53", "second", "--ssh", "dropbear", "--pty", "--disk", "64MiB") as told:
        assert told["port"] != a53["port"] and told["console"].startswith("/dev/")
        sent = good("deploy", "--board", "virt-a53", "@second", olmoe, "--engine", a53_engine)
        assert sent["golden"] == golden(olmoe)
        ran = kit("board", "console", "second", stdin=b"ps | grep -c '[d]ropbear -F'\n")
        assert "\n1\n" in ran.out.replace("\r", "")
        assert good("board", "down", "second")["ended"] == {"second": "off"}
        assert not alive(told["pid"])
        again = good("board", "up", "virt-a53", "--as", "second", "--ssh", "dropbear")
        assert again["started"] and again["pid"] != told["pid"]
        status = good("status", "@second", "--check")  # the disk and the keys stayed
        assert (status["current"], status["health"]) == (sent["release"], "ok")
    assert not alive(again["pid"])
    assert inside("a53", "echo still here") == "still here\n"
    ran = kit("status", "@a35", "--json")
    assert (ran.rc, ran.json["error"]["code"]) == (6, "CK-VBOARD-DOWN")
    assert ran.json["error"]["message"] == "virtual board a35 is not up; did you mean 'a53'?"


def test_a_guest_that_cannot_start_leaves_nothing(board_dir: Path) -> None:
    ran = kit("board", "up", "virt-a72", "--as", "late", "--timeout", "1", "--json")
    assert (ran.rc, ran.json["error"]["code"]) == (4, "CK-VBOARD-START"), ran.err
    pid = json.loads((board_dir / "late" / "state.json").read_text())["pid"]
    assert not alive(pid)
    ran = kit("status", "@late", "--json")
    assert (ran.rc, ran.json["error"]["code"]) == (6, "CK-VBOARD-DOWN")


def test_instruction_time_makes_the_probe_repeat(board_dir: Path, olmoe: Path, a53_engine: Path) -> None:
    """Counted instructions, not nanoseconds of a real board: the same on every machine and load."""
    with board("virt-a53", "counted", "--deterministic"):
        good("deploy", "--board", "virt-a53", "@counted", olmoe, "--engine", a53_engine)
        first, second = (good("probe", "--latency", "@counted")["probe"] for _ in range(2))
        for name in ("token_ns", "route_ns", "first_token_ns"):
            assert second[name]["p50"] == pytest.approx(first[name]["p50"], rel=0.002)
        assert first["route_ns"]["p99"] < 1.2 * first["route_ns"]["p50"]


@pytest.mark.timeout(600)
def test_a_service_under_systemd_outlives_a_kill_and_a_reboot(
    board_dir: Path, olmoe: Path, a53_engine: Path
) -> None:
    """The real engine as the real unit. (Watchdog, reload, limits: test_board_service.py.)"""
    with board("virt-a53", "kept", "--init", "systemd", "--ram", "256MiB"):
        words = ("--engine", a53_engine, "--budget", "64MiB", "--service")
        done = good("deploy", "--board", "virt-a53", "root@@kept", olmoe, *words)
        text = good("run", olmoe, "--prompt", "ab", "-n", 4)["text"]
        first = served.wait_active("kept")
        assert served.complete("kept", "ab") == (text, done["golden"][:12])
        inside("kept", f"kill -9 {first['MainPID']}", user="root")
        assert served.wait_active("kept", not_pid=first["MainPID"])["NRestarts"] == "1"
        boot = inside("kept", served.BOOT_ID, user="root")
        inside("kept", "systemctl --no-block reboot", user="root")
        served.wait_rebooted("kept", boot)
        served.wait_active("kept")
        assert served.complete("kept", "ab") == (text, done["golden"][:12])
