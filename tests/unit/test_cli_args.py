"""The `colibri` tool's command line: options, suggestions, sizes, help."""

from __future__ import annotations

import ctypes as ct
import json
import re

import engine_build as eb
import pytest
from engine_build import colibri, ok, ok_json
from hypothesis import given, settings
from hypothesis import strategies as st

USAGE = [
    ([], "Usage"),
    (["rnu"], 'unknown verb "rnu"; did you mean run?'),
    (["quite-else"], "unknown verb"),
    (["run", "--promt", "x"], "unknown option --promt; did you mean --prompt?"),
    (["run", "--temperature", "1"], "unknown option --temperature"),
    (["run", "-z"], "unknown option -z"),
    (["run", "hello"], 'unexpected word "hello"'),
    (["run", "--prompt"], "--prompt needs a value"),
    (["run", "--prompt", "--temp", "1"], "--prompt needs a value (TEXT), but --temp follows"),
    (["run", "--seed", "1", "--seed", "2"], "--seed is given twice"),
    (["run", "-n", "1", "--n-predict", "2"], "--n-predict is given twice"),
    (["run", "--chat=yes"], "--chat takes no value"),
    (["run", "-n", "0"], "from 1 to"),
    (["run", "-n", "-1"], "--n-predict must be a whole number"),
    (["run", "-n", "1.5"], "whole number"),
    (["run", "-n", "99999999999999999999"], "whole number"),
    (["run", "--seed", "18446744073709551616"], "below 2^64"),
    (["run", "--temp", "nan"], "--temp must be a number"),
    (["run", "--temp", "inf"], "--temp must be a number"),
    (["run", "--temp", "0x10"], "--temp must be a number"),
    (["run", "--temp", ""], "--temp must be a number"),
    (["run", "--top-p", "1.01"], "from 0 to 1"),
    (["run", "--repeat-last-n", "1025"], "from 0 to 1024"),
    (["run", "--kv", "f8"], "--kv must be one of f16|f32"),
    (["run", "--budget", "12XB"], "--budget must be a size such as 512MiB"),
    (["run", "--budget", "99999999999GiB"], "--budget must be a size"),
    (["run", "--budget", "-1"], "--budget must be a size"),
    (["run", "--threads", "65"], "from 1 to 64"),
    (["run", *["--stop", "x"] * 5], "--stop may be given at most 4 times"),
    (["run", "--prompt", "x"], "--model DIR is missing"),
    (["check"], "--model DIR is missing"),
    (["check", "--isa", "avx9", "--model", "m"], "--isa avx9: this build has scalar"),
    (["bench", "--json"], "bench writes CSV"),
    (["bench", "--part", "model"], "--model DIR is missing"),
    (["selftest", "--kernel", "no_such_kernel"], "no kernel matches"),
    (["probe", "--runs", "0"], "from 1 to 1000"),
]


@pytest.mark.parametrize(("args", "words"), USAGE)
def test_usage_errors(args: list[str], words: str) -> None:
    done = colibri(*args)
    assert done.returncode == 2
    assert words in done.stderr.decode()
    if args[:1] != ["selftest"] and "--json" not in args:
        assert done.stdout == b""


def test_errors_are_json_under_json() -> None:
    done = colibri("run", "--json", "--promt", "x")
    doc = json.loads(done.stdout)
    assert done.returncode == 2 == doc["error"]["exit_status"]
    assert doc["error"]["code"] == "CB_EINVAL"
    assert "--prompt" in doc["error"]["message"]


def test_help_names_every_verb_and_option() -> None:
    text = ok("--help").stdout.decode()
    verbs = re.findall(r"^  (\w+) ", text, re.MULTILINE)
    assert sorted(verbs) == sorted(
        [
            "run",
            "check",
            "plan",
            "logits",
            "tokenize",
            "selftest",
            "bench",
            "probe",
            "version",
            "serve",
            "health",
            "expertd",
        ]
    )
    for verb in verbs:
        text = ok(verb, "--help").stdout.decode()
        assert ("--json" if verb != "serve" else "--log") in text
        assert "Exit status" in text
    for option in ("--prompt-file", "--min-p", "--no-strict-utf8", "--over-budget", "--trace"):
        assert option in ok("run", "--help").stdout.decode()


def test_version() -> None:
    doc = ok_json("version")
    header = (eb.NATIVE / "include/colibri.h").read_text()
    assert doc["version"] == re.search(r'CB_VERSION "(.+)"', header).group(1)  # type: ignore[union-attr]
    assert str(doc["abi"]) == re.search(r"CB_ABI (\d+)u", header).group(1)  # type: ignore[union-attr]
    assert doc["isas"].split(",")[0] == "scalar"
    assert doc["isa_best"] in doc["isas"].split(",")
    assert doc["target"].endswith("-linux")


def args_lib() -> ct.CDLL:
    lib = eb.library("cli/args.c", "core/err.c")
    lib.args_nearest.restype = ct.c_char_p
    return lib


@pytest.mark.parametrize(
    ("text", "want"),
    [("0", 0), ("4096", 4096), ("512MiB", 512 << 20), ("512M", 512 << 20), ("1.5GiB", 3 << 29),
     ("2KiB", 2048), ("7B", 7), ("16EiB", None), ("1.GiB", None), (".5GiB", None), ("1 GiB", None),
     ("1.5", None), ("", None), ("GiB", None), ("1gib", None), ("0x10", None), ("+1", None),
     ("17179869183GiB", 17179869183 << 30), ("17179869184GiB", None)],
)  # fmt: skip
def test_sizes(text: str, want: int | None) -> None:
    out = ct.c_uint64(77)
    rc = args_lib().args_size(text.encode(), ct.byref(out))
    assert (rc, out.value) == ((0, want) if want is not None else (-1, 77))


def levenshtein(a: str, b: str) -> int:
    row = list(range(len(b) + 1))
    for i, ca in enumerate(a, 1):
        last, row[0] = row[0], i
        for j, cb in enumerate(b, 1):
            last, row[j] = row[j], min(last + (ca != cb), row[j] + 1, row[j - 1] + 1)
    return row[-1]


@settings(max_examples=300, deadline=None)
@given(
    st.text("-abcd", min_size=1, max_size=9), st.lists(st.text("-abcd", min_size=5, max_size=9), max_size=5)
)
def test_suggestions_are_near(word: str, names: list[str]) -> None:
    array = (ct.c_char_p * max(1, len(names)))(*[n.encode() for n in names])
    got = args_lib().args_nearest(word.encode(), array, ct.c_size_t(len(names)))
    near = [n for n in names if levenshtein(word, n) == 1]
    if near:
        assert got is not None
    if got is not None:
        assert levenshtein(word, got.decode()) <= 3 or got.decode().startswith(word)
