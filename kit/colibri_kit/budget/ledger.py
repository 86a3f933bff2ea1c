"""The memory ledger: the engine's own arithmetic (cb_plan), asked for another machine."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Settings:
    """Engine options that change the sum. 0 = the engine's default; budget in bytes."""

    budget: int
    ctx: int = 0
    batch: int = 0
    threads: int = 0
    kv: str = "f16"
    weights: str = "arena"
    cache_experts: int | None = None
    hot_swap: bool = False


@dataclass(frozen=True)
class Ledger:
    """The plan's sum.

    Attributes:
        lines: name -> bytes, in the engine's order.
        slots: expert slots; 0 in the mapped modes and when not even the fewest fit.
        records: experts of the model.
        info: ``struct cb_info``: geometry, and ctx, batch, threads as resolved.
        message: the engine's words when it does not fit.
    """

    lines: dict[str, int]
    total: int
    slots: int
    records: int
    slot_bytes: int
    fits: bool
    message: str
    info: dict[str, Any]

    @property
    def largest(self) -> str:
        return max(self.lines, key=lambda name: self.lines[name])


def engine_ledger(folder: Path, settings: Settings) -> Ledger:
    """What the engine would take on a machine that has the whole budget free.

    The engine plans with the smaller of the budget and what *this* machine has left. Where
    that is less than the budget, the slots are searched for: the most with which the
    engine's sum stays inside.

    Raises:
        FormatError, UsageError, EngineError: the model or an option is wrong.
    """
    got = _ask(folder, settings)
    short = got["ledger"]["available"] < settings.budget
    if not short or settings.weights in ("mmap", "lazy"):
        return _ledger(got, settings)
    if settings.weights == "preload" or settings.cache_experts == 0:
        return _ledger(_ask(folder, settings, over_budget=True), settings)
    low, high = 1, settings.cache_experts or got["ledger"]["records"]
    best = _ledger(_ask(folder, replace(settings, cache_experts=low), over_budget=True), settings)
    while low < high:
        middle = (low + high + 1) // 2
        there = _ask(folder, replace(settings, cache_experts=middle), over_budget=True)
        if there["ledger"]["total"] <= settings.budget:
            low, best = middle, _ledger(there, settings)
        else:
            high = middle - 1
    return best


def _ask(folder: Path, settings: Settings, *, over_budget: bool = False) -> dict[str, Any]:
    from colibri_kit.native import plan

    return plan(folder, over_budget=over_budget, **asdict(settings))


def _ledger(got: dict[str, Any], settings: Settings) -> Ledger:
    raw = got["ledger"]
    return Ledger(
        lines=raw["lines"],
        total=raw["total"],
        slots=raw["slots"],
        records=raw["records"],
        slot_bytes=raw["slot_bytes"],
        fits=raw["total"] <= settings.budget,
        message=got["message"],
        info=got["info"],
    )


@dataclass(frozen=True)
class Advice:
    """A flag that would help: bytes less in sum, whether it then fits, and with how many slots."""

    flag: str
    saves: int
    fits: bool
    slots: int


def advise(folder: Path, settings: Settings, ledger: Ledger) -> list[Advice]:
    """Flags that lower the sum or give more slots, those that fit first; each asked of the engine."""
    from colibri_kit.errors import KitError

    info, out = ledger.info, []
    tries: list[tuple[str, Settings]] = [
        (f"--ctx {ctx}", replace(settings, ctx=ctx)) for ctx in (2048, 1024, 512) if ctx < info["ctx"]
    ]
    tries += [(f"--batch {b}", replace(settings, batch=b)) for b in (8, 1) if b < info["batch"]]
    if settings.kv != "q8_0":
        tries.append(("--kv q8_0", replace(settings, kv="q8_0")))
    if ledger.records and settings.weights != "arena":
        tries.append(("--weights arena", replace(settings, weights="arena")))
    if ledger.records and settings.cache_experts != 0:
        tries.append(("--cache-experts 0", replace(settings, weights="arena", cache_experts=0)))
    if settings.hot_swap:
        tries.append(("without --hot-swap", replace(settings, hot_swap=False)))
    small = replace(settings, kv="q8_0", ctx=min(512, info["ctx"]), batch=1, weights="arena", hot_swap=False)
    tries.append((f"--kv q8_0 --ctx {small.ctx} --batch 1", replace(small, cache_experts=0)))
    for flag, other in tries:
        try:
            there = engine_ledger(folder, other)
        except KitError:  # not possible for this model or in this build
            continue
        if there.total < ledger.total or there.slots > ledger.slots:
            out.append(Advice(flag, ledger.total - there.total, there.fits, there.slots))
    return sorted(out, key=lambda a: (not a.fits, a.flag.count("--"), -a.slots, -a.saves))
