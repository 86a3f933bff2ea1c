"""Compiles units to objects, two at a time, through a cache that goes by content."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from colibri_kit import resources
from colibri_kit.errors import BuildError
from colibri_kit.toolchain.sources import Unit
from colibri_kit.toolchain.zig import cc

JOBS = 2


def publish(temporary: Path, final: Path) -> None:
    """Renames into place; a reader sees the whole file or none."""
    final.parent.mkdir(parents=True, exist_ok=True)
    temporary.replace(final)


def scratch(final: Path) -> Path:
    """A fresh name beside final, for :func:`publish`."""
    final.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{final.name}.", suffix=final.suffix, dir=final.parent)
    os.close(handle)
    return Path(name)


def object_path(unit: Unit) -> Path:
    return resources.cache_dir() / "objects" / unit.key[:2] / f"{unit.key}.o"


def compile_units(native: Path, units: list[Unit], done: Callable[[int], None]) -> list[Path]:
    """Objects of the units, in order; ``done(1)`` is called as each is there.

    Raises:
        BuildError: the first unit (in source order) that the compiler refused.
    """

    def one(unit: Unit) -> Path:
        final = object_path(unit)
        if not final.is_file():
            temporary = scratch(final)
            try:
                prefix = f"-ffile-prefix-map={native}=."
                cc([*unit.flags, prefix, "-c", unit.source, "-o", str(temporary)], native)
                publish(temporary, final)
            finally:
                temporary.unlink(missing_ok=True)
        done(1)
        return final

    with ThreadPoolExecutor(JOBS) as pool:
        futures = [pool.submit(one, unit) for unit in units]
        try:
            return [future.result() for future in futures]
        except BuildError:
            for future in futures:
                future.cancel()
            raise
