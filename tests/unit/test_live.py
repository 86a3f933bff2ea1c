"""Frames, pictures and journals from text: no service, no network, no terminal."""

from __future__ import annotations

import itertools
import json
import math
import random
from datetime import datetime, timezone

import pytest

from colibri_kit.deploy import services
from colibri_kit.deploy.plan import Settings
from colibri_kit.deploy.serving import ServeOptions
from colibri_kit.errors import UsageError
from colibri_kit.live import draw, frame, journal, sample, service
from colibri_kit.live.ask import NoAnswer, ask
from colibri_kit.transport.sshforward import Endpoint, ForwardRefused, parse_endpoint

BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


def histogram_text(name: str, seconds: list[float]) -> str:
    lines = [f'colibri_{name}_bucket{{le="{b:g}"}} {sum(s <= b for s in seconds)}' for b in BOUNDS]
    lines.append(f'colibri_{name}_bucket{{le="+Inf"}} {len(seconds)}')
    return "\n".join(
        [*lines, f"colibri_{name}_sum {sum(seconds)}", f"colibri_{name}_count {len(seconds)}", ""]
    )


def moment(
    at: float, *, health: str = "ok", steps: list[float] | None = None, **figures: float
) -> sample.Sample:
    """A sample with the shapes of the service's answers; ``figures`` override /metrics."""
    layers = figures.pop("layers", 3)
    values = {
        "up_seconds": at, "tokens_answer_total": 0, "tokens_prompt_total": 0, "tokens_per_second": 0,
        "requests_active": 0, "requests_queued": 0, "memory_planned_bytes": 300 << 20,
        "memory_budget_bytes": 400 << 20, "expert_hits_total": 0, "expert_misses_total": 0,
        "expert_bytes_read_total": 0, **figures,
    }  # fmt: skip
    metrics = "# HELP colibri_x y\n" + "".join(f"colibri_{k} {v!r}\n" for k, v in values.items())
    metrics += 'colibri_temperature_celsius{zone="0",type="cpu \\"a\\""} 51.500\n'
    metrics += histogram_text("step_seconds", steps or [])
    status = {
        "model": "small", "arch": "qwen3moe", "version": "0.1.0", "isa": "neon", "threads": 4, "ctx": 2048,
        "golden": "ab" * 32, "uptime_s": at, "sequences": 4, "capacity": 12, "slots": 20, "records": 96,
        "ledger": [["dense weights", 100 << 20], ["experts", 150 << 20], ["KV cache", 50 << 20],
                   ["stacks", 0]],
        "heat": ["0123456789" * 3 + "09"] * layers, "heat_experts": 32, "temperature": [["cpu", 51.5]],
        "recent": [
            {"id": "1", "kind": "chat", "stream": True, "status": 200, "finish": "stop", "prompt_tokens": 9,
             "completion_tokens": 21, "first_token_ms": 400.0, "total_ms": 2400.0, "ago_s": 3.0}
        ] * 16,
    }  # fmt: skip
    return sample.read(
        at, json.dumps({"status": health}).encode(), json.dumps(status).encode(), metrics.encode()
    )


def text(made: frame.Frame, width: int, height: int, **more: object) -> list[str]:
    return [line.plain for line in draw.draw(made, "pi@board", width, height, **more)]  # type: ignore[arg-type]


def test_metrics_are_read_with_labels_and_escapes() -> None:
    found = sample.parse_metrics('# c\ncolibri_a 2\nother{x="1\\"\\n}{",b="y"} +Inf\ncolibri_e 1e3 12345\n')
    assert found == {"a": {(): 2.0}, "other": {(("b", "y"), ("x", '1"\n}{')): math.inf}, "e": {(): 1000.0}}
    for bad in ("colibri_a", "colibri_a x", "{} 1", "colibri a 1"):
        with pytest.raises(ValueError):
            sample.parse_metrics(bad)


