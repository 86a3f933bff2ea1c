"""Clients that are slow, many, or gone."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path

import pytest

from tests.service.rig import Service, frozen, parse, read_all, read_answer, request


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
    with frozen(strict):
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
    ask = json.dumps({"prompt": [5], "max_tokens": 480, "temperature": 0, "stream": stream}).encode()
    with frozen(service):
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
    assert after["tokens_answer_total"] - before["tokens_answer_total"] < 5 * 480
    assert service.json("/health")["active"] == 0


def test_a_deadline(model: Path) -> None:
    with Service(model, "--deadline", "1") as s:
        with frozen(s):
            c = s.connect()
            c.sendall(request("POST", "/v1/completions", b'{"prompt":"x","max_tokens":5}'))
            time.sleep(1.3)
        status, body = parse(read_all(c))
        c.close()
        assert status == 504
        assert json.loads(body)["error"]["code"] == "deadline_exceeded"
        assert s.complete("x", max_tokens=2)["usage"]["completion_tokens"] <= 2
