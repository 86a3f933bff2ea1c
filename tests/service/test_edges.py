"""What happens once in a year on a board: nothing of it may end the service or keep it busy."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.service.rig import Service, engine_thread, frozen, parse, read_all, request, tool
from tests.service.test_siege import Bare
from tests.service.test_stay_up import LONG, ask, until


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def child_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


# ---- connections --------------------------------------------------------------------


def test_a_half_closed_client_that_does_not_read_costs_no_time(model: Path) -> None:
    """More requests than the buffers hold, then an end: the socket stays readable for poll()."""
    with Service(model, "--io-timeout", "30") as s:
        c = socket.socket()
        c.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        c.connect(("127.0.0.1", s.port))
        c.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2800)  # 98 KB; 72 KB are taken
        c.shutdown(socket.SHUT_WR)
        time.sleep(0.5)
        before = cpu_seconds(s.pid)
        time.sleep(2)
        assert cpu_seconds(s.pid) - before < 0.5
        assert s.get("/health")[0] == 200
        c.close()


def test_http_1_0_gets_no_interim_answer(model: Path) -> None:
    """RFC 9110, 10.1.1: a server must ignore Expect: 100-continue of an HTTP/1.0 request."""
    body = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
    head = request("POST", "/v1/completions", body, Expect="100-continue")[: -len(body)]
    with Service(model) as s:
        for version, interim in (("1.0", False), ("1.1", True)):
            with s.connect(0.5) as c:
                c.sendall(head.replace(b"HTTP/1.1", f"HTTP/{version}".encode()))
                try:
                    got = c.recv(100)
                except TimeoutError:
                    got = b""
                assert (got == b"HTTP/1.1 100 Continue\r\n\r\n") is interim
                c.settimeout(30)
                c.sendall(body)
                assert read_all(c).startswith(b"HTTP/1.1 200 OK\r\n")


def test_a_stream_that_fails_on_the_way_is_noted_as_failed(model: Path) -> None:
    """Its head was 200 when it began; the journal and the histogram of whole answers know better."""
    with Service(model, "--deadline", "2") as s:
        for n in range(40):
            before = n
            c = ask(s, **LONG, stream=True)
            got = c.recv(4096)
            with contextlib.suppress(AssertionError), frozen(s):
                if s.json("/health")["active"]:
                    time.sleep(2.1)
            got += read_all(c)
            c.close()
            if b"deadline_exceeded" in got:
                break
        else:
            raise AssertionError("every one was over before its thread stood still")
        assert got.startswith(b"HTTP/1.1 200 OK")
        noted = s.wait_for("request", before + 1)
        assert (noted["status"], noted["finish"], noted["level"]) == (504, "deadline_exceeded", "error")
        assert s.metrics()["request_seconds_count"] == before
        assert s.json("/status")["recent"][0]["status"] == 504


def choices(answer: bytes) -> list[Any]:
    """Of a stream's events."""
    events = [e[6:] for e in answer.split(b"\n\n") if e.startswith(b"data: {")]
    assert answer.endswith(b"data: [DONE]\n\n")
    return [json.loads(e)["choices"] for e in events]


def test_events_do_not_depend_on_when_they_are_written(model: Path) -> None:
    """A token without text follows another one; it belongs to the same event, read at once or late."""
    body = json.dumps({**LONG, "logprobs": 1, "stream": True}).encode()
    with Service(model) as s:
        seen = []
        for wait in (0, 0, 0, 0, 0.5):
            with s.connect() as c:
                c.sendall(request("POST", "/v1/completions", body))
                time.sleep(wait)
                seen.append(choices(parse(read_all(c))[1]))
        tokens = [t for e in seen[0] for x in e if x["logprobs"] for t in x["logprobs"]["tokens"]]
        assert len(tokens) == 480
        assert all(one == seen[0] for one in seen[1:])


