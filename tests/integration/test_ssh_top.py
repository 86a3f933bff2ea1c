"""`colibri-kit top` and `logs`: over real SSH, beside the real service, on a real pseudo-terminal."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import shutil
import signal
import stat
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ssh_servers
from kit_cli import Ran, kit
from serving_rig import Said, Verb, small_chat
from ssh_servers import Server, start_sshd
from tests.service.rig import Service

Deploy = Callable[..., Ran]


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_chat(tmp_path_factory.getbasetemp())


@pytest.fixture
def service(chat_model: Path) -> Iterator[Service]:
    with Service(chat_model, "--sequences", "2", "--queue", "3", "--ctx", "256") as running:
        yield running


def over(server: Server, service: Service) -> list[object]:
    return [server.target, *server.args, "--remote", service.port]


def test_every_figure_is_the_services_own(server: Server, service: Service) -> None:
    for seed in range(4):
        service.complete("The board is small", max_tokens=30, seed=seed)
    service.wait_for("request", 4)
    ran = kit("top", *over(server, service), "--once", "--json")
    assert ran.rc == 0, ran.err
    got, metrics, status = ran.json, service.metrics(), service.json("/status")
    assert got["target"] == server.target
    for key, name in {
        "tokens_answer": "tokens_answer_total", "tokens_prompt": "tokens_prompt_total",
        "planned": "memory_planned_bytes", "budget": "memory_budget_bytes", "active": "requests_active",
        "queued": "requests_queued",
    }.items():  # fmt: skip
        assert got[key] == metrics[name], key
    assert got["experts"]["hits"] == metrics["expert_hits_total"] > 0
    assert got["experts"]["misses"] == metrics["expert_misses_total"]
    assert got["experts"]["heat"] == status["heat"]
    assert got["ledger"] == status["ledger"]
    assert [b for b in got["ledger"] if metrics[f'memory_bytes{{line="{b[0]}"}}'] != b[1]] == []
    for key in ("model", "golden", "version", "isa", "threads", "ctx", "sequences", "capacity"):
        assert got[key] == status[key], key
    for row in got["latency"]:
        name = {"first token": "first_token", "request": "request", "step": "step", "queue": "queue"}[
            row["name"]
        ]
        assert row["count"] == sum(row["counts"]) == metrics[f"{name}_seconds_count"] > 0
        assert row["counts"][0] == metrics[f'{name}_seconds_bucket{{le="0.005"}}']
    assert [r["completion_tokens"] for r in got["recent"]] == [
        r["completion_tokens"] for r in status["recent"]
    ]
    assert got["answers"]["degraded"] == 0 and got["offload"]["state"] == "unused"


def test_speed_and_lately_between_two_looks(sshd: Server, service: Service) -> None:
    with Verb("top", *over(sshd, service), "--json", "--interval", "1") as verb:
        verb.until(lambda: verb.lines(), "first look")
        answered = service.complete("The board is small", max_tokens=90, seed=1)["usage"]["completion_tokens"]
        looks = verb.until(
            lambda: [x for x in verb.lines() if x["tokens_answer"] == answered], "look with the answer"
        )
        first = looks[0]
        before = verb.lines()[verb.lines().index(first) - 1]
        assert before["tokens_answer"] in range(answered)
        # A second at least lies between two looks, and under load not ten.
        gained = first["tokens_answer"] - before["tokens_answer"]
        assert gained / 10 < first["tokens_per_s"] <= gained
        assert first["window_s"] >= 1
        assert next(x for x in first["latency"] if x["name"] == "request")["lately_count"] == 1
        assert len(first["speeds"]) == verb.lines().index(first) + 1
        assert verb.interrupt() == 0
        assert verb.err == ""


def test_a_service_that_goes_and_comes_back(sshd: Server, chat_model: Path) -> None:
    port = ssh_servers.free_port()
    listen = ("--listen", f"127.0.0.1:{port}")
    with Service(chat_model, *listen) as first, contextlib.ExitStack() as stack:
        verb = stack.enter_context(
            Verb("top", sshd.target, *sshd.args, "--remote", port, "--json", "--interval", "0.3")
        )
        verb.until(lambda: verb.lines(), "first look")
        before = set(sshd.sessions())
        first.process.kill()
        lost = verb.until(lambda: [x for x in verb.lines() if "lost" in x], "word of the loss")
        assert f"nothing listens at 127.0.0.1:{port}" in lost[0]["lost"]
        stack.enter_context(Service(chat_model, *listen))
        verb.until(lambda: "model" in verb.lines()[-1], "return")
        # And the link under it:
        n = len(verb.lines())
        for pid in before:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        verb.until(lambda: len(verb.lines()) > n + 3 and "model" in verb.lines()[-1], "return of the link")
        assert verb.interrupt() == 0


def test_a_bearer_token_from_a_file_and_never_shown(chat_model: Path, tmp_path: Path) -> None:
    secret, wrong = "a-secret-of-many-characters", "another-secret-of-the-desk"
    file, other = tmp_path / "token", tmp_path / "other"
    file.write_text(secret + "\nsecond-line-token-here\n")
    other.write_text(wrong + "\n")
    file.chmod(0o600)
    with Service(chat_model, "--token-file", str(file)) as running:
        url = running.url
        none = kit("top", "--url", url, "--json")
        assert (none.rc, none.json["error"]["code"]) == (5, "CK-SERVICE-TOKEN")
        bad = kit("top", "--url", url, "--token-file", other, "--json", "--once")
        assert (bad.rc, bad.json["error"]["code"]) == (5, "CK-SERVICE-TOKEN")
        good = kit("top", "--url", url, "--token-file", file, "--once", "-v")
        assert good.rc == 0, good.err
        shown = "".join(x.out + x.err for x in (none, bad, good))
        assert secret not in shown and wrong not in shown
        assert running.json("/status", Authorization=f"Bearer {secret}")["model"] in good.out


def test_errors_and_the_command_line(sshd: Server) -> None:
    port = ssh_servers.free_port()
    gone = kit("top", "--url", f"http://127.0.0.1:{port}", "--json")
    assert (gone.rc, gone.json["error"]["code"]) == (4, "CK-SERVICE-DOWN")
    gone = kit("top", sshd.target, *sshd.args, "--remote", port, "--json")
    assert (gone.rc, gone.json["error"]["code"]) == (4, "CK-SERVICE-DOWN")
    with Said(lambda sock, head: None) as said:
        odd = kit("top", "--url", f"127.0.0.1:{said.port}", "--json")
        assert (odd.rc, odd.json["error"]["code"]) == (4, "CK-SERVICE-ANSWER")
    for args in (["top"], ["top", "h", "--url", "http://x"], ["top", "--url", "https://x"],
                 ["top", "--url", "http://x", "--remote", "1"], ["tunnel"],
                 ["tunnel", "h", "--sudo"]):  # fmt: skip
        assert kit(*args).rc == 2, args


# ---- a terminal -------------------------------------------------------------


class Terminal:
    """The verb on a pseudo-terminal; ``screen()`` is what its last picture says, without colours."""

    def __init__(self, *args: object, columns: int = 80, lines: int = 24) -> None:
        self.master, slave = pty.openpty()
        self.resize(columns, lines)
        self.child = subprocess.Popen(
            [sys.executable, "-m", "colibri_kit", *map(str, args)],
            stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
            env={**os.environ, "TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"},
        )  # fmt: skip
        self.before = termios.tcgetattr(slave)
        self.slave = slave
        self.seen = b""

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def until(self, true: Callable[[list[str]], bool], seconds: float = 60) -> list[str]:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if select.select([self.master], [], [], 0.1)[0]:
                self.seen += os.read(self.master, 65536)
            if true(self.screen()):
                return self.screen()
        raise AssertionError("\n".join(self.screen()))

    def screen(self) -> list[str]:
        text = self.seen.decode("utf-8", "replace")
        last = text.rpartition("\x1b[H")[2]
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", last).replace("\r", "").split("\n")

    def close(self) -> None:
        if self.child.poll() is None:
            self.child.kill()
        self.child.wait()
        os.close(self.master), os.close(self.slave)


def whole(lines: list[str]) -> bool:
    return any("q or Ctrl-C leaves" in line for line in lines)


@pytest.mark.parametrize("leave", [b"q", b"\x03"])
def test_live_on_a_terminal(service: Service, leave: bytes) -> None:
    terminal = Terminal("top", "--url", service.url, "--interval", "0.3")
    try:
        lines = terminal.until(whole)
        assert len(lines) <= 24 and max(map(len, lines)) <= 80
        answered = service.complete("The board is small", max_tokens=40, seed=1)["usage"]["completion_tokens"]
        terminal.until(lambda s: whole(s) and any(f"  {answered} answered" in line for line in s))
        terminal.resize(120, 40)
        wide = terminal.until(lambda s: whole(s) and any("tok/s" in line for line in s[5:]))
        assert max(map(len, wide)) <= 120
        os.write(terminal.master, b"\x1b[A")  # an arrow key is not Escape
        terminal.until(whole)
        assert terminal.child.poll() is None
        if leave == b"q":
            os.write(terminal.master, leave)
        else:
            terminal.child.send_signal(signal.SIGINT)
        assert terminal.child.wait(20) == 0
        # The terminal is as it was: out of the alternate screen, cursor shown, lines and echo.
        with contextlib.suppress(OSError):
            while select.select([terminal.master], [], [], 0.2)[0]:
                terminal.seen += os.read(terminal.master, 65536)
        assert terminal.seen.rfind(b"\x1b[?1049l") > terminal.seen.rfind(b"\x1b[?1049h") > -1
        assert terminal.seen.rfind(b"\x1b[?25h") > terminal.seen.rfind(b"\x1b[?25l")
        assert termios.tcgetattr(terminal.slave) == terminal.before
    finally:
        terminal.close()


def test_live_ends_with_its_terminal(service: Service) -> None:
    """A closed window leaves no process that asks a board for ever."""
    terminal = Terminal("top", "--url", service.url, "--interval", "0.3")
    terminal.until(whole)
    os.close(terminal.slave)
    os.close(terminal.master)
    try:
        assert terminal.child.wait(20) == 0
    finally:
        terminal.child.kill()
        terminal.child.wait()


def test_live_says_lost_and_keeps_the_last_picture(chat_model: Path) -> None:
    with Service(chat_model) as running:
        model = running.json("/status")["model"]
        terminal = Terminal("top", "--url", running.url, "--interval", "0.3")
        try:
            terminal.until(whole)
            running.process.kill()
            lines = terminal.until(lambda s: any("lost, retrying: " in line for line in s))
            assert " lost, retrying " in lines[0] and model in lines[0]
        finally:
            terminal.close()


# ---- logs -------------------------------------------------------------------

ENGINE_LINES = [
    '{"time":"2026-11-30T11:00:00.000Z","level":"info","event":"ready","port":8080}',
    "2026-11-30T12:00:00.500Z info request status=200",
    "a line of a library",
]


@pytest.fixture
def placed(deploy: Deploy, server: Server, prefix: Path) -> list[object]:
    assert deploy(server).rc == 0
    return [server.target, *server.args, "--prefix", prefix]


def test_logs_of_a_file(placed: list[object], prefix: Path) -> None:
    (prefix / "log" / "engine.log").write_text("\n".join(["older"] * 30 + ENGINE_LINES) + "\n")
    got = kit("logs", *placed, "-n", 3, "--json").json
    assert got["source"] == f"{prefix}/log/engine.log"
    assert got["engine"] == [
        json.loads(ENGINE_LINES[0]),
        {"time": "2026-11-30T12:00:00.500Z", "message": "info request status=200"},
        {"message": "a line of a library"},
    ]
    assert got["deployments"][-1]["event"] == "deploy"
    text = kit("logs", *placed, "-n", 3).out.splitlines()
    assert text[-3:] == ENGINE_LINES
    since = kit("logs", *placed, "--since", "2026-11-30T11:30:00Z", "--json").json
    assert [e["message"] for e in since["engine"]] == ["info request status=200", "a line of a library"]
    assert len(kit("logs", *placed, "--json").json["engine"]) == 20
    assert kit("logs", *placed, "--since", "yesterday").rc == 2


def test_logs_follow_a_file_that_is_replaced(placed: list[object], prefix: Path, user: str) -> None:
    log = prefix / "log" / "engine.log"
    log.write_text("\n".join(ENGINE_LINES) + "\n")
    shutil.chown(log, user) if os.geteuid() == 0 else None
    with Verb("logs", *placed, "--follow", "-n", 1, "--json") as verb:
        verb.until(lambda: verb.lines() == [{"message": "a line of a library"}], "last line")
        with log.open("a") as out:
            out.write('{"event":"request"}\n')
        verb.until(lambda: verb.lines()[1:] == [{"event": "request"}], "new line")
        log.rename(log.with_name("engine.log.1"))
        log.write_text("in the new file\n")
        verb.until(lambda: {"message": "in the new file"} in verb.lines(), "line of the new file")
        assert verb.interrupt() == 0
        processes = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
        assert f"tail -n 1 -F {log}" not in processes


JOURNALCTL = r"""#!/bin/sh
echo "$@" >>"$(dirname "$0")/asked"
cat "$(dirname "$0")/entries"
case "$*" in *--follow*) while [ ! -f "$(dirname "$0")/more" ]; do sleep 0.1; done
  cat "$(dirname "$0")/more"; sleep 60;; esac
