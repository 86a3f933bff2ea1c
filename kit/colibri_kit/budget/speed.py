"""Predicted speed. Every figure that goes in is shown with where it comes from.

Decode, seconds a token:

    dense + max(experts that hit, reads of those that miss) + experts that miss

where a part computes in max(bytes / bandwidth, multiply-accumulates / rate), as the engine
issues a layer's reads before it computes its hits. Look-ahead is not counted. Prefill is the
same sum for a chunk: weights are read once a chunk, each distinct expert once a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from colibri_kit.budget.traffic import Traffic
    from colibri_kit.config import Board
    from colibri_kit.trace.file import Trace

#: LRU with half of OLMoE's experts in memory hits 62 % with this exponent, as was measured.
ZIPF = 0.7
ZIPF_SOURCE = "Zipf 0.7: reproduces the 62.4 % that LRU with 32 of 64 slots hit on OLMoE (colibri pull 362)"
_REACHED = 0.8
_REACHED_SOURCE = "llama.cpp reaches 2.9 to 3.5 of 3.7 GB/s on a Pi 4"
_LOOKUPS = 60_000  # simulated at most


@dataclass(frozen=True)
class Cpu:
    """Multiply-accumulates a cycle and core on Q4_K, decode and prefill; clock in GHz."""

    decode: float
    prefill: float
    ghz: float
    source: str


_MODEL = "llvm-mca cycles of the engine's Q4_K kernel (docs/kernels-arm.md)"
_MEASURED = "this engine's Q4_K model, one core of a 2.6 GHz x86-64 virtual machine"
CPUS = {
    "cortex_a53": Cpu(2.7, 2.7, 1.2, _MODEL),
    "cortex_a72": Cpu(5.9, 5.9, 1.5, _MODEL),
    "cortex_a76": Cpu(11.8, 11.8, 2.4, "estimate: twice the Cortex-A72's, which has half the NEON width"),
    "x86_64_v3": Cpu(13.5, 27.0, 2.0, _MEASURED),
    "x86_64": Cpu(4.8, 6.4, 2.0, _MEASURED + ", SSE4.1"),
    "generic": Cpu(5.9, 5.9, 1.5, "as a Cortex-A72"),
}


@dataclass(frozen=True)
class Input:
    """A figure that went into the prediction."""

    name: str
    value: float
    unit: str
    source: str


@dataclass(frozen=True)
class Hits:
    """Expected share of look-ups that hit: decode and prefill, and experts a layer and chunk."""

    decode: float
    prefill: float
    distinct: float
    source: str


@dataclass(frozen=True)
class Speed:
    """The prediction; None where nothing honest can be said, and then why."""

    decode_tok_s: float | None
    prefill_tok_s: float | None
    first_token_s: float | None
    start_s: float | None
    inputs: tuple[Input, ...]
    why_not: str | None = None


def expected_hits(
    t: Traffic, slots: int, batch: int, policy: str, *, zipf: float = ZIPF, trace: Trace | None = None
) -> Hits:
    """Replays choices (a recorded trace, or drawn ones) through the engine's cache rules."""
    from colibri_kit.trace.simulate import Cache, synthetic

    source = ZIPF_SOURCE if zipf == ZIPF else f"Zipf {zipf:g}, as asked"
    if t.n_moe_layer == 0:
        return Hits(1.0, 1.0, 0.0, "a dense model")
    n = max(16, min(256, _LOOKUPS // (t.n_moe_layer * t.n_used)))
    if trace is not None:
        single = [c for c in trace.chunks() if all(len(layer) <= t.n_used for layer in c)][: 4 * n]
        source = f"replay of a recorded trace, {len(single)} tokens"
    else:
        single = synthetic(t.n_moe_layer, t.n_expert, t.n_used, n, zipf=zipf)
    chunks = [_merge(single[i : i + batch]) for i in range(0, len(single), batch)]
    distinct = sum(len(layer) for c in chunks for layer in c) / (len(chunks) * t.n_moe_layer)
    if slots >= t.n_moe_layer * t.n_expert:
        return Hits(1.0, 1.0, distinct, "every expert has a slot")
    rates = []
    for part in (single, chunks):
        cache = Cache(t.n_moe_layer, t.n_expert, t.n_used, slots, policy)
        warm = len(part) // 4
        for i, chunk in enumerate(part):
            if i == warm:
                cache.hits = cache.misses = 0
            for il, experts in enumerate(chunk):
                cache.layer(il, experts)
        rates.append(cache.rate().hit_rate)
    return Hits(rates[0], rates[1], distinct, source)


def _merge(tokens: Sequence[Sequence[Sequence[int]]]) -> list[list[int]]:
    return [sorted({e for token in tokens for e in token[il]}) for il in range(len(tokens[0]))]


def predict(
    t: Traffic,
    board: Board,
    *,
    slots: int,
    slot_bytes: int,
    hits: Hits,
    threads: int,
    batch: int,
    ctx: int,
    kv_factor: float,
    prompt: int,
    storage: tuple[float, str] | None = None,
) -> Speed:
    """Tokens a second and seconds to the first one.

    Args:
        kv_factor: bytes of the cache's type in units of F16's.
        prompt: tokens of the prompt that the first token waits for.
        storage: MB/s and its source, instead of the board's.
    """
    cpu = CPUS.get(board.mcpu, CPUS["generic"])
    cores = min(threads, board.cores)
    disk_mb, disk_source = storage or (board.storage.read_mb_s, board.storage.source)
    bandwidth, disk = board.memory_bandwidth_gb_s * 1e9 * _REACHED, disk_mb * 1e6
    rate = cpu.ghz * 1e9 * cores
    depth = min(ctx, max(prompt, 512))  # positions that attention reads in the middle of an answer
    kv = t.kv_bytes * kv_factor * depth
    inputs = (
        Input("memory bandwidth", board.memory_bandwidth_gb_s, "GB/s", board.memory_bandwidth_source),
        Input("share of it reached", _REACHED, "", _REACHED_SOURCE),
        Input("multiply-accumulates, decode", cpu.decode, "a cycle and core", cpu.source),
        Input("multiply-accumulates, prefill", cpu.prefill, "a cycle and core", cpu.source),
        Input("clock", cpu.ghz, f"GHz, {cores} cores", "assumed"),
        Input("storage", disk_mb, "MB/s", disk_source),
        Input("hit rate, decode", hits.decode, "", hits.source),
        Input("hit rate, prefill", hits.prefill, "", hits.source),
        Input("weights read for a token", t.token_bytes / 1e6, "MB", "the model's headers"),
        Input("expert record", t.record_bytes / 1e6, "MB", "the model's headers"),
    )

    def work(n_bytes: float, macs: float, per_cycle: float) -> float:
        return max(n_bytes / bandwidth, macs / (rate * per_cycle))

    def step(n_tok: int, distinct: float, hit: float, per_cycle: float, head: float) -> float:
        """Seconds for a chunk; ``head``: how often the output matrix is needed."""
        lookups = t.n_moe_layer * distinct
        macs = t.n_moe_layer * t.n_used * t.expert_macs * n_tok
        dense = work(
            t.dense_bytes - (1 - head) * t.head_bytes + kv,
            (t.dense_macs - t.head_macs) * n_tok + head * t.head_macs,
            per_cycle,
        )
        experts = work(lookups * t.expert_bytes, macs, per_cycle)
        reads = (1 - hit) * lookups * t.record_bytes / disk
        return dense + max(hit * experts, reads) + (1 - hit) * experts

    decode = step(1, t.n_used, hits.decode, cpu.decode, 1)
    chunk = step(batch, hits.distinct, hits.prefill, cpu.prefill, 0)
    chunks = -(-prompt // batch)
    start = (t.file_bytes + slots * slot_bytes) / disk
    return Speed(1 / decode, batch / chunk, chunks * chunk, start, inputs)
