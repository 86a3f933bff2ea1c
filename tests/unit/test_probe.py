"""The probe: order statistics, the engine's answer, verdicts, table, report."""

from __future__ import annotations

import base64
import copy
import ctypes as ct
import json
import re
import sys
from pathlib import Path
from typing import Any

import engine_build as eb
import numpy as np
import pytest
from click.testing import CliRunner
from engine_build import colibri, ok_json
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_model import tiny_model

from colibri_kit.errors import ConfigError, EngineError, LimitError, PreflightError, UsageError
from colibri_kit.probe import act, report, result, stats, table, verdict
from colibri_kit.probe.plan import ProbePlan, make_plan
from colibri_kit.transport.base import Completed
from colibri_kit.transport.fake import FakeTransport
from colibri_kit.transport.local import LocalTransport


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory)


@pytest.fixture(scope="module")
def answer(model: Path) -> dict[str, Any]:
    """A real answer with samples: 3 runs of 8 + 20 tokens."""
    flags = ["--runs", "3", "--tokens", "20", "--prompt-tokens", "8", "--samples", "--threads", "1"]
    doc: dict[str, Any] = ok_json("probe", "--model", model, *flags)
    return doc


# ---- statistics ------------------------------------------------------------

samples = st.lists(st.integers(0, 2**60), min_size=1, max_size=300)


@settings(max_examples=300, deadline=None)
@given(samples, st.integers(0, 100))
def test_nearest_rank_is_numpys_inverted_cdf(values: list[int], percent: int) -> None:
    # numpy works on the sorted indices: exact whatever the size of the values
    index = int(np.percentile(np.arange(len(values)), percent, method="inverted_cdf"))
    assert stats.nearest_rank(values, percent) == sorted(values)[index]


@settings(max_examples=300, deadline=None)
@given(samples, st.integers(0, 100))
def test_the_engine_computes_the_same(values: list[int], percent: int) -> None:
    lib = eb.library("cli/stats.c")
    lib.stats_rank.restype = ct.c_uint64
    array = (ct.c_uint64 * len(values))(*values)
    lib.stats_sort(array, ct.c_size_t(len(values)))
    assert list(array) == sorted(values)
    got = lib.stats_rank(array, ct.c_size_t(len(values)), ct.c_uint32(percent))
    assert got == stats.nearest_rank(values, percent)


def test_no_samples_no_percentile() -> None:
    with pytest.raises(ValueError, match="no samples"):
        stats.nearest_rank([], 50)
    with pytest.raises(ValueError, match="101th"):
        stats.nearest_rank([1], 101)
    with pytest.raises(ValueError, match="no samples"):
        stats.summary([])


# ---- the engine's answer ---------------------------------------------------


def test_figures_follow_from_the_samples(answer: dict[str, Any]) -> None:
    raw = answer["samples"]
    assert len(raw["token_ns"]) == 3 * 20
    assert len(raw["route_ns"]) == 3 * 20 * answer["model"]["n_moe_layer"] == 120
    assert len(raw["first_token_ns"]) == len(raw["prefill_ns"]) == len(raw["decode_ns"]) == 3
    for key in ("token_ns", "route_ns", "first_token_ns"):
        assert result.parse(json.dumps(answer)) is not None
        s = stats.summary(raw[key])
        want = {"n": s.n, "min": s.min, "p50": s.p50, "p90": s.p90, "p99": s.p99, "max": s.max}
        assert answer[key] == want
    for run in range(3):
        assert sum(raw["token_ns"][run * 20 : run * 20 + 20]) == raw["decode_ns"][run]
        assert raw["prefill_ns"][run] <= raw["first_token_ns"][run]
    rates = sorted(20 * 1e9 / ns for ns in raw["decode_ns"])
    got = answer["decode_tok_s"]
    assert [got["min"], got["p50"], got["max"]] == pytest.approx(rates, rel=1e-6)
    cold = answer["cold"]
    assert cold["first_token_ns"] > cold["load_ns"] + cold["golden_ns"] > 0
    assert "mean" not in json.dumps(answer)


