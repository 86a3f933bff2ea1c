"""A program of three files to try the tool chain on, and a cache of its own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from colibri_kit import resources

HEADER = "int cb_answer(int x);\n"
ANSWER = '#include "colibri.h"\nint cb_answer(int x) { return x * 42; }\n'
MAIN = (
    '#include <stdio.h>\n#include "colibri.h"\n'
    'int main(int argc, char **argv) { (void)argv; printf("%d\\n", cb_answer(argc)); return 0; }\n'
)


def tree(base: Path, **files: str) -> Path:
    """A small source tree: a program, and more files given as path__with__slashes=content."""
    native = base / "native"
    wanted = {"include/colibri.h": HEADER, "core/answer.c": ANSWER, "cli/main.c": MAIN}
    wanted |= {name.replace("__", "/") + ".c": text for name, text in files.items()}
    for name, text in wanted.items():
        path = native / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return native


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty object cache; zig's own (its libc builds take a minute) stays shared."""
    shared = os.environ.get("ZIG_GLOBAL_CACHE_DIR") or str(resources.cache_dir() / "zig")
    monkeypatch.setenv("ZIG_GLOBAL_CACHE_DIR", shared)
    monkeypatch.setenv("ZIG_LOCAL_CACHE_DIR", shared)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "colibri-kit"
