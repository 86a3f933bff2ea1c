"""What a check found. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Level = Literal["ok", "warn", "fail"]
_RANK: dict[Level, int] = {"ok": 0, "warn": 1, "fail": 2}
#: Exit status when something fails: the one of "refused before anything was changed".
FAILED = 6


@dataclass(frozen=True)
class Finding:
    """``what`` was checked, ``found`` in words, ``remedy`` where it is not ok."""

    level: Level
    what: str
    found: str
    remedy: str | None = None


def ok(what: str, found: str) -> Finding:
    return Finding("ok", what, found)


def warn(what: str, found: str, remedy: str) -> Finding:
    return Finding("warn", what, found, remedy)


def fail(what: str, found: str, remedy: str) -> Finding:
    return Finding("fail", what, found, remedy)


def worst(findings: Sequence[Finding]) -> Level:
    return max((f.level for f in findings), key=_RANK.__getitem__, default="ok")


def exit_status(findings: Sequence[Finding], strict: bool) -> int:
    """0, or 6 when something fails (with ``strict`` also when something warns)."""
    return FAILED if _RANK[worst(findings)] >= (1 if strict else 2) else 0


def as_json(target: str, findings: Sequence[Finding]) -> dict[str, Any]:
    count = {level: sum(f.level == level for f in findings) for level in _RANK}
    rows = [asdict(f) for f in findings]
    return {"target": target, "worst": worst(findings), "count": count, "findings": rows}


def text(
    target: str,
    findings: Sequence[Finding],
    table: Callable[[Sequence[str], Sequence[Sequence[object]]], str],
) -> str:
    """A table, and below it the remedies."""
    rows = [(f.level, f.what, f.found) for f in findings]
    out = [table(("", target, ""), rows)]
    out += [f"{f.what}: {f.remedy}" for f in findings if f.remedy]
    return "\n".join(out)
