"""--options FILE: what it may hold, who wins, and what a SIGHUP changes."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import engine_build as eb
import pytest

from tests.service.rig import Service, request
from tests.service.test_stay_up import LONG, ask, frozen, parse, read_all, until

TOKEN = "0123456789abcdef0123456789abcdef"


def write(path: Path, text: str) -> str:
    """Replaced in one step, as a deployment does."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)
    return str(path)


# ---- the file --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "where", "words"),
    [
        ("queue 3\nquue 4\n", 2, "unknown option --quue; did you mean --queue?"),
        ("--queue 3\n", 1, "without dashes"),
        ("\n# x\nqueue 0\n", 3, "from 1 to 1024"),
        ("queue 3\n\nqueue 4\n", 3, "--queue is given twice"),
        ("queue\n", 1, "--queue needs a value (N)"),
        ("queue 3 4\n", 1, 'not "3 4"'),
        ("hot-swap yes\n", 1, "--hot-swap takes no value"),
        ("log xml\n", 1, "text|json"),
        ("options other\n", 1, "unknown option --options"),
        ("json\n", 1, "unknown option --json"),
        ("help\n", 1, "unknown option"),
        ("queue 3\nbody 1\0\n", 2, "a zero byte"),
        ("n" * 100 + " 1\n", 1, "unknown option"),
        ("queue=3\n", 1, "unknown option --queue=3"),
        ("".join(f"allow-host h{i}\n" for i in range(17)), 17, "at most 16 times"),
    ],
)
def test_a_wrong_line_is_named(model: Path, tmp_path: Path, text: str, where: int, words: str) -> None:
    path = write(tmp_path / "serve.options", text)
    done = eb.colibri("serve", "--model", model, "--options", path)
    assert done.returncode == 2
    assert f"{path}:{where}: " in done.stderr.decode()
    assert words in done.stderr.decode()


def test_a_file_that_cannot_be_read(model: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "long").write_bytes(b"#\n" * 32769)
    for name, words in (("none", "no such file"), ("fifo", "no such file"), ("long", "more than 65536")):
        done = eb.colibri("serve", "--model", model, "--options", tmp_path / name)
        assert (done.returncode, words in done.stderr.decode()) == (2, True), done.stderr


def test_every_long_option_may_stand_there(tmp_path: Path) -> None:
    """A name that the help shows and the file does not know would be a surprise."""
    shown = re.findall(r"^  (?:-\w, )?--([a-z-]+)", eb.ok("serve", "--help").stdout.decode(), re.M)
    assert {"model", "listen", "queue", "budget", "hot-swap", "give-up", "options"} <= set(shown)
    for name in set(shown) - {"options", "json", "help"}:
        path = write(tmp_path / "serve.options", f"{name} x\nnonsense 1\n")
        said = eb.colibri("serve", "--options", path).stderr.decode()
        assert f"--{name} " in said or "unknown option --nonsense" in said, said


def test_lines_hold_what_words_would(model: Path, tmp_path: Path) -> None:
    (tmp_path / "a token").write_text(TOKEN + "\n")
    (tmp_path / "a token").chmod(0o600)
    path = write(
        tmp_path / "serve.options",
        "# a comment\r\n\n  sequences   2  \nqueue 3\r\n"
        "allow-host board.example\nallow-host second.example\n"
        f"\ttoken-file {tmp_path}/a token\nhot-swap\nctx 64\nlisten 127.0.0.1:1",
    )
    with Service(model, "--options", path, "--listen", "127.0.0.1:0", "--queue", "5") as s:
        ready = s.log("ready")[0]
        assert ready["sequences"] == 2
        assert ready["capacity"] == 7  # words win over lines
        assert s.port > 1
        assert s.get("/status")[0] == 401
        for host, status in (("board.example", 200), ("second.example", 200), ("third.example", 421)):
            assert s.get("/status", Authorization=f"Bearer {TOKEN}", Host=host)[0] == status
        assert s.json("/status", Authorization=f"Bearer {TOKEN}")["ctx"] == 64
        s.process.send_signal(signal.SIGHUP)
        s.wait_for("swapped")  # hot-swap, as a line


def test_a_word_that_wins_does_not_excuse_a_wrong_line(model: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "serve.options", "queue many\n")
    done = eb.colibri("serve", "--model", model, "--options", path, "--queue", "5")
    assert done.returncode == 2
    assert b":1: --queue must be a whole number" in done.stderr


# ---- SIGHUP ------------------------------------------------------------------------


def hup(s: Service, event: str, count: int) -> dict[str, str]:
    os.kill(s.process.pid, signal.SIGHUP)
    return s.wait_for(event, count)


