"""HTTP as strict as docs/service.md says: malformed requests, limits, access, slow and vanishing clients."""

# ruff: noqa: E501
from __future__ import annotations

import json
import socket
import subprocess
import time
from pathlib import Path

import pytest

from tests.service.rig import Service, frozen, parse, read_all, request

LENGTH = b"Host: x.test\r\nContent-Type: application/json\r\nContent-Length: "

#: name -> (bytes, status)
MALFORMED: dict[str, tuple[bytes, int]] = {
    "tls": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    "http2 preface": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "no version": (b"GET /\r\n\r\n", 400),
    "version 2": (b"GET / HTTP/2.0\r\nHost: localhost\r\n\r\n", 505),
    "version 1.2": (b"GET / HTTP/1.2\r\nHost: localhost\r\n\r\n", 505),
    "version words": (b"GET / HTTP/1.1x\r\nHost: localhost\r\n\r\n", 400),
    "lower case version": (b"GET / http/1.1\r\nHost: localhost\r\n\r\n", 400),
    "two spaces": (b"GET  / HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
    "tab for a space": (b"GET\t/ HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
    "leading space": (b" GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
    "leading line": (b"\r\nGET / HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
    "absolute target": (b"GET http://localhost/ HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
    "authority target": (b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
    "star target": (b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
    "raw utf-8 target": ("GET /é HTTP/1.1\r\nHost: localhost\r\n\r\n".encode(), 400),
    "nul in target": (b"GET /\x00 HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
    "long target": (b"GET /" + b"a" * 1100 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 414),
    "endless request line": (b"GET /" + b"a" * 9000, 414),
    "bare lf": (b"GET / HTTP/1.1\nHost: localhost\n\n", 400),
    "lf in a header": (b"GET / HTTP/1.1\r\nHost: localhost\nX: y\r\n\r\n", 400),
    "bare cr": (b"GET / HTTP/1.1\r\nHost: local\rhost\r\n\r\n", 400),
    "nul in a header": (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: a\x00b\r\n\r\n", 400),
    "delete in a header": (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: a\x7fb\r\n\r\n", 400),
    "folded header": (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: a\r\n b\r\n\r\n", 400),
    "space before colon": (b"GET / HTTP/1.1\r\nHost : localhost\r\n\r\n", 400),
    "no colon": (b"GET / HTTP/1.1\r\nHost: localhost\r\nnonsense\r\n\r\n", 400),
    "empty name": (b"GET / HTTP/1.1\r\nHost: localhost\r\n: x\r\n\r\n", 400),
    "no host": (b"GET /health HTTP/1.1\r\n\r\n", 400),
    "two hosts": (b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n", 400),
    "too many headers": (b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 70 + b"\r\n", 431),
    "long header": (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 9000, 431),
    "length twice": (b"POST /v1/completions HTTP/1.1\r\n" + LENGTH + b"2\r\nContent-Length: 2\r\n\r\n{}", 400),
    "negative length": (b"POST /v1/completions HTTP/1.1\r\n" + LENGTH + b"-2\r\n\r\n{}", 400),
    "signed length": (b"POST /v1/completions HTTP/1.1\r\n" + LENGTH + b"+2\r\n\r\n{}", 400),
    "hex length": (b"POST /v1/completions HTTP/1.1\r\n" + LENGTH + b"0x2\r\n\r\n{}", 400),
    "list of lengths": (b"POST /v1/completions HTTP/1.1\r\n" + LENGTH + b"2, 2\r\n\r\n{}", 400),
    "empty length": (b"POST /v1/completions HTTP/1.1\r\n" + LENGTH + b"\r\n\r\n{}", 400),
    "huge length": (b"POST /v1/completions HTTP/1.1\r\n" + LENGTH + b"9" * 30 + b"\r\n\r\n", 413),
    "no length": (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n\r\n", 411),
    "chunked": (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        501,
    ),
    "chunked and length": (
        b"POST /v1/completions HTTP/1.1\r\n" + LENGTH + b"5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        501,
    ),
    "compressed": (b"POST /v1/completions HTTP/1.1\r\n" + LENGTH + b"2\r\nContent-Encoding: gzip\r\n\r\n{}", 415),
    "expect": (b"POST /v1/completions HTTP/1.1\r\n" + LENGTH + b"2\r\nExpect: more\r\n\r\n{}", 417),
    "authorization twice": (
        b"GET / HTTP/1.1\r\nHost: localhost\r\nAuthorization: a\r\nAuthorization: b\r\n\r\n",
        400,
    ),
    "foreign host": (b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n", 421),
    "host like ours": (b"GET / HTTP/1.1\r\nHost: localhost.evil.example\r\n\r\n", 421),
    "host like an address": (b"GET / HTTP/1.1\r\nHost: 127.0.0.1.evil.example:80\r\n\r\n", 421),
    "host with user": (b"GET / HTTP/1.1\r\nHost: localhost@evil.example\r\n\r\n", 421),
    "empty host": (b"GET / HTTP/1.1\r\nHost: \r\n\r\n", 421),
    "bad port": (b"GET / HTTP/1.1\r\nHost: localhost:80a\r\n\r\n", 421),
    "foreign origin": (b"GET / HTTP/1.1\r\nHost: localhost\r\nOrigin: http://evil.example\r\n\r\n", 403),
    "null origin": (b"GET / HTTP/1.1\r\nHost: localhost\r\nOrigin: null\r\n\r\n", 403),
    "unknown path": (b"GET /etc/passwd HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", 404),
    "dots": (b"GET /../../etc/passwd HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", 404),
    "delete": (b"DELETE /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", 405),
    "preflight": (b"OPTIONS /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", 405),
    "get of a post": (b"GET /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", 405),
    "post of a get": (b"POST /health HTTP/1.1\r\n" + LENGTH.replace(b"x.test", b"localhost") + b"0\r\nConnection: close\r\n\r\n", 405),
    "body of a get": (b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\n\r\nabc", 400),
    "form": (request("POST", "/v1/completions", b"prompt=x", Content_Type="application/x-www-form-urlencoded"), 415),
    "text": (request("POST", "/v1/completions", b"{}", Content_Type="text/plain"), 415),
    "large body": (request("POST", "/v1/completions", b"{" + b" " * 70000 + b"}"), 413),
    "no json": (request("POST", "/v1/completions", b"hello"), 400),
    "empty body": (request("POST", "/v1/completions", b""), 400),
    "a list": (request("POST", "/v1/completions", b"[]"), 400),
    "cut json": (request("POST", "/v1/completions", b'{"prompt": "x'), 400),
    "two values": (request("POST", "/v1/completions", b'{"prompt":"x"} {}'), 400),
    "key twice": (request("POST", "/v1/completions", b'{"prompt":"x","prompt":"y"}'), 400),
    "deep json": (request("POST", "/v1/completions", b'{"prompt":' + b"[" * 1000 + b"]" * 1000 + b"}"), 400),
    "stray bytes": (request("POST", "/v1/completions", b'{"prompt":"\xff\xfe"}'), 400),
    "lone surrogate": (request("POST", "/v1/completions", b'{"prompt":"\\ud800"}'), 400),
    "escaped nul": (request("POST", "/v1/completions", b'{"prompt":"a\\u0000b"}'), 400),
    "raw control": (request("POST", "/v1/completions", b'{"prompt":"a\nb"}'), 400),
    "nan": (request("POST", "/v1/completions", b'{"prompt":"x","temperature":NaN}'), 400),
    "huge number": (request("POST", "/v1/completions", b'{"prompt":"x","temperature":1e999}'), 400),
    "many values": (request("POST", "/v1/completions", b'{"prompt":[' + b"1," * 20000 + b"1]}"), 400),
}  # fmt: skip


@pytest.mark.parametrize("name", MALFORMED)
def test_what_is_not_right_gets_its_status(service: Service, name: str) -> None:
    data, want = MALFORMED[name]
    status, body = parse(service.raw(data))
    assert status == want, body
    error = json.loads(body)["error"]
    assert error["message"]
    assert error["type"] == ("server_error" if want >= 500 else "invalid_request_error")


@pytest.mark.parametrize("cut", [1, 7, 40, 90, 150])
def test_a_request_in_pieces(service: Service, cut: int) -> None:
    data = request("POST", "/v1/completions", b'{"prompt":"x","max_tokens":2,"seed":1}')
    with service.connect() as s:
        s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for part in (data[:cut], data[cut : cut + 3], data[cut + 3 :]):
            s.sendall(part)
            time.sleep(0.02)
        assert parse(read_all(s))[0] == 200


def test_one_byte_at_a_time(service: Service) -> None:
    with service.connect() as s:
        s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in request("GET", "/health"):
            s.sendall(bytes([byte]))
        assert parse(read_all(s))[0] == 200


def read_answer(s: socket.socket) -> tuple[int, bytes]:
    """One answer with Content-Length of a kept connection."""
    head = b""
    while b"\r\n\r\n" not in head:
        head += s.recv(1)
    n = int(next(x for x in head.split(b"\r\n") if x.startswith(b"Content-Length:")).split(b":")[1])
    body = b""
    while len(body) < n:
        body += s.recv(n - len(body))
    return int(head.split()[1]), body


def test_kept_and_pipelined(service: Service) -> None:
    keep = request("GET", "/health").replace(b"Connection: close\r\n", b"")
    with service.connect() as s:
        for _ in range(5):
            s.sendall(keep)
            assert read_answer(s)[0] == 200
        missing = request("GET", "/nothing").replace(b"Connection: close\r\n", b"")
        s.sendall(keep * 20 + missing + keep + request("GET", "/v1/models"))
        assert [read_answer(s)[0] for _ in range(22)] == [200] * 20 + [404, 200]
        assert parse(read_all(s))[0] == 200


def test_pipelined_behind_a_generation(service: Service) -> None:
    ask = request("POST", "/v1/completions", b'{"prompt":"x","max_tokens":40,"seed":1}')
    data = service.raw(ask.replace(b"Connection: close\r\n", b"") + request("GET", "/health"))
    first, second = data.split(b"0\r\n\r\nHTTP/1.1")
    assert parse(first + b"0\r\n\r\n")[0] == 200
    assert parse(b"HTTP/1.1" + second)[0] == 200


def test_http_1_0(service: Service) -> None:
    data = service.raw(b"GET /health HTTP/1.0\r\n\r\n")
    assert parse(data)[0] == 200
    body = b'{"prompt":"x","max_tokens":3,"seed":1}'
    ask = b"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    head, _, answer = service.raw(ask % len(body) + body).partition(b"\r\n\r\n")
    assert b"chunked" not in head
    assert json.loads(answer)["usage"]["completion_tokens"] <= 3


def test_head_has_no_body(service: Service) -> None:
    for path in ("/", "/health", "/metrics", "/v1/models"):
        head, _, body = service.raw(request("HEAD", path)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK")
        assert body == b""


def test_continue(service: Service) -> None:
    body = b'{"prompt":"x","max_tokens":2,"seed":1}'
    data = request("POST", "/v1/completions", body, Expect="100-continue")
    with service.connect() as s:
        s.sendall(data[: -len(body)])
        assert s.recv(25, socket.MSG_WAITALL) == b"HTTP/1.1 100 Continue\r\n\r\n"
        s.sendall(body)
        assert parse(read_all(s))[0] == 200


@pytest.mark.parametrize("host", ["localhost:1", "127.0.0.1", "[::1]:8080", "192.168.7.9:80", "LOCALHOST"])
def test_hosts_that_may_ask(service: Service, host: str) -> None:
    assert service.get("/health", Host=host)[0] == 200
    assert service.get("/health", Host=host, Origin=f"http://{host}")[0] == 200


def test_curl(service: Service) -> None:
    url = f"{service.url}/v1/completions"
    body = '{"prompt": "a", "max_tokens": 8, "seed": 2, "stream": true}'
    done = subprocess.run(
        ["curl", "-sSN", "--fail", url, "-H", "Content-Type: application/json", "-d", body],
        capture_output=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout.endswith(b"data: [DONE]\n\n")
    big = json.dumps({"prompt": "a" * 20000, "max_tokens": 1})
    done = subprocess.run(
        ["curl", "-sS", "-w", "%{http_code}", url, "-H", "Content-Type: application/json",
         "-H", "Expect: 100-continue", "-d", "@-"],
        input=big.encode(), capture_output=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout.endswith(b"400")
    assert b"context" in done.stdout


# ---- access -------------------------------------------------------------------


def test_tokens(model: Path, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("# who may ask\nfirst-token-0123456789\nsecond-token-0123456789\n")
    tokens.chmod(0o600)
    with Service(
        model, "--token-file", str(tokens), "--allow-host", "board.lan", "--listen", "0.0.0.0:0"
    ) as s:
        for good in ("first-token-0123456789", "second-token-0123456789"):
            assert s.get("/v1/models", Authorization=f"Bearer {good}", Host="board.lan:8080")[0] == 200
            assert (
                s.post("/v1/completions", {"prompt": "x", "max_tokens": 1}, Authorization=f"bearer {good}")[0]
                == 200
            )
        for bad in ("", "Bearer", "Bearer ", "Bearer first-token-012345678", "Basic first-token-0123456789",
                    "Bearer first-token-01234567890", "Bearer " + "x" * 4000):  # fmt: skip
            for path in ("/v1/models", "/metrics", "/status"):
                assert s.get(path, **({"Authorization": bad} if bad else {}))[0] == 401
            assert (
                s.post("/v1/completions", {"prompt": "x"}, **({"Authorization": bad} if bad else {}))[0]
                == 401
            )
        assert s.get("/health")[0] == s.get("/")[0] == 200
        assert s.metrics_with("first-token-0123456789")["unauthorised_total"] == 28
        journal = s.journal.read_text()
    assert "token-0123" not in journal


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--listen", "0.0.0.0:0"], "--token-file"),
        (["--listen", "[::]:0"], "--token-file"),
        (["--listen", "nowhere"], "expected ADDRESS:PORT"),
        (["--listen", "board:80"], "an address in digits"),
        (["--listen", "127.0.0.1:99999"], "expected ADDRESS:PORT"),
        (["--listen", "none"], "nobody could ask"),
        (["--token-file", "/nonexistent"], "No such file"),
        (["--allow-host", "a:80"], "without port"),
        (["--sequences", "40"], "--batch"),
    ],
)
def test_what_is_refused_before_loading(model: Path, options: list[str], words: str) -> None:
    import engine_build as eb

    done = eb.colibri("serve", "--model", model, *options)
    assert done.returncode == 2
    assert words in done.stderr.decode()
    assert b"golden" not in done.stderr


def test_a_token_file_that_all_may_read_is_refused(model: Path, tmp_path: Path) -> None:
    import engine_build as eb

    tokens = tmp_path / "tokens"
    tokens.write_text("first-token-0123456789\n")
    tokens.chmod(0o644)
    done = eb.colibri("serve", "--model", model, "--token-file", tokens)
    assert done.returncode == 2
    assert b"chmod 600" in done.stderr
    tokens.write_text("short\n")
    tokens.chmod(0o600)
    assert b"characters" in eb.colibri("serve", "--model", model, "--token-file", tokens).stderr


def test_a_port_that_is_taken(service: Service, model: Path) -> None:
    import engine_build as eb

    done = eb.colibri("serve", "--model", model, "--listen", f"127.0.0.1:{service.port}")
    assert done.returncode == 1
    assert b"Address already in use" in done.stderr


def test_a_unix_socket(model: Path, tmp_path: Path) -> None:
    import engine_build as eb

    path = tmp_path / "socket"
    with Service(model, "--unix", str(path)) as s:
        assert path.stat().st_mode & 0o777 == 0o660
        with socket.socket(socket.AF_UNIX) as c:
            c.connect(str(path))
            c.sendall(request("GET", "/health"))
            assert parse(read_all(c))[0] == 200
        done = eb.colibri("serve", "--model", model, "--listen", "none", "--unix", path)
        assert b"somebody answers there already" in done.stderr
        s.process.kill()
        s.process.wait()
        assert path.exists()
    with Service(model, "--unix", str(path), "--listen", "127.0.0.1:0"):
        pass  # a leftover is no obstacle
    assert not path.exists()


# ---- slow, many, gone -----------------------------------------------------------


@pytest.fixture(scope="module")
def strict(model: Path):  # type: ignore[no-untyped-def]
    """Short clocks, few connections."""
    options = ["--io-timeout", "1", "--idle-timeout", "2", "--connections", "6", "--queue", "2"]
    with Service(model, *options) as running:
        yield running


@pytest.mark.parametrize("part", [b"GET /hea", request("POST", "/v1/completions", b'{"prompt":"x"}')[:-3]])
def test_a_request_that_does_not_come(strict: Service, part: bytes) -> None:
    start = time.monotonic()
    assert parse(strict.raw(part))[0] == 408
    assert 0.9 < time.monotonic() - start < 6


def test_a_drip_does_not_hold_a_connection(strict: Service) -> None:
    """A byte now and then must not start the clock anew."""
    with strict.connect() as s:
        start = time.monotonic()
        got = b""
        s.settimeout(0.2)
        while not got and time.monotonic() - start < 10:
            try:
                s.sendall(b"G" if time.monotonic() - start < 0.1 else b"E")
                got = s.recv(100)
            except TimeoutError:
                continue
        assert got.startswith(b"HTTP/1.1 4")
        assert time.monotonic() - start < 6


def test_idle_connections_are_closed(strict: Service) -> None:
    with strict.connect() as s:
        s.sendall(request("GET", "/health").replace(b"Connection: close\r\n", b""))
        assert read_answer(s)[0] == 200
        start = time.monotonic()
        assert s.recv(1) == b""
        assert 1.5 < time.monotonic() - start < 8


def test_idle_ones_make_room(strict: Service) -> None:
    idle = [strict.connect() for _ in range(6)]
    try:
        time.sleep(0.2)
        for _ in range(4):
            assert strict.get("/health")[0] == 200
    finally:
        for s in idle:
            s.close()


def test_the_queue_is_bounded_and_busy_places_are_not_given_away(strict: Service) -> None:
    ask = request("POST", "/v1/completions", b'{"prompt":"x","max_tokens":3,"seed":1}')
    with frozen(strict.pid):
        held = [strict.connect() for _ in range(3)]
        for s in held:
            s.sendall(ask)
        while strict.json("/health")["queued"] < 3:
            time.sleep(0.01)
        data = strict.raw(ask)
        assert parse(data)[0] == 429
        assert b"\r\nRetry-After: 1\r\n" in data
        held += [strict.connect() for _ in range(3)]
        for s in held[3:]:
            s.sendall(ask[:30])
        time.sleep(0.3)
        turned = strict.raw(request("GET", "/health"))
        assert turned.startswith(b"HTTP/1.1 503") or turned == b""
    for s in held[:3]:
        assert parse(read_all(s))[0] == 200
    for s in held:
        s.close()
    assert strict.metrics()["queue_full_total"] == 1


def test_a_reader_that_stands_still_is_dropped(strict: Service) -> None:
    """Far more data than socket buffers hold: the page, many times over one connection."""
    one = request("GET", "/").replace(b"Connection: close\r\n", b"")
    before = strict.metrics()["timeouts_total"]
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        s.connect(("127.0.0.1", strict.port))
        s.sendall(one * 800)
        end = time.monotonic() + 60
        while strict.metrics()["timeouts_total"] == before and time.monotonic() < end:
            time.sleep(0.1)
    assert strict.metrics()["timeouts_total"] == before + 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_costs_nothing_more(service: Service, stream: bool) -> None:
    before = service.metrics()
    ask = json.dumps({"prompt": [3], "max_tokens": 500, "temperature": 0, "stream": stream}).encode()
    with frozen(service.pid):
        gone = [service.connect() for _ in range(10)]
        for s in gone:
            s.sendall(request("POST", "/v1/completions", ask))
        while service.json("/health")["queued"] < 10:
            time.sleep(0.01)
        for s in gone[:5]:  # in the queue
            s.close()
        while service.json("/health")["queued"] > 5:
            time.sleep(0.01)
    for s in gone[5:]:  # in prefill or decode
        s.close()
    end = time.monotonic() + 20
    while service.json("/health")["active"] + service.json("/health")["queued"] and time.monotonic() < end:
        time.sleep(0.02)
    after = service.metrics()
    assert after["cancelled_total"] - before["cancelled_total"] == 10
    assert after["tokens_answer_total"] - before["tokens_answer_total"] < 5 * 500
    assert service.json("/health")["active"] == 0


def test_a_deadline(model: Path) -> None:
    with Service(model, "--deadline", "1") as s:
        with frozen(s.pid):
            c = s.connect()
            c.sendall(request("POST", "/v1/completions", b'{"prompt":"x","max_tokens":5}'))
            time.sleep(1.3)
        status, body = parse(read_all(c))
        c.close()
        assert status == 504
        assert json.loads(body)["error"]["code"] == "deadline_exceeded"
        assert s.complete("x", max_tokens=2)["usage"]["completion_tokens"] <= 2
