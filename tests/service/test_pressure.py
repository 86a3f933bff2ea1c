"""Full house: who gives up a place and who does not; a swap among readers that stand still; figures."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_model import DATA, NAME

from tests.service.rig import Service, frozen, parse, read_all, read_answer, request, tool, with_chat
from tests.service.test_stay_up import LONG, ask, link, until

TOKEN = "0123456789abcdef0123456789abcdef"


def keep(data: bytes) -> bytes:
    """A request that leaves its connection open."""
    return data.replace(b"Connection: close\r\n", b"")


def reads_little(s: Service, data: bytes) -> socket.socket:
    c = socket.socket()
    c.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    c.connect(("127.0.0.1", s.port))
    c.sendall(data)
    return c


def streamed(**more: Any) -> bytes:
    """LONG with logprobs, as a stream."""
    body = json.dumps({**LONG, "logprobs": 5, "stream": True, **more}).encode()
    return request("POST", "/v1/completions", body)


def stalled(s: Service, **more: Any) -> socket.socket:
    """A stream of LONG that is computed and longer than the buffers; its client does not read."""
    before = s.metrics()["requests_draining"]
    c = reads_little(s, streamed(**more))
    until(lambda: s.metrics()["requests_draining"] == before + 1)
    return c


def events(answer: bytes) -> list[Any]:
    status, body = parse(answer)
    assert status == 200
    assert body.endswith(b"data: [DONE]\n\n")
    return [json.loads(e[6:]) for e in body.split(b"\n\n") if e.startswith(b"data: {")]


# ---- places -------------------------------------------------------------------------


@pytest.fixture
def locked(model: Path, tmp_path: Path) -> Iterator[Service]:
    """Six places, and a token that the strangers below do not have."""
    tokens = tmp_path / "tokens"
    tokens.write_text(TOKEN + "\n")
    tokens.chmod(0o600)
    with Service(model, "--connections", "6", "--token-file", str(tokens)) as s:
        yield s


def drip(held: list[socket.socket], stop: threading.Event) -> None:
    while not stop.wait(0.3):
        for c in held:
            with contextlib.suppress(OSError):
                c.recv(1100, socket.MSG_DONTWAIT)


@pytest.mark.parametrize("way", ["silent", "dripping"])
def test_slow_readers_without_a_token_make_room(locked: Service, way: str) -> None:
    """They pipeline what needs no token. Those that drip take whole answers all the time."""
    many = keep(request("GET", "/" if way == "silent" else "/health")) * (60 if way == "silent" else 1200)
    stop = threading.Event()
    held = [reads_little(locked, many) for _ in range(6)]
    thread = threading.Thread(target=drip, args=(held if way == "dripping" else [], stop))
    thread.start()
    try:
        time.sleep(0.5)
        assert locked.raw(request("GET", "/health"))[:12] in (b"HTTP/1.1 503", b"")
        time.sleep(2)
        for _ in range(6):
            assert locked.raw(request("GET", "/health")).startswith(b"HTTP/1.1 200")
        assert locked.metrics_with(TOKEN)["timeouts_total"] >= 1
    finally:
        stop.set()
        thread.join()
        for c in held:
            c.close()


def test_who_waits_for_tokens_or_reads_them_keeps_its_place(model: Path) -> None:
    """The same crowd around a stream that its client reads late, and one that is not computed yet."""
    with Service(model, "--connections", "6", "--sequences", "1") as s:
        whole = events(s.raw(streamed()))
        kept = stalled(s)
        held = [reads_little(s, keep(request("GET", "/")) * 60) for _ in range(5)]
        time.sleep(2.5)
        for _ in range(12):  # one slow reader goes; then there is a place
            assert s.get("/health")[0] == 200
        held += [reads_little(s, keep(request("GET", "/")) * 60) for _ in range(3)]
        time.sleep(2.5)
        for _ in range(12):
            held.append(reads_little(s, keep(request("GET", "/")) * 60))
        late = events(read_all(kept))
        assert [e["choices"] for e in late] == [e["choices"] for e in whole]
        for c in held:
            c.close()
        with frozen(s):
            late_one = ask(s, **LONG)
            held = [reads_little(s, keep(request("GET", "/")) * 60) for _ in range(5)]
            time.sleep(2.5)
            for _ in range(12):
                assert s.get("/health")[0] == 200
        assert len(json.loads(parse(read_all(late_one))[1])["choices"]) == 1
        for c in (*held, kept, late_one):
            c.close()


def test_a_burst_gets_answers_or_is_turned_away_by_name(model: Path) -> None:
    """More requests than places lie in the kernel's buffers before the service sees the first."""
    one = request("GET", "/health")
    with Service(model, "--connections", "16") as s:
        before = s.metrics()["connections_refused_total"]
        s.process.send_signal(signal.SIGSTOP)
        held = []
        for _ in range(50):
            c = s.connect(10)
            c.sendall(one)
            held.append(c)
        s.process.send_signal(signal.SIGCONT)
        seen: collections.Counter[str] = collections.Counter()
        for c in held:
            got = b""
            try:
                while data := c.recv(4096):
                    got += data
                seen[got[9:12].decode()] += 1
            except ConnectionResetError:  # also behind an answer: other systems drop it then
                seen["reset"] += 1
            c.close()
        assert set(seen) == {"200", "503"}, seen
        assert seen["200"] >= 16
        assert s.metrics()["connections_refused_total"] - before == seen["503"]


