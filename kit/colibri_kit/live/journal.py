"""The lines of a service's log: from systemd's journal, or from a file. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from colibri_kit.errors import UsageError

#: What the engine writes first on each line: in text, and in JSON.
_STAMP = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?Z) ")
_AGO = re.compile(r"(\d+)\s*(s|sec|min|m|h|d)(?:\s+ago)?")
_UNITS = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
#: A line that never ends is cut into pieces of so many bytes.
_LINE_BYTES = 1 << 16


@dataclass(frozen=True)
class Line:
    """One line. ``time`` is seconds since 1970, None when the line has none of its own.

    ``fields`` is the line as an object: the engine's own when it wrote JSON.
    """

    text: str
    time: float | None
    fields: dict[str, Any]


def since_seconds(text: str, board_now: float) -> float:
    """``2h``, ``10min ago``, or a time such as ``2026-11-30 12:00`` (of this machine's zone, or with Z).

    Args:
        board_now: the board's clock, which a span is counted back from.

    Raises:
        UsageError: it is neither.
    """
    found = _AGO.fullmatch(text.strip())
    if found:
        return board_now - int(found.group(1)) * _UNITS[found.group(2)]
    try:
        return datetime.fromisoformat(text.strip().replace("Z", "+00:00")).timestamp()
    except ValueError as err:
        raise UsageError(
            f"--since {text}: give a span (90s, 10min, 2h, 3d) or a time (2026-11-30, 2026-11-30 12:00)"
        ) from err


def of_file(text: str) -> Line:
    """A line of log/engine.log."""
    doc = _object(text)
    if doc is not None:
        return Line(text, _epoch(doc.get("time")), doc)
    found = _STAMP.match(text)
    time = _epoch(found.group(1)) if found else None
    fields = {"time": found.group(1), "message": text[found.end() :]} if found else {"message": text}
    return Line(text, time, fields)


def of_journal(entry: str) -> Line | None:
    """A line of ``journalctl -o json``; None for one that is none."""
    doc = _object(entry)
    if doc is None:
        return None
    message = doc.get("MESSAGE")
    if isinstance(message, list):  # bytes that are no UTF-8
        message = bytes(b for b in message if isinstance(b, int) and 0 <= b < 256).decode("utf-8", "replace")
    message = message if isinstance(message, str) else ""
    stamp = str(doc.get("__REALTIME_TIMESTAMP", ""))
    time = int(stamp) / 1e6 if stamp.isdigit() else None
    own = _object(message)
    who = str(doc.get("SYSLOG_IDENTIFIER", "?"))
    when = "?" if time is None else _utc(time)
    if own is not None:
        return Line(message, time, own)
    if _STAMP.match(message):  # the engine's own text line
        return Line(message, time, of_file(message).fields)
    return Line(f"{when} {who}: {message}", time, {"time": when, "identifier": who, "message": message})


def kept(lines: Iterable[Line], since: float | None) -> list[Line]:
    """Those from ``since`` on; a line without a time goes with the one before it."""
    if since is None:
        return list(lines)
    out: list[Line] = []
    keep = False
    for line in lines:
        keep = line.time >= since if line.time is not None else keep
        if keep:
            out.append(line)
    return out


class Splitter:
    """Turns pieces of bytes into whole lines, as they come."""

    def __init__(self, sink: Callable[[str], None]) -> None:
        self._sink, self._rest = sink, b""

    def __call__(self, piece: bytes) -> None:
        *whole, self._rest = (self._rest + piece).split(b"\n")
        for line in whole:
            self._sink(line.decode("utf-8", "replace"))
        if len(self._rest) > _LINE_BYTES:
            self.end()

    def end(self) -> None:
        """Hands over what came after the last line's end."""
        if self._rest:
            self._sink(self._rest.decode("utf-8", "replace"))
            self._rest = b""


def _object(text: str) -> dict[str, Any] | None:
    if not text.startswith("{"):
        return None
    try:
        doc = json.loads(text)
    except ValueError:
        return None
    return doc if isinstance(doc, dict) else None


def _epoch(stamp: object) -> float | None:
    if not isinstance(stamp, str):
        return None
    try:
        # Python 3.10 takes neither Z nor a fraction of other than 3 or 6 digits.
        return datetime.fromisoformat(re.sub(r"\.\d+", "", stamp).replace("Z", "+00:00")).timestamp()
    except ValueError:
        return None


def _utc(seconds: float) -> str:
    when = datetime.fromtimestamp(seconds, timezone.utc)
    return when.strftime("%Y-%m-%dT%H:%M:%S.") + f"{when.microsecond // 1000:03d}Z"
