"""Hit rates for each policy and cache size, and which experts to pin."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from colibri_kit.trace.simulate import Cache, Rate, replay

if TYPE_CHECKING:
    from colibri_kit.trace.file import Trace

_SHARES = (0.0625, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)


@dataclass(frozen=True)
class Point:
    """One replay."""

    policy: str
    slots: int
    rate: Rate


def sizes(trace: Trace) -> list[int]:
    """Cache sizes worth a look: one token's experts, then shares of all."""
    total = trace.n_layer * trace.n_expert
    return sorted({min(trace.n_used, total), *(max(trace.n_used, round(s * total)) for s in _SHARES)})


def curves(
    trace: Trace, policies: Sequence[str], slots: Iterable[int], pinned: Iterable[int] = ()
) -> list[Point]:
    """Replays the trace for each policy and size; the cache begins full, as the engine's does."""
    chunks = list(trace.chunks())
    pins = list(pinned)
    out = []
    for policy in policies:
        for n in slots:
            cache = Cache(trace.n_layer, trace.n_expert, trace.n_used, n, policy, pinned=pins)
            out.append(Point(policy, cache.n_slot, replay(chunks, cache)))
    return out


def pins(trace: Trace, n: int) -> list[tuple[int, int]]:
    """The n most used experts as (block number, expert), most used first; ties by number."""
    counts = trace.counts()
    ranked = sorted(
        (-int(counts[il, e]), il, e) for il in range(trace.n_layer) for e in range(trace.n_expert)
    )
    return [(il + trace.first_layer, e) for c, il, e in ranked[:n] if c < 0]


def repeats(trace: Trace) -> float:
    """Share of a token's experts that the token before it used too."""
    import numpy as np

    if trace.n_token < 2:
        return 0.0
    same = (trace.experts[1:, :, :, None] == trace.experts[:-1, :, None, :]).any(axis=3)
    return float(np.mean(same))


def coverage(trace: Trace, share: float) -> float:
    """Share of look-ups that the most used ``share`` of the experts serve."""
    import numpy as np

    counts = np.sort(trace.counts().ravel())[::-1]
    return float(counts[: max(1, round(share * counts.size))].sum() / max(1, counts.sum()))