def test_memory_and_faults_are_this_process(answer: dict[str, Any]) -> None:
    memory = answer["memory"]
    assert memory["before"]["rss_anon"] == memory["after"]["rss_anon"] > 0
    assert memory["after"]["peak"] >= memory["after"]["rss_anon"]
    assert memory["ledger"]["total"] > 0
    assert answer["minor_faults_per_token"] < 1
    load = float(Path("/proc/loadavg").read_text().split()[0])
    assert answer["machine"]["before"]["load1"] == pytest.approx(load, abs=20)
    assert len(answer["machine"]["before"]["cpu_khz"]) >= 1


def test_too_much_is_refused(model: Path) -> None:
    done = colibri("probe", "--model", model, "--tokens", "600")
    assert done.returncode == 2
    assert b"do not fit the context" in done.stderr
    done = colibri("probe", "--model", model, "--runs", "1000", "--tokens", "100000")
    assert done.returncode == 2


def test_the_engines_own_table(model: Path) -> None:
    text = colibri("probe", "--model", model, "--runs", "2", "--tokens", "4").stdout.decode()
    assert re.search(r"^routing, a layer +[\d.]+ +[\d.]+ +[\d.]+ +[\d.]+  us +16$", text, re.MULTILINE)
    assert re.search(r"^token +[\d.]+ +[\d.]+ +[\d.]+ +[\d.]+  ms +8$", text, re.MULTILINE)
    assert "page faults a token" in text


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(value, dict):
        return [path, *(p for k, v in value.items() for p in leaves(v, (*path, k)))]
    return [path]


def test_whatever_is_missing_is_an_error(answer: dict[str, Any]) -> None:
    doc = {k: v for k, v in answer.items() if k != "samples"}
    read = result.of_dict(doc)
    assert read.samples == {}
    free = {"version", "batch", "golden", "sha256", "ok", "page_cache", "arch", "n_layer", "n_moe_layer"}
    free |= {"n_expert", "n_expert_used", "experts_loaded", "n_vocab"}
    younger = {"cache", "lossy", "degraded", "zeros", "extra", "unhealthy", "offload"}  # not in every engine
    checked = 0
    for path in leaves(doc):
        if path and path[0] in younger:
            continue
        if not path or "ledger" in path or path[-1] in free:
            continue
        broken = copy.deepcopy(doc)
        parent = broken
        for key in path[:-1]:
            parent = parent[key]
        del parent[path[-1]]
        with pytest.raises(EngineError):
            result.of_dict(broken)
        checked += 1
    assert checked > 50


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"schema": 2}', '{"schema": 1, "model": 3}', "{"])
def test_nonsense_is_an_error(text: str) -> None:
    with pytest.raises(EngineError):
        result.parse(text)


# ---- plan and act ----------------------------------------------------------


def plan(**kw: Any) -> ProbePlan:
    base: dict[str, Any] = {
        "recorded": [], "runs": 2, "tokens": 3, "prompt_tokens": 4, "threads": None, "ctx": None,
        "samples": False, "timeout": 60,
    }  # fmt: skip
    return make_plan("/e", "/m.coli", **{**base, **kw})


def test_plan() -> None:
    assert plan().argv == (
        "/e", "probe", "--model", "/m.coli", "--json", "--runs", "2", "--tokens", "3", "--prompt-tokens", "4",
    )  # fmt: skip
    got = plan(recorded=["--budget", "1000", "--threads", "4"], threads=2, samples=True).argv
    assert got[-5:] == ("--budget", "1000", "--threads", "2", "--samples")


def test_act_runs_the_engine_itself(model: Path) -> None:
    steps = make_plan(
        str(eb.tool()), str(model), runs=2, tokens=3, prompt_tokens=4, threads=1, ctx=64, samples=True,
        timeout=60,
    )  # fmt: skip
    got = act.run(LocalTransport(), steps)
    assert (got.runs, got.tokens, got.prompt_tokens, got.threads, got.ctx) == (2, 3, 4, 1, 64)
    assert got.token.n == 6 == len(got.samples["token_ns"])


