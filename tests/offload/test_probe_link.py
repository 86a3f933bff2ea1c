"""`colibri-kit probe` shows, warns of, records and compares what the link did: real engine, real module."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from colibri_kit.errors import EngineError
from colibri_kit.offload.frames import RESULT
from colibri_kit.probe import act, result, table, verdict
from colibri_kit.probe.plan import make_plan
from colibri_kit.probe.result import Result
from colibri_kit.transport.local import LocalTransport

from . import faulty
from .conftest import eb, reference
from .faulty import TO_BOARD, FaultyRelay

KINDS = ("late", "dropped", "cut", "crc", "garbage", "gaps", "refused", "errors", "wrong")


@pytest.fixture(scope="module")
def model(convert: Callable[..., Path]) -> Path:
    return convert(reference("olmoe", "q4_k_m").gguf)


def measure(model: Path, link: str | None, *, share: int | None = 100) -> Result:
    recorded = ["--offload-share", str(share), "--offload-deadline", "20000"] if link and share else []
    steps = make_plan(
        str(eb.tool()), str(model), recorded=recorded, runs=2, tokens=8, prompt_tokens=8, threads=1, ctx=64,
        samples=False, timeout=120, offload=link,
    )  # fmt: skip
    return act.run(LocalTransport(), steps)


@pytest.fixture(scope="module")
def plain(model: Path) -> Result:
    return measure(model, None)


@pytest.fixture
def linked(model: Path, module: Any, tmp_path: Path) -> Result:
    module(model, "--listen", f"unix:{tmp_path}/s")
    return measure(model, f"unix:{tmp_path}/s")


def test_counters_are_those_of_both_ends(model: Path, module: Any, tmp_path: Path) -> None:
    """The module saw what the engine says it sent in the runs, and before them greeting, PINGs and trial."""
    there = module(model, "--listen", f"unix:{tmp_path}/s")
    got = measure(model, f"unix:{tmp_path}/s")
    stats, link = there.stop(), got.offload
    assert link is not None and link.state == "up" and link.trouble == {}
    # docs/offload.md for d = 256, 2 of the experts a token, Q8_K, 2 layers: 1 token, and a prompt of 8.
    one, prompt = 2 * (28 + 32 + 292), 2 * (28 + 16 + 8 * 16 + 8 * 292)
    assert link.bytes_out == 2 * (8 * one + prompt)
    # A CREDIT of 32 comes behind its RESULT: the one before the runs and the last may fall to either side.
    late = 2 * 2 * (8 * (44 + 2 * 1024 + 32) + (44 + 16 * 1024 + 32)) - link.bytes_in
    assert late in (-32, 0, 32)
    greeting = (28 + 144) + 4 * 28 + sum(28 + n for n in (1024, 4096, 16384))
    assert stats["bytes_in"] - link.bytes_out == greeting + one // 2 + prompt  # trial, the cold prompt
    assert link.local == link.connects == 0 and stats["failed"] == 0
    assert stats["rows"] > link.experts > 0  # an expert of the prompt has several rows
    assert link.module is not None and link.module.startswith("colibri ")


def test_table_json_and_warnings(linked: Result, plain: Result) -> None:
    text = table.render(linked, "here")
    (line,) = [row for row in text.splitlines() if row.startswith("offload ")]
    assert linked.offload is not None
    assert f"{linked.offload.experts} experts there, 0 sent but computed here" in line
    assert re.search(r"sent [\d.]+ MiB, received [\d.]+ MiB, waited [\d.]+ ms; latency [\d.]+ ms", line)
    assert not re.search(rf"\b({'|'.join(KINDS)}) \d", line)
    assert not any("offload" in words for words in verdict.warnings(linked))
    assert plain.offload is None and "offload" not in table.render(plain, "here")
    assert result.of_dict(json.loads(json.dumps(linked.raw))) == linked


def test_a_cut_link_is_named(model: Path, module: Any, tmp_path: Path) -> None:
    module(model, "--listen", f"unix:{tmp_path}/s")
    relay = FaultyRelay(tmp_path / "r", tmp_path / "s", RESULT, TO_BOARD, faulty.cut, range(20, 21))
    try:
        got = measure(model, f"unix:{tmp_path}/r")
    finally:
        relay.close()
    assert relay.done == 1 and got.offload is not None
    assert got.offload.trouble["cut"] == 1 and got.offload.local > 0
    assert "; cut 1" in table.render(got, "here")
    (warning,) = [w for w in verdict.warnings(got) if "offload" in w]
    assert warning.startswith("trouble on the offload link (") and "cut 1" in warning


def test_nobody_there_is_named(model: Path, tmp_path: Path) -> None:
    got = measure(model, f"unix:{tmp_path}/nobody")
    (warning,) = [w for w in verdict.warnings(got) if "offload" in w]
    assert warning.startswith(
        f"the offload link was down: connecting to the module at unix:{tmp_path}/nobody"
    )
    assert "offload            down; 0 experts there" in table.render(got, "here")


def test_compare(linked: Result, plain: Result) -> None:
    assert linked.offload is not None
    worse = replace(linked, offload=replace(linked.offload, latency_ns=linked.offload.latency_ns * 2, late=3))
    rows = {c.name: c for c in verdict.compare(linked, worse)}
    assert (rows["link latency"].percent, rows["link latency"].better) == (pytest.approx(100), False)
    assert (rows["link: late"].base, rows["link: late"].now, rows["link: late"].better) == (0, 3, False)
    assert rows["experts there"].better is None and rows["sent but computed here"].better is None
    line = next(r for r in table.render_changes(list(rows.values())).splitlines() if "link: late" in r)
    assert line.split() == ["link:", "late", "0", "3", "worse"]
    assert not any("link" in c.name for c in verdict.compare(plain, linked))
    assert "with an offload link, was without" in verdict.differences(plain, linked)
    assert "without an offload link, was with" in verdict.differences(linked, plain)


def test_whatever_is_missing_is_an_error(linked: Result) -> None:
    for key in ("state", "why", "module", "latency_ns", "bytes_s", "experts", "local", "bytes_out",
                "bytes_in", "wait_ns", "connects", *KINDS):  # fmt: skip
        broken = copy.deepcopy(linked.raw)
        del broken["offload"][key]
        with pytest.raises(EngineError):
            result.of_dict(broken)


def test_every_counter_of_the_document_is_read(linked: Result) -> None:
    """docs/offload.md, the engine's JSON and the kit name the same counters."""
    text = (Path(__file__).resolve().parents[2] / "docs/offload.md").read_text()
    section = text[text.index("## What is counted") : text.index("## Does it pay")]
    documented = set(re.findall(r"^\| ([a-z]+) \|", section, re.MULTILINE)) - {"counter"}
    assert documented == {"experts", "local", *KINDS}
    assert documented <= set(linked.raw["offload"])


def test_the_verb(model: Path, module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--offload LINK` reaches the engine; --json holds the block, --compare compares it."""
    from colibri_kit.commands import probe as verb

    module(model, "--listen", f"unix:{tmp_path}/s")
    monkeypatch.setattr(verb, "_host_engine", lambda ui: str(eb.tool()))
    args = ["--model", str(model), "--runs", "1", "--tokens", "4", "--prompt-tokens", "4", "--threads", "1",
            "--offload", f"unix:{tmp_path}/s", "--json"]  # fmt: skip
    done = CliRunner().invoke(verb.command, args)
    assert done.exit_code == 0, done.output
    doc = json.loads(done.stdout)
    assert doc["probe"]["offload"]["state"] == "up"
    (tmp_path / "base.json").write_text(done.stdout)
    done = CliRunner().invoke(verb.command, [*args, "--compare", str(tmp_path / "base.json")])
    assert done.exit_code == 0, done.output
    assert "link latency" in {c["name"] for c in json.loads(done.stdout)["compare"]}