@pytest.mark.parametrize("seed", range(20))
def test_quantiles_lie_in_the_bucket_of_the_true_one(seed: int) -> None:
    """Compared with the sorted values themselves, which the histogram no longer has."""
    draws = random.Random(seed)
    values = sorted(draws.lognormvariate(-2, 2) for _ in range(draws.randint(1, 400)))
    now = moment(100.0, steps=values)
    for q in (0.5, 0.99):
        got = sample.quantile(now.histogram("step_seconds"), q)
        true = values[max(0, math.ceil(q * len(values)) - 1)]
        edges = [0.0, *BOUNDS, math.inf]
        i = next(i for i, (a, b) in enumerate(itertools.pairwise(edges)) if a < true <= b)
        assert got is not None and edges[i] <= got <= min(edges[i + 1], 300.0), (q, true, got)


def test_quantiles_of_nothing_and_beyond_the_last_bound() -> None:
    assert sample.quantile([], 0.5) is None
    assert sample.quantile(moment(1.0).histogram("step_seconds"), 0.5) is None
    assert sample.quantile(moment(1.0, steps=[1e4]).histogram("step_seconds"), 0.5) == 300.0


def test_rates_come_from_two_samples() -> None:
    a = moment(100.0, tokens_answer_total=1000, tokens_per_second=7.5, expert_hits_total=50,
               expert_misses_total=50, expert_bytes_read_total=0, steps=[0.2] * 5)  # fmt: skip
    b = moment(104.0, tokens_answer_total=1050, tokens_per_second=7.5, expert_hits_total=140,
               expert_misses_total=60, expert_bytes_read_total=8 << 20,
               steps=[0.2] * 5 + [2.0] * 10)  # fmt: skip
    alone, both = frame.make(b), frame.make(b, a, a, speeds=(1.0, 2.0))
    assert (alone.tokens_per_s, alone.window_s, alone.experts.lately_hit_rate) == (7.5, 0.0, None)
    assert both.tokens_per_s == 50 / 4
    assert both.speeds == (1.0, 2.0, 12.5)
    assert both.service_tokens_per_s == 7.5
    assert both.experts.hit_rate == 140 / 200
    assert both.experts.lately_hit_rate == 90 / 100
    assert both.experts.read_bytes_per_s == 2 << 20
    step = {x.name: x for x in both.latency}["step"]
    assert (step.count, step.lately_count) == (15, 10)
    assert step.counts == (0, 0, 0, 0, 0, 5, 0, 0, 10, 0, 0, 0, 0, 0, 0)
    assert step.p50 is not None and 1 < step.p50 <= 2.5
    assert step.lately_p50 is not None and 1 < step.lately_p50 <= 2.5
    assert alone.recent[0].tokens_per_s == 20 / 2.0


def test_a_restart_is_no_negative_rate() -> None:
    a = moment(500.0, tokens_answer_total=9000, expert_hits_total=10)
    b = moment(502.0, up_seconds=1.0, tokens_answer_total=30, tokens_per_second=3.0, expert_hits_total=1)
    made = frame.make(b, a, a)
    assert made == frame.make(b)
    assert made.tokens_per_s == 3.0


@pytest.mark.parametrize(
    ("before", "now", "state"),
    [
        ({}, {}, "unused"),
        ({"offload_connects_total": 1}, {"offload_connects_total": 1}, "idle"),
        ({"offload_connects_total": 1, "offload_experts_total": 5},
         {"offload_connects_total": 1, "offload_experts_total": 9}, "working"),
        ({"offload_connects_total": 1},
         {"offload_connects_total": 1, 'offload_trouble_total{kind="cut"}': 2}, "trouble"),
        ({"offload_connects_total": 1, 'offload_trouble_total{kind="cut"}': 2},
         {"offload_connects_total": 1, 'offload_trouble_total{kind="cut"}': 2}, "idle"),
    ],
)  # fmt: skip
def test_the_link_to_a_module(before: dict[str, float], now: dict[str, float], state: str) -> None:
    made = frame.make(moment(3.0, **now), moment(1.0, **before))
    assert made.offload.state == state
    shown = [line for line in text(made, 80, 24) if line.startswith("offload")]
    assert bool(shown) == (state != "unused")


