"""Releases with a service: the real engine's `serve` under a stand-in service manager, over a real SSH
server as root. After every step the service itself says which release it is."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ssh_servers
from kit_cli import Ran, kit
from ssh_servers import Server

HERE = Path(__file__).parent


@dataclass
class Rig:
    """A board with a service manager: where its files are, and how to reach it."""

    server: Server
    tools: Path
    units: Path

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.tools / "state.json").read_text())
        return found

    def restarts(self) -> int:
        """How often a start was ordered so far."""
        calls = self.tools / "calls"
        return (
            calls.read_text().split("\n").count("start --no-block colibri.service") if calls.exists() else 0
        )

    def answered(self, pid: int) -> list[int]:
        """Statuses of the completions that one process of the service gave."""
        out: list[int] = []
        mine = False
        for line in (self.tools / "journal").read_text().splitlines():
            with contextlib.suppress(ValueError):
                doc = json.loads(line)
                if doc.get("event") == "ready":
                    mine = doc["pid"] == pid
                elif doc.get("event") == "request" and mine:
                    out.append(doc["status"])
        return out


@pytest.fixture(scope="module")
def rig(open_dir: Path, identity: Path, user: str) -> Iterator[Rig]:
    """sshd for root in a mount namespace of its own, whose /etc/systemd/system is a scratch folder."""
    if os.geteuid() != 0:
        pytest.skip("installing a service needs root")
    tools, units = open_dir / "manager", open_dir / "units"
    tools.mkdir()
    units.mkdir()
    for name in ("systemctl", "journalctl"):
        text = (HERE / "fake_systemctl.py").read_text().split("\n", 1)[1]
        (tools / name).write_text(f"#!{sys.executable}\n{text}")
        (tools / name).chmod(0o755)
    begin = 'mkdir -p /run/sshd /etc/systemd/system && mount --bind "$0" /etc/systemd/system && exec "$@"'
    server = ssh_servers.start_sshd(
        open_dir / "root-sshd", "root", identity,
        extra=f"SetEnv PATH={tools}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\n",
        wrap=["unshare", "-m", "--propagation", "slave", "sh", "-c", begin, str(units)],
    )  # fmt: skip
    yield Rig(server, tools, units)
    with contextlib.suppress(OSError, ValueError):
        runner = json.loads((tools / "state.json").read_text())["runner"]
        if runner > 0:  # 0 would be ourselves
            os.kill(runner, signal.SIGKILL)
    server.stop()


@pytest.fixture(scope="module")
def other(olmoe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with another golden in its manifest: it cannot pass its own check."""
    folder = tmp_path_factory.mktemp("other") / "other.coli"
    shutil.copytree(olmoe, folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["golden"]["sha256"] = "ab" * 32
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


@dataclass
class Board:
    """One deployment under a prefix of its own, with a port of its own."""

    rig: Rig
    prefix: Path
    port: int
    user: str
    board: str
    engine: Path
    model: Path
    folder: Path

    @property
    def place(self) -> list[object]:
        return [self.rig.server.target, *self.rig.server.args, "--prefix", self.prefix]

    def recipe(self, model: Path | None = None, check: str = "", **service: object) -> Path:
        """A recipe file for this board; ``service`` goes over the usual keys."""
        keys = {"listen": f"127.0.0.1:{self.port}", "user": self.user, "log": "json", "drain": 5, **service}
        lines = [
            f"name: r\nmodel: {model or self.model}\nboard: {self.board}\nhost: {self.rig.server.target}\n"
        ]
        lines += ["budget: 64MiB\nctx: 128\nthreads: 1\nservice:\n"]
        lines += [f"  {key}: {value}\n" for key, value in keys.items()]
        path = self.folder / "recipe.yaml"
        path.write_text("".join(lines) + check)
        return path

    def deploy(self, what: Path, *more: object) -> Ran:
        return kit(
            "deploy",
            what,
            *self.rig.server.args,
            "--prefix",
            self.prefix,
            "--engine",
            self.engine,
            *more,
            "--json",
        )

    def health(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=10) as answer:
            doc: dict[str, Any] = json.load(answer)
            return doc

    def silent(self) -> bool:
        try:
            self.health()
        except OSError:
            return True
        return False


@pytest.fixture
def at(
    rig: Rig, prefix: Path, user: str, board: str, real_engine: Path, olmoe: Path, tmp_path: Path
) -> Iterator[Board]:
    made = Board(rig, prefix, ssh_servers.free_port(), user, board, real_engine, olmoe, tmp_path)
    yield made
    kit("undeploy", *made.place, "--yes")
    assert made.silent()


def golden(model: Path) -> str:
    return str(json.loads((model / "manifest.json").read_text())["golden"]["sha256"])


def link(prefix: Path) -> str:
    return (prefix / "current").readlink().name


def test_recipe_puts_a_service_up_that_answers(at: Board) -> None:
    ran = at.deploy(at.recipe(queue=3, deadline=77, allow_host="[gateway.lan]"))
    assert ran.rc == 0, ran.err
    told = at.health()
    assert told["golden"] == golden(at.model) == ran.json["golden"]
    assert told["capacity"] == 1 + 3
    unit = (at.rig.units / "colibri.service").read_text()
    assert "Type=notify" in unit and f"User={at.user}" in unit
    options = (at.prefix / "current" / "serve.options").read_text().splitlines()
    assert {"queue 3", "deadline 77", "allow-host gateway.lan", "ctx 128", f"budget {64 << 20}"} <= set(
        options
    )
    pid = at.rig.state()["MainPID"]
    assert Path(f"/proc/{pid}").stat().st_uid != 0
    # The token that deploy asked for came from this very process.
    assert at.rig.answered(pid) == [200]
    status = kit("status", *at.place, "--check", "--json").json
    assert (status["health"], status["service"]["golden"]) == ("ok", told["golden"])
    # The very same again: nothing is sent, and it is not restarted.
    before = at.rig.restarts()
    again = at.deploy(at.recipe(queue=3, deadline=77, allow_host="[gateway.lan]"))
    assert again.rc == 0, again.err
    assert (again.json["changed"], again.json["sent"]["bytes_sent"]) == (False, 0)
    assert at.rig.restarts() == before and at.rig.state()["MainPID"] == pid
    # Fallen and not come back: a deploy of the same brings it up again.
    os.kill(at.rig.state()["runner"], signal.SIGTERM)
    end = time.monotonic() + 10
    while not at.silent() and time.monotonic() < end:
        time.sleep(0.05)
    again = at.deploy(at.recipe(queue=3, deadline=77, allow_host="[gateway.lan]"))
    assert again.rc == 0, again.err
    assert "started again" in again.err and at.health()["capacity"] == 4


def test_other_options_send_one_file_and_rollback_restores_them(at: Board) -> None:
    first = at.deploy(at.recipe(queue=3))
    assert first.rc == 0, first.err
    assert at.health()["capacity"] == 4
    dry = at.deploy(at.recipe(queue=5, sequences=2), "--dry-run")
    assert dry.rc == 0, dry.err
    assert [item["name"] for item in dry.json["send"]] == ["serve.options"]
    assert "queue 5" in dry.json["serve_options"]
    assert at.health()["capacity"] == 4
    second = at.deploy(at.recipe(queue=5, sequences=2))
    assert second.rc == 0, second.err
    size = (at.prefix / "current" / "serve.options").stat().st_size
    assert (second.json["sent"]["files_sent"], second.json["sent"]["bytes_sent"]) == (1, size)
    assert at.health()["capacity"] == 7
    ran = kit("rollback", *at.place, "--json")
    assert ran.rc == 0, ran.err
    assert ran.json["to"] == first.json["release"] == link(at.prefix)
    assert at.health()["capacity"] == 4
    # Without a recipe the service stays as it is; the command line's words go into its options.
    third = kit(
        "deploy", "--board", at.board, at.rig.server.target, at.model, *at.place[1:], "--engine", at.engine,
        "--ctx", "64", "--threads", "1", "--budget", "64MiB", "--json",
    )  # fmt: skip
    assert third.rc == 0, third.err
    assert at.health()["capacity"] == 4
    assert "ctx 64" in (at.prefix / "current" / "serve.options").read_text()


def cut_off(at: Board, queue: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A deployment that Ctrl-C ends after the switch: what ran before still answers, with the same golden."""
    from colibri_kit.deploy import act

    def cut(_self: act.Deployment) -> None:
        raise KeyboardInterrupt

    before, told = link(at.prefix), at.health()["capacity"]
    with monkeypatch.context() as here:
        here.setattr(act.Deployment, "_start", cut)
        ran = at.deploy(at.recipe(queue=queue))
    assert ran.rc == 130 and "is current but unchecked" in ran.err
    assert link(at.prefix) != before and at.health()["capacity"] == told
    # Where the next boot goes back to; what does so is tests/unit/test_boot_guard.py's.
    assert (at.prefix / "trial").readlink().name == before
    assert kit("status", *at.place, "--json").json["previous"] == before


def test_cut_off_before_its_checks_then_the_same_again(at: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    first = at.deploy(at.recipe(queue=3))
    assert first.rc == 0, first.err
    cut_off(at, 5, monkeypatch)
    again = at.deploy(at.recipe(queue=5))
    assert again.rc == 0, again.err
    assert not list(at.prefix.glob("trial*"))
    assert at.health()["capacity"] == 6  # its own service, not the one before
    assert kit("status", *at.place, "--json").json["previous"] == first.json["release"]


def test_cut_off_before_its_checks_then_back(at: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    first = at.deploy(at.recipe(queue=3))
    assert first.rc == 0, first.err
    cut_off(at, 5, monkeypatch)
    # Another release goes back to the one that was well, not to the unchecked one.
    wrong = at.deploy(at.recipe(queue=6, check="check: {prompt: Hello, max_new: 2, expect: no such words}\n"))
    assert (wrong.rc, link(at.prefix)) == (9, first.json["release"]), wrong.err
    assert not list(at.prefix.glob("trial*"))
    cut_off(at, 7, monkeypatch)
    assert kit("rollback", *at.place).rc == 0
    assert link(at.prefix) == first.json["release"] and at.health()["capacity"] == 4


def test_bad_release_is_taken_back_and_the_old_service_answers(at: Board, other: Path) -> None:
    good = at.deploy(at.recipe())
    assert good.rc == 0, good.err
    began = time.monotonic()
    ran = at.deploy(at.recipe(other))
    assert ran.rc == 9, ran.err
    error = ran.json["error"]
    assert "status 5 (its golden does not match)" in error["message"]
    assert error["state"] == f"rolled back to {good.json['release']}, which is well"
    assert f"colibri-kit logs {at.place[0]}" in error["hint"]  # as it can be typed
    told = at.health()
    assert told["golden"] == golden(at.model)
    assert told["uptime_s"] < time.monotonic() - began  # started anew, by going back
    assert link(at.prefix) == good.json["release"]
    assert at.deploy(at.recipe(other)).json["error"]["code"] == "CK-PREFLIGHT-BAD"


def test_wrong_answer_is_a_bad_release(at: Board) -> None:
    good = at.deploy(at.recipe())
    assert good.rc == 0, good.err
    check = "check: {prompt: Hello, max_new: 2, expect: no such words}\n"
    ran = at.deploy(at.recipe(queue=2, check=check))
    assert ran.rc == 9, ran.err
    assert "without 'no such words'" in ran.json["error"]["message"]
    assert at.health()["capacity"] == 9 and link(at.prefix) == good.json["release"]


def test_first_release_that_is_bad_leaves_no_service(at: Board, other: Path) -> None:
    ran = at.deploy(at.recipe(other))
    assert ran.rc == 9, ran.err
    assert "no release is current" in ran.json["error"]["state"]
    assert at.silent()
    assert not (at.rig.units / "colibri.service").exists()
    assert not (at.prefix / "current").is_symlink()


def test_taken_port_is_told_and_taken_back(at: Board) -> None:
    """Something else answers where the new release should: that is not the new release."""
    import socket

    good = at.deploy(at.recipe())
    assert good.rc == 0, good.err
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        ran = at.deploy(at.recipe(listen=f"127.0.0.1:{port}"))
    assert ran.rc == 9, ran.err
    # musl's words for EADDRINUSE.
    assert f"cannot listen on 127.0.0.1:{port}: Address in use" in ran.json["error"]["message"]
    assert at.health()["golden"] == golden(at.model)


def test_rollback_to_a_release_that_is_unwell_stays(at: Board) -> None:
    first = at.deploy(at.recipe(queue=3))
    second = at.deploy(at.recipe(queue=4))
    assert (first.rc, second.rc) == (0, 0), second.err
    old = at.prefix / "releases" / first.json["release"] / "model.coli" / "experts-0000.coli"
    old.unlink()
    ran = kit("rollback", *at.place, "--json")
    assert ran.rc == 9, ran.err
    assert "status 3" in ran.json["error"]["message"]
    assert link(at.prefix) == second.json["release"]
    assert at.health()["capacity"] == 5


def test_token_is_used_and_a_missing_one_refused(at: Board, tmp_path: Path) -> None:
    tokens = at.prefix.parent / "tokens"
    ran = at.deploy(at.recipe(token_file=tokens))
    assert (ran.rc, ran.json["error"]["code"]) == (6, "CK-DEPLOY-TOKEN"), ran.err
    assert "no release is current" in ran.json["error"]["state"]
    tokens.write_text("0123456789abcdef0123\n")
    tokens.chmod(0o600)
    ran = at.deploy(at.recipe(token_file=tokens))
    assert ran.rc == 0, ran.err
    assert tokens.stat().st_mode & 0o777 == 0o640  # the service's group, nobody else
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"http://127.0.0.1:{at.port}/v1/models", timeout=10)
    outside = at.deploy(at.recipe(listen=f"0.0.0.0:{at.port}"))
    assert outside.rc == 2 and "token_file is needed" in outside.err


def test_folder_that_the_user_may_not_enter(at: Board) -> None:
    at.prefix.parent.chmod(0o700)
    shutil.chown(at.prefix.parent, "root")
    ran = at.deploy(at.recipe())
    at.prefix.parent.chmod(0o755)
    assert (ran.rc, ran.json["error"]["code"]) == (6, "CK-SERVICE-USER"), ran.err
    assert f"user {at.user} may not run" in ran.json["error"]["message"]
    assert "no release is current" in ran.json["error"]["state"] and at.silent()


def test_without_service_it_stops(at: Board) -> None:
    assert at.deploy(at.recipe()).rc == 0
    ran = at.deploy(at.recipe(), "--no-service")
    assert ran.rc == 0, ran.err
    assert at.silent() and not (at.rig.units / "colibri.service").exists()
    back = kit("rollback", *at.place, "--json")
    assert back.rc == 0, back.err
    assert at.health()["golden"] == golden(at.model)
    assert kit("undeploy", *at.place, "--yes").rc == 0
    assert at.silent() and not at.prefix.exists() and not (at.rig.units / "colibri.service").exists()