@pytest.mark.parametrize(
    ("rc", "code"), [(1, ""), (2, "-USAGE"), (3, "-FORMAT"), (4, "-BUDGET"), (5, "-GOLDEN")]
)
def test_act_names_the_failure(rc: int, code: str) -> None:
    board = FakeTransport({"probe": Completed(rc, b"", b"colibri probe: error: so it is")})
    with pytest.raises(EngineError, match="so it is") as caught:
        act.run(board, plan())
    assert caught.value.code == f"CK-ENGINE{code}"
    assert caught.value.state == "nothing was changed"


def test_act_on_garbage_and_interrupt() -> None:
    with pytest.raises(EngineError, match="not JSON"):
        act.run(FakeTransport({"probe": Completed(0, b"hello")}), plan())
    with pytest.raises(KeyboardInterrupt):
        act.run(FakeTransport({"probe": Completed(130)}), plan())
    with pytest.raises(EngineError, match="another CPU"):
        act.run(FakeTransport({"probe": Completed(132)}), plan())


# ---- verdicts --------------------------------------------------------------


def changed(answer: dict[str, Any], *changes: tuple[str, Any]) -> result.Result:
    """The answer, calm but for the changes ("machine.after.load1", 3)."""
    doc = copy.deepcopy(answer)
    calm = [("token_ns.p99", doc["token_ns"]["p50"]), ("machine.before.load1", 0.0),
            ("machine.before.cpu_khz", [1500000] * 4), ("machine.after.cpu_khz", [1500000] * 4),
            ("machine.after.cpu_khz_max", 1500000), ("major_faults_per_token", 0)]  # fmt: skip
    for path, value in [*calm, *changes]:
        parent = doc
        *keys, last = path.split(".")
        for key in keys:
            parent = parent[key]
        parent[last] = value
    return result.of_dict(doc)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ([("machine.after.throttled_bits", 0x50005)], "throttled now: under-voltage, throttled"),
        ([("machine.before.throttled_bits", 0), ("machine.after.throttled_bits", 0x80000)],
         "throttled while measuring: soft temperature limit active"),
        ([("machine.before.throttle_count", 5), ("machine.after.throttle_count", 8)], "throttled 3 times"),
        ([("machine.after.cpu_khz", [600000] * 4), ("machine.after.governor", "powersave")],
         "0.60 of 1.50 GHz after measuring (governor powersave)"),
        ([("token_ns.p50", 1000), ("token_ns.p99", 5000)], "5.0 times the median"),
        ([("machine.before.load1", 2.5)], "load average was 2.50 on 4 CPUs"),
        ([("memory.before.rss_anon", 4096), ("memory.after.rss_anon", 8192)], "changed by +4096 bytes"),
        ([("major_faults_per_token", 0.5)], "0.50 major page faults"),
    ],
)  # fmt: skip
def test_warnings(answer: dict[str, Any], changes: list[tuple[str, Any]], words: str) -> None:
    assert verdict.warnings(changed(answer)) == []
    got = verdict.warnings(changed(answer, *changes))
    assert len(got) == 1
    assert words in got[0]


def test_old_throttling_is_no_news(answer: dict[str, Any]) -> None:
    old = ("machine.before.throttled_bits", 0x50000), ("machine.after.throttled_bits", 0x50000)
    assert verdict.warnings(changed(answer, *old)) == []


def test_limit(answer: dict[str, Any]) -> None:
    got = changed(answer, ("token_ns.p99", 2_000_000))
    verdict.check_limit(got, None)
    verdict.check_limit(got, 2.0)
    with pytest.raises(LimitError, match=r"2\.00 ms, the limit 1\.99 ms"):
        verdict.check_limit(got, 1.99)


