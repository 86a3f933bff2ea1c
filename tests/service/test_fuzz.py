"""The fuzz harnesses' seeds and their variants under ASan and UBSan; libFuzzer itself is for longer runs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import engine_build as eb
import pytest

FUZZ = eb.NATIVE / "tests" / "fuzz"
UNITS = {
    "http": ["serve/http.c", "serve/access.c", "core/sha256.c", "core/err.c"],
    "json": ["core/json.c", "serve/buf.c", "text/utf8.c", "core/err.c"],
}


@pytest.mark.parametrize("name", UNITS)
def test_hostile_input(name: str, tmp_path: Path) -> None:
    sanitize = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    sources = ["tests/fuzz/replay.c", f"tests/fuzz/fuzz_{name}.c", *UNITS[name]]
    flags = [f for f in eb.FLAGS if f != "-Werror"]
    command = [
        *eb.compiler(),
        *flags,
        *sanitize,
        "-D_POSIX_C_SOURCE=200809L",
        *sources,
        "-o",
        str(tmp_path / "f"),
    ]
    subprocess.run(command, cwd=eb.NATIVE, check=True, timeout=120)
    seeds = sorted(map(str, (FUZZ / "seeds" / name).iterdir()))
    done = subprocess.run(
        [tmp_path / "f", "2000", *seeds], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == f"{len(seeds)} files\n"
