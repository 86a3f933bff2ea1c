"""The whole service under ASan + UBSan, and under TSan: clients, load, hot swaps, options, drain.

COLIBRI_MINUTES=1 for the long form; COLIBRI_SANITIZE=address (or thread) before pytest
tests/service puts every other test of this folder under the sanitizer too.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import threading
from pathlib import Path

import hostile
import openai
import pytest

from tests.service import load
from tests.service.rig import REPORTS, Service, parse, read_all, tool
from tests.service.test_options import write
from tests.service.test_stay_up import LONG, ask, link, until

SECONDS = 60 * float(os.environ.get("COLIBRI_MINUTES", "0.15"))


@pytest.fixture(scope="module")
def releases(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The same weights under three names; the last one's golden is wrong."""
    top = tmp_path_factory.mktemp("releases")
    out = []
    for name in ("one", "two", "bad"):
        copy = Path(shutil.copytree(model, top / f"{name}.coli"))
        manifest = json.loads((copy / "manifest.json").read_text())
        manifest["name"] = name
        if name == "bad":
            manifest["golden"]["sha256"] = "0" * 64
        (copy / "manifest.json").write_text(json.dumps(manifest))
        out.append(copy)
    return out


def clients(service: Service) -> None:
    """What the openai package asks for, one after the other and at once."""
    base = service.url + "/v1"
    c = openai.OpenAI(base_url=base, api_key="-", max_retries=0)
    words = {"model": "colibri", "prompt": "a b", "max_tokens": 12, "seed": 3, "stop": ["zz"]}
    whole = c.completions.create(**words, logprobs=5)  # type: ignore[call-overload]
    parts = c.completions.create(**words, stream=True)  # type: ignore[call-overload]
    assert "".join(p.choices[0].text for p in parts) == whole.choices[0].text
    messages = [{"role": "user", "content": "Grüße 🐦"}]
    chat = c.chat.completions.create(  # type: ignore[call-overload]
        model="colibri", messages=messages, max_tokens=9, seed=1, logprobs=True, top_logprobs=20
    )
    assert len(chat.choices[0].logprobs.content) == chat.usage.completion_tokens
    with pytest.raises(openai.BadRequestError):
        c.completions.create(model="colibri", prompt="x", n=2)
    assert c.models.list().data[0].owned_by == "colibri"

    async def together() -> list[str]:
        async with openai.AsyncOpenAI(base_url=base, api_key="-", max_retries=0) as a:
            words = {"model": "colibri", "prompt": "x y", "max_tokens": 8}
            asks = [a.completions.create(**words, seed=i % 2) for i in range(6)]  # type: ignore[call-overload]
            return [got.choices[0].text for got in await asyncio.gather(*asks)]

    texts = asyncio.run(together())
    assert texts[::2] == texts[:1] * 3
    assert texts[1::2] == texts[1:2] * 3


class Swapper(threading.Thread):
    """Another release, other options, and a SIGHUP, again and again."""

    def __init__(self, service: Service, current: Path, options: Path, releases: list[Path]) -> None:
        super().__init__(daemon=True)
        self.service, self.current, self.options, self.releases = service, current, options, releases
        self.stop, self.n = threading.Event(), 0

    def run(self) -> None:
        while not self.stop.wait(0.7):
            link(self.releases[self.n % 3], self.current)
            lines = f"queue {3 + self.n % 2}\nidle-timeout {5 + self.n}\nallow-host h{self.n}.example\n"
            write(self.options, lines)
            self.service.process.send_signal(signal.SIGHUP)
            self.n += 1


@pytest.mark.timeout(900)
@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_no_report(releases: list[Path], tmp_path: Path, sanitizer: str) -> None:
    current, options = tmp_path / "current.coli", tmp_path / "serve.options"
    link(releases[0], current)
    options.write_text("queue 4\n")
    words = [
        "--sequences",
        "4",
        "--connections",
        "48",
        "--hot-swap",
        "--cache-experts",
        "6",
        "--readers",
        "2",
    ]
    s = Service(current, *words, "--options", str(options), sanitizer=sanitizer)
    s.port = int(s.wait_for("ready", seconds=120)["port"])
    clients(s)
    swapper = Swapper(s, current, options, releases)
    swapper.start()
    r = load.run(s, SECONDS, 24, chat=True)
    swapper.stop.set()
    swapper.join()
    assert r.wrong == []
    assert min(r.right, r.invalid, r.left, r.slow) > 0
    until(lambda: s.json("/health")["active"] + s.json("/health")["queued"] == 0, 60)
    clients(s)
    assert s.log("swapped")
    assert s.log("swap_refused")
    assert len(s.log("options_read")) == swapper.n
    running = [ask(s, **{**LONG, "stream": i % 2 == 1}) for i in range(4)]
    until(lambda: s.json("/health")["active"] == 4)
    s.process.send_signal(signal.SIGTERM)
    s.process.send_signal(signal.SIGHUP)
    for n, c in enumerate(running):
        answer = read_all(c)
        assert parse(answer)[0] == 200
        assert n % 2 == 0 or b"data: [DONE]" in answer
        c.close()
    assert s.process.wait(60) == 0
    said = s.journal.read_text(errors="replace")
    shutil.rmtree(s.folder)
    assert not any(word in said for word in REPORTS), said[-6000:]


def test_a_report_would_be_seen(model: Path) -> None:
    """The sanitizers are there: the journal of a build with them differs from one without."""
    binary = tool("address").read_bytes()
    assert b"__asan_init" in binary
    assert b"__ubsan_handle_shift_out_of_bounds" in binary
    assert b"__tsan_init" in tool("thread").read_bytes()
    more = {"ASAN_OPTIONS": hostile.ENV["ASAN_OPTIONS"] + ":handle_abort=1"}
    s = Service(model, sanitizer="address", env=more)
    with pytest.raises(AssertionError, match="AddressSanitizer: ABRT"), s:
        os.kill(s.process.pid, signal.SIGABRT)
        s.process.wait(20)