@pytest.mark.parametrize("layers", [0, 1, 3, 27, 94])
@pytest.mark.parametrize(("width", "height"), [(80, 24), (81, 25), (100, 30), (200, 60)])
def test_the_picture_fits_and_grows(layers: int, width: int, height: int) -> None:
    trouble = {"offload_connects_total": 1, "degraded_answers_total": 2, "queue_full_total": 3}
    made = frame.make(moment(9.0, layers=layers, **trouble), speeds=[float(i) for i in range(400)])
    lines = text(made, width, height)
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    assert all("\n" not in line for line in lines)
    whole = "\n".join(lines)
    for words in ("small", "pi@board", "offload", "golden abababababab", "2 degraded", "3 queue full",
                  "cpu 52 °C", "300 MiB of 400 MiB", "20 slots for 96"):  # fmt: skip
        assert words in whole, words
    rows = [line for line in lines if line.startswith("layer ")]
    assert (len(rows) > 0) == (layers > 0)
    if layers and height == 60:
        assert len(rows) >= min(layers, 15)
    if layers:
        assert rows[0].startswith("layer 0")
        assert f"{layers - 1} " in rows[-1]
    assert sum(" stream 200 " in line for line in lines) >= 1


def test_the_picture_says_what_is_wrong() -> None:
    made = frame.make(moment(9.0, health="stuck"), throttled=("under-voltage",), release="r2026-1")
    whole = "\n".join(text(made, 100, 30, lost="nothing listens"))
    for words in ("lost, retrying", "nothing listens", "under-voltage", "r2026-1"):
        assert words in whole
    assert " stuck " in text(made, 80, 24)[0]


def test_ascii_only_where_blocks_cannot_be_shown() -> None:
    made = frame.make(moment(9.0, steps=[0.1, 3.0]), speeds=(1.0, 5.0))
    assert "\n".join(text(made, 80, 24, glyphs=draw.ASCII)).isascii()


def test_hostile_answers_are_errors_or_harmless() -> None:
    good = moment(9.0)
    status = dict(good.status)
    for key, value in (
        ("heat", ["12x"]), ("heat", [5]), ("ledger", [1]), ("ledger", 7), ("recent", [{}]), ("model", None),
        ("threads", "many"), ("uptime_s", []), ("temperature", [["a"]]),
    ):  # fmt: skip
        bad = sample.Sample(9.0, good.health, {**status, key: value}, good.metrics)
        if key == "model":
            assert frame.make(bad).model == "None"
            continue
        with pytest.raises(sample.Odd):
            frame.make(bad)
    evil = sample.Sample(9.0, good.health, {**status, "model": "\x1b]0;x\x07\x9b2J[bold]m"}, good.metrics)
    shown = "\n".join(text(frame.make(evil), 80, 24))
    assert "[bold]m" in shown
    assert not any(c in shown for c in "\x1b\x07\x9b")
    for broken in (b"", b"[]", b"{", b"\xff"):
        with pytest.raises(sample.Odd):
            sample.read(1.0, b"{}", broken, b"colibri_a 1\n")
    with pytest.raises(sample.Odd):
        sample.read(1.0, b"{}", b'{"model":"x"}', b"<html>")


