"""The `colibri` tool's memory side: where experts live, what is said of them, what is refused.

Real runs of the tool on small models; --prompts with hot swaps is in test_cli_prompts.py.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import engine_build as eb
import numpy as np
import pytest
from engine_build import colibri, ok, ok_json
from tiny_model import DATA, NAME, tiny_model

OLMOE = DATA.parent / "moe-refs" / "q4_k_m" / "olmoe.t256.Q4_K_M.gguf"
HELLO = ["--prompt", "hello there, hello", "-n", "24"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """2 layers, 8 experts of 48 KiB, 2 used."""
    return tiny_model(tmp_path_factory)


@pytest.fixture(scope="module")
def olmoe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """2 layers, 8 experts of 128 KiB, 2 used; heads of 64."""
    out = tmp_path_factory.mktemp("olmoe") / "olmoe.coli"
    cmd = [sys.executable, "-m", "colibri_kit", "convert", str(OLMOE), "-q", "-o", str(out)]
    done = subprocess.run(cmd, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    return out


def run(model: Path, *flags: str | Path) -> Any:
    return ok_json("run", "--model", model, *HELLO, *flags)


# ---- every flag does something -------------------------------------------------


def test_modes_policies_and_sizes_say_the_same_and_what_they_are(model: Path) -> None:
    plain = run(model)
    assert (plain["cache"]["weights"], plain["cache"]["policy"], plain["cache"]["slots"]) == (
        "arena", "slru", 16,
    )  # fmt: skip
    assert plain["cache"]["hit_rate"] == 1
    assert (plain["lossy"], plain["degraded"], plain["zeros"], plain["extra"]) == (False, 0, 0, 0)
    for weights in ("mmap", "lazy", "preload"):
        doc = run(model, "--weights", weights)
        assert doc["text"] == plain["text"]
        assert doc["cache"]["weights"] == weights
        assert (doc["cache"]["hit_rate"] is None) == (weights != "preload")
        assert doc["cache"]["slots"] == (16 if weights == "preload" else 0)
    seen = set()
    for policy in ("slru", "lru", "lfu"):
        doc = run(model, "--cache-policy", policy, "--cache-experts", "7", "--no-lookahead")
        cache = doc["cache"]
        assert doc["text"] == plain["text"]
        assert (cache["policy"], cache["slots"], cache["ahead_issued"]) == (policy, 7, 0)
        assert cache["hits"] + cache["misses"] == plain["cache"]["hits"]
        assert cache["bytes_read"] == cache["misses"] * 49152 > 0
        assert cache["hit_rate"] == pytest.approx(cache["hits"] / plain["cache"]["hits"])
        seen.add((cache["hits"], cache["evictions"]))
    assert len(seen) > 1
    none = run(model, "--cache-experts", "0")
    assert (none["text"], none["cache"]["slots"]) == (plain["text"], 2)
    assert none["ledger"]["experts"] < plain["ledger"]["experts"]
    assert run(model, "--cache-experts", "all")["cache"]["slots"] == 16


def test_lookahead_can_be_switched_off(olmoe: Path) -> None:
    """Guesses are read only while storage is idle; where nothing waits for reads, and these come from the
    page cache, that is often."""
    flags = ["--cache-experts", "8", "--on-miss", "zeros", "--buffered", "-n", "300", "--temp", "2"]

    def issued(*more: str) -> int:
        cache = ok_json("run", "--model", olmoe, "--prompt", "hello", *flags, *more)["cache"]
        assert cache["ahead_useful"] + cache["ahead_wasted"] <= cache["ahead_issued"]
        return int(cache["ahead_issued"])

    assert any(issued("--seed", str(seed)) for seed in range(40))
    assert not any(issued("--seed", str(seed), "--no-lookahead") for seed in range(3))


def test_readers_and_buffered_reach_the_engine(model: Path, tmp_path: Path) -> None:
    """Counted from outside: threads in /proc/PID/task, O_DIRECT in /proc/PID/fdinfo."""
    copy = Path(shutil.copytree(model, tmp_path / "m.coli"))

    def look(*flags: str) -> tuple[int, bool]:
        args = [eb.tool(), "run", "--model", copy, "--prompts", "-", "-t", "1", "-n", "1", "--json", *flags]
        child = subprocess.Popen(list(map(str, args)), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write(b"hello\n")
        child.stdin.flush()
        assert json.loads(child.stdout.readline())["finish"] == "length"
        proc = Path(f"/proc/{child.pid}")
        threads = len(list((proc / "task").iterdir()))
        shard = next(p for p in (proc / "fd").iterdir() if "experts-0000" in str(p.readlink()))
        flags_line = (proc / "fdinfo" / shard.name).read_text()
        open_flags = int(re.search(r"flags:\s*([0-7]+)", flags_line).group(1), 8)  # type: ignore[union-attr]
        child.communicate(timeout=30)
        assert child.returncode == 0
        return threads, bool(open_flags & 0o40000)

    one, direct = look("--readers", "1")
    four, _ = look("--readers", "4")
    assert four - one == 3
    if direct:  # the file system does it
        assert look("--buffered")[1] is False


def test_lazy_blocks_change_no_bit(olmoe: Path) -> None:
    """Two blocks of 1 MiB, or one of 64."""
    plain = run(olmoe)["text"]
    for block in ("1", "64"):
        assert run(olmoe, "--weights", "lazy", "--lazy-block", block)["text"] == plain


def test_kv_types_take_what_they_take(olmoe: Path) -> None:
    plan = {
        kv: ok_json("plan", "--model", olmoe, "--kv", kv)["ledger"]["KV cache"]
        for kv in ("f32", "f16", "q8_0")
    }
    assert plan["f32"] == 2 * plan["f16"]
    assert plan["q8_0"] / plan["f16"] == pytest.approx(34 / 64, rel=0.02)
    assert ok_json("check", "--model", olmoe, "--kv", "q8_0")["golden"]["ok"] is True


def test_hot_swap_takes_room_for_a_second_release(model: Path) -> None:
    once = ok_json("plan", "--model", model)["ledger"]["dense weights"]
    twice = ok_json("plan", "--model", model, "--hot-swap")["ledger"]["dense weights"]
    assert twice > 1.5 * once


def test_pinned_experts_stay(model: Path, tmp_path: Path) -> None:
    trace = tmp_path / "t.colt"
    tight = ["--cache-experts", "4", "--no-lookahead", "--cache-policy", "lru"]
    free = run(model, *tight, "--trace-experts", trace)
    from colibri_kit.trace.file import read

    counts = read(trace).counts()
    layer, expert = np.unravel_index(int(counts.argmax()), counts.shape)
    pins = tmp_path / "pins.txt"
    pins.write_text(f"# the most used\n{layer} {expert}\n")
    held = run(model, *tight, "--pin-file", pins)
    assert held["text"] == free["text"]
    assert held["cache"]["misses"] != free["cache"]["misses"]
    pins.write_text("".join(f"{layer} {e}\n" for e in range(4)))
    done = colibri("run", "--model", model, *HELLO, *tight, "--pin-file", pins)
    assert done.returncode == 4
    assert b"4 experts are pinned, but there are 4 slots" in done.stderr


def test_a_slow_token_is_reported(model: Path, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("\n".join(["a b c d e f g h " * 28] * 15) + "\n")
    base = ["run", "--model", model, "--prompts", tmp_path / "p.txt", "-n", "1", "-t", "1", "--isa", "scalar"]
    done = ok(*base, "--batch", "256", "--token-deadline", "1")
    found = re.findall(r"^stuck: layer (\d), (?:expert \d|no expert awaited), (\d+) ms$",
                       done.stderr.decode(), re.MULTILINE)  # fmt: skip
    assert found
    assert all(int(layer) < 2 and 1 <= int(ms) < 10_000 for layer, ms in found)
    assert b"stuck:" not in ok("run", "--model", model, *HELLO, "--token-deadline", "60000").stderr


# ---- lossy answers say so ---------------------------------------------------------


def test_zeros_are_lossy_and_say_so(model: Path) -> None:
    flags = ["--cache-experts", "3", "--on-miss", "zeros"]
    doc = run(model, *flags)
    assert doc["lossy"] is True
    assert doc["zeros"] > 0
    done = ok("run", "--model", model, *HELLO, *flags)
    assert re.search(rb"^LOSSY: zeros: \d+ expert outputs were left out", done.stderr, re.MULTILINE)
    assert b"LOSSY" not in ok("run", "--model", model, *HELLO).stderr


def test_an_extra_expert_is_lossy_and_says_so(model: Path) -> None:
    doc = run(model, "--extra-expert-below", "1e5")
    assert doc["lossy"] is True
    assert doc["extra"] == doc["cache"]["routes"]  # every top logit is below that
    none = run(model, "--extra-expert-below", "-1e5")
    assert (none["lossy"], none["extra"], none["text"]) == (False, 0, run(model)["text"])
    done = ok("run", "--model", model, *HELLO, "--extra-expert-below=1e5")
    assert re.search(rb"^LOSSY: extra: \d+ routings", done.stderr, re.MULTILINE)


def test_probe_and_logits_say_it_too(model: Path, tmp_path: Path) -> None:
    flags = ["--cache-experts", "3", "--on-miss", "zeros"]
    doc = ok_json("probe", "--model", model, "--runs", "2", "--tokens", "8", *flags)
    assert doc["lossy"] is True
    assert doc["cache"]["slots"] == 3
    rate = doc["cache"]["hit_rate"]
    assert rate is None or 0 <= rate <= 1  # every look-up may have been left out
    table = ok("probe", "--model", model, "--runs", "1", "--tokens", "8", *flags).stdout
    assert b"LOSSY: zeros" in table
    assert re.search(rb"^experts: (hit rate [\d.]+ % \(\d+ of \d+\), )?read ", table, re.MULTILINE)
    whole = ok("probe", "--model", model, "--runs", "1", "--tokens", "8", "--cache-experts", "3").stdout
    assert re.search(rb"^experts: hit rate [\d.]+ % \(\d+ of \d+\), read ", whole, re.MULTILINE)
    io = ["--tokens", DATA / f"{NAME}.tokens.npy", "-o", tmp_path / "l.npy"]
    assert ok_json("logits", "--model", model, *io, *flags)["zeros"] > 0
    assert ok_json("logits", "--model", model, *io)["lossy"] is False


def test_kit_shows_cache_and_loss(model: Path) -> None:
    from colibri_kit.probe import result, table

    flags = ["--runs", "1", "--tokens", "8", "--cache-experts", "3"]
    raw = ok_json("probe", "--model", model, *flags, "--on-miss", "zeros")
    text = table.render(result.of_dict(raw), "here")
    assert "3 of 16 experts have slots; weights arena" in text
    if raw["cache"]["hit_rate"] is not None:  # every look-up may have been left out
        assert f"hit rate {100 * raw['cache']['hit_rate']:.1f} % (slru)" in text
    assert f"LOSSY              zeros {raw['zeros']}" in text
    del raw["cache"]
    assert "experts  " not in table.render(result.of_dict(raw), "here")


# ---- words ------------------------------------------------------------------------


def test_start_and_end_lines(model: Path) -> None:
    err = ok("run", "--model", model, *HELLO, "--cache-experts", "5", "--cache-policy", "lfu").stderr.decode()
    assert (
        "experts loaded: 5 of 16 resident (5 slots of 48.0 KiB), 8 a layer, 2 used; weights arena, "
        "cache lfu\n" in err
    )
    assert re.search(
        r"^experts: hit rate [\d.]+ % \(\d+ of \d+\), read [\d.]+ [KM]iB, waited [\d.]+ ms, "
        r"look-ahead \d+ useful \d+ wasted, \d+ of \d+ routes recomputed$",
        err,
        re.MULTILINE,
    )
    err = ok("run", "--model", model, *HELLO, "--weights", "mmap").stderr.decode()
    assert "experts loaded: 0 of 16 resident (mapped as they are touched)" in err


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--weights", "ram"], "--weights must be one of arena|mmap|lazy|preload"),
        (["--cache-experts", "-1"], "--cache-experts must be a whole number"),
        (["--cache-experts", "some"], "0 (only the experts in use) or all"),
        (["--cache-experts", "99999999999"], "--cache-experts must be a whole number"),
        (["--cache-policy", "fifo"], "--cache-policy must be one of slru|lru|lfu"),
        (["--readers", "0"], "--readers must be a whole number from 1 to 16"),
        (["--readers", "17"], "--readers must be a whole number from 1 to 16"),
        (["--on-bad-expert", "skip"], "--on-bad-expert must be one of fail|next"),
        (["--on-miss", "guess"], "--on-miss must be one of wait|zeros"),
        (["--extra-expert-below", "nan"], "--extra-expert-below must be a number"),
        (["--lazy-block", "65", "--weights", "lazy"], "--lazy-block must be a whole number from 1 to 64"),
        (["--lazy-block", "8"], "--lazy-block goes with --weights lazy"),
        (
            ["--cache-experts", "4", "--weights", "mmap"],
            "--cache-experts goes with --weights arena, not mmap",
        ),
        (["--cache-policy", "lfu", "--weights", "preload"], "--cache-policy goes with --weights arena"),
        (["--readers", "4", "--weights", "lazy"], "--readers goes with --weights arena, not lazy"),
        (["--buffered", "--weights", "mmap"], "--buffered goes with --weights arena, not mmap"),
        (["--no-lookahead", "--weights", "mmap"], "--no-lookahead goes with --weights arena, not mmap"),
        (["--on-miss", "zeros", "--weights", "lazy"], "--on-miss zeros goes with --weights arena, not lazy"),
        (["--token-deadline", "0"], "--token-deadline must be a whole number from 1"),
        (["--kv", "q4_0"], "--kv must be one of f16|f32|q8_0"),
        (["--hot-swap=1"], "--hot-swap takes no value"),
        (["--pin-file", "/nowhere/pins"], "--pin-file: cannot open /nowhere/pins"),
        (["--trace-experts", "/nowhere/t"], "--trace-experts: cannot create /nowhere/t"),
    ],
)
def test_bad_values_are_refused(model: Path, flags: list[str], text: str) -> None:
    done = colibri("run", "--model", model, *HELLO, *flags)
    assert (done.returncode, done.stdout) == (2, b"")
    assert text in done.stderr.decode()


@pytest.mark.parametrize("line", ["0 8", "2 0", "x y", "0", "0 1 2"])
def test_bad_pins_are_refused(model: Path, tmp_path: Path, line: str) -> None:
    (tmp_path / "p").write_text(line + "\n")
    done = colibri("run", "--model", model, *HELLO, "--pin-file", tmp_path / "p")
    assert done.returncode == 2
    assert f'pin file: "{line}"' in done.stderr.decode()


def test_q8_0_keys_need_heads_of_32(model: Path) -> None:
    head = json.loads((model / "manifest.json").read_text())["geometry"]["head_dim"]
    assert head % 32 != 0
    done = colibri("plan", "--model", model, "--kv", "q8_0")
    assert done.returncode == 3
    assert b"multiple of 32" in done.stderr


@pytest.mark.parametrize("name", ["experts-0000.coli", "dense.coli", "tokenizer.coli"])
def test_a_missing_file_is_a_bad_model(model: Path, tmp_path: Path, name: str) -> None:
    copy = Path(shutil.copytree(model, tmp_path / "m.coli"))
    (copy / name).unlink()
    for verb in ("check", "plan"):
        done = colibri(verb, "--model", copy)
        assert done.returncode == 3
        assert name in done.stderr.decode()


# ---- refusals ---------------------------------------------------------------------


def test_advice_is_the_engines_own_arithmetic(olmoe: Path) -> None:
    """Each flag named saves what it says, and fits when it says so: planned again with it."""
    least = ok_json("plan", "--model", olmoe, "--cache-experts", "0")["ledger"]["total"]
    budget = str(least - 300_000)
    done = colibri("plan", "--model", olmoe, "--budget", budget, "--json")
    doc = json.loads(done.stdout)
    assert done.returncode == 4
    ledger = {k: v for k, v in doc["ledger"].items() if k not in ("total", "budget", "available")}
    assert doc["largest"] == max(ledger, key=lambda k: ledger[k])
    flags = {a["flag"].split()[0] for a in doc["advice"]}
    assert {"--ctx", "--batch", "--kv"} <= flags
    for advice in doc["advice"]:
        there = colibri(
            "plan", "--model", olmoe, "--budget", budget, "--json", "--cache-experts", "0",
            *advice["flag"].split(),
        )  # fmt: skip
        assert (there.returncode == 0) is advice["fits"]
        assert json.loads(there.stdout)["ledger"]["total"] == doc["ledger"]["total"] - advice["saves"]
    assert any(a["fits"] for a in doc["advice"])


def test_refusals_name_line_and_flags(olmoe: Path) -> None:
    whole = ok_json("plan", "--model", olmoe)["ledger"]["total"]
    flags = ["--weights", "preload", "--budget", str(whole - 500_000)]
    done = colibri("run", "--model", olmoe, *HELLO, *flags)
    lines = done.stderr.decode().splitlines()
    assert done.returncode == 4
    assert lines[0] == "the largest line is experts: 2.0 MiB"
    assert any(
        re.fullmatch(r"  --weights arena --cache-experts 0 saves 1\.\d MiB, then it fits", line)
        for line in lines
    )
    assert lines[-1].startswith("colibri run: error: needs ")
    doc = json.loads(colibri("check", "--model", olmoe, *flags, "--json").stdout)
    assert (doc["error"]["code"], doc["error"]["exit_status"], doc["error"]["largest"]) == (
        "CB_EBUDGET", 4, "experts",
    )  # fmt: skip
    assert "arena" in doc["error"]["advice"][-1]["flag"]
    hopeless = colibri("plan", "--model", olmoe, "--budget", "1MiB")
    assert hopeless.returncode == 4
    assert b"no flag makes it fit" in hopeless.stdout


# ---- expert traces ----------------------------------------------------------------


def test_a_trace_is_what_logits_chooses(model: Path, tmp_path: Path) -> None:
    """Prompt and answer alike, in rank order, chunk starts where batches begin."""
    from colibri_kit.trace.file import read

    trace = tmp_path / "t.colt"
    text = "hello there, hello over there"
    flags = ["--batch", "4", "-n", "9", "--trace", "--trace-experts", trace, "--cache-experts", "5"]
    done = ok("run", "--model", model, "--prompt", text, *flags)
    shown = [int(i) for i in re.findall(r"^token \d+: id (\d+) ", done.stderr.decode(), re.MULTILINE)]
    manifest = json.loads((model / "manifest.json").read_text())
    bos = [manifest["tokenizer"]["bos"]] if manifest["tokenizer"].get("add_bos") else []
    prompt = [*bos, *ok_json("tokenize", "--model", model, stdin=text.encode())["ids"]]
    assert len(prompt) > 8
    ids = [*prompt, *shown]
    np.save(tmp_path / "i.npy", np.array(ids, np.int32))
    io = ["--tokens", tmp_path / "i.npy", "-o", tmp_path / "l.npy", "--experts", tmp_path / "e.npy"]
    ok("logits", "--model", model, *io)
    want = np.swapaxes(np.load(tmp_path / "e.npy"), 0, 1)  # [token][layer][rank]
    got = read(trace)
    n = got.n_token
    assert len(prompt) < n <= len(ids)  # the last token shown is never evaluated
    assert (got.experts == want[:n]).all()
    assert (got.n_expert, got.n_used, got.n_layer, got.first_layer) == (8, 2, 2, 0)
    assert got.model_id.hex() == ok_json("plan", "--model", model)["model"]["model_id"]
    starts = np.flatnonzero(got.starts).tolist()
    chunks = [*range(0, len(prompt), 4), *range(len(prompt), n)]
    assert starts == chunks


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_trace_that_cannot_be_written_is_an_error(model: Path) -> None:
    done = colibri("run", "--model", model, *HELLO, "--trace-experts", "/dev/full")
    assert done.returncode == 1
    assert b"writing /dev/full: No space left on device" in done.stderr


# ---- through the kit ---------------------------------------------------------------


def test_kit_run_hands_the_options_on(model: Path) -> None:
    flags = [
        "--weights", "arena", "--kv", "f32", "--cache-experts", "0", "--cache-policy", "lfu", "--batch", "8",
        "--readers", "3", "--buffered", "--no-lookahead", "--on-bad-expert", "next", "--on-miss", "wait",
        "--extra-expert-below", "-2.5", "--token-deadline", "5000",
    ]  # fmt: skip
    cmd = [sys.executable, "-m", "colibri_kit", "run", str(model), "--engine", str(eb.tool()), "-p", "hello",
           "-n", "4", "--json", *flags]  # fmt: skip
    dry = json.loads(subprocess.run([*cmd, "--dry-run"], check=True, capture_output=True).stdout)
    assert all(word in dry["argv"] for word in flags)
    done = subprocess.run(cmd, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    doc = json.loads(done.stdout)
    assert (doc["cache"]["policy"], doc["cache"]["slots"], doc["batch"]) == (
        "lfu",
        3,
        8,
    )  # one more for --extra-expert-below
