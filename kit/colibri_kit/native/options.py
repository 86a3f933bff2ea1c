"""Fills ``struct cb_options`` from Python values."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from colibri_kit.errors import UsageError

KV_TYPES = {"f16": 0, "f32": 1, "q8_0": 2}
WEIGHTS = {"arena": 0, "mmap": 1, "lazy": 2, "preload": 3}
CACHE_POLICIES = {"slru": 0, "lru": 1, "lfu": 2}
ON_BAD = {"fail": 0, "next": 1}
ON_MISS = {"wait": 0, "zeros": 1}

#: (shard, offset, bytes) -> errno or 0; called by the reader threads
IoHook = Callable[[int, int, int], int]
#: (layer, expert or -1, milliseconds); called by the watchdog thread
StuckHook = Callable[[int, int, int], None]


def _pick(table: dict[str, int], what: str, value: str) -> int:
    if value not in table:
        raise UsageError(f"{what} must be one of {', '.join(table)}, not '{value}'")
    return table[value]


def options(
    ffi: Any,
    model_dir: str | os.PathLike[str],
    *,
    ctx: int = 0,
    threads: int = 0,
    budget: int = 0,
    isa: str | None = None,
    kv: str = "f16",
    batch: int = 0,
    over_budget: bool = False,
    lock: bool = False,
    weights: str = "arena",
    cache_experts: int | None = None,
    cache_policy: str = "slru",
    readers: int = 0,
    buffered: bool = False,
    lookahead: bool = True,
    on_bad: str = "fail",
    on_miss: str = "wait",
    extra_expert_below: float | None = None,
    hot_swap: bool = False,
    lazy_block_mib: int = 0,
    token_deadline_ms: int = 0,
    pin_file: str | os.PathLike[str] | None = None,
    offload: str | None = None,
    offload_share: int | None = None,
    offload_deadline_ms: int = 0,
    io_hook: IoHook | None = None,
    on_stuck: StuckHook | None = None,
) -> tuple[Any, list[Any]]:
    """A filled ``struct cb_options`` and what must outlive it (and the engine, for the hooks).

    Args:
        ctx, threads, budget, batch, readers, lazy_block_mib: 0 = the engine's default.
        isa: None = the best of this CPU.
        cache_experts: None = as many slots as fit; 0 = only the experts in use.
        token_deadline_ms: 0 = no watchdog.
        offload: a link to a module, as the engine's ``--offload``; None = none.
        offload_share: percent of the experts that go, for tests; None = the cost model decides.

    Raises:
        UsageError: an unknown word, or a number out of range.
    """
    path = ffi.new("char[]", os.fsencode(Path(model_dir)))
    keep: list[Any] = [path]
    opt = ffi.new("struct cb_options *")
    opt.model_dir = path
    if isa:
        keep.append(ffi.new("char[]", isa.encode()))
        opt.isa = keep[-1]
    if pin_file is not None:
        keep.append(ffi.new("char[]", os.fsencode(Path(pin_file))))
        opt.pin_file = keep[-1]
    if offload is not None:
        keep.append(ffi.new("char[]", os.fsencode(offload)))
        opt.offload = keep[-1]
    opt.kv_type = _pick(KV_TYPES, "kv", kv)
    opt.weights = _pick(WEIGHTS, "weights", weights)
    opt.cache_policy = _pick(CACHE_POLICIES, "cache_policy", cache_policy)
    opt.on_bad, opt.on_miss = _pick(ON_BAD, "on_bad", on_bad), _pick(ON_MISS, "on_miss", on_miss)
    opt.over_budget, opt.lock, opt.buffered = int(over_budget), int(lock), int(buffered)
    opt.no_lookahead, opt.hot_swap, opt.cache_none = (
        int(not lookahead),
        int(hot_swap),
        int(cache_experts == 0),
    )
    if extra_expert_below is not None:
        opt.extra_expert, opt.extra_below = 1, extra_expert_below
    try:
        opt.budget, opt.ctx, opt.batch, opt.threads = budget, ctx, batch, threads
        opt.cache_experts, opt.readers = cache_experts or 0, readers
        opt.lazy_block_mib, opt.token_deadline_ms = lazy_block_mib, token_deadline_ms
        opt.offload_force = 0 if offload_share is None else offload_share + 1
        opt.offload_deadline_ms = offload_deadline_ms
    except OverflowError as err:
        raise UsageError(f"an engine option is out of range: {err}") from err
    if io_hook is not None:
        hook = io_hook
        keep.append(
            ffi.callback("int(void *, uint32_t, uint64_t, uint64_t)", lambda _ud, *a: hook(*a), error=5)
        )
        opt.io_hook = keep[-1]
    if on_stuck is not None:
        stuck = on_stuck
        keep.append(ffi.callback("cb_stuck_fn", lambda _ud, *a: stuck(*a)))
        opt.on_stuck = keep[-1]
    return opt, keep
