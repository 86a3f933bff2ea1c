"""HTTP as strict as docs/service.md says: malformed requests, limits, access, slow and vanishing clients."""

# ruff: noqa: E501
from __future__ import annotations

import json
import socket
import subprocess
import time

import pytest

from tests.service.rig import Service, parse, read_all, read_answer, request

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
    "leading lines": (b"\r\n\r\nGET / HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
    "leading lf": (b"\nGET / HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
    "absolute foreign": (b"GET http://evil.example/health HTTP/1.1\r\nHost: localhost\r\n\r\n", 421),
    "absolute foreign, no header": (b"GET http://evil.example/health HTTP/1.0\r\n\r\n", 421),
    "absolute without header": (b"GET http://localhost/health HTTP/1.1\r\n\r\n", 400),
    "absolute with user": (b"GET http://localhost@evil.example/ HTTP/1.1\r\nHost: localhost\r\n\r\n", 421),
    "absolute, fragment": (b"GET http://evil.example#localhost/ HTTP/1.1\r\nHost: localhost\r\n\r\n", 421),
    "absolute without host": (b"GET http:///health HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
    "other scheme": (b"GET https://localhost/health HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
    "absolute, foreign origin": (
        b"GET http://localhost/health HTTP/1.1\r\nHost: evil.example\r\nOrigin: http://evil.example\r\n\r\n",
        403,
    ),
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


@pytest.mark.parametrize(
    "line",
    [
        "\r\nGET /health",
        "GET http://localhost/health",
        "GET HTTP://LOCALHOST:80/health?a=http://b/",
        "GET http://[::1]:8080/health",
    ],
)
def test_other_forms_of_a_request_line(service: Service, line: str) -> None:
    """RFC 9112: an empty line before it (2.2), the host in the target in place of the header (3.2.2)."""
    for version in ("1.1\r\nHost: evil.example", "1.0"):
        status, body = parse(service.raw(f"{line} HTTP/{version}\r\nConnection: close\r\n\r\n".encode()))
        if line.startswith("\r\n") and version != "1.0":
            assert status == 421, "without a host in the target the header counts"
        else:
            assert status == 200 and json.loads(body)["status"] == "ok"
    for root in ("http://localhost", "http://localhost?x", "http://localhost/"):
        page = service.raw(f"GET {root} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        assert parse(page)[0] == 200 and b"<html" in page


def test_curl_that_takes_it_for_a_proxy(service: Service) -> None:
    """A real client that writes the whole URL in its request line."""
    port = service.port
    done = subprocess.run(
        ["curl", "-sS", "-x", f"http://127.0.0.1:{port}", "http://127.0.0.1/health"],
        capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    assert done.returncode == 0 and json.loads(done.stdout)["status"] == "ok", done


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
