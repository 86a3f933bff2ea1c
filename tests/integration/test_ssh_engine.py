"""The real engine and a real model: converted, built, deployed, run, tampered with."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from kit_cli import Ran, kit
from ssh_servers import Server


@pytest.fixture
def deployed(
    sshd: Server, board: str, prefix: Path, olmoe: Path, real_engine: Path
) -> Iterator[list[object]]:
    """The arguments that reach the board, with the model deployed on it."""
    place = [sshd.target, *sshd.args, "--prefix", prefix]
    ran = kit("deploy", "--board", board, sshd.target, olmoe, *place[1:], "--engine", real_engine, "--json")
    assert ran.rc == 0, ran.err
    import json

    promised = json.loads((olmoe / "manifest.json").read_text())["golden"]["sha256"]
    assert ran.json["golden"] == promised
    yield place


def text(ran: Ran) -> str:
    assert ran.rc == 0, ran.err
    return str(ran.json["text"])


def test_board_and_host_say_the_same(deployed: list[object], olmoe: Path, real_engine: Path) -> None:
    here = kit("run", olmoe, "--engine", real_engine, "--prompt", "grün 雪", "-n", 12, "--json")
    there = kit("run", *deployed, "--prompt", "grün 雪", "-n", 12, "--json")
    assert text(there) == text(here)
    assert there.json["golden"] == here.json["golden"]
    assert there.json["tokens"]["generated"] == here.json["tokens"]["generated"] > 0


def test_engine_errors_come_through(deployed: list[object]) -> None:
    for prompt, words in (("", "the prompt is empty"), ("x " * 3000, "the context holds")):
        ran = kit("run", *deployed, "--prompt", prompt, "--ctx", 64)
        assert ran.rc == 13
        assert words in ran.err
    ran = kit("run", *deployed, "--prompt", b"\xff\xfe".decode("utf-8", "surrogateescape"))
    assert ran.rc == 13 and "not UTF-8" in ran.err


def test_flipped_byte_in_an_expert_makes_the_board_unwell(
    deployed: list[object], prefix: Path, board: str, olmoe: Path, real_engine: Path, sshd: Server
) -> None:
    blob = (prefix / "current" / "model.coli" / "experts-0000.coli").resolve()
    data = bytearray(blob.read_bytes())
    data[len(data) // 2] ^= 4
    blob.chmod(0o644)
    blob.write_bytes(data)
    health = kit("status", *deployed, "--check", "--json").json["health"]
    assert health != "ok" and "expert" in health
    assert kit("run", *deployed, "--prompt", "x").rc == 13
    ran = kit(
        "deploy", "--board", board, sshd.target, olmoe, *deployed[1:], "--engine", real_engine, "--json"
    )
    assert ran.rc == 0, ran.err
    assert ran.json["sent"]["repaired"] == 1
    assert kit("status", *deployed, "--check", "--json").json["health"] == "ok"


def test_budget_that_only_the_engine_can_judge(
    sshd: Server, board: str, prefix: Path, olmoe: Path, real_engine: Path
) -> None:
    """Weights and KV fit 3 MiB, the engine's whole ledger does not: refused before the switch."""
    ran = kit(
        "deploy", "--board", board, sshd.target, olmoe, *sshd.args, "--prefix", prefix,
        "--engine", real_engine, "--budget", "3MiB", "--json",
    )  # fmt: skip
    assert (ran.rc, ran.json["error"]["code"]) == (6, "CK-PREFLIGHT-BUDGET")
    assert "board unchanged: no release is current" in ran.json["error"]["state"]
    assert list((prefix / "releases").iterdir()) == []


def test_folder_on_this_machine(tmp_path: Path, olmoe: Path) -> None:
    """Board ``host``: no SSH, the engine is built by deploy itself."""
    root = tmp_path / "a board"
    ran = kit("deploy", "--board", "host", "--root", root, olmoe, "--json")
    assert ran.rc == 0, ran.err
    assert kit("deploy", "--board", "host", "--root", root, olmoe, "--json").json["sent"]["bytes_sent"] == 0
    assert kit("status", "--root", root, "--check", "--json").json["health"] == "ok"
    assert kit("run", "--root", root, "--prompt", "x", "-n", 2).rc == 0
    if os.uname().machine == "x86_64":
        ran = kit("deploy", "--board", "rpi4", "--root", tmp_path / "pi", olmoe, "--json")
        assert (ran.rc, ran.json["error"]["code"]) == (6, "CK-PREFLIGHT-ARCH")
        assert not (tmp_path / "pi").exists()
    shutil.rmtree(root / "blobs")
    assert kit("status", "--root", root, "--json").json["health"].startswith("the engine does not start")
    assert kit("undeploy", "--root", root, "--yes").rc == 0
    assert not root.exists()
