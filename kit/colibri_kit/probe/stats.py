"""Order statistics, as the engine computes them. Pure Python; samples are small.

Percentiles are nearest-rank: the smallest sample such that at least p per cent of
the samples are not above it, ``sorted(v)[ceil(p/100 * n) - 1]``. It is always a
value that was really measured (numpy calls it ``method="inverted_cdf"``). Means are
never given: a mean hides the stalls that a probe is for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


def nearest_rank(values: Sequence[float], percent: int) -> float:
    """The p-th percentile of values in any order, p a whole number from 0 to 100.

    Raises:
        ValueError: no values, or no such percentile.
    """
    if not values:
        raise ValueError("no samples")
    if not 0 <= percent <= 100:
        raise ValueError(f"no {percent}th percentile")
    rank = -(-len(values) * percent // 100)
    return sorted(values)[max(rank, 1) - 1]


@dataclass(frozen=True)
class Summary:
    """n samples; the rest in their unit."""

    n: int
    min: float
    p50: float
    p90: float
    p99: float
    max: float


def summary(values: Sequence[float]) -> Summary:
    """Raises ValueError when there are no values."""
    return Summary(
        len(values),
        min(values, default=0),
        nearest_rank(values, 50),
        nearest_rank(values, 90),
        nearest_rank(values, 99),
        max(values),
    )