def test_sighup_takes_what_needs_no_memory(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "serve.options"
    write(path, "queue 4\nallow-host old.example\nbody 2000\n")
    with Service(model, "--options", str(path)) as s:
        assert s.get("/health", Host="old.example")[0] == 200
        write(path, "queue 2\nallow-host new.example\nbody 1500\nio-timeout 1\nidle-timeout 1\ndeadline 1\n")
        hup(s, "options_read", 1)
        assert s.log("options_need_restart") == []
        assert s.get("/health", Host="old.example")[0] == 421
        assert s.get("/health", Host="new.example")[0] == 200
        assert s.json("/health")["capacity"] == 3
        long_body = b'{"prompt":"%s"}' % (b"x" * 1600)
        assert s.post("/v1/completions", long_body)[0] == 413
        with s.connect() as slow:
            slow.sendall(b"GET / HT")
            start = time.monotonic()
            assert parse(read_all(slow))[0] == 408
            assert time.monotonic() - start < 10  # 20 s before
        with s.connect() as idle:
            start = time.monotonic()
            assert idle.recv(10) == b""
            assert time.monotonic() - start < 10
        with frozen(s):
            waiting = [ask(s, **LONG) for _ in range(3)]
            until(lambda: s.json("/health")["queued"] == 3)
            assert s.post("/v1/completions", LONG)[0] == 429
            time.sleep(1.1)
        for c in waiting:
            assert b"not done within 1 s" in read_all(c)
            c.close()


def test_sighup_names_what_needs_a_restart(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "serve.options"
    write(path, "queue 4\nctx 64\n")
    with Service(model, "--options", str(path), "--body", "3000") as s:
        write(path, "queue 9\nctx 32\nconnections 7\ndrain 9\nbody 9000\nlock\nweights mmap\nbudget 1GiB\n")
        named = set(hup(s, "options_need_restart", 1)["options"].split(" "))
        assert named == {"queue", "ctx", "connections", "lock", "weights", "budget"}  # body: the words won
        assert s.json("/health")["capacity"] == 5
        assert s.json("/status")["ctx"] == 64
        write(path, "queue 4\nctx 64\n")
        hup(s, "options_read", 2)
        time.sleep(0.1)
        assert len(s.log("options_need_restart")) == 1


def test_a_bad_file_changes_nothing(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "serve.options"
    write(path, "allow-host old.example\n")
    with Service(model, "--options", str(path)) as s:
        bad = [
            "allow-host new.example\nqueue none\n",
            "allow-host a:1\n",
            "sequences 99999\n",
            "ctx 64\nbatch 0\n",
        ]
        for n, text in enumerate(bad):
            write(path, text)
            message = hup(s, "options_refused", n + 1)["message"]
            assert "a name without port" in message or f"{path}:" in message
            assert s.get("/health", Host="old.example")[0] == 200
            assert s.get("/health", Host="new.example")[0] == 421
        path.unlink()
        assert "no such file" in hup(s, "options_refused", len(bad) + 1)["message"]
        assert s.log("options_read") == []
        before = s.rss_anon()
        for n in range(20):
            write(path, f"allow-host h{n}.example\nqueue {n % 8 + 1}\n")
            hup(s, "options_read", n + 1)
        assert s.get("/health", Host="h19.example")[0] == 200
        assert s.rss_anon() <= before + 200_000  # pages of the second table are touched once
        after = s.rss_anon()
        for n in range(20, 40):
            hup(s, "options_read", n + 1)
        assert s.rss_anon() == after


def test_a_request_that_runs_keeps_its_deadline(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "serve.options"
    write(path, "deadline 600\n")
    with Service(model, "--options", str(path)) as s:
        want = s.complete(**LONG)["choices"]
        with frozen(s):
            c = ask(s, **LONG)
            until(lambda: s.json("/health")["queued"] == 1)
            write(path, "deadline 1\n")
            hup(s, "options_read", 1)
            time.sleep(1.2)
        assert parse(read_all(c))[0] == 200
        assert s.complete(**{**LONG, "max_tokens": 480})["choices"] == want
        c.close()


# ---- under the supervisor ------------------------------------------------------------


def test_every_child_reads_it(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "serve.options"
    write(path, "supervise\nqueue 2\n")
    with Service(model, "--options", str(path)) as s:
        assert s.pid != s.process.pid
        assert s.json("/health")["capacity"] == 3
        write(path, "supervise\nqueue 6\nctx 64\n")
        named = hup(s, "options_need_restart", 1)["options"]  # passed on to the child
        assert set(named.split()) == {"queue", "ctx"}
        os.kill(s.pid, signal.SIGKILL)
        s.port = int(s.wait_for("ready", 2)["port"])
        assert s.json("/health")["capacity"] == 7
        assert s.json("/status")["ctx"] == 64
        write(path, "queue nothing\n")
        os.kill(s.pid, signal.SIGKILL)
        s.port = int(s.wait_for("ready", 3, seconds=90)["port"])
        assert f"{path}:1" in s.log("options_refused")[0]["message"]
        assert s.json("/health")["capacity"] == 3  # those that the supervisor began with
        write(path, "allow-host late.example\n")
        hup(s, "options_read", 1 + 1)
        assert s.get("/health", Host="late.example")[0] == 200
        assert s.raw(request("GET", "/health", Host="else.example")).startswith(b"HTTP/1.1 421")
