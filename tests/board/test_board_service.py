"""The unit that `deploy --service` installs, under a real systemd, running the real engine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from served import BOOT_ID, active, ask, complete, golden, journal, wait_active, wait_rebooted
from virtual import board, compile_standin, good, inside, kit

pytestmark = pytest.mark.timeout(600)  # an emulated board on a busy machine is slow

PROMPT = "grün 雪"


@pytest.fixture(scope="module")
def unit(board_dir: Path) -> Iterator[dict[str, Any]]:
    with board("virt-a53", "unit", "--init", "systemd", "--ram", "512MiB") as told:
        assert inside("unit", "systemctl is-system-running --wait; true", user="root") == "running\n"
        yield told


def deploy(model: Path, engine: Path, *more: object) -> tuple[object, ...]:
    return ("deploy", "--board", "virt-a53", "root@@unit", model, "--engine", engine, "--service", "--budget",
            "64MiB", *more)  # fmt: skip


@pytest.fixture(scope="module")
def served(unit: dict[str, Any], olmoe: Path, a53_engine: Path) -> dict[str, Any]:
    done = good(*deploy(olmoe, a53_engine))
    wait_active("unit")
    return done


def text_here(model: Path) -> str:
    """What the engine says on this machine."""
    return str(good("run", model, "--prompt", PROMPT, "-n", 4, "--temp", 0)["text"])


def answers(model: Path) -> None:
    assert ask("unit", "GET", "/health").json["status"] == "ok"
    text, fingerprint = complete("unit", PROMPT)
    assert text == text_here(model)
    assert fingerprint and golden(model).startswith(fingerprint)


def test_confined_enabled_and_answering(served: dict[str, Any], olmoe: Path) -> None:
    state = active("unit")
    assert state["UnitFileState"] == "enabled" and state["User"] not in ("root", "")
    assert 64 << 20 < int(state["MemoryMax"]) < 128 << 20
    assert state["NRestarts"] == "0" and state["WatchdogUSec"] not in ("0", "infinity")
    answers(olmoe)


def test_killed_it_comes_back(served: dict[str, Any], olmoe: Path) -> None:
    before = active("unit")
    inside("unit", f"kill -9 {before['MainPID']}", user="root")
    after = wait_active("unit", not_pid=before["MainPID"])
    assert int(after["NRestarts"]) == int(before["NRestarts"]) + 1
    answers(olmoe)


def test_stopped_the_watchdog_brings_it_back(served: dict[str, Any], olmoe: Path) -> None:
    """The process lives but does nothing: only systemd's watchdog can tell. Its time is cut to 15 s."""
    inside(
        "unit",
        "mkdir -p /run/systemd/system/colibri.service.d && cd /run/systemd/system/colibri.service.d && "
        "printf '[Service]\\nWatchdogSec=15\\n' > quick.conf && systemctl daemon-reload && "
        "systemctl restart colibri",
        user="root",
    )
    try:
        before = wait_active("unit")
        assert before["WatchdogUSec"] == "15s"
        # It beats: twice its time later it is the same process.
        inside("unit", "sleep 31", user="root")
        assert active("unit")["MainPID"] == before["MainPID"]
        inside("unit", f"kill -STOP {before['MainPID']}", user="root")
        after = wait_active("unit", not_pid=before["MainPID"])
        assert int(after["NRestarts"]) == int(before["NRestarts"]) + 1
        said = inside("unit", "journalctl -b --no-pager -o cat | grep -i 'watchdog'", user="root")
        assert "Watchdog timeout" in said, said
        answers(olmoe)
    finally:
        inside("unit", "rm -r /run/systemd/system/colibri.service.d && systemctl daemon-reload", user="root")


def test_reload_keeps_the_process(served: dict[str, Any], olmoe: Path) -> None:
    before = wait_active("unit")
    inside("unit", "systemctl reload colibri", user="root")
    assert wait_active("unit")["MainPID"] == before["MainPID"]
    answers(olmoe)


def test_reload_with_hot_swap_follows_current(
    served: dict[str, Any], twins: list[Path], a53_engine: Path, tmp_path: Path
) -> None:
    """`systemctl reload` is SIGHUP: the weights that ``current`` names now, in the same process."""
    recipe = tmp_path / "hot.yaml"
    releases = []
    for model in twins:
        recipe.write_text(
            f"name: hot\nmodel: {model}\nboard: virt-a53\nbudget: 64MiB\nservice: {{hot_swap: true}}\n"
        )
        releases.append(good("deploy", "root@@unit", recipe, "--engine", a53_engine)["release"])
    before = wait_active("unit")
    answers(twins[1])
    for number in (0, 1):
        switch = f"cd /opt/colibri && ln -sfn releases/{releases[number]} current && systemctl reload colibri"
        inside("unit", switch, user="root")
        wanted = golden(twins[number])
        end = time.monotonic() + 120
        while not wanted.startswith(complete("unit", PROMPT)[1]):
            assert time.monotonic() < end, journal("unit")
        answers(twins[number])
    after = active("unit")
    assert (after["MainPID"], after["NRestarts"]) == (before["MainPID"], before["NRestarts"])


def test_another_release_replaces_it_and_goes_back(
    served: dict[str, Any], olmoe: Path, granite: Path, a53_engine: Path
) -> None:
    done = good(*deploy(granite, a53_engine))
    wait_active("unit")
    answers(granite)
    assert done["golden"] == golden(granite) != golden(olmoe)
    again = good(*deploy(olmoe, a53_engine))
    wait_active("unit")
    answers(olmoe)
    assert again["golden"] == golden(olmoe)


def test_reboot_brings_it_back(served: dict[str, Any], olmoe: Path) -> None:
    boot = inside("unit", BOOT_ID, user="root")
    inside("unit", "systemctl --no-block reboot", user="root")
    wait_rebooted("unit", boot)
    assert wait_active("unit")["NRestarts"] == "0"
    answers(olmoe)


def test_more_memory_than_its_limit_is_not_had(
    served: dict[str, Any], olmoe: Path, standin: Path, tmp_path: Path
) -> None:
    """An engine (a stand-in) that takes 200 MiB of 64: the kernel ends it inside its own cgroup."""
    greedy = compile_standin(tmp_path / "greedy", "-DGREED=(200u << 20)")
    ran = kit(*deploy(olmoe, greedy), "--json")
    words = inside("unit", "journalctl -b --no-pager | grep -ciE 'oom|out of memory' ; true", user="root")
    assert int(words) > 0, ran.out + ran.err
    assert inside("unit", "echo the board lives") == "the board lives\n", journal("unit")


def test_taken_away(served: dict[str, Any]) -> None:
    assert good("undeploy", "root@@unit", "--yes")
    assert inside("unit", "systemctl is-enabled colibri 2>&1; true", user="root").strip() != "enabled"
    assert ask("unit", "GET", "/health").status == 0