def test_an_answer_that_is_read_slowly_outlives_the_drain_of_the_engine(model: Path) -> None:
    """Nothing is computed any more when the signal comes, but the client has not yet got all of it."""
    body = json.dumps({**LONG, "logprobs": 5, "stream": True}).encode()

    with Service(model) as s:
        status, whole = parse(s.raw(request("POST", "/v1/completions", body)))
        assert status == 200
        assert len(whole) > 160_000  # more than both sides' buffers hold
        c = socket.socket()
        c.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        c.connect(("127.0.0.1", s.port))
        c.sendall(request("POST", "/v1/completions", body))
        until(lambda: s.metrics()["requests_draining"] == 1)
        s.process.send_signal(signal.SIGTERM)
        s.wait_for("stopping")
        time.sleep(1)
        assert s.process.poll() is None
        status, answer = parse(read_all(c))
        assert (status, choices(answer)) == (200, choices(whole))
        assert s.process.wait(10) == 0


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_what_is_computed_for_a_client_that_left_ends_with_the_step(model: Path, phase: str) -> None:
    """Its thread stands still when the client leaves: after that there is at most the step under way."""
    wanted: dict[str, Any] = LONG if phase == "decode" else {**LONG, "prompt": [5] * 500, "max_tokens": 12}
    with Service(model, "--batch", "1") as s:
        for _ in range(40):
            c = ask(s, **wanted)
            until(lambda: s.json("/health")["active"] == 1 or s.log("request"))
            with frozen(s):
                before = s.metrics()
                done, total = before["prefill_tokens_done"], before["prefill_tokens"]
                under_way = before["requests_active"] == 1
                hit = under_way and (done < total - 2 if phase == "prefill" else total == 0)
                c.close()
                if under_way:
                    seen = before["cancelled_total"]
                    while s.metrics()["cancelled_total"] == seen:
                        time.sleep(0.01)
            until(lambda: s.json("/health")["active"] == 0)
            after = s.metrics()
            if hit and before["tokens_answer_total"] < 470:
                break
        else:
            raise AssertionError(f"never stopped in {phase}")
        assert after["tokens_answer_total"] - before["tokens_answer_total"] <= (phase == "decode")
        assert s.complete("x", max_tokens=2)["choices"]


# ---- a Unix socket ------------------------------------------------------------------


def bound_not_listening(path: Path) -> bool:
    """/proc/net/unix: the flag 0x10000 is set when listen() was called."""
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        words = line.split()
        if words[-1] == str(path):
            return int(words[3], 16) & 0x10000 == 0
    return False


def test_a_socket_of_a_service_that_still_loads_is_not_taken_over(model: Path, tmp_path: Path) -> None:
    """Between bind() and listen() nobody answers on it: it looks like a leftover."""
    path = tmp_path / "socket"
    words = [
        str(tool()),
        "serve",
        "--model",
        str(model),
        "--listen",
        "none",
        "--unix",
        str(path),
        "--log",
        "json",
    ]
    for _ in range(100):
        path.unlink(missing_ok=True)
        first = subprocess.Popen(words, stderr=subprocess.DEVNULL)
        until(path.exists)
        first.send_signal(signal.SIGSTOP)
        if bound_not_listening(path):
            break
        first.kill()
        first.wait()
    else:
        raise AssertionError("it was always faster")
    try:
        second = subprocess.run(words, stderr=subprocess.PIPE, timeout=30, check=False)
        assert second.returncode == 1
        assert b"another service" in second.stderr
    finally:
        first.send_signal(signal.SIGCONT)

    def answers() -> bool:
        with socket.socket(socket.AF_UNIX) as c, contextlib.suppress(ConnectionError, FileNotFoundError):
            c.connect(str(path))
            c.sendall(request("GET", "/health"))
            return parse(read_all(c))[0] == 200
        return False

    until(answers)
    first.terminate()
    assert first.wait(20) == 0
    assert list(tmp_path.iterdir()) == []  # neither the socket nor its lock


# ---- files --------------------------------------------------------------------------


