"""Hostile clients, a hostile journal, a machine that runs out of things: it goes on answering."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import random
import resource
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.service.rig import Service, frozen, parse, read_all, request, tool
from tests.service.test_options import write
from tests.service.test_stay_up import LONG, ask, link, open_files, until

# ---- the journal --------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Bare(Service):
    """A service whose stderr is what the test gives it; its journal is not read."""

    def __init__(
        self, model: Path, *options: str, stderr: Any, before: Callable[[], None] | None = None
    ) -> None:
        self.port = free_port()
        words = ["serve", "--model", str(model), "--log", "json", "--threads", "1"]
        self.process = subprocess.Popen(
            [tool(), *words, "--listen", f"127.0.0.1:{self.port}", *options], stderr=stderr, preexec_fn=before
        )

    def __enter__(self) -> Bare:
        def answers() -> bool:
            with contextlib.suppress(ConnectionError):
                return self.get("/health")[0] == 200
            assert self.process.poll() is None, f"it ended with {self.process.returncode}"
            return False

        until(answers, 60)
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        try:
            assert self.process.wait(20) == 0
        finally:
            self.process.kill()
            self.process.wait()

    def serve(self, n: int) -> None:
        """n requests, each with its line in the journal; none may take long."""
        for i in range(n):
            start = time.monotonic()
            assert self.complete("x", max_tokens=2, seed=i)["choices"]
            assert time.monotonic() - start < 5


def ends(kind: str) -> tuple[int, int]:
    """(what the test reads, what the service writes), with little room in between."""
    if kind == "pipe":
        r, w = os.pipe()
        fcntl.fcntl(w, 1031, 4096)  # F_SETPIPE_SZ
        return r, w
    if kind == "terminal":
        return pty.openpty()
    a, b = socket.socketpair()
    b.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return a.detach(), b.detach()


def drain(fd: int) -> bytes:
    """What lies in the journal until it is quiet."""
    os.set_blocking(fd, False)
    out, quiet = b"", 0
    while quiet < 20:
        try:
            data = os.read(fd, 65536)
            out, quiet = out + data, 0
        except BlockingIOError:
            quiet += 1
            time.sleep(0.01)
    return out


@pytest.mark.parametrize("kind", ["pipe", "socket", "terminal"])
def test_a_journal_that_nobody_reads(model: Path, kind: str) -> None:
    r, w = ends(kind)
    with Bare(model, stderr=w) as s:
        s.serve(300)
        flags = fcntl.fcntl(w, fcntl.F_GETFL)
        assert not flags & os.O_NONBLOCK  # the other owners' file is as it was
        first = drain(r)
        assert first.count(b'"event":"request"') < 290
        s.serve(3)
        second = drain(r)
        whole = [x for x in second.replace(b"\r", b"").split(b"\n") if x[:1] == b"{" and x[-1:] == b"}"]
        lines = [json.loads(x) for x in whole]
        lost = [x["lines"] for x in lines if x["event"] == "journal_lost"]
        kept = sum(t.count(b'"event":"request"') for t in (first, second))
        assert len(lost) == 1
        assert abs(lost[0] + kept - 303) <= 2  # a line that was cut off counts for both
        assert lines[-1]["event"] == "request"
    os.close(r)
    os.close(w)


def test_a_journal_that_is_gone(model: Path) -> None:
    r, w = os.pipe()
    with Bare(model, "--supervise", stderr=w) as s:
        os.close(w)
        os.close(r)
        s.serve(5)
        child = children(s.process.pid)[0]
        os.kill(child, signal.SIGKILL)
        until(lambda: children(s.process.pid) not in ([], [child]), 20)
        with s:
            s.serve(5)


def test_a_blocked_journal_and_a_fall(model: Path) -> None:
    r, w = ends("pipe")
    with Bare(model, "--supervise", stderr=w) as s:
        s.serve(60)
        child = children(s.process.pid)[0]
        os.kill(child, signal.SIGKILL)
        until(lambda: children(s.process.pid) not in ([], [child]), 20)
        s.__enter__()
        s.serve(5)
    os.close(r)
    os.close(w)


def children(pid: int) -> list[int]:
    return [int(x) for x in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def close_all() -> None:
    for fd in (0, 1, 2):
        with contextlib.suppress(OSError):
            os.close(fd)


def test_started_with_everything_closed(model: Path) -> None:
    """Otherwise the listening socket could be number 2, and lines of the journal answers."""
    with Bare(model, stderr=None, before=close_all) as s:
        held = [s.connect() for _ in range(3)]
        s.serve(5)
        for fd in range(3):
            assert str(Path(f"/proc/{s.process.pid}/fd/{fd}").readlink()) == "/dev/null"
        for c in held:
            c.setblocking(False)
            with pytest.raises(BlockingIOError):
                c.recv(1)
            c.close()


def test_a_full_disk(model: Path, tmp_path: Path) -> None:
    with Path("/dev/full").open("wb") as full, Bare(model, stderr=full) as s:
        s.serve(5)

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)

    with (tmp_path / "journal").open("wb") as out, Bare(model, stderr=out, before=limit) as s:
        s.serve(20)
    assert (tmp_path / "journal").stat().st_size <= 1000


# ---- clients --------------------------------------------------------------------------


@pytest.mark.parametrize("part", [b"P", b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nX: ", "body"])
def test_slow_requests_make_room(model: Path, part: bytes | str) -> None:
    whole = request("POST", "/v1/completions", b'{"prompt":"x","max_tokens":1}')
    start = whole[:-5] if part == "body" else part
    assert isinstance(start, bytes)
    with Service(model, "--connections", "6") as s:
        held = [s.connect() for _ in range(6)]
        for c in held:
            c.sendall(start)
        time.sleep(0.2)
        answer = s.raw(request("GET", "/health"))
        assert answer.startswith(b"HTTP/1.1 503") or answer == b""
        time.sleep(2)
        for _ in range(6):  # one after the other gets in, long before --io-timeout
            assert s.get("/health")[0] == 200
        for c in held:
            c.close()


def test_a_reader_that_takes_a_little_now_and_then(model: Path) -> None:
    """It never stands still for --io-timeout, and would hold its place for minutes."""
    one = request("POST", "/v1/completions", json.dumps({**LONG, "logprobs": 5}).encode())
    with Service(model, "--deadline", "2", "--io-timeout", "2") as s, socket.socket() as c:
        size = 6 * len(s.raw(one))
        assert size > 300_000  # more than the kernel's buffers hold
        c.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        c.connect(("127.0.0.1", s.port))
        c.sendall(one.replace(b"Connection: close\r\n", b"") * 6)
        start, got = time.monotonic(), 0
        with contextlib.suppress(ConnectionError):
            while s.metrics()["timeouts_total"] == 0:
                got += len(c.recv(600))
                time.sleep(0.2)
        assert 3.5 < time.monotonic() - start < 30
        assert 0 < got < size / 2
        until(lambda: s.metrics()["requests_draining"] == 0)
        assert s.log("request")[-1]["status"] == 499


def test_ten_thousand_connects(model: Path) -> None:
    with Service(model) as s:
        s.metrics(), s.json("/status")
        before, files = s.rss_anon(), open_files(s.pid)
        for i in range(10_000):
            c = s.connect()
            if i % 4 == 1:
                c.sendall(b"GET /health HTTP/1.1\r\n")
            if i % 4 == 2:
                c.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            if i % 4 == 3:
                c.shutdown(socket.SHUT_WR)
            c.close()
            if i % 1000 == 0:
                assert s.get("/health")[0] == 200
        until(lambda: open_files(s.pid) <= files)
        assert s.rss_anon() == before
        assert s.complete("x", max_tokens=2)["choices"]


STRANGE: list[Any] = [
    None, True, -1, 0, 1, 2**31, 2**32, 2**53, 2**63, 2**64 - 1, 2**64, 2**70, -(2**63), 1e308, -1e308,
    1e-320, 0.1, "", "x", "é", "\0", "\ud800", "\U0001f600" * 50, "a" * 70, [], [[]], ["", ""],
    ["a", "b", "c", "d", "e"], [-1], [10**9], {}, {"a": {}}, [{"role": "user", "content": "x"}],
]  # fmt: skip
FIELDS = (
    "prompt", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stream", "logprobs",
    "n", "model", "repeat_penalty", "echo", "stream_options", "messages", "top_logprobs", "logit_bias",
    "user", "best_of", "suffix",
)  # fmt: skip
BYTES = [
    b"\xff", b"\xc3", b"\xed\xa0\x80", b"\0", b"\\u0000", b"\\ud83d", b"\\udc00", b"\\", b'"', b"[" * 60,
    b"1e999",
]  # fmt: skip


def strange_requests(rng: random.Random, n: int) -> Iterator[bytes]:
    for _ in range(n):
        chat = rng.random() < 0.3
        doc: dict[str, Any] = {"max_tokens": 3, "seed": 1}
        doc |= {"messages": [{"role": "user", "content": "x"}]} if chat else {"prompt": "x"}
        for _ in range(rng.randrange(3)):
            doc[rng.choice(FIELDS)] = rng.choice(STRANGE)
        body = bytearray(json.dumps(doc, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass"))
        for _ in range(rng.choice([0, 0, 1, 3])):
            at = rng.randrange(len(body))
            body[at : at + rng.randrange(3)] = rng.choice(BYTES)
        path = "/v1/chat/completions" if chat else "/v1/completions"
        data = bytearray(request("POST", path, bytes(body)))
        if rng.random() < 0.1:
            data[rng.randrange(len(data))] = rng.randrange(256)
        yield bytes(data)


@pytest.mark.timeout(900)  # with the build
def test_strange_requests(model: Path) -> None:
    """Under the sanitizers: each gets an answer with a status, and none takes it down."""
    words = ["--sequences", "2", "--io-timeout", "1", "--idle-timeout", "1"]
    rng, seen = random.Random(7), set()
    with Service(model, *words, sanitizer="address") as s:
        for data in strange_requests(rng, 800):
            answer = s.raw(data)
            status, body = parse(answer)
            seen.add(status)
            if status >= 400 and b"HEAD" not in data[:5]:
                assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
            assert status < 500 or status in (501, 503, 505), (data, answer)
        assert {200, 400} <= seen
        assert s.complete("x", max_tokens=2, seed=1)["choices"]


def test_garbage_behind_a_request(service: Service) -> None:
    """What was asked before it is answered; then the connection ends with a refusal."""
    good = request("GET", "/health").replace(b"Connection: close\r\n", b"")
    for garbage in (b"\x16\x03\x01\x02\x00", b"GET\r\n\r\n", b"\r\n" * 9, b"A" * 20_000):
        answer = service.raw(good * 3 + garbage)
        assert answer.count(b"HTTP/1.1 200 OK") == 3
        assert answer.rfind(b"HTTP/1.1 4") > answer.rfind(b"HTTP/1.1 200")


# ---- the machine -------------------------------------------------------------------------


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_no_more_descriptors(model: Path) -> None:
    with Service(model, "--connections", "4") as s:
        keep = s.connect()
        keep.sendall(request("GET", "/health").replace(b"Connection: close\r\n", b""))
        assert keep.recv(4096).startswith(b"HTTP/1.1 200")
        old = resource.prlimit(s.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(s.pid, resource.RLIMIT_NOFILE, (open_files(s.pid), old[1]))
        waiting = s.connect()  # in the kernel's queue
        waiting.sendall(request("GET", "/health"))
        before = cpu_seconds(s.pid)
        time.sleep(2)
        assert cpu_seconds(s.pid) - before < 0.3
        keep.sendall(request("GET", "/health"))
        assert keep.recv(4096).startswith(b"HTTP/1.1 200")
        resource.prlimit(s.pid, resource.RLIMIT_NOFILE, old)
        assert parse(read_all(waiting))[0] == 200
        waiting.close()
        keep.close()


def test_stopped_while_a_release_is_loaded(model: Path) -> None:
    with Service(model, "--hot-swap") as s:
        for _ in range(200):
            s.process.send_signal(signal.SIGHUP)
            end = time.monotonic() + 1
            while s.json("/health")["status"] != "swapping" and time.monotonic() < end:
                pass
            with frozen(s):
                if s.json("/health")["status"] != "swapping":
                    continue
                s.process.send_signal(signal.SIGTERM)
                said = s.wait_for("stopped")
                assert "being loaded" in said["message"]
                time.sleep(0.3)
            assert s.process.wait(10) == 0
            return
        raise AssertionError("it was never seen to swap")


def test_signals_all_at_once(model: Path, tmp_path: Path) -> None:
    path, current = tmp_path / "serve.options", tmp_path / "current.coli"
    write(path, "queue 3\n")
    link(model, current)
    for n in range(6):
        with Service(current, "--hot-swap", "--sequences", "2", "--options", str(path)) as s:
            held = [ask(s, **LONG) for _ in range(3)]
            until(lambda s=s: sum(s.json("/health")[k] for k in ("active", "queued")) == 3)

            def storm(s: Service = s) -> None:
                for _ in range(40):
                    s.process.send_signal(signal.SIGHUP)

            threads = [threading.Thread(target=storm) for _ in range(3)]
            for t in threads:
                t.start()
            time.sleep(0.002 * n)
            s.process.send_signal(signal.SIGTERM)
            for t in threads:
                t.join()
            for c in held:
                status, _ = parse(read_all(c))
                assert status in (200, 503)
                c.close()
            assert s.process.wait(30) == 0


def test_slow_tokens_are_lines_of_the_journal(model: Path) -> None:
    with Service(model, "--token-deadline", "20", "--batch", "4") as s:
        c = ask(s, prompt=[5] * 400, max_tokens=1)
        until(lambda: s.json("/health")["active"] == 1)
        for _ in range(20):
            with frozen(s):
                time.sleep(0.1)
            if s.log("slow_token"):
                break
        assert s.log("slow_token")[0]["ms"] >= 20
        c.close()
        assert all(x.startswith("{") for x in s.journal.read_text().splitlines())