class Pipe:
    """A connection that gives what it was told to."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces, self.sent, self.closed = list(pieces), b"", False

    def settimeout(self, seconds: float | None, /) -> None:
        assert seconds is None or seconds > 0

    def recv(self, size: int, /) -> bytes:
        return self.pieces.pop(0) if self.pieces else b""

    def sendall(self, data: bytes, /) -> None:
        self.sent += data

    def close(self) -> None:
        self.closed = True


def test_answers_in_pieces_and_in_a_row() -> None:
    whole = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi" + (
        b"HTTP/1.1 503 No\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
    )
    pipe = Pipe(*(whole[i : i + 1] for i in range(len(whole))))
    got = ask(pipe, ["/a", "/b"], token="secret-of-16-chars", timeout=5)
    assert [(a.status, a.body) for a in got] == [(200, b"hi"), (503, b"abc")]
    assert pipe.sent.count(b"Authorization: Bearer secret-of-16-chars\r\n") == 2
    assert pipe.sent.count(b"Connection: close") == 1
    assert pipe.closed
    for bad in (b"", b"SSH-2.0-x\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhi", b"\0" * 100):
        with pytest.raises(NoAnswer):
            ask(Pipe(bad), ["/a"], token=None, timeout=5)
    with pytest.raises(NoAnswer, match="more than 4 MiB"):
        ask(Pipe(*[b"x" * (1 << 20)] * 6), ["/a"], token=None, timeout=5)


@pytest.mark.parametrize(
    ("given", "want"),
    [
        ("8080", Endpoint("127.0.0.1", 8080)),
        ("10.0.0.7:81", Endpoint("10.0.0.7", 81)),
        ("[::1]:81", Endpoint("::1", 81)),
        ("board.local:65535", Endpoint("board.local", 65535)),
        ("/run/colibri/s", Endpoint("/run/colibri/s")),
    ],
)
def test_endpoints(given: str, want: Endpoint) -> None:
    assert parse_endpoint(given) == want
    assert parse_endpoint(str(want)) == want


@pytest.mark.parametrize(
    "bad", ["", "0", "65536", "host", "::1:80", "a b:80", "run/x", "/" + "x" * 107, "-1"]
)
def test_no_endpoints(bad: str) -> None:
    with pytest.raises(UsageError):
        parse_endpoint(bad)


@pytest.mark.parametrize(
    ("command", "at"),
    [
        ("serve --listen 127.0.0.1:9000", Endpoint("127.0.0.1", 9000)),
        ('args="serve --listen=0.0.0.0:9000"', Endpoint("127.0.0.1", 9000)),
        ("serve --token-file /t \\\n  --listen [::]:9000", Endpoint("::1", 9000)),
        ("serve --listen none --unix /run/colibri/s.sock", Endpoint("/run/colibri/s.sock")),
        ("serve --unix /run/colibri/s.sock", service.DEFAULT),
        ("serve", service.DEFAULT),
    ],
)
def test_where_an_installed_service_listens(command: str, at: Endpoint) -> None:
    lines = "".join(f"definition={line}\n" for line in f"x\n{command}".splitlines())
    found = service.parse_installed("kind=systemd\nactive=failed\n" + lines)
    assert (found.kind, found.active, found.at) == ("systemd", "failed", at)
    assert service.parse_installed("") == service.Installed()


@pytest.mark.parametrize("kind", ["systemd", "openrc", "sysv"])
@pytest.mark.parametrize(
    ("options", "at"),
    [
        (ServeOptions(), service.DEFAULT),
        (ServeOptions(listen="0.0.0.0:9000", token_file="/etc/tokens"), Endpoint("127.0.0.1", 9000)),
        (ServeOptions(listen="none", unix="/run/colibri/s"), Endpoint("/run/colibri/s")),
        (ServeOptions(listen="[::]:9000", unix="/run/colibri/s"), Endpoint("::1", 9000)),
    ],
)
def test_what_deploy_installs_is_understood(kind: str, options: ServeOptions, at: Endpoint) -> None:
    made = services.render(
        kind, services.Service("/srv/co-li.bri", "nobody", Settings(1 << 28), 1 << 29, options)
    )
    assert made is not None
    assert made.path in (f"/etc/systemd/system/{services.NAME}.service", f"/etc/init.d/{services.NAME}")
    lines = "".join(f"definition={line}\n" for line in made.text.splitlines())
    found = service.parse_installed(f"kind={kind}\nactive=active\n{lines}")
    assert found == service.Installed(kind, "active", at, "/srv/co-li.bri")


# ---- journals ---------------------------------------------------------------

ENGINE = '{"time":"2026-11-30T12:00:01.250Z","level":"info","event":"ready","port":8080}'
TEXT = "2026-11-30T12:00:01.250Z info request status=200"


def entry(message: object, at: float, who: str = "colibri") -> str:
    return json.dumps(
        {"MESSAGE": message, "__REALTIME_TIMESTAMP": str(round(at * 1e6)), "SYSLOG_IDENTIFIER": who}
    )


def test_journal_lines() -> None:
    at = datetime(2026, 11, 30, 12, 0, 1, 250000, timezone.utc).timestamp()
    own = journal.of_journal(entry(ENGINE, at))
    assert own == journal.Line(ENGINE, at, json.loads(ENGINE))
    words = journal.of_journal(entry(TEXT, at))
    assert words is not None and words.text == TEXT
    assert words.fields == {"time": "2026-11-30T12:00:01.250Z", "message": "info request status=200"}
    manager = journal.of_journal(entry("Started colibri.", at, "systemd"))
    assert manager is not None and manager.text == "2026-11-30T12:00:01.250Z systemd: Started colibri."
    assert manager.fields["identifier"] == "systemd"
    odd = journal.of_journal(entry([104, 105, 255], at))
    assert odd is not None and odd.fields["message"] == "hi\N{REPLACEMENT CHARACTER}"
    assert journal.of_journal("-- No entries --") is None
    empty = journal.of_journal('{"MESSAGE":null}')
    assert empty is not None and empty.time is None


def test_lines_of_a_file_since() -> None:
    lines = [
        journal.of_file(t) for t in ("loose", TEXT, "  more of it", TEXT.replace("12:00", "12:30"), "end")
    ]
    at = datetime(2026, 11, 30, 12, 15, tzinfo=timezone.utc).timestamp()
    assert [line.text for line in journal.kept(lines, at)] == [TEXT.replace("12:00", "12:30"), "end"]
    assert len(journal.kept(lines, None)) == 5
    assert len(journal.kept(lines, at - 3600)) == 4
    assert journal.of_file(ENGINE).fields["event"] == "ready"
    assert journal.of_file('{"broken').fields == {"message": '{"broken'}


def test_since_counts_on_the_boards_clock() -> None:
    assert journal.since_seconds("2h", 10_000.0) == 2800.0
    assert journal.since_seconds("10min ago", 10_000.0) == 9400.0
    assert journal.since_seconds("3d", 0.0) == -259200.0
    day = datetime(2026, 11, 30, 12, 0, tzinfo=timezone.utc).timestamp()
    assert journal.since_seconds("2026-11-30T12:00:00Z", 0.0) == day
    assert journal.since_seconds("2026-11-30 12:00", 0.0) == datetime(2026, 11, 30, 12, 0).timestamp()
    for bad in ("yesterday", "", "2 weeks", "12:00", "-1h", "@5"):
        with pytest.raises(UsageError):
            journal.since_seconds(bad, 0.0)


def test_pieces_become_lines() -> None:
    got: list[str] = []
    lines = journal.Splitter(got.append)
    data = "grün\n雪\n\nlast".encode()
    for i in range(len(data)):
        lines(data[i : i + 1])
    assert got == ["grün", "雪", ""]
    lines.end()
    assert got[-1] == "last"
    lines(b"x" * 200_000)
    assert len(got) == 5  # a line without an end does not pile up


def test_nothing_listens_where_the_user_said() -> None:
    refused = ForwardRefused("nothing listens at 127.0.0.1:9999 on b", nothing_there=True)
    at = Endpoint("127.0.0.1", 8080)
    found = service.Installed("systemd", "active", at)
    elsewhere = service.explain(refused, found, "b", Endpoint("127.0.0.1", 9999))
    assert elsewhere.message.endswith("; the systemd service there listens at 127.0.0.1:8080")
    assert elsewhere.hint == "leave --remote out"
    for remote in (None, at):
        loading = service.explain(refused, found, "b", remote)
        assert "may still be loading" in loading.message and loading.hint == "colibri-kit logs b --follow"
    unknown = service.explain(refused, service.Installed(), "b", at)
    assert "no service is installed" in unknown.message
