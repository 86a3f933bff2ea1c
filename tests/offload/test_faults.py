"""Bar 2: whatever happens to the link, the output stays, and the counters say what happened."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from colibri_kit.native import Engine
from colibri_kit.offload.frames import CREDIT, ERROR, EXEC, HELLO, PING, PONG, RESULT

from . import faulty
from .conftest import FAMILY, eventually, reference
from .faulty import TO_BOARD, TO_MODULE, FaultyRelay


@contextmanager
def linked(model: Path, link: Path, **more: Any) -> Iterator[Engine]:
    with Engine(model, threads=1, offload=f"unix:{link}", **{"offload_share": 100, **more}) as engine:
        yield engine


def same(engine: Engine, tokens: list[int], want: Any, step: int = 1) -> None:
    """All tokens from position 0, ``step`` at a time: the local logits, byte for byte."""
    engine.reset()
    got = [engine.eval(tokens[i : i + step])[0] for i in range(0, len(tokens), step)]
    assert np.concatenate(got).tobytes() == want.tobytes()


@pytest.fixture
def relay(tmp_path: Path) -> Iterator[Any]:
    made: list[FaultyRelay] = []

    def make(kind: int, way: int, harm: Any, which: range = range(1)) -> Path:
        path = tmp_path / f"relay{len(made)}"
        made.append(FaultyRelay(path, tmp_path / "s", kind, way, harm, which))
        return path

    make.made = made  # type: ignore[attr-defined]
    yield make
    for one in made:
        one.close()


WIRE = [
    (HELLO, TO_MODULE), (HELLO, TO_BOARD), (PING, TO_MODULE), (PONG, TO_BOARD), (EXEC, TO_MODULE),
    (RESULT, TO_BOARD), (CREDIT, TO_BOARD),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "way"), WIRE)
def test_cut(
    kind: int, way: int, model: Path, module: Any, relay: Any, tmp_path: Path, tokens: list[int], want: Any
) -> None:
    """The connection ends inside each kind of frame, twice; afterwards the link comes back."""
    module(model, "--listen", f"unix:{tmp_path}/s")
    path = relay(kind, way, faulty.cut, range(2))
    with linked(model, path) as engine:
        for _ in range(200):
            same(engine, tokens[:8], want[:8])
            if relay.made[0].done == 2 and engine.offload()["state"] == "up":
                break
            time.sleep(0.02)
        count = engine.counters()
        assert relay.made[0].done == 2
        assert count["offload_cut"] == 2
        eventually(lambda: engine.offload()["state"] == "up")
        same(engine, tokens, want)
        assert engine.counters()["offload_experts"] > count["offload_experts"]


def test_cut_at_error(
    model: Path, module: Any, relay: Any, tmp_path: Path, tokens: list[int], want: Any
) -> None:
    """An ERROR is provoked by a HELLO of another version, then cut."""
    module(model, "--listen", f"unix:{tmp_path}/s")
    first = relay(HELLO, TO_MODULE, faulty.version, range(1))
    second = tmp_path / "outer"
    outer = FaultyRelay(second, first, ERROR, TO_BOARD, faulty.cut, range(1))
    try:
        with linked(model, second) as engine:
            same(engine, tokens, want)
            eventually(lambda: engine.offload()["state"] == "up")
            assert outer.done == 1 and engine.counters()["offload_cut"] == 1
            same(engine, tokens, want)
    finally:
        outer.close()


@pytest.mark.parametrize(
    ("harm", "kind", "way", "counted"),
    [
        (faulty.garbage, RESULT, TO_BOARD, "offload_garbage"),
        (faulty.garbage, EXEC, TO_MODULE, None),
        (faulty.garbage, PONG, TO_BOARD, "offload_garbage"),
        (faulty.drop_byte, RESULT, TO_BOARD, "offload_crc"),
        (faulty.drop_byte, EXEC, TO_MODULE, "offload_late"),
        (faulty.flip, RESULT, TO_BOARD, "offload_crc"),
        (faulty.flip, EXEC, TO_MODULE, "offload_late"),
        (faulty.swallow, RESULT, TO_BOARD, "offload_gaps"),
        (faulty.swallow, CREDIT, TO_BOARD, "offload_gaps"),
        (faulty.twice, RESULT, TO_BOARD, "offload_gaps"),
        (faulty.twice, EXEC, TO_MODULE, "offload_dropped"),
    ],
)
def test_damage(
    harm: Any, kind: int, way: int, counted: str | None, model: Path, module: Any, relay: Any,
    tmp_path: Path, tokens: list[int], want: Any,
) -> None:  # fmt: skip
    """One frame of the second layer after greeting is harmed."""
    there = module(model, "--listen", f"unix:{tmp_path}/s")
    path = relay(kind, way, harm, range(1, 2))
    with linked(model, path, offload_deadline_ms=400) as engine:
        same(engine, tokens, want)
        assert relay.made[0].done == 1
        eventually(lambda: engine.offload()["state"] == "up")
        same(engine, tokens, want)
        count = engine.counters()
        if counted:
            assert count[counted] >= 1, count
        assert count["offload_wrong"] == 0
        assert count["offload_experts"] > 0
    stats = there.stop()
    if way == TO_MODULE and harm is faulty.garbage:
        assert stats["garbage"] >= 1
    if way == TO_MODULE and harm in (faulty.flip, faulty.drop_byte):
        assert stats["crc"] >= 1


def test_stall_of_a_second(
    model: Path, module: Any, relay: Any, tmp_path: Path, tokens: list[int], want: Any
) -> None:
    """The results come after the deadline: dropped by sequence number; the link proves itself by PING."""
    module(model, "--listen", f"unix:{tmp_path}/s")
    path = relay(RESULT, TO_BOARD, faulty.stall(1.0), range(2, 3))
    with linked(model, path) as engine:
        same(engine, tokens, want)
        count = engine.counters()
        assert count["offload_late"] == 1 and engine.offload()["state"] == "demoted"
        eventually(lambda: engine.offload()["state"] == "up")
        count = engine.counters()
        assert count["offload_dropped"] == 1 and count["offload_cut"] == 0
        same(engine, tokens, want)
        assert engine.counters()["offload_experts"] > count["offload_experts"]


def test_module_stopped_for_5_seconds(
    model: Path, module: Any, tmp_path: Path, tokens: list[int], want: Any
) -> None:
    """SIGSTOP in mid-work: no token waits longer than a deadline; after SIGCONT the link is used again."""
    there = module(model, "--listen", f"unix:{tmp_path}/s")
    with linked(model, tmp_path / "s") as engine:
        same(engine, tokens, want)
        there.pause()
        slowest, end = 0.0, time.monotonic() + 5
        while time.monotonic() < end:
            start = time.monotonic()
            same(engine, tokens[:4], want[:4])
            slowest = max(slowest, time.monotonic() - start)
            time.sleep(0.05)
        assert slowest < 1.5  # deadline of one layer, on a busy machine
        count = engine.counters()
        assert count["offload_late"] >= 1 and count["offload_local"] >= 1
        there.resume()
        eventually(lambda: engine.offload()["state"] == "up")
        same(engine, tokens, want)
        assert engine.counters()["offload_experts"] > count["offload_experts"]


def test_module_restarted_with_another_model(
    model: Path, module: Any, convert: Callable[..., Path], tmp_path: Path, tokens: list[int], want: Any
) -> None:
    link = tmp_path / "s"
    other = convert(reference(FAMILY, "f32").gguf)
    first = module(model, "--listen", f"unix:{link}")
    with linked(model, link) as engine:
        same(engine, tokens, want)
        first.kill()
        module(other, "--listen", f"unix:{link}")
        eventually(lambda: same(engine, tokens, want) or engine.counters()["offload_refused"] > 0)
        assert engine.counters()["offload_cut"] >= 1
        assert engine.offload()["state"] == "down"
        assert "another model" in engine.offload()["why"]
        same(engine, tokens, want)


@pytest.mark.parametrize("way", [TO_MODULE, TO_BOARD])
def test_another_protocol_version(
    way: int, model: Path, module: Any, relay: Any, tmp_path: Path, tokens: list[int], want: Any
) -> None:
    module(model, "--listen", f"unix:{tmp_path}/s")
    path = relay(HELLO, way, faulty.version, range(1000))
    with linked(model, path) as engine:
        same(engine, tokens, want)
        assert engine.counters()["offload_refused"] == 1
        assert engine.counters()["offload_experts"] == 0
        assert "protocol version" in engine.offload()["why"]


def test_a_module_with_other_bits_is_found_out(
    model: Path, module: Any, relay: Any, tmp_path: Path, tokens: list[int], want: Any
) -> None:
    """Its CRCs are right, its numbers are not: the trial after greeting fails, nothing else is sent."""
    module(model, "--listen", f"unix:{tmp_path}/s")
    path = relay(RESULT, TO_BOARD, faulty.other_bits, range(1000))
    with linked(model, path) as engine:
        same(engine, tokens, want)
        count = engine.counters()
        assert count["offload_wrong"] == 1 and count["offload_experts"] == 0
        assert engine.offload()["why"] == "the module computes other bits"


def test_golden_needs_no_link(model: Path, module: Any, tmp_path: Path) -> None:
    """The golden is this machine's own: only the trial row goes there."""
    there = module(model, "--listen", f"unix:{tmp_path}/s")
    with linked(model, tmp_path / "s") as engine:
        assert engine.golden() == engine.info()["golden"]
        assert engine.counters()["offload_experts"] == 0
    assert there.stop()["rows"] == 1


