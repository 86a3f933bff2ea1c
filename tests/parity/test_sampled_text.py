"""Same seed, same text, on every board: sampling on a Cortex-A72 under qemu-user and here."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from .conftest import kit
from .test_bits import qemu

GGUF = Path(__file__).resolve().parents[1] / "data/engine/qwen3moe.t64.f32.gguf"


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("text")
    kit("convert", GGUF, "-o", folder / "m.coli", "-q")
    for board in ("host", "rpi4"):
        kit("build", "--board", board, "-o", folder / board, "-q")
    return {name: folder / name for name in ("host", "rpi4", "m.coli")}


@pytest.mark.parametrize(
    "flags",
    [
        ["--temp", "1", "--top-k", "0", "--top-p", "1", "--min-p", "0"],
        ["--temp", "0.7", "--top-k", "40", "--top-p", "0.9", "--min-p", "0.02", "--repeat-penalty", "1.2"],
    ],
)
def test_same_seed_same_text(flags: list[str], here: dict[str, Path]) -> None:
    texts = {}
    for seed in ("1", "2", "18446744073709551615"):
        answers = []
        for command in ([here["host"]], [*qemu("cortex-a72"), here["rpi4"]]):
            argv = [
                *command,
                "run",
                "-m",
                here["m.coli"],
                "-p",
                "hello",
                "-n",
                "60",
                "--json",
            ]
            done = subprocess.run([*map(str, argv), "--seed", seed, *flags], capture_output=True, check=False)
            assert done.returncode == 0, done.stderr
            doc = json.loads(done.stdout)
            answers.append((doc["text"], doc["tokens"], doc["finish"], doc["golden"]))
        assert answers[0] == answers[1]
        texts[seed] = answers[0][0]
    assert len(set(texts.values())) == 3  # the seed matters
