"""The embedded page, and what /status, /metrics and answers say about experts."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
from pathlib import Path

import engine_build as eb

from tests.service.rig import Service, frozen, parse, read_all, request
from tests.service.test_stay_up import ask, link, until

SERVE = eb.NATIVE / "serve"


def test_the_page_is_the_one_in_the_tree(service: Service) -> None:
    spec = importlib.util.spec_from_file_location("make_page", SERVE / "make_page.py")
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    html = (SERVE / "page.html").read_bytes()
    assert (SERVE / "page.c").read_text() == made.page_c(html)
    assert service.get("/")[1] == html


def test_the_page_needs_nothing_from_outside(service: Service) -> None:
    html = service.get("/")[1].decode()
    assert re.findall(r"""(?:src|href|url\(|import)\s*[=(]?\s*["']?(?:https?:)?//""", html) == []
    assert '<meta name="viewport"' in html
    head = service.raw(request("GET", "/")).partition(b"\r\n\r\n")[0]
    assert b"Content-Security-Policy: default-src 'none'" in head
    # the script asks for nothing but /status, and every name it reads is there
    names = set(re.findall(r"\bs\.([a-z_]+)\b", html))
    assert names <= set(service.json("/status")), names - set(service.json("/status"))


def test_status_and_metrics_add_up(service: Service) -> None:
    before = service.metrics()
    service.complete("word", max_tokens=5, seed=1)
    status, after = service.json("/status"), service.metrics()
    assert sum(n for _, n in status["ledger"]) == status["total"] == after["memory_planned_bytes"]
    assert {len(row) for row in status["heat"]} == {8}
    assert len(status["heat"]) == 2
    assert "9" in "".join(status["heat"])
    newest = status["recent"][0]
    assert newest["completion_tokens"] == after["tokens_answer_total"] - before["tokens_answer_total"]
    buckets = [v for k, v in after.items() if k.startswith("request_seconds_bucket")]
    assert buckets == sorted(buckets)
    assert buckets[-1] == after["request_seconds_count"] == before["request_seconds_count"] + 1


def test_the_text_format_is_prometheus(service: Service) -> None:
    kinds: dict[str, str] = {}
    for line in service.get("/metrics")[1].decode().splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name not in kinds
            kinds[name] = kind
        elif not line.startswith("# HELP "):
            found = re.fullmatch(r'([a-z_]+)(\{[a-z]+="[^"]*"(,[a-z]+="[^"]*")*\})? -?[0-9.e+-]+', line)
            assert found, line
            base = re.sub(r"_(bucket|sum|count)$", "", found[1])
            assert found[1] in kinds or kinds.get(base) == "histogram", line


# ---- answers that are not the model's own --------------------------------------


def break_experts(model: Path) -> None:
    """Every second expert of the shard, in place: the open file sees it."""
    shard = model / "experts-0000.coli"
    data = bytearray(shard.read_bytes())
    for at in range(len(data) // 4, len(data), 100_000):
        data[at] ^= 0x10
    with shard.open("r+b") as f:
        f.write(data)


def test_degraded_answers_say_so(model: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(model, tmp_path / "copy.coli"))
    with Service(copy, "--cache-experts", "0", "--on-bad-expert", "next") as s:
        clean = s.complete("word", max_tokens=20, seed=1)["colibri"]
        assert (clean["degraded"], clean["zeros"], clean["extra"]) == (0, 0, 0)
        break_experts(copy)
        lossy = s.complete("word", max_tokens=20, seed=1)["colibri"]
        assert lossy["degraded"] > 0
        figures = s.metrics()
        assert figures["degraded_answers_total"] == 1
        assert figures["unhealthy_experts"] > 0
        assert s.log("request")[-1]["degraded"] == lossy["degraded"]
        ask = json.dumps({"prompt": "word", "max_tokens": 5, "stream": True}).encode()
        assert b'"degraded":0' not in s.raw(request("POST", "/v1/completions", ask))


def test_a_failed_expert_is_named_and_the_service_lives(model: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(model, tmp_path / "copy.coli"))
    with Service(copy, "--cache-experts", "0") as s:
        break_experts(copy)
        status, doc = s.post("/v1/completions", {"prompt": "word", "max_tokens": 20, "seed": 1})
        assert status == 500
        assert doc["error"]["code"] == "expert_failed"
        assert re.search(r"layer \d+, expert \d+", doc["error"]["message"])
        assert s.json("/health")["status"] == "ok"
        assert s.metrics()["failed_expert_answers_total"] == 1


def test_extra_experts_say_so(model: Path) -> None:
    with Service(model, "--extra-expert-below", "1e6") as s:
        assert s.complete("word", max_tokens=5, seed=1)["colibri"]["extra"] > 0
        assert s.metrics()["extra_answers_total"] == 1


# ---- whose fault it was, and for how long ---------------------------------------


def test_each_of_a_batch_gets_its_own_count(model: Path) -> None:
    """Alone and among others a request meets the same: here, routings with one more expert."""
    asks = [{"prompt": [5 + 7 * i, 90 + i], "max_tokens": 12 + 5 * i, "seed": i} for i in range(4)]
    with Service(model, "--sequences", "4", "--extra-expert-below", "2.6") as s:
        alone = [s.complete(**a) for a in asks]
        counts = [a["colibri"]["extra"] for a in alone]
        assert len(set(counts)) > 1
        assert all(n > 0 for n in counts)
        rows = sum(a["usage"]["total_tokens"] for a in alone)
        assert sum(counts) < 2 * rows  # two layers: not every routing
        with frozen(s):
            held = [ask(s, **a) for a in asks]
            until(lambda: s.json("/health")["queued"] == 4)
        together = [json.loads(parse(read_all(c))[1]) for c in held]
        for c in held:
            c.close()
        assert [a["choices"] for a in together] == [a["choices"] for a in alone]
        assert [a["colibri"]["extra"] for a in together] == counts
        assert s.metrics()["extra_total"] == 2 * sum(counts)


def test_unhealthy_experts_go_with_their_release(model: Path, tmp_path: Path) -> None:
    bad, current = Path(shutil.copytree(model, tmp_path / "bad.coli")), tmp_path / "current.coli"
    link(bad, current)
    with Service(current, "--cache-experts", "0", "--on-bad-expert", "next", "--hot-swap") as s:
        break_experts(bad)
        s.complete("word", max_tokens=20, seed=1)
        gone = s.metrics()["unhealthy_experts"]
        assert gone == s.json("/status")["unhealthy"] > 0
        os.kill(s.pid, signal.SIGHUP)  # the same damaged files: refused, and what was stays
        assert "golden" in s.wait_for("swap_refused")["message"]
        assert s.metrics()["unhealthy_experts"] == gone
        link(model, current)
        os.kill(s.pid, signal.SIGHUP)
        s.wait_for("swapped")
        assert s.metrics()["unhealthy_experts"] == s.json("/status")["unhealthy"] == 0
        assert s.complete("word", max_tokens=20, seed=1)["colibri"]["degraded"] == 0
