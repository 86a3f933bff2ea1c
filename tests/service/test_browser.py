"""The status page in headless Chromium: what it shows is what /status and /metrics say."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.service.browser import Browser
from tests.service.rig import Service
from tests.service.test_stay_up import LONG, ask, frozen, parse, read_all, until

TOKEN = "0123456789abcdef0123456789abcdef"
TEXT = "document.body.innerText"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A phone: 360 × 740."""
    with Browser() as b:
        yield b


def open_page(b: Browser, s: Service) -> None:
    b.requests.clear()
    b.complaints.clear()
    b.open(s.url + "/")
    b.until(lambda: b.run("document.querySelectorAll('#bar span').length") > 0)


def figures(b: Browser) -> dict[str, str]:
    """name → value of the figures on top."""
    got = b.run(
        "Object.fromEntries([...document.querySelectorAll('#big > div')].map("
        "d => [d.querySelector('.soft').textContent, d.querySelector('b').textContent]))"
    )
    assert isinstance(got, dict)
    return got


def size(n: float) -> str:
    """As the page writes bytes."""
    if n >= 2**30:
        return f"{n / 2**30:.2f} GiB"
    return f"{n / 2**20:.1f} MiB" if n >= 2**20 else f"{n / 1024:.0f} KiB"


def test_it_shows_what_the_service_says(service: Service, browser: Browser) -> None:
    service.complete("word", max_tokens=9, seed=1)
    service.post("/v1/completions", {"prompt": "word", "max_tokens": 100000})  # 400: no request
    open_page(browser, service)
    status = service.json("/status")
    browser.until(lambda: len(browser.requests) >= 3)  # it asks again by itself
    shown, metrics = figures(browser), service.metrics()
    assert shown["tokens answered"] == f"{metrics['tokens_answer_total']:,.0f}"
    assert shown["computed / waiting"] == "0 / 0"
    assert browser.run("document.getElementById('model').textContent") == status["model"]
    assert browser.run("document.title").endswith(status["model"])
    assert status["golden"][:12] in browser.run("document.getElementById('facts').textContent")
    assert browser.complaints == []
    assert {u.removeprefix(service.url) for u in browser.requests} == {"/", "/status"}


LEGEND = (
    "[...document.querySelectorAll('#legend > span')]"
    ".map(s => ['span', 'em'].map(t => s.querySelector(t).textContent))"
)
PARTS = "[...document.querySelectorAll('#bar span')]"


@pytest.mark.parametrize("budget", ["", "64MiB"])
def test_the_ledger_is_the_ledger(model: Path, browser: Browser, budget: str) -> None:
    with Service(model, *(["--budget", budget] if budget else [])) as s:
        open_page(browser, s)
        metrics, status = s.metrics(), s.json("/status")
        start = 'memory_bytes{line="'
        lines = {k[len(start) : -2]: v for k, v in metrics.items() if k.startswith(start)}
        assert sorted(browser.run(LEGEND)) == sorted([name, size(n)] for name, n in lines.items() if n)
        whole = 64 << 20 if budget else status["total"]  # of all memory there is it is too little to see
        widths = browser.run(f"{PARTS}.map(s => parseFloat(s.style.width))")
        assert widths == pytest.approx([100 * n / whole for _, n in status["ledger"] if n], rel=1e-3)
        box = browser.run("document.getElementById('bar').getBoundingClientRect().width")
        drawn = browser.run(f"{PARTS}.map(s => s.getBoundingClientRect().width)")
        assert sum(drawn) / box == pytest.approx(metrics["memory_planned_bytes"] / whole, abs=0.04)
        assert size(metrics["memory_planned_bytes"]) in browser.run(
            "document.getElementById('whole').textContent"
        )


def test_the_heat_map_has_a_cell_an_expert(service: Service, browser: Browser) -> None:
    service.complete("word " * 20, max_tokens=20, seed=2)
    open_page(browser, service)
    status = service.json("/status")
    shades = browser.run(
        "(() => { const c = document.getElementById('heat');"
        " const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data, out = [];"
        " for (let y = 0; y < c.height; y++) { let row = [];"
        " for (let x = 0; x < c.width; x++) row.push(Math.round(d[4 * (y * c.width + x) + 3] * 9 / 255));"
        " out.push(row.join('')); } return out; })()"
    )
    assert shades == status["heat"]
    assert (len(shades), {len(row) for row in shades}) == (2, {8})  # layers × experts of the model
    assert len(set("".join(shades))) > 2
    assert browser.run("document.getElementById('heat').getBoundingClientRect().height") >= 40


def test_the_speed_is_the_metric(service: Service, browser: Browser) -> None:
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            service.complete("word", max_tokens=60, seed=1)

    worker = threading.Thread(target=work)
    worker.start()
    try:
        open_page(browser, service)

        def same() -> bool:
            told = f"{service.metrics()['tokens_per_second']:.1f}"
            return browser.run("document.getElementById('speed').textContent") == told != "0.0"

        browser.until(same)
        browser.until(
            lambda: (
                browser.run("document.querySelector('#line polyline').getAttribute('points')").count(" ") > 1
            )
        )
    finally:
        stop.set()
        worker.join()


