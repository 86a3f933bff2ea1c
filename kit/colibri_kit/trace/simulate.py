"""The engine's expert cache (native/expert/cache.c), replayed on recorded choices.

The same rules in the same order: look-ups touch first, then misses claim slots; never a
victim: a pinned record, one wanted by the layer at work, a record of that layer while
others are above their floor; a layer at its floor gives only when no other can. Look-ahead
is not simulated. Counts equal the engine's as long as the experts of a chunk and layer fit
the slots together; beyond that the engine works in waves whose order depends on time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

POLICIES = ("slru", "lru", "lfu")
_HOT = 1 << 48  # above every tick, and every (uses, tick) below it stays ordered
_USE = 1 << 40


@dataclass(frozen=True)
class Rate:
    """Look-ups of one replay."""

    hits: int
    misses: int
    evictions: int

    @property
    def hit_rate(self) -> float:
        return self.hits / max(1, self.hits + self.misses)


class Cache:
    """``n_slot`` expert slots for ``n_layer`` × ``n_expert`` records.

    Args:
        floor: slots a layer keeps while others can give; None = the engine's rule, one token's
            experts and one more, at most an even share.
        pinned: record numbers (layer · n_expert + expert).
        fill: begin full, as the engine does: pinned first, then expert by expert over the layers.
    """

    def __init__(
        self,
        n_layer: int,
        n_expert: int,
        n_used: int,
        n_slot: int,
        policy: str = "slru",
        *,
        floor: int | None = None,
        pinned: Iterable[int] = (),
        fill: bool = True,
    ) -> None:
        import numpy as np

        if policy not in POLICIES:
            raise ValueError(f"policy {policy!r}")
        self.n_layer, self.n_expert, self.policy = n_layer, n_expert, policy
        self.n_slot = min(max(n_slot, 1), n_layer * n_expert)
        self.floor = min(self.n_slot // n_layer, n_used + 1) if floor is None else floor
        self._np = np
        self._slot = np.full(n_layer * n_expert, -1, np.int64)  # record -> slot
        self._uses = np.zeros(n_layer * n_expert, np.int64)
        self._pinned = np.zeros(n_layer * n_expert, np.bool_)
        self._pinned[list(pinned)] = True
        self._record = np.full(self.n_slot, -1, np.int64)  # slot -> record
        self._layer = np.full(self.n_slot, -1, np.int64)
        self._busy = np.zeros(self.n_slot, np.bool_)  # wanted now, or pinned
        self._hot = np.zeros(self.n_slot, np.bool_)
        self._tick_of = np.zeros(self.n_slot, np.int64)
        self._key = np.zeros(self.n_slot, np.int64)  # lowest goes first
        self._resident = np.zeros(n_layer, np.int64)
        self._tick = self._used_slots = self._n_hot = 0
        self.hits = self.misses = self.evictions = 0
        if fill:
            self._fill()

    def _fill(self) -> None:
        n = self.n_layer * self.n_expert
        turn = [k % self.n_layer * self.n_expert + k // self.n_layer for k in range(n)]
        first = [r for r in turn if self._pinned[r]]
        for r in [*first, *(r for r in turn if not self._pinned[r])][: self.n_slot]:
            self._claim(r, -1)
            self._busy[self._slot[r]] = self._pinned[r]

    def _set_key(self, i: int) -> None:
        key = int(self._tick_of[i])
        if self.policy == "lfu":
            key += int(self._uses[self._record[i]]) * _USE
        elif self.policy == "slru" and self._hot[i]:
            key += _HOT
        self._key[i] = key

    def _victim(self, layer: int) -> int:
        np = self._np
        if self._used_slots < self.n_slot:
            self._used_slots += 1
            return self._used_slots - 1
        free = ~self._busy
        other = free & (self._layer != layer) if layer >= 0 and self.floor > 0 else free
        rich = other & (self._resident > self.floor)[self._layer]
        for mask in (rich, other, free):
            candidates = np.flatnonzero(mask)
            if len(candidates):
                return int(candidates[self._key[candidates].argmin()])
        return -1

    def _claim(self, record: int, layer: int) -> bool:
        i = self._victim(layer)
        if i < 0:
            return False
        old = self._record[i]
        if old >= 0:
            self.evictions += 1
            self._slot[old] = -1
            self._resident[self._layer[i]] -= 1
            self._n_hot -= int(self._hot[i])
        self._tick += 1
        self._record[i], self._layer[i] = record, record // self.n_expert
        self._slot[record], self._hot[i], self._tick_of[i] = i, False, self._tick
        self._resident[self._layer[i]] += 1
        self._set_key(i)
        self._busy[i] = True
        return True

    def _touch(self, i: int) -> None:
        record = self._record[i]
        self._uses[record] += 1
        if self.policy == "slru" and not self._hot[i] and self._uses[record] > 1:
            self._hot[i] = True
            self._n_hot += 1
            self._set_key(i)
            if self._n_hot > self.n_slot - self.n_slot // 5:
                hot = self._np.flatnonzero(self._hot)
                cold = int(hot[self._key[hot].argmin()])
                self._hot[cold] = False
                self._n_hot -= 1
                self._set_key(cold)
        self._tick += 1
        self._tick_of[i] = self._tick
        self._set_key(i)

    def layer(self, layer: int, experts: Sequence[int]) -> None:
        """A layer asks for its distinct experts, ascending."""
        records = [layer * self.n_expert + e for e in experts]
        for r in records:  # all are wanted before the first is looked up
            if self._slot[r] >= 0:
                self._busy[self._slot[r]] = True
        missing = []
        for r in records:
            if self._slot[r] >= 0:
                self.hits += 1
                self._touch(int(self._slot[r]))
            else:
                self.misses += 1
                missing.append(r)
        done = [r for r in records if self._slot[r] >= 0]
        for r in missing:
            if not self._claim(r, layer):  # waves: what was computed gives way
                self._release(done)
                done = []
                self._claim(r, layer)
            done.append(r)
        self._release(records)

    def _release(self, records: Iterable[int]) -> None:
        for r in records:
            if self._slot[r] >= 0:
                self._busy[self._slot[r]] = self._pinned[r]

    def rate(self) -> Rate:
        return Rate(self.hits, self.misses, self.evictions)


def replay(chunks: Iterable[Sequence[Sequence[int]]], cache: Cache) -> Rate:
    """Runs chunks (as :meth:`~colibri_kit.trace.file.Trace.chunks` gives them) through a cache."""
    for chunk in chunks:
        for il, experts in enumerate(chunk):
            cache.layer(il, experts)
    return cache.rate()


def synthetic(
    n_layer: int, n_expert: int, n_used: int, n_token: int, *, zipf: float = 0.0, seed: int = 1
) -> list[list[list[int]]]:
    """Chunks of one token whose experts are drawn independently.

    Args:
        zipf: 0 = all alike; s = the i-th most popular expert of a layer has weight (i + 1)^-s.
    """
    import numpy as np

    rng = np.random.default_rng(seed)
    weight = np.log(np.arange(1, n_expert + 1, dtype=np.float64)) * -zipf
    order = np.array([rng.permutation(n_expert) for _ in range(n_layer)])
    # Gumbel top-k: n_used distinct experts with probabilities in proportion to the weights.
    score = weight + rng.gumbel(size=(n_token, n_layer, n_expert))
    top = np.argpartition(-score, n_used - 1, axis=2)[:, :, :n_used]
    chosen: Any = np.sort(order[np.arange(n_layer)[None, :, None], top], axis=2)
    return [[[int(e) for e in row] for row in token] for token in chosen]
