"""What keeps it up for months: draining, hot swap, beats, the supervisor, kill -9, memory, load."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.service import load
from tests.service.rig import Service, engine_thread, frozen, parse, read_all, request

LONG = {"prompt": [3, 9, 27], "max_tokens": 480, "seed": 1, "temperature": 0}


def until(true: Callable[[], Any], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


def ask(service: Service, **body: Any) -> socket.socket:
    s = service.connect()
    s.sendall(request("POST", "/v1/completions", json.dumps(body).encode()))
    return s


def open_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


# ---- the end --------------------------------------------------------------------


def test_sigterm_finishes_what_runs_and_refuses_the_rest(model: Path) -> None:
    with Service(model, "--sequences", "2", "--queue", "4") as s:
        want = s.complete(**LONG)["choices"]
        kept = s.connect()
        kept.sendall(request("GET", "/health").replace(b"Connection: close\r\n", b""))
        kept.recv(4096)
        with frozen(s.pid):
            running = [ask(s, **LONG) for _ in range(2)]
            until(lambda: s.json("/health")["queued"] == 2)
        until(lambda: s.json("/health")["active"] == 2 or s.metrics()["tokens_answer_total"] > 480)
        with frozen(s.pid):
            waiting = [ask(s, **LONG) for _ in range(2)]
            until(lambda: s.json("/health")["queued"] >= 2)
            s.process.send_signal(signal.SIGTERM)
            s.wait_for("stopping")
            with pytest.raises(ConnectionRefusedError):
                s.connect()
            for c in waiting:
                status, body = parse(read_all(c))
                assert (status, json.loads(body)["error"]["code"]) == (503, "stopping")
            assert s.process.poll() is None
        for c in running:
            status, body = parse(read_all(c))
            assert (status, json.loads(body)["choices"]) == (200, want)
        assert s.process.wait(10) == 0
        kept.close()
        s.wait_for("stopped")


def test_the_drain_has_a_limit_and_a_second_signal_ends_it(model: Path) -> None:
    with Service(model, "--drain", "1") as s:
        with frozen(s.pid):
            c = ask(s, **LONG)
            until(lambda: s.json("/health")["queued"] == 1)
        with frozen(s.pid):
            if s.json("/health")["active"]:
                s.process.send_signal(signal.SIGTERM)
                s.wait_for("stopping")
                s.process.send_signal(signal.SIGTERM)
                assert s.process.wait(10) == 143
        c.close()


def test_it_can_be_stopped_while_it_loads(model: Path) -> None:
    import subprocess

    import engine_build as eb

    for delay in (0.0, 0.005, 0.02):
        p = subprocess.Popen([eb.tool(), "serve", "--model", model, "--listen", "127.0.0.1:0"], stderr=-1)
        time.sleep(delay)
        p.terminate()
        assert p.wait(20) in (0, 143, -15)


# ---- other weights ----------------------------------------------------------------


def link(to: Path, at: Path) -> None:
    """Like `current` of a deployment: replaced in one step."""
    at.with_suffix(".new").symlink_to(to)
    at.with_suffix(".new").replace(at)


def test_sighup_takes_the_release_behind_the_link(model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.coli"
    shutil.copytree(model, other)
    manifest = json.loads((other / "manifest.json").read_text())
    manifest["name"] = "another"
    (other / "manifest.json").write_text(json.dumps(manifest))
    broken = tmp_path / "broken.coli"
    shutil.copytree(model, broken)
    manifest["golden"]["sha256"] = "0" * 64
    (broken / "manifest.json").write_text(json.dumps(manifest))
    current = tmp_path / "current.coli"
    link(model, current)
    with Service(current, "--hot-swap") as s:
        want = s.complete(**LONG)["choices"]
        link(other, current)
        with frozen(s.pid):
            running = ask(s, **LONG)
            until(lambda: s.json("/health")["queued"] == 1)
        s.process.send_signal(signal.SIGHUP)
        body = json.loads(parse(read_all(running))[1])
        assert body["choices"] == want  # finished first, with one release or the other: same weights
        assert s.wait_for("swapped")["model"] == "another"
        assert s.json("/v1/models")["data"][0]["id"] == "another"
        assert s.complete(**LONG)["choices"] == want
        link(broken, current)
        s.process.send_signal(signal.SIGHUP)
        assert "golden" in s.wait_for("swap_refused")["message"]
        assert s.complete(**LONG)["choices"] == want
        assert s.metrics()["swaps_refused_total"] == 1


def test_sighup_without_room_is_refused(service: Service) -> None:
    os.kill(service.pid, signal.SIGHUP)
    assert "--hot-swap" in service.wait_for("swap_refused")["message"]
    assert service.json("/health")["status"] == "ok"


# ---- beats --------------------------------------------------------------------------


def manager(path: str) -> tuple[socket.socket, list[tuple[float, str]]]:
    """A stand-in for systemd's notify socket: messages with their times."""
    s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    s.bind("\0" + path[1:] if path[0] == "@" else path)
    got: list[tuple[float, str]] = []

    def listen() -> None:
        with contextlib.suppress(OSError):
            while data := s.recv(4096):
                got.append((time.monotonic(), data.decode()))

    threading.Thread(target=listen, daemon=True).start()
    return s, got


