"""Puts ledger, verdict, prediction and advice together. Pure but for reading the model's heads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from colibri_kit.budget.ledger import Advice, Ledger, Settings, advise, engine_ledger
from colibri_kit.budget.speed import ZIPF, Speed, expected_hits, predict
from colibri_kit.budget.traffic import Traffic, measure

if TYPE_CHECKING:
    from colibri_kit.config import Board
    from colibri_kit.trace.file import Trace

#: bytes of a KV element in units of F16's: Q8_0 has 34 bytes for 32
_KV = {"f16": 1.0, "f32": 2.0, "q8_0": 34 / 64}


@dataclass(frozen=True)
class Report:
    """What ``plan`` shows."""

    board: Board
    settings: Settings
    budget_source: str
    ledger: Ledger
    verdict: str
    slots_per_layer: float
    speed: Speed
    prompt: int
    advice: tuple[Advice, ...]


def make(
    folder: Path,
    *,
    board_name: str,
    boards_dir: Path | None,
    budget: str | None,
    ctx: int,
    batch: int,
    threads: int,
    kv: str,
    weights: str,
    cache_experts: int | None,
    cache_policy: str,
    hot_swap: bool,
    prompt_tokens: int,
    storage: float | None,
    routing: float | None,
    trace: Path | None,
) -> Report:
    """Plans for a board.

    Raises:
        ConfigError, UsageError: board or option. FormatError: the model or the trace.
    """
    from colibri_kit.config import load_board

    board = load_board(board_name, boards_dir)
    limit, source = _budget(board, budget)
    settings = Settings(
        limit, ctx, batch, threads or board.cores, kv, weights, cache_experts, hot_swap=hot_swap
    )
    traffic = measure(folder)
    ledger = engine_ledger(folder, settings)
    recorded = _trace(trace, traffic) if trace else None
    verdict = judge(ledger, settings, traffic)
    info = ledger.info
    speed = _speed(
        traffic, board, ledger, settings, verdict, cache_policy, prompt_tokens, storage, routing, recorded
    )
    advice = advise(folder, settings, ledger) if verdict != "fits resident" else []
    per_layer = ledger.slots / info["n_moe_layer"] if info["n_moe_layer"] else 0.0
    return Report(board, settings, source, ledger, verdict, per_layer, speed, prompt_tokens, tuple(advice))


def _budget(board: Board, text: str | None) -> tuple[int, str]:
    from colibri_kit.config.scalars import format_size, parse_size
    from colibri_kit.errors import UsageError

    if text is None:
        return board.budget, f"profile {board.name}"
    try:
        asked = parse_size(text)
    except ValueError as err:
        raise UsageError(f"--budget: {err}") from err
    if asked > board.ram:
        raise UsageError(f"--budget {text} is more than the board's memory, {format_size(board.ram)}")
    return asked, "--budget"


def _trace(path: Path, t: Traffic) -> Trace:
    from colibri_kit.errors import UsageError
    from colibri_kit.trace.file import read

    got = read(path)
    if (got.n_layer, got.n_expert) != (t.n_moe_layer, t.n_expert):
        raise UsageError(
            f"{path} is of a model with {got.n_layer} MoE layers of {got.n_expert} experts, "
            f"this one has {t.n_moe_layer} of {t.n_expert}"
        )
    return got


def judge(ledger: Ledger, settings: Settings, t: Traffic) -> str:
    """``fits resident``, ``fits streaming`` or ``refuse``."""
    if not ledger.fits:
        return "refuse"
    if ledger.records == 0:
        return "fits resident"
    if settings.weights in ("mmap", "lazy"):
        held = ledger.total - ledger.lines["experts"] + ledger.records * t.record_bytes
        return "fits resident" if held <= settings.budget else "fits streaming"
    if ledger.slots == 0:
        return "refuse"
    return "fits resident" if ledger.slots >= ledger.records else "fits streaming"


def _speed(
    t: Traffic,
    board: Board,
    ledger: Ledger,
    settings: Settings,
    verdict: str,
    policy: str,
    prompt: int,
    storage: float | None,
    routing: float | None,
    trace: Trace | None,
) -> Speed:
    if verdict == "refuse":
        return Speed(None, None, None, None, (), "it does not fit")
    slots = ledger.slots
    if settings.weights in ("mmap", "lazy"):
        if verdict == "fits streaming":
            why = f"with weights {settings.weights} the kernel's page cache decides what stays"
            return Speed(None, None, None, None, (), why)
        slots = ledger.records
    info = ledger.info
    hits = expected_hits(
        t, slots, info["batch"], policy, zipf=ZIPF if routing is None else routing, trace=trace
    )
    return predict(
        t,
        board,
        slots=slots,
        slot_bytes=ledger.slot_bytes,
        hits=hits,
        threads=info["threads"],
        batch=info["batch"],
        ctx=info["ctx"],
        kv_factor=_KV[settings.kv],
        prompt=prompt,
        storage=None if storage is None else (storage, "--storage"),
    )
