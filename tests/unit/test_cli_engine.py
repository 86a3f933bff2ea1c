"""The `colibri` tool's verbs on a small model: what they say, what they refuse."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import engine_build as eb
import numpy as np
import pytest
from engine_build import colibri, ok, ok_json
from tiny_model import DATA, NAME, tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory)


@pytest.fixture
def copy(model: Path, tmp_path: Path) -> Path:
    """A model to damage."""
    return Path(shutil.copytree(model, tmp_path / "copy.coli"))


# ---- bad models ------------------------------------------------------------


def test_no_model_there(tmp_path: Path) -> None:
    done = colibri("check", "--model", tmp_path / "none.coli")
    assert done.returncode == 3
    assert b"is not a model" in done.stderr


def damage(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("verb", ["check", "run", "logits", "probe"])
def test_a_flipped_byte_in_an_expert_is_found(verb: str, copy: Path, tmp_path: Path) -> None:
    shard = copy / "experts-0000.coli"
    damage(shard, shard.stat().st_size - 100_000)
    extra = {
        "run": ["--prompt", "x"],
        "logits": ["--tokens", DATA / f"{NAME}.tokens.npy", "-o", tmp_path / "l.npy"],
    }.get(verb, [])
    done = colibri(verb, "--model", copy, *extra)
    assert done.returncode == 6
    assert b"experts-0000.coli: layer 1, expert 5 is unhealthy" in done.stderr
    assert not (tmp_path / "l.npy").exists()


def test_a_cut_file_is_found(copy: Path) -> None:
    data = (copy / "dense.coli").read_bytes()
    (copy / "dense.coli").write_bytes(data[:-1])
    done = colibri("check", "--model", copy)
    assert done.returncode == 3, done.stderr


def test_over_budget_shows_the_sum(model: Path) -> None:
    done = colibri("check", "--model", model, "--budget", "1MiB")
    assert done.returncode == 4
    doc = json.loads(colibri("plan", "--model", model, "--budget", "1MiB", "--json").stdout)
    assert doc["fits"] is False
    lines = {k: v for k, v in doc["ledger"].items() if k not in ("total", "budget", "available")}
    assert sum(lines.values()) == doc["ledger"]["total"] > 1 << 20 == doc["ledger"]["budget"]


def edit_golden(folder: Path, golden: str | None) -> str:
    manifest = json.loads((folder / "manifest.json").read_text())
    before: str = manifest["golden"]["sha256"]
    if golden is None:
        del manifest["golden"]
    else:
        manifest["golden"]["sha256"] = golden
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return before


def test_a_wrong_golden_is_refused_by_all_who_serve(copy: Path, tmp_path: Path) -> None:
    wrong = "0" * 64
    right = edit_golden(copy, wrong)
    done = colibri("check", "--model", copy)
    assert done.returncode == 5
    assert wrong in done.stderr.decode()
    assert right in done.stderr.decode()
    doc = json.loads(colibri("check", "--model", copy, "--json").stdout)
    assert (doc["golden"]["ok"], doc["golden"]["sha256"], doc["golden"]["promised"]) == (False, right, wrong)
    done = colibri("run", "--model", copy, "--prompt", "x")
    assert (done.returncode, done.stdout) == (5, b"")
    assert colibri("probe", "--model", copy).returncode == 5
    # logits is the tool to find out why
    ok("logits", "--model", copy, "--tokens", DATA / f"{NAME}.tokens.npy", "-o", tmp_path / "l.npy")


def test_no_golden_is_no_licence(copy: Path) -> None:
    edit_golden(copy, None)
    done = colibri("check", "--model", copy)
    assert done.returncode == 5
    assert b"promises no golden" in done.stderr


def test_check(model: Path) -> None:
    promised = json.loads((model / "manifest.json").read_text())["golden"]["sha256"]
    text = ok("check", "--model", model).stdout.decode()
    assert re.search(rf"^golden ok {promised} \(\w+, \d+ threads?, [\d.]+ s\)$", text, re.MULTILINE)
    assert "experts loaded: 16 of 16 resident (16 slots of 48.0 KiB), 8 a layer, 2 used;" in text
    assert "memory total: " in text
    for isa in ok_json("version")["isas"].split(","):
        doc = ok_json("check", "--model", model, "--isa", isa, "--threads", "2", "--kv", "f32")
        assert (doc["isa"], doc["threads"]) == (isa, 2)
        assert doc["golden"]["ok"] is True


# ---- run -------------------------------------------------------------------


def test_run_says_what_users_know(model: Path) -> None:
    done = ok("run", "--model", model, "--prompt", "hello", "-n", "8", "--trace")
    err = done.stderr.decode()
    assert "experts loaded: 16" in err
    assert "memory total: " in err
    assert "golden ok " in err
    assert "routing latency: p50 " in err
    assert re.search(r"prefill \d+ tokens [\d.]+ tok/s, decode \d+ tokens [\d.]+ tok/s", err)
    layers = re.findall(r"MoE layer (\d): experts activated (\d) \(([\d.]+)\) (\d) \(([\d.]+)\)", err)
    assert [r[0] for r in layers[:2]] == ["0", "1"]
    for row in layers:  # qwen3moe renormalises: the weights of a layer sum to 1, the best first
        assert abs(float(row[2]) + float(row[4]) - 1) < 0.002
        assert float(row[2]) >= float(row[4])
    assert done.stdout.endswith(b"\n")


def test_greedy_text_is_the_argmax_of_the_logits(model: Path, tmp_path: Path) -> None:
    """Every token that run shows is the likeliest of what logits gives for the text so far."""
    prompt = ok_json("tokenize", "--model", model, stdin=b"hello")["ids"]
    assert len(prompt) > 0
    done = ok("run", "--model", model, "--prompt", "hello", "-n", "16", "--trace")
    shown = [int(i) for i in re.findall(r"^token \d+: id (\d+) ", done.stderr.decode(), re.MULTILINE)]
    assert len(shown) >= 2
    manifest = json.loads((model / "manifest.json").read_text())["tokenizer"]
    bos = [manifest["bos"]] if manifest.get("add_bos") else []
    ids = [*bos, *prompt, *shown]
    np.save(tmp_path / "t.npy", np.array(ids, np.int32))
    ok("logits", "--model", model, "--tokens", tmp_path / "t.npy", "-o", tmp_path / "l.npy")
    best = np.load(tmp_path / "l.npy").argmax(axis=1).tolist()
    start = len(ids) - len(shown)
    assert best[start - 1 : -1] == shown


def test_run_json_and_prompt_sources(model: Path, tmp_path: Path) -> None:
    one = ok_json("run", "--model", model, "--prompt", 'hé"\\\n', "-n", "12", "--temp", "1", "--seed", "3")
    (tmp_path / "p.txt").write_bytes('hé"\\\n'.encode())
    flags = ["-n", "12", "--temp", "1", "--seed", "3"]
    two = ok_json("run", "--model", model, "--prompt-file", tmp_path / "p.txt", *flags, "--threads", "2")
    three = ok_json("run", "--model", model, "-f", "-", *flags, "--isa", "scalar", stdin='hé"\\\n'.encode())
    assert one["text"] == two["text"] == three["text"]
    assert one["tokens"] == two["tokens"] == three["tokens"]
    other = ok_json(
        "run", "--model", model, "-f", tmp_path / "p.txt", "-n", "12", "--temp", "1", "--seed", "4"
    )
    assert other["text"] != one["text"]
    assert one["finish"] in ("length", "eog")
    assert one["golden"]["ok"] is True
    assert one["ledger"]["total"] > 0
    assert one["timings"]["decode_tok_s"] > 0
    plain = ok("run", "--model", model, "-f", tmp_path / "p.txt", *flags).stdout
    assert plain.decode("utf-8", "replace").rstrip("\n").replace("�", "") == one["text"].rstrip("\n").replace(
        "�", ""
    )


def test_stop_strings_cut(model: Path) -> None:
    for seed in range(20):
        flags = ["--model", model, "--prompt", "hello", "-n", "40", "--temp", "1.5", "--top-k", "0",
                 "--min-p", "0", "--seed", str(seed)]  # fmt: skip
        text = ok_json("run", *flags)["text"]
        clean = re.search(r"[\x20-\x7e]{6,}", text)
        if clean:
            break
    else:
        pytest.fail("no run of plain letters in twenty texts")
    stop = clean.group()[2:6]
    got = ok_json("run", *flags, "--stop", stop)
    assert got["finish"] == "stop"
    assert got["text"] == text[: text.index(stop)]


def test_prompts_that_are_refused(model: Path, tmp_path: Path) -> None:
    def refused(*args: str | Path, stdin: bytes = b"") -> str:
        done = colibri("run", "--model", model, *args, stdin=stdin)
        assert (done.returncode, done.stdout) == (2, b"")
        return done.stderr.decode()

    assert "the prompt is empty" in refused("--prompt", "")
    assert "the prompt is empty" in refused("--prompt-file", "-")
    assert "either --prompt TEXT or --prompt-file" in refused()
    assert "either --prompt TEXT or --prompt-file" in refused("--prompt", "x", "--prompt-file", "y")
    assert "byte 0xff at offset 3" in refused("-f", "-", stdin=b"abc\xffdef")
    assert "at offset 1" in refused("-f", "-", stdin=b"a\xed\xa0\x80")  # a surrogate
    assert "cannot open" in refused("-f", tmp_path / "none.txt")
    assert "--system needs --chat" in refused("--prompt", "x", "--system", "y")
    assert "context" in refused("--prompt", "hello " * 300, "--ctx", "32")
    assert "--ctx" in refused("--prompt", "abcdefghijklmnopqrstuvwxyz0123456789!?", "--ctx", "16")


def test_stray_bytes_pass_when_asked(model: Path) -> None:
    assert ok_json("run", "--model", model, "-f", "-", "-n", "2", "--no-strict-utf8", stdin=b"a\xff")[
        "tokens"
    ]


def test_chat_without_a_template_is_refused(model: Path) -> None:
    done = colibri("run", "--model", model, "--prompt", "hi", "--chat")
    assert done.returncode == 3
    assert b"chat template" in done.stderr


def test_the_context_ends_a_run(model: Path) -> None:
    for seed in range(10):
        doc = ok_json(
            "run", "--model", model, "--prompt", "ab", "--ctx", "24", "-n", "100", "--temp", "2", "--seed",
            str(seed),
        )  # fmt: skip
        if doc["finish"] == "context":
            # the last token needs no place of its own
            assert doc["tokens"]["prompt"] + doc["tokens"]["generated"] == 25
            return
    pytest.fail("no run reached the end of the context")


def test_interrupt_ends_cleanly(model: Path) -> None:
    args = [eb.tool(), "run", "--model", model, "--prompt", "ab", "-n", "16000000", "--ctx", "512", "--trace"]
    for seed in range(20):
        child = subprocess.Popen(
            [*map(str, args), "--temp", "3", "--top-k", "0", "--min-p", "0", "--seed", str(seed)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        assert child.stderr is not None
        while b"token 1:" not in (line := child.stderr.readline()) and line:
            pass
        child.send_signal(signal.SIGINT)
        rest = child.communicate(timeout=60)[1]
        if child.returncode == 130:
            assert b"finish: cancel" in rest
            return
        time.sleep(0.01)  # it was done before the signal came: again
    pytest.fail("never interrupted")


# ---- bench, selftest -------------------------------------------------------


def test_bench_is_csv(model: Path) -> None:
    out = ok("bench", "--model", model, "--reps", "1", "--mem-bytes", "1MiB", "--max-tokens", "128").stdout
    rows = list(csv.DictReader(io.StringIO(out.decode())))
    assert {r["part"] for r in rows} == {"memory", "kernel", "model"}
    assert {"Q4_K", "Q6_K", "Q8_0", "F32"} <= {r["name"] for r in rows if r["part"] == "kernel"}
    assert [r["n"] for r in rows if r["name"] == "prefill"] == ["8", "32", "128"]
    assert [r["n"] for r in rows if r["name"] == "decode"] == ["1", "128"]
    for row in rows:
        assert float(row["rate"]) > 0
        assert row["unit"] in ("GB/s", "tok/s")
    prefill = next(r for r in rows if r["name"] == "prefill")
    assert float(prefill["rate"]) == pytest.approx(8 / float(prefill["median_s"]), rel=0.02)


def test_selftest() -> None:
    done = ok("selftest", "--kernel", "softmax")
    assert b"0 failed" in done.stdout
    doc = ok_json("selftest", "--kernel", "softmax")
    assert (doc["ok"], doc["failed"]) == (True, 0)
    assert any("softmax" in line for line in doc["lines"])