def test_compare(answer: dict[str, Any]) -> None:
    old = changed(answer, ("token_ns.p50", 1_000_000), ("decode_tok_s.p50", 10.0))
    now = changed(answer, ("token_ns.p50", 1_500_000), ("decode_tok_s.p50", 12.0), ("threads", 2))
    rows = {c.name: c for c in verdict.compare(old, now)}
    assert (rows["token p50"].percent, rows["token p50"].better) == (pytest.approx(50), False)
    assert (rows["decode"].percent, rows["decode"].better) == (pytest.approx(20), True)
    assert rows["first token cold"].better is None
    assert verdict.differences(old, now) == ["threads 2, was 1"]
    text = table.render_changes(list(rows.values()))
    assert re.search(r"token p50 +1 +1.5 +ms +\+50.0 % +worse", text)


def test_table(answer: dict[str, Any]) -> None:
    text = table.render(changed(answer, ("token_ns.p50", 1_234_000), ("token_ns.max", 9_876_000)), "my board")
    assert "on my board" in text
    assert re.search(r"^token +1\.234 .* 9\.876 +ms +60$", text, re.MULTILINE)
    assert "page cache not dropped" in text
    dense = changed(answer, ("route_ns", None))
    assert "routing" not in table.render(dense, "x")


# ---- the report ------------------------------------------------------------


def test_report_is_one_file(answer: dict[str, Any], tmp_path: Path) -> None:
    got = changed(answer, ("model.name", "<script>alert(1)</script>"))
    out = tmp_path / "r.html"
    report.write(out, got, "board & more", ["a <warning>"], verdict.compare(got, got))
    text = out.read_text()
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert "a &lt;warning&gt;" in text
    assert "board &amp; more" in text
    images = re.findall(r'src="data:image/png;base64,([^"]+)"', text)
    assert len(images) == 3
    for image in images:
        assert base64.b64decode(image).startswith(b"\x89PNG\r\n\x1a\n")
    assert not re.search(r'(src|href)="(?!data:)', text)  # nothing is fetched
    assert [p.name for p in tmp_path.iterdir()] == ["r.html"]
    assert len(re.findall("<img", report.render(changed(answer, ("samples.route_ns", [])), "x", [], []))) == 2


def test_report_that_cannot_be_written(answer: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot write"):
        report.write(tmp_path / "no" / "r.html", result.of_dict(answer), "x", [], [])


def test_report_without_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(PreflightError) as caught:
        report.require_matplotlib()
    assert "colibri-kit[report]" in (caught.value.hint or "")
    assert caught.value.state == "nothing was measured"


# ---- the verb --------------------------------------------------------------


def invoke(*args: str) -> Any:
    from colibri_kit.commands.probe import command

    return CliRunner().invoke(command, list(args))


def test_dry_run_shows_the_command_line(model: Path) -> None:
    done = invoke(
        "--latency", "--model", str(model), "--runs", "7", "--report", "x.html", "--dry-run", "--json"
    )
    assert done.exit_code == 0, done.output
    argv = json.loads(done.stdout)["argv"]
    assert argv[1:4] == ["probe", "--model", str(model)]
    assert argv[argv.index("--runs") + 1] == "7"
    assert "--samples" in argv  # the report needs them


def test_a_bad_base_is_named_before_measuring(model: Path, tmp_path: Path) -> None:
    base = tmp_path / "base.json"
    done = invoke("--model", str(model), "--compare", str(base), "--dry-run")
    assert isinstance(done.exception, UsageError)
    base.write_text("no json")
    assert isinstance(
        invoke("--model", str(model), "--compare", str(base), "--dry-run").exception, ConfigError
    )
    base.write_text('{"probe": {"schema": 9}}')
    done = invoke("--model", str(model), "--compare", str(base), "--dry-run")
    assert isinstance(done.exception, ConfigError)
    assert "probe --json" in done.exception.message


def test_a_base_is_either_the_verbs_or_the_engines(
    answer: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    for doc in (answer, {"target": "x", "probe": answer}):
        (tmp_path / "base.json").write_text(json.dumps(doc))
        done = invoke("--model", str(model), "--compare", str(tmp_path / "base.json"), "--dry-run")
        assert done.exit_code == 0, done.output


def test_nothing_to_probe_is_a_usage_error() -> None:
    assert isinstance(invoke().exception, UsageError)
