"""From samples to the figures of one picture. Pure: no clock, no network, no drawing."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from colibri_kit.live.sample import Odd, Sample, between, quantile
from colibri_kit.live.service import plain

#: What the four histograms of the service are called here.
LATENCIES = {
    "first token": "first_token_seconds",
    "request": "request_seconds",
    "step": "step_seconds",
    "queue": "queue_seconds",
}


@dataclass(frozen=True)
class Latency:
    """One histogram. Seconds; None where there is nothing to tell.

    Attributes:
        counts: of each bucket since the start, the last one without an upper bound.
        p50, p99: since the start. lately_p50, lately_p99: of the window.
    """

    name: str
    count: int
    counts: tuple[int, ...]
    p50: float | None
    p99: float | None
    lately_count: int
    lately_p50: float | None
    lately_p99: float | None


@dataclass(frozen=True)
class Experts:
    """The expert cache. Rates are 0 to 1, None when nothing was looked up.

    Attributes:
        heat: a string a layer, a digit a cell: 0 never used to 9 most used since the start.
        experts: in a layer (a cell may stand for several).
    """

    slots: int
    records: int
    hits: int
    misses: int
    hit_rate: float | None
    lately_hit_rate: float | None
    bytes_read: int
    read_bytes_per_s: float
    heat: tuple[str, ...]
    experts: int


@dataclass(frozen=True)
class Offload:
    """The link to a module. ``state``: unused, idle, working, trouble."""

    state: str
    experts: int
    local: int
    connects: int
    bytes_out: int
    bytes_in: int
    trouble: dict[str, int]


@dataclass(frozen=True)
class Answers:
    """What answers were other than the model's own, and what was refused; counts since the start."""

    degraded: int
    zeros: int
    extra: int
    failed: int
    unhealthy_experts: int
    queue_full: int
    late: int
    cancelled: int
    timeouts: int


@dataclass(frozen=True)
class Recent:
    """One request that ended. Times in ms."""

    ago_s: float
    kind: str
    stream: bool
    status: int
    finish: str
    prompt_tokens: int
    completion_tokens: int
    first_token_ms: float
    total_ms: float
    tokens_per_s: float | None