def test_idle_connections_still_make_room_for_a_burst(model: Path) -> None:
    """Nothing was asked on them, so nothing is lost: the newcomers get their places at once."""
    with Service(model, "--connections", "8") as s:
        idle = [s.connect() for _ in range(4)]
        for c in idle:
            c.sendall(keep(request("GET", "/health")))
            assert read_answer(c)[0] == 200
        idle += [s.connect() for _ in range(4)]
        for _ in range(8):
            with s.connect() as c:
                c.sendall(request("GET", "/health"))
                assert parse(read_all(c))[0] == 200
        for c in idle:
            c.close()


# ---- a swap among readers that stand still --------------------------------------------


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights under another name, whose tokens are spelt with another alphabet."""
    top = tmp_path_factory.mktemp("other")
    small = range(ord("a"), ord("z") + 1)
    one = (1).to_bytes(8, "little")
    data = (DATA / f"{NAME}.gguf").read_bytes()
    old, new = (b"".join(one + bytes([c]) for c in way) for way in (small, reversed(small)))
    assert data.count(old) == 1
    (top / "other.gguf").write_bytes(data.replace(old, new))
    words = ["convert", str(top / "other.gguf"), "-o", str(top / "plain.coli"), "-q"]
    subprocess.run([sys.executable, "-m", "colibri_kit", *words], check=True, timeout=280)
    out = with_chat(top / "plain.coli", top / "other.coli")
    manifest = json.loads((out / "manifest.json").read_text())
    manifest["name"] = "another"
    (out / "manifest.json").write_text(json.dumps(manifest))
    return out


def swap(s: Service, current: Path, release: Path) -> None:
    link(release, current)
    s.process.send_signal(signal.SIGHUP)


def quick(s: Service) -> Any:
    start = time.monotonic()
    doc = s.complete([5], max_tokens=12, temperature=0)
    assert time.monotonic() - start < 5
    return doc


@pytest.fixture
def current(model: Path, tmp_path: Path) -> Path:
    """The link that is followed anew at each swap; to ``model``."""
    path = tmp_path / "current.coli"
    link(model, path)
    return path


def test_a_reader_that_stands_still_holds_neither_a_swap_nor_others(current: Path, other: Path) -> None:
    """Its answer stays that of the release that computed it: name, fingerprint, spelling of tokens."""
    with Service(current, "--hot-swap", "--sequences", "2", "--io-timeout", "60") as s:
        want = events(s.raw(streamed()))
        first = quick(s)
        c = stalled(s)
        swap(s, current, other)
        assert s.wait_for("swapped", seconds=10)["model"] == "another"
        assert quick(s)["model"] == "another"
        got = events(read_all(c))
        for key in ("choices", "model", "system_fingerprint"):
            assert [e[key] for e in got] == [e[key] for e in want]
        assert {e["model"] for e in got} == {first["model"]}
        again = events(s.raw(streamed()))
        assert {e["model"] for e in again} == {"another"}
        assert [e["choices"] for e in again] != [e["choices"] for e in want]
        c.close()


def test_the_second_swap_waits_for_a_reader_of_the_first_release_and_nobody_else(
    model: Path, current: Path, other: Path
) -> None:
    """There is room for two releases: the third needs that of the one whose tokens are still spelt."""
    with Service(current, "--hot-swap", "--sequences", "2", "--io-timeout", "60") as s:
        want = events(s.raw(streamed()))
        c = stalled(s)
        swap(s, current, other)
        s.wait_for("swapped", seconds=10)
        swap(s, current, model)
        s.wait_for("swap_wanted", 2)
        for _ in range(5):
            assert quick(s)["model"] == "another"
        time.sleep(1.5)
        assert len(s.log("swapped")) == 1
        got = events(read_all(c))
        assert [e["choices"] for e in got] == [e["choices"] for e in want]
        s.wait_for("swapped", 2, seconds=10)
        assert quick(s)["model"] == want[0]["model"]
        c.close()


def test_without_logprobs_a_reader_holds_no_swap_at_all(model: Path, current: Path, other: Path) -> None:
    with Service(current, "--hot-swap", "--io-timeout", "60") as s:
        c = stalled(s, logprobs=None)
        for n, release in enumerate((other, model, other)):
            swap(s, current, release)
            s.wait_for("swapped", n + 1, seconds=10)
            quick(s)
        got = events(read_all(c))
        assert {e["model"] for e in got} == {got[0]["model"]} != {"another"}
        c.close()


# ---- figures ------------------------------------------------------------------------


def test_figures_of_experts_while_every_request_fails(plain: Path, tmp_path: Path) -> None:
    """A card that loses its blocks: no step goes well any more, and that is when the figures count."""
    broken = Path(shutil.copytree(plain, tmp_path / "broken.coli"))
    with Service(broken, "--cache-experts", "0", "--no-lookahead") as s:
        assert s.complete("a", max_tokens=2)["choices"]
        before = s.metrics()
        assert before["unhealthy_experts"] == before["expert_retries_total"] == 0
        shard = broken / "experts-0000.coli"
        with shard.open("r+b") as f:
            f.seek(16384)
            f.write(bytes(shard.stat().st_size - 16384))
            os.fsync(f.fileno())
        for n in range(4):
            status, doc = s.post("/v1/completions", {"prompt": f"abc {n}", "max_tokens": 4})
            assert (status, doc["error"]["code"]) == (500, "expert_failed")
            now = s.metrics()
            assert now["failed_expert_answers_total"] == n + 1
            assert now["unhealthy_experts"] >= 1
            assert now["expert_retries_total"] >= now["unhealthy_experts"]
        assert s.json("/status")["unhealthy"] == now["unhealthy_experts"]


def test_figures_of_the_link_while_nobody_asks(model: Path, tmp_path: Path) -> None:
    where = f"unix:{tmp_path}/module"
    with Service(model, "--offload", where) as s:
        assert s.metrics()["offload_connects_total"] == 0
        words = [str(tool()), "expertd", "--model", str(model), "--threads", "1", "--listen", where]
        module = subprocess.Popen(words, stderr=subprocess.DEVNULL)
        try:
            until(lambda: s.metrics()["offload_connects_total"] >= 1)
        finally:
            module.kill()
            module.wait()
        until(lambda: s.metrics()['offload_trouble_total{kind="cut"}'] >= 1)
        assert s.log("request") == []


# ---- an empty line, a time-out, a long object -------------------------------------------


def test_an_empty_line_behind_a_request_starts_no_clock(model: Path) -> None:
    """What older clients send behind a body. Its connection is idle, whatever --io-timeout says."""
    body = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
    post = keep(request("POST", "/v1/completions", body))
    with Service(model, "--io-timeout", "1", "--idle-timeout", "30") as s, s.connect() as c:
        for _ in range(2):
            c.sendall(keep(request("GET", "/health")) + b"\r\n")
            assert read_answer(c)[0] == 200
            c.settimeout(2.5)
            with pytest.raises(TimeoutError):
                c.recv(1)
            c.settimeout(30)
        c.sendall(keep(request("GET", "/health")) + b"\r")  # a line in two pieces
        assert read_answer(c)[0] == 200
        c.sendall(b"\n" + post + b"\r\n" + request("GET", "/health"))
        answer = read_all(c)
        assert answer.startswith(b"HTTP/1.1 200")
        assert answer.count(b"HTTP/1.1 200") == 2
        assert s.metrics()["timeouts_total"] == s.metrics()["malformed_total"] == 0


@pytest.mark.parametrize("between", [0.0, 0.2])
def test_two_empty_lines_are_an_error(service: Service, between: float) -> None:
    with service.connect() as c:
        c.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        c.sendall(keep(request("GET", "/health")) + b"\r\n")
        assert read_answer(c)[0] == 200
        time.sleep(between)
        c.sendall(b"\r\n" + request("GET", "/health"))
        assert parse(read_all(c))[0] == 400


def test_a_time_out_is_counted_once(model: Path) -> None:
    with Service(model, "--io-timeout", "1") as s:
        assert parse(s.raw(b"GET /health HTTP/1.1\r\nHost: "))[0] == 408
        figures = s.metrics()
        assert (figures["timeouts_total"], figures["malformed_total"]) == (1, 0)
        assert parse(s.raw(b"GET\r\n\r\n"))[0] == 400
        figures = s.metrics()
        assert (figures["timeouts_total"], figures["malformed_total"]) == (1, 1)


def pairs(n: int) -> dict[str, int]:
    return {f"{i:04x}": i for i in range(n)}


@pytest.mark.parametrize(
    ("metadata", "right"),
    [
        (pairs(64), True),
        (pairs(65), False),
        (pairs(4000), False),
        ({"a": {"b": [{}, pairs(65)]}}, False),
        ({"a": pairs(64), "b": pairs(64), "c": ["x:" * 500, ':\\":' * 500, {"d": pairs(64)}]}, True),
        ([pairs(9)] * 100, True),
    ],
    ids=["most", "one more", "many", "inside", "each has few", "a list"],
)
def test_members_of_an_object(service: Service, metadata: Any, right: bool) -> None:
    """To look for keys that come twice takes the square of them, and everybody waits meanwhile."""
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "metadata": metadata}
    status, doc = service.post("/v1/chat/completions", body)
    if right:
        assert status == 200, doc
    else:
        assert status == 400
        assert doc["error"]["message"] == "an object with more than 64 members"