def beats(got: list[tuple[float, str]], since: float) -> int:
    return sum(text == "WATCHDOG=1" and at > since for at, text in got)


@pytest.mark.parametrize("kind", ["path", "abstract"])
def test_beats_follow_progress(model: Path, tmp_path: Path, kind: str) -> None:
    path = str(tmp_path / "notify") if kind == "path" else f"@colibri-test-{os.getpid()}"
    s, got = manager(path)
    env = {"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "6000000"}
    with Service(model, env=env) as service:
        until(lambda: any(text.startswith("READY=1") for _, text in got))
        ready = next(text for _, text in got if text.startswith("READY=1"))
        assert f"MAINPID={service.pid}" in ready
        start = time.monotonic()
        until(lambda: beats(got, start) >= 2)  # an idle engine lives
        with frozen(service.pid):
            c = ask(service, **LONG)
            time.sleep(2.5)  # a beat may have been due for what was before
            stuck = time.monotonic()
            time.sleep(6.5)  # a whole period of the manager
            assert beats(got, stuck) == 0
            assert service.get("/health")[0] == 200
        until(lambda: beats(got, stuck) >= 1)
        assert parse(read_all(c))[0] == 200
        until(lambda: any(text.startswith("STATUS=") for _, text in got))
    assert any(text == "STOPPING=1" for _, text in got)
    s.close()


def test_no_beats_when_nobody_watches(model: Path, tmp_path: Path) -> None:
    s, got = manager(str(tmp_path / "notify"))
    with Service(
        model, env={"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "600000", "WATCHDOG_PID": "1"}
    ):
        time.sleep(1.5)
    assert beats(got, 0) == 0
    s.close()


def test_three_failed_checks_end_it(model: Path) -> None:
    with Service(model, "--health-interval", "1") as s:
        with frozen(s.pid):
            c = ask(s, **LONG)
            until(lambda: s.get("/health")[0] == 503)
            s.wait_for("giving_up", seconds=15)
            time.sleep(0.3)
        assert s.process.wait(15) == 7
        assert [x["failures"] for x in s.log("stuck")] == [1, 2, 3]
        c.close()


# ---- the supervisor -------------------------------------------------------------------


def test_the_supervisor_starts_it_again(model: Path) -> None:
    with Service(model, "--supervise", "--listen", "127.0.0.1:0") as s:
        first = s.pid
        assert first != s.process.pid
        want = s.complete(**LONG)["choices"]
        os.kill(first, signal.SIGKILL)
        again = s.wait_for("ready", 2)
        assert again["pid"] != first
        assert s.log("restart")[0]["exit_status"] == 137
        s.port = again["port"]
        assert s.complete(**LONG)["choices"] == want
        os.kill(s.process.pid, signal.SIGTERM)
        assert s.process.wait(20) == 0
        with pytest.raises(ProcessLookupError):
            os.kill(again["pid"], 0)


def test_the_supervisor_kills_what_makes_no_progress(model: Path) -> None:
    with Service(model, "--supervise", "--watchdog", "2") as s:
        with frozen(s.pid):
            s.wait_for("no_beat", seconds=15)
        assert s.wait_for("ready", 2)["pid"] != s.log("ready")[0]["pid"]


def test_the_supervisor_gives_up_and_says_so(model: Path) -> None:
    with Service(model, "--supervise", "--give-up", "3") as s:
        for n in (1, 2, 3):
            os.kill(int(s.wait_for("ready", n)["pid"]), signal.SIGKILL)
        s.wait_for("gave_up")
        assert s.process.wait(10) == 8
        assert [x["wait_s"] for x in s.log("restart")] == [1, 2, 0]


def test_what_a_restart_cannot_mend_is_not_tried_again(model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.coli"
    shutil.copytree(model, broken)
    manifest = json.loads((broken / "manifest.json").read_text())
    manifest["golden"]["sha256"] = "0" * 64
    (broken / "manifest.json").write_text(json.dumps(manifest))
    s = Service(broken, "--supervise")
    assert s.process.wait(30) == 5
    assert s.log("restart") == []
    assert s.log("ready") == []
    shutil.rmtree(s.folder)


def test_the_child_dies_with_its_parent(model: Path) -> None:
    with Service(model, "--supervise") as s:
        child = s.pid
        s.process.kill()
        s.process.wait()
        until(lambda: not Path(f"/proc/{child}").exists())


def test_killed_at_any_moment_it_comes_back(model: Path, tmp_path: Path) -> None:
    """COLIBRI_KILLS=200 for the long form."""
    kills = int(os.environ.get("COLIBRI_KILLS", "20"))
    rng = random.Random(5)
    before = {p.name: p.read_bytes() for p in model.iterdir()}
    want = None
    for n in range(kills):
        with Service(model, "--sequences", "2") as s:
            answer = s.complete(**{**LONG, "max_tokens": 8})["choices"]
            assert want is None or answer == want, f"after {n} kills"
            want = answer
            held = [ask(s, **LONG, stream=True) for _ in range(4)]
            time.sleep(rng.random() * 0.15)
            os.kill(s.pid, signal.SIGKILL)
            s.process.wait()
            for c in held:
                c.close()
            assert s.log("ready")[0]["golden"] == json.loads(before["manifest.json"])["golden"]["sha256"]
    assert {p.name: p.read_bytes() for p in model.iterdir()} == before


# ---- memory, latency, load ----------------------------------------------------------------


def test_memory_is_fixed(model: Path) -> None:
    with Service(model, "--sequences", "3") as s:
        for i in range(10):
            s.complete("warm", max_tokens=4, seed=i)
        s.json("/status"), s.metrics(), s.get("/")
        before, fds = s.rss_anon(), open_files(s.pid)
        for i in range(500):
            if i % 5 == 4:
                s.raw(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}")
            else:
                s.complete("word " * (i % 40 + 1), max_tokens=i % 7 + 1, seed=i, logprobs=i % 6)
        assert s.rss_anon() == before
        until(lambda: open_files(s.pid) == fds)
        ready = s.log("ready")[0]
        assert ready["server_bytes"] == s.metrics()['memory_bytes{line="server"}']


def test_the_servers_buffers_count_against_the_budget(model: Path) -> None:
    import engine_build as eb

    doc = eb.ok_json("plan", "--model", model)
    engine = doc["ledger"]["total"]
    done = eb.colibri("serve", "--model", model, "--budget", str(engine + 4096), "--connections", "1000")
    assert done.returncode == 4
    assert b"for connections and requests" in done.stderr


def test_a_short_load(model: Path) -> None:
    """The short form of tests/service/load.py."""
    with Service(model, "--sequences", "4", "--queue", "4", "--connections", "48") as s:
        r = load.run(s, 12, 32, chat=True)
        assert r.wrong == []
        assert min(r.right, r.refused, r.invalid, r.left, r.slow) > 0
        assert r.p99() < 0.05
        assert r.rss[-1] == r.rss[len(r.rss) // 4]
        until(lambda: s.json("/health")["active"] + s.json("/health")["queued"] == 0)
        assert s.log("overflow") == []


def test_health_shows_the_prompts_progress(model: Path) -> None:
    with Service(model, "--batch", "1") as s:
        c = ask(s, prompt=[5] * 500, max_tokens=1)
        seen = set()
        until(lambda: s.json("/health")["prefill"] is not None)
        while p := s.json("/health")["prefill"]:
            seen.add(p["done"])
            assert p["total"] == 500
        assert len(seen) > 1
        assert parse(read_all(c))[0] == 200
        c.close()


def test_the_engine_has_a_thread_of_its_own(service: Service) -> None:
    assert engine_thread(service.pid) != service.pid
