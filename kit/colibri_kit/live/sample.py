"""One look at a service: its ``/health``, ``/status`` and ``/metrics``, taken together."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from colibri_kit.errors import UnreachableError

PATHS = ("/health", "/status", "/metrics")

#: A label set, sorted: (("le", "0.5"),).
Labels = tuple[tuple[str, str], ...]

_LINE = re.compile(r"([A-Za-z_:][A-Za-z0-9_:]*)(?:\{(.*)\})? (\S+)(?: \d+)?")
_LABEL = re.compile(r'([A-Za-z_][A-Za-z0-9_]*)="((?:[^"\\]|\\.)*)",?')


class Odd(UnreachableError):
    """The service answers, but not as this kit knows it."""

    default_code = "CK-SERVICE-ANSWER"


@dataclass(frozen=True)
class Sample:
    """Figures of one moment.

    Attributes:
        at: seconds of a clock that only goes forward; differences count.
        health, status: the parsed objects. metrics: name without ``colibri_`` → labels → value.
    """

    at: float
    health: Mapping[str, Any]
    status: Mapping[str, Any]
    metrics: Mapping[str, Mapping[Labels, float]]

    def value(self, name: str, **labels: str) -> float:
        """One figure of /metrics; 0 when a release of the engine does not have it."""
        return self.metrics.get(name, {}).get(tuple(sorted(labels.items())), 0.0)

    def histogram(self, name: str) -> list[tuple[float, float]]:
        """(upper bound in seconds, how many are at most that), ascending; the last bound is infinite."""
        pairs = [
            (float(dict(k).get("le", "nan")), v) for k, v in self.metrics.get(f"{name}_bucket", {}).items()
        ]
        return sorted((bound, n) for bound, n in pairs if not math.isnan(bound))


def read(at: float, health: bytes, status: bytes, metrics: bytes) -> Sample:
    """A sample from the three answers.

    Raises:
        Odd: they are not what ``colibri serve`` says.
    """
    try:
        docs = [json.loads(health), json.loads(status)]
        figures = parse_metrics(metrics.decode())
    except ValueError as err:
        raise Odd(f"the service's answer cannot be read: {err}") from err
    if not all(isinstance(doc, dict) for doc in docs) or "model" not in docs[1] or not figures:
        raise Odd("what answers is not `colibri serve`")
    return Sample(at, docs[0], docs[1], figures)


def parse_metrics(text: str) -> dict[str, dict[Labels, float]]:
    """Prometheus' text format 0.0.4, ``colibri_`` taken off the names.

    Raises:
        ValueError: a line that is none, with its text.
    """
    out: dict[str, dict[Labels, float]] = {}
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        found = _LINE.fullmatch(line)
        if found is None:
            raise ValueError(f"not a line of metrics: {line[:80]!r}")
        labels = tuple(sorted((k, _unescape(v)) for k, v in _LABEL.findall(found.group(2) or "")))
        out.setdefault(found.group(1).removeprefix("colibri_"), {})[labels] = float(found.group(3))
    return out


def _unescape(text: str) -> str:
    return re.sub(r"\\(.)", lambda m: {"n": "\n"}.get(m.group(1), m.group(1)), text)


def between(old: list[tuple[float, float]], new: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """What a histogram gained from one sample to the next; ``new`` itself after a restart."""
    before = dict(old)
    gained = [(bound, n - before.get(bound, 0.0)) for bound, n in new]
    return new if any(n < 0 for _, n in gained) else gained


def quantile(histogram: list[tuple[float, float]], q: float) -> float | None:
    """The q-quantile in seconds, linear within its bucket as Prometheus computes it.

    None of nothing; the highest finite bound when it lies beyond that.
    """
    if not histogram or histogram[-1][1] <= 0:
        return None
    rank = q * histogram[-1][1]
    lower, below = 0.0, 0.0
    for bound, n in histogram:
        if n >= rank and n > below:
            return lower if math.isinf(bound) else lower + (bound - lower) * (rank - below) / (n - below)
        lower, below = (lower if math.isinf(bound) else bound), n
    return lower