def test_nothing_is_allocated_while_the_link_comes_and_goes(
    model: Path, module: Any, relay: Any, tmp_path: Path
) -> None:
    """mmap, mremap, brk forbidden (no_alloc.c): results come, are cut, the link is dialled anew."""
    import subprocess

    from .conftest import eb

    source = str(Path(__file__).resolve().parents[1] / "unit" / "no_alloc.c")
    there = module(model, "--listen", f"unix:{tmp_path}/s")
    path = relay(RESULT, TO_BOARD, faulty.cut, range(40, 4000, 40))
    done = subprocess.run(
        [eb.program(source), model, "4000", f"unix:{path}"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    got = dict(pair.split("=") for pair in done.stdout.split())
    assert got["calls"] == "0" and got["rss_before"] == got["rss_after"]
    assert relay.made[0].done >= 1 and there.stop()["connections"] >= 2


def test_metrics(model: Path, module: Any, relay: Any, tmp_path: Path) -> None:
    """A served model whose link is cut goes on answering, and /metrics says so."""
    import json
    import socket
    import subprocess
    import urllib.request

    from .conftest import eb

    module(model, "--listen", f"unix:{tmp_path}/s")
    path = relay(RESULT, TO_BOARD, faulty.cut, range(3, 4))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    argv = [eb.tool(), "serve", "--model", model, "--threads", "1", "--listen", f"127.0.0.1:{port}"]
    argv += ["--offload", f"unix:{path}", "--offload-share", "100"]
    server = subprocess.Popen([str(a) for a in argv], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        try:
            return bool(urllib.request.urlopen(f"{url}/health", timeout=5).status == 200)
        except OSError:
            return False

    try:
        eventually(answers)
        body = json.dumps({"prompt": "ab", "max_tokens": 12, "temperature": 0}).encode()
        ask = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
        first = json.load(urllib.request.urlopen(ask, timeout=30))["choices"][0]["text"]
        text = urllib.request.urlopen(f"{url}/metrics", timeout=30).read().decode()
        assert 'colibri_offload_trouble_total{kind="cut"} 1' in text
        assert "colibri_offload_connects_total 1" in text
        assert json.load(urllib.request.urlopen(ask, timeout=30))["choices"][0]["text"] == first
    finally:
        server.terminate()
        assert server.wait(20) == 0


def test_figures_are_shown(model: Path, module: Any, tmp_path: Path) -> None:
    """run, check and probe report the link."""
    from .conftest import eb

    module(model, "--listen", f"unix:{tmp_path}/s")
    link = ["--offload", f"unix:{tmp_path}/s", "--offload-share", "100"]
    probe = eb.ok_json(
        "probe", "--model", model, "--runs", 1, "--tokens", 4, "--prompt-tokens", 4, *link
    )["offload"]  # fmt: skip
    assert probe["state"] == "up" and probe["experts"] > 0 and probe["bytes_s"] > 0
    for key in ("late", "dropped", "cut", "crc", "garbage", "gaps", "refused", "errors", "wrong"):
        assert probe[key] == 0
    done = eb.ok("run", "--model", model, "--prompt", "a", "-n", "2", *link)
    assert b"offload: up, " in done.stderr