def test_recent_requests(service: Service, browser: Browser) -> None:
    service.complete("word", max_tokens=7, seed=3)
    service.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3})
    open_page(browser, service)
    want = service.json("/status")["recent"]
    rows = browser.run(
        "[...document.querySelectorAll('#recent tr')].map(r => [...r.children].map(d => d.textContent))"
    )
    assert len(rows) == len(want) >= 2
    assert rows[0][0] == "chat"
    for row, r in zip(rows, want, strict=True):
        assert row[0].startswith(r["kind"])
        assert [row[3], row[4]] == [str(r["prompt_tokens"]), str(r["completion_tokens"])]
        assert r["finish"] in row[1]


def test_nothing_is_wider_than_a_phone(service: Service, browser: Browser) -> None:
    for i in range(16):
        service.complete("word " * (i + 1), max_tokens=1 + i, seed=i)
    open_page(browser, service)
    assert browser.run("document.documentElement.scrollWidth") <= 360
    wide = browser.run(
        "[...document.querySelectorAll('body *')].filter(e => e.getBoundingClientRect().right > 361)"
        ".map(e => e.outerHTML.slice(0, 100))"
    )
    assert wide == []
    small = browser.run(
        "[...document.querySelectorAll('body *')].filter(e => e.innerText && e.tagName !== 'SCRIPT')"
        ".map(e => parseFloat(getComputedStyle(e).fontSize)).reduce((a, b) => Math.min(a, b))"
    )
    assert small >= 13


def test_text_can_be_told_from_its_ground(service: Service) -> None:
    """WCAG's contrast of 4.5 to 1 for every text, by day and by night."""
    code = """(() => {
      const rgb = t => t.match(/[\\d.]+/g).map(Number);
      const part = v => (v /= 255) <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
      const light = c => .2126 * part(c[0]) + .7152 * part(c[1]) + .0722 * part(c[2]);
      const ground = e => {
        for (; e; e = e.parentElement) {
          const c = rgb(getComputedStyle(e).backgroundColor);
          if (c.length < 4 || c[3] > 0) return c;
        }
      };
      const says = e => e.tagName !== 'SCRIPT' && e.offsetParent &&
        [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim());
      return [...document.querySelectorAll('body *')].filter(says).map(e => {
        const a = light(rgb(getComputedStyle(e).color)), b = light(ground(e));
        return [(Math.max(a, b) + .05) / (Math.min(a, b) + .05), e.textContent];
      }).filter(x => x[0] < 4.5);
    })()"""
    for dark in (False, True):
        with Browser(dark=dark) as b:
            open_page(b, service)
            assert b.run("matchMedia('(prefers-color-scheme:dark)').matches") is dark
            assert b.run(code) == []


def test_a_prompt_under_way_and_an_end(model: Path, browser: Browser) -> None:
    with Service(model, "--batch", "1") as s:
        open_page(browser, s)
        with frozen(s):
            c = ask(s, **LONG)
            until(lambda: s.json("/health")["queued"] == 1)
            browser.until(lambda: figures(browser)["computed / waiting"] == "0 / 1")
        assert parse(read_all(c))[0] == 200
    browser.until(lambda: "no answer" in browser.run(TEXT))  # it is gone, and the page says so
    assert browser.run("getComputedStyle(document.getElementById('main')).opacity") < "1"


def type_token(b: Browser, text: str) -> None:
    b.run(
        f"document.getElementById('token').value = {json.dumps(text)},"
        "document.querySelector('#ask button').click()"
    )


def test_it_asks_for_the_token(model: Path, tmp_path: Path, browser: Browser) -> None:
    file = tmp_path / "tokens"
    file.write_text(TOKEN + "\n")
    file.chmod(0o600)
    visible: Any = "document.getElementById('token').offsetParent !== null"
    with Service(model, "--token-file", str(file)) as s:
        browser.open(s.url + "/")
        browser.until(lambda: browser.run(visible))
        assert "bearer token" in browser.run(TEXT)
        assert "Memory" not in browser.run(TEXT)
        type_token(browser, "f" * 32)
        browser.until(lambda: "not accepted" in browser.run(TEXT))
        asked = len(browser.requests)
        type_token(browser, TOKEN)
        browser.until(lambda: browser.run("document.querySelectorAll('#bar span').length") > 0)
        assert not browser.run(visible)
        assert len(browser.requests) > asked
        assert (
            browser.run("document.getElementById('model').textContent")
            == s.json("/status", Authorization=f"Bearer {TOKEN}")["model"]
        )
        assert TOKEN not in "".join(browser.requests)
        assert all(u.startswith(s.url) for u in browser.requests[-3:])
