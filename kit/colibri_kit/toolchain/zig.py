"""Runs ``zig cc`` from the pinned ziglang package."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from colibri_kit import resources
from colibri_kit.errors import BuildError

MAX_ERROR_LINES = 30


def zig_env() -> dict[str, str]:
    """The environment for zig: its caches named (it fails without a home), others' kept."""
    env = dict(os.environ)
    for name in ("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR"):
        if not env.get(name):
            env[name] = str(resources.cache_dir() / "zig")
    return env


def zig_version() -> str:
    """Version of the installed ziglang package, ``0.17.1``.

    Raises:
        BuildError: it is not installed.
    """
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("ziglang")
    except PackageNotFoundError as err:
        raise BuildError(
            "the cross compiler (ziglang) is not installed", hint="pip install --force-reinstall colibri-kit"
        ) from err


def cc(args: Sequence[str], cwd: Path) -> str:
    """``zig cc ARGS`` in cwd; returns what it printed.

    Raises:
        BuildError: the compiler refused; carries its first errors and the command to repeat.
    """
    cmd = [sys.executable, "-m", "ziglang", "cc", *args]
    try:
        done = subprocess.run(
            cmd, cwd=cwd, env=zig_env(), stdin=subprocess.DEVNULL, capture_output=True, check=False
        )
    except OSError as err:
        raise BuildError(f"cannot run the compiler: {err}") from err
    text = (done.stdout + done.stderr).decode("utf-8", "replace")
    if done.returncode != 0:
        raise BuildError(
            f"the compiler failed with status {done.returncode}\n{first_errors(text)}",
            hint=f"cd {shlex.quote(str(cwd))} && {shlex.join(cmd)}",
            code="CK-BUILD-CC",
        )
    return text


def first_errors(text: str) -> str:
    """The lines from the first error on, at most MAX_ERROR_LINES."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if "error:" in line or "fatal" in line), 0)
    return "\n".join(lines[start : start + MAX_ERROR_LINES])


def link(flags: Sequence[str], objects: Sequence[Path], output: Path, list_file: Path) -> None:
    """Links objects; their names go through list_file, which stays so that a failure can be repeated.

    zig's reading of such lists knows no escapes, so names in it are relative to the object cache.

    Raises:
        BuildError: the linker refused.
    """
    base = resources.cache_dir() / "objects"
    list_file.parent.mkdir(parents=True, exist_ok=True)
    # Another build of the same engine may be reading it: never half a list.
    mine = list_file.with_name(f".{list_file.name}.{os.getpid()}")
    mine.write_text("".join(f"{path.relative_to(base).as_posix()}\n" for path in objects))
    mine.replace(list_file)
    cc([*flags, f"@{list_file}", "-o", str(output)], base)