@dataclass(frozen=True)
class Frame:
    """Everything on one picture. Bytes, seconds, degrees Celsius.

    Attributes:
        tokens_per_s: generated between the two samples; the service's own figure when there is one.
        service_tokens_per_s: the service's, over its last five seconds. speeds: tok/s, oldest first.
        window_s: how far back "lately" goes; 0 = nothing to compare with.
        throttled: what the firmware says now; None where it says nothing.
    """

    model: str
    arch: str
    version: str
    isa: str
    threads: int
    ctx: int
    golden: str
    release: str | None
    state: str
    uptime_s: float
    tokens_per_s: float
    service_tokens_per_s: float
    speeds: tuple[float, ...]
    tokens_prompt: int
    tokens_answer: int
    active: int
    queued: int
    sequences: int
    capacity: int
    prefill: tuple[int, int]
    window_s: float
    latency: tuple[Latency, ...]
    ledger: tuple[tuple[str, int], ...]
    planned: int
    budget: int
    resident: int
    experts: Experts
    offload: Offload
    answers: Answers
    temperature: tuple[tuple[str, float], ...]
    throttled: tuple[str, ...] | None
    recent: tuple[Recent, ...]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def make(
    now: Sample,
    before: Sample | None = None,
    window: Sample | None = None,
    *,
    speeds: Sequence[float] = (),
    release: str | None = None,
    throttled: tuple[str, ...] | None = None,
) -> Frame:
    """The frame at ``now``.

    Args:
        before: the sample just before; gives rates. window: an older one; gives "lately".
        speeds: earlier tokens/s for the curve; this frame's is added.

    Raises:
        Odd: a figure is missing or of another kind than ``colibri serve`` gives.
    """
    if before is not None and restarted(before, now):
        before = window = None
    s = now.status
    try:
        speed = _speed(now, before)
        return Frame(
            model=plain(str(s["model"])),
            arch=plain(str(s["arch"])),
            version=plain(str(s["version"])),
            isa=plain(str(s["isa"])),
            threads=int(s["threads"]),
            ctx=int(s["ctx"]),
            golden=plain(str(s["golden"])),
            release=None if release is None else plain(release),
            state=plain(str(now.health["status"])),
            uptime_s=float(s["uptime_s"]),
            tokens_per_s=speed,
            service_tokens_per_s=now.value("tokens_per_second"),
            speeds=(*speeds, speed),
            tokens_prompt=int(now.value("tokens_prompt_total")),
            tokens_answer=int(now.value("tokens_answer_total")),
            active=int(now.value("requests_active")),
            queued=int(now.value("requests_queued")),
            sequences=int(s["sequences"]),
            capacity=int(s["capacity"]),
            prefill=(int(now.value("prefill_tokens_done")), int(now.value("prefill_tokens"))),
            window_s=now.at - window.at if window is not None else 0.0,
            latency=tuple(_latency(name, key, now, window) for name, key in LATENCIES.items()),
            ledger=tuple((plain(str(name)), int(n)) for name, n in s["ledger"]),
            planned=int(now.value("memory_planned_bytes")),
            budget=int(now.value("memory_budget_bytes")),
            resident=int(now.value("resident_anonymous_bytes")),
            experts=_experts(now, before, window),
            offload=_offload(now, before),
            answers=_answers(now),
            temperature=tuple((plain(str(zone)), float(c)) for zone, c in s["temperature"]),
            throttled=throttled,
            recent=tuple(_recent(r) for r in s["recent"]),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as err:
        raise Odd(
            f"the service's figures are not those that this kit knows ({type(err).__name__}: {err})",
            hint="engine and kit may differ in version",
        ) from err


def restarted(before: Sample, now: Sample) -> bool:
    """Another process answers: counters began anew, rates between the two mean nothing."""
    return now.value("up_seconds") < before.value("up_seconds")


def _gain(name: str, now: Sample, before: Sample | None) -> float:
    return now.value(name) - before.value(name) if before is not None else 0.0


def _speed(now: Sample, before: Sample | None) -> float:
    """Tokens a second since the sample before; without one the service's own figure."""
    if before is None or now.at <= before.at:
        return now.value("tokens_per_second")
    return _gain("tokens_answer_total", now, before) / (now.at - before.at)


def _latency(name: str, key: str, now: Sample, window: Sample | None) -> Latency:
    whole = now.histogram(key)
    lately = between(window.histogram(key), whole) if window is not None else []
    sums = [0.0, *(n for _, n in whole)]
    return Latency(
        name=name,
        count=int(now.value(f"{key}_count")),
        counts=tuple(int(b - a) for a, b in itertools.pairwise(sums)),
        p50=quantile(whole, 0.5),
        p99=quantile(whole, 0.99),
        lately_count=int(lately[-1][1]) if lately else 0,
        lately_p50=quantile(lately, 0.5),
        lately_p99=quantile(lately, 0.99),
    )


def _rate(hits: float, misses: float) -> float | None:
    return hits / (hits + misses) if hits + misses > 0 else None


def _experts(now: Sample, before: Sample | None, window: Sample | None) -> Experts:
    hits, misses = now.value("expert_hits_total"), now.value("expert_misses_total")
    elapsed = now.at - before.at if before is not None else 0.0
    heat = tuple(now.status["heat"])
    if any(not (isinstance(r, str) and r.isascii() and r.isdigit() and len(r) == len(heat[0])) for r in heat):
        raise ValueError("heat")
    return Experts(
        slots=int(now.status["slots"]),
        records=int(now.status["records"]),
        hits=int(hits),
        misses=int(misses),
        hit_rate=_rate(hits, misses),
        lately_hit_rate=_rate(
            _gain("expert_hits_total", now, window), _gain("expert_misses_total", now, window)
        ),
        bytes_read=int(now.value("expert_bytes_read_total")),
        read_bytes_per_s=_gain("expert_bytes_read_total", now, before) / elapsed if elapsed > 0 else 0.0,
        heat=heat,
        experts=int(now.status["heat_experts"]),
    )


def _offload(now: Sample, before: Sample | None) -> Offload:
    def trouble(sample: Sample) -> dict[str, int]:
        found = sample.metrics.get("offload_trouble_total", {})
        return {plain(dict(labels).get("kind", "?")): int(n) for labels, n in found.items() if n}

    all_trouble = trouble(now)
    experts, connects = now.value("offload_experts_total"), now.value("offload_connects_total")
    if before is not None and sum(all_trouble.values()) > sum(trouble(before).values()):
        state = "trouble"
    elif not (experts or connects or all_trouble):
        state = "unused"
    else:
        state = "working" if _gain("offload_experts_total", now, before) > 0 else "idle"
    return Offload(
        state,
        int(experts),
        int(now.value("offload_local_total")),
        int(connects),
        int(now.value("offload_bytes_out_total")),
        int(now.value("offload_bytes_in_total")),
        all_trouble,
    )


def _answers(now: Sample) -> Answers:
    names = (
        "degraded_answers_total", "zeros_answers_total", "extra_answers_total", "failed_expert_answers_total",
        "unhealthy_experts", "queue_full_total", "deadline_exceeded_total", "cancelled_total",
        "timeouts_total",
    )  # fmt: skip
    return Answers(*(int(now.value(name)) for name in names))


def _recent(r: Mapping[str, Any]) -> Recent:
    n, span = int(r["completion_tokens"]), float(r["total_ms"]) - float(r["first_token_ms"])
    return Recent(
        ago_s=float(r["ago_s"]),
        kind=plain(str(r["kind"])),
        stream=bool(r["stream"]),
        status=int(r["status"]),
        finish=plain(str(r["finish"])),
        prompt_tokens=int(r["prompt_tokens"]),
        completion_tokens=n,
        first_token_ms=float(r["first_token_ms"]),
        total_ms=float(r["total_ms"]),
        tokens_per_s=(n - 1) * 1000 / span if n > 1 and span > 0 else None,
    )
