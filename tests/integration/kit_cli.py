"""The kit's command line, run in this process."""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Ran:
    """One run of the command line."""

    rc: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        doc: dict[str, Any] = json.loads(self.out)
        return doc


def kit(*args: object) -> Ran:
    """``colibri-kit ARGS`` in this process."""
    from colibri_kit.cli import main

    out, err = io.StringIO(), io.StringIO()
    rc = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main([str(a) for a in args])
        except SystemExit as stop:
            rc = int(stop.code or 0)
    return Ran(rc, out.getvalue(), err.getvalue())