def test_a_token_file_that_became_a_pipe_stops_nothing(model: Path, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("0123456789abcdef\n")
    tokens.chmod(0o600)
    with Service(model, "--token-file", str(tokens)) as s:
        tokens.unlink()
        os.mkfifo(tokens, 0o600)
        s.process.send_signal(signal.SIGHUP)
        s.wait_for("tokens_kept", seconds=10)
        assert s.get("/v1/models", Authorization="Bearer 0123456789abcdef")[0] == 200


def test_health_reads_a_token_file_as_serve_does(model: Path, tmp_path: Path) -> None:
    """A comment longer than any token is still a comment."""
    tokens = tmp_path / "tokens"
    tokens.write_text("# " + "who may ask here " * 40 + "\n\nfedcba9876543210\n")
    tokens.chmod(0o600)
    with Service(model, "--token-file", str(tokens)) as s:
        words = [str(tool()), "health", "--listen", f"127.0.0.1:{s.port}", "--token-file", str(tokens)]
        done = subprocess.run([*words, "--prompt", "x"], capture_output=True, timeout=60, check=False)
        assert (done.returncode, done.stderr) == (0, b"")


# ---- managers and supervisors -------------------------------------------------------


@pytest.mark.parametrize("options", [(), ("--supervise",)], ids=["alone", "supervised"])
def test_ready_is_said_again_until_it_is_heard(model: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    """A manager that is busy while a board boots has a full socket: then send() does not take it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ear:
        ear.bind(str(tmp_path / "notify"))
        ear.settimeout(10)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other, contextlib.suppress(BlockingIOError):
            other.setblocking(False)
            for _ in range(10000):
                other.sendto(b"x", str(tmp_path / "notify"))
        with Service(model, *options, env={"NOTIFY_SOCKET": str(tmp_path / "notify")}) as s:
            time.sleep(0.5)
            heard = ear.recv(4096)
            while heard == b"x":
                heard = ear.recv(4096)
            assert heard == b"READY=1\nMAINPID=%d" % s.process.pid


def test_supervised_by_one_that_was_started_with_sigchld_ignored(model: Path) -> None:
    """An ignored SIGCHLD is inherited by exec: ends of children would be nobody's to see."""

    def ignore() -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)

    with Bare(model, "--supervise", stderr=subprocess.DEVNULL, before=ignore) as s:
        first = child_of(s.process.pid)
        os.kill(first, signal.SIGKILL)
        time.sleep(0.5)
        s.__enter__()  # it answers again
        assert child_of(s.process.pid) != first


def test_a_supervisor_without_descriptors_tries_again(model: Path) -> None:
    with Service(model, "--supervise") as s:
        first, hard = s.pid, resource.prlimit(s.process.pid, resource.RLIMIT_NOFILE)[1]
        resource.prlimit(s.process.pid, resource.RLIMIT_NOFILE, (3, hard))
        os.kill(first, signal.SIGKILL)
        s.wait_for("fork", seconds=15)
        resource.prlimit(s.process.pid, resource.RLIMIT_NOFILE, (1024, hard))
        again = s.wait_for("ready", 2)
        s.port = again["port"]
        assert s.get("/health")[0] == 200


def test_a_service_that_hangs_while_it_stops_is_ended(model: Path) -> None:
    """The supervisor's own end must not wait for ever for a child that does nothing at all."""
    with Service(model, "--supervise", "--watchdog", "2") as s:
        child = s.pid
        assert engine_thread(child)
        os.kill(child, signal.SIGSTOP)
        s.process.send_signal(signal.SIGTERM)
        assert s.process.wait(30) == 137
        assert s.log("no_beat")
        assert not Path(f"/proc/{child}").exists()


def test_told_twice_to_stop_the_supervisor_waits_no_longer(model: Path) -> None:
    with Service(model, "--supervise", "--watchdog", "300") as s:
        child = s.pid
        os.kill(child, signal.SIGSTOP)
        s.process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        s.process.send_signal(signal.SIGTERM)
        assert s.process.wait(10) == 137
        assert not Path(f"/proc/{child}").exists()


# ---- text ---------------------------------------------------------------------------


def test_characters_lie_whole_in_a_long_answer(model: Path) -> None:
    """A long text is written in pieces of 512 bytes; a stream's events are each shorter."""
    over = 0
    with Service(model) as s:
        for seed in range(60):
            asked = {**LONG, "temperature": 1.5, "seed": seed}
            text = s.complete(**asked)["choices"][0]["text"]
            _, stream = parse(
                s.raw(request("POST", "/v1/completions", json.dumps({**asked, "stream": True}).encode()))
            )
            assert text == "".join(c["text"] for e in choices(stream) for c in e)
            at = 0
            for char in text:  # a byte that is no UTF-8 came out as one U+FFFD
                n = 1 if char == "\N{REPLACEMENT CHARACTER}" else len(char.encode())
                over += at < 512 < at + n
                at += n
    assert over > 0, "no character lay on the border"


def test_a_stop_string_that_begins_with_a_token_takes_all_its_tokens_away(model: Path) -> None:
    with Service(model) as s:
        asked = {**LONG, "logprobs": 0}
        whole = s.complete(**asked)["choices"][0]
        tokens, offsets, text = whole["logprobs"]["tokens"], whole["logprobs"]["text_offset"], whole["text"]
        k = next(
            i for i in range(5, len(tokens) - 1)
            if (stop := tokens[i] + tokens[i + 1]).isascii() and len(tokens[i]) and len(tokens[i + 1])
            and "bytes:" not in stop and text.find(stop) == offsets[i]
        )  # fmt: skip
        cut = s.complete(**asked, stop=tokens[k] + tokens[k + 1])["choices"][0]
        assert (cut["text"], cut["finish_reason"]) == (text[: offsets[k]], "stop")
        assert cut["logprobs"]["tokens"] == tokens[:k]