"""


@pytest.fixture
def journal(open_dir: Path, user: str, identity: Path, prefix: Path) -> Iterator[tuple[Server, Path]]:
    """A server whose PATH has a journalctl and a systemctl of our own."""
    folder = open_dir / "systemd"
    folder.mkdir(mode=0o755)
    for name, text in (
        ("journalctl", JOURNALCTL),
        ("systemctl", '#!/bin/sh\n[ "$*" = "cat colibri.service" ]\n'),
    ):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    (folder / "asked").touch()
    (folder / "asked").chmod(stat.S_IRUSR | stat.S_IWUSR | stat.S_IROTH | stat.S_IWOTH)
    path = f"{folder}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
    found = start_sshd(open_dir / "with-systemd", user, identity, extra=f"SetEnv PATH={path}\n")
    yield found, folder
    found.stop()
    shutil.rmtree(folder)
    shutil.rmtree(open_dir / "with-systemd")


def entry(message: str, seconds: int, who: str = "colibri") -> str:
    doc: dict[str, Any] = {"MESSAGE": message, "__REALTIME_TIMESTAMP": f"{seconds}000000"}
    return json.dumps({**doc, "SYSLOG_IDENTIFIER": who}) + "\n"


def test_logs_of_the_journal(journal: tuple[Server, Path], deploy: Deploy, prefix: Path) -> None:
    server, folder = journal
    assert deploy(server).rc == 0
    place = [server.target, *server.args, "--prefix", prefix]
    (prefix / "log" / "engine.log").write_text("a file of earlier days\n")
    (folder / "entries").write_text(
        entry(ENGINE_LINES[0], 1796040001) + entry("Started colibri.", 1796040000, "systemd")  # newest first
    )
    got = kit("logs", *place, "-n", 7, "--since", "2026-11-30T00:00:00Z", "--json").json
    assert got["source"] == "journal"
    assert got["engine"] == [
        {"time": "2026-11-30T12:00:00.000Z", "identifier": "systemd", "message": "Started colibri."},
        json.loads(ENGINE_LINES[0]),
    ]
    asked = (folder / "asked").read_text().splitlines()
    assert asked == ["-u colibri.service -o json --no-pager -n 7 --since=@1795996800 --reverse"]
    ran = kit("logs", *place)
    text = ran.out.splitlines()
    # The login is in no group that may read the journal: an empty one would look like silence.
    assert ("keeps the service's journal from this login" in ran.err) == (server.user == "ckboard")
    assert text[-2:] == ["2026-11-30T12:00:00.000Z systemd: Started colibri.", ENGINE_LINES[0]]
    with Verb("logs", *place, "--follow") as verb:
        verb.until(lambda: ENGINE_LINES[0] in verb.out, "old entries")
        (folder / "more").write_text(entry(ENGINE_LINES[1], 1796040002))
        verb.until(lambda: ENGINE_LINES[1] in verb.out, "new entry")
        assert "release=" in text[0] and "release=" not in verb.out
        assert verb.interrupt() == 0
