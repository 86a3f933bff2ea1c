"""A result as text. Pure; percentiles are nearest-rank (stats.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from colibri_kit.probe.result import Machine, Offload, Result
from colibri_kit.probe.stats import Summary
from colibri_kit.probe.verdict import Change
from colibri_kit.ui import Ui


def render(result: Result, where: str) -> str:
    """The whole table, several lines."""
    rows = []
    if result.route is not None:
        rows.append(_row("routing, a layer", result.route, 1e3, "us"))
    rows.append(_row("token", result.token, 1e6, "ms"))
    rows.append(_row("first token, warm", result.first, 1e6, "ms"))
    lines = [
        f"{result.model} on {where}: {result.isa}, {_threads(result.threads)}, context {result.ctx}, "
        f"KV {result.kv}; {result.runs} runs of {result.prompt_tokens} + {result.tokens} tokens",
        "",
        Ui.table(["", "p50", "p90", "p99", "max", "", "samples"], rows),
        "",
        f"first token, cold  {result.cold_ns / 1e6:.1f} ms (load {result.load_ns / 1e6:.1f}, "
        f"golden {result.golden_ns / 1e6:.1f}; page cache not dropped)",
        f"prefill            {_rate(result.prefill.p50, result.prefill.min, result.prefill.max)}",
        f"decode             {_rate(result.decode.p50, result.decode.min, result.decode.max)}",
        f"memory             {_memory(result)}",
    ]
    if result.minor_faults is not None and result.major_faults is not None:
        lines.append(
            f"page faults        {result.minor_faults:.2f} minor, {result.major_faults:.2f} major a token"
        )
    lines += _cache(result.raw)
    if result.offload is not None:
        lines.append(f"offload            {_offload(result.offload)}")
    lines.append(f"machine            {_machine(result.machine_before, result.machine_after)}")
    return "\n".join(lines)


def _cache(raw: dict[str, Any]) -> list[str]:
    """What the expert cache did, and what made the output lossy; engines before it say nothing."""
    cache = raw.get("cache")
    if not isinstance(cache, dict) or not cache.get("records"):
        return []
    rate = cache.get("hit_rate")
    words = [
        f"{cache.get('slots')} of {cache['records']} experts have slots" if cache.get("slots") else "mapped"
    ]
    words.append(f"weights {cache.get('weights')}")
    if rate is not None:
        words.append(f"hit rate {100 * rate:.1f} % ({cache.get('policy')})")
    words.append(f"read {size(cache.get('bytes_read'))}, waited {cache.get('wait_ns', 0) / 1e6:.1f} ms")
    words.append(f"look-ahead {cache.get('ahead_useful')} useful, {cache.get('ahead_wasted')} wasted")
    lines = [f"experts            {'; '.join(words)}"]
    if raw.get("lossy"):
        what = ", ".join(f"{name} {raw[name]}" for name in ("degraded", "zeros", "extra") if raw.get(name))
        lines.append(f"LOSSY              {what}: not the model's own output")
    if raw.get("unhealthy"):
        lines.append(f"UNHEALTHY          {raw['unhealthy']} experts cannot be used")
    return lines


def _offload(o: Offload) -> str:
    """What the link did; a counter of trouble is named only when it counted."""
    words = [f"{o.state}, {o.module}" if o.module else o.state]
    words.append(f"{o.experts} experts there, {o.local} sent but computed here")
    words.append(f"sent {size(o.bytes_out)}, received {size(o.bytes_in)}, waited {o.wait_ns / 1e6:.1f} ms")
    if o.bytes_s:
        words.append(f"latency {o.latency_ns / 1e6:.3f} ms, {o.bytes_s / 1e6:.1f} MB/s")
    if o.connects:
        words.append(f"{o.connects} reconnects")
    words += [f"{name} {n}" for name, n in o.trouble.items()]
    return "; ".join(words)


def render_changes(changes: Sequence[Change]) -> str:
    rows = [
        (
            c.name,
            f"{c.base:.4g}",
            f"{c.now:.4g}",
            c.unit,
            f"{c.percent:+.1f} %" if c.base else "",
            {None: "", True: "better", False: "worse"}[c.better],
        )
        for c in changes
    ]
    return Ui.table(["", "before", "now", "", "change", ""], rows)


def _row(name: str, s: Summary, unit_ns: float, unit: str) -> tuple[object, ...]:
    cells = [f"{v / unit_ns:10.3f}" for v in (s.p50, s.p90, s.p99, s.max)]
    return (name, *cells, unit, s.n)


def _threads(n: int) -> str:
    return f"{n} thread{'' if n == 1 else 's'}"


def _rate(p50: float, low: float, high: float) -> str:
    return f"{p50:.1f} tok/s (median run; {low:.1f} to {high:.1f})"


def size(n: int | None) -> str:
    """Bytes in words."""
    if n is None:
        return "unknown"
    return f"{n / 2**30:.2f} GiB" if n >= 2**30 else f"{n / 2**20:.1f} MiB"


def _memory(result: Result) -> str:
    after = result.after
    budget = result.ledger.get("budget") or result.ledger.get("available")
    return (
        f"anonymous {size(after.rss_anon)}, file {size(after.rss_file)}, peak {size(after.peak)}; "
        f"planned {size(result.ledger.get('total'))} of {size(budget)}"
    )


def _machine(before: Machine, after: Machine) -> str:
    parts = []
    if after.cpu_khz:
        clock = f"{min(after.cpu_khz) / 1e6:.2f}–{max(after.cpu_khz) / 1e6:.2f} GHz"
        parts.append(f"clock {clock}" + (f" ({after.governor})" if after.governor else ""))
    for zone, value in after.temperature_mc.items():
        if zone in before.temperature_mc:
            parts.append(f"{zone} {before.temperature_mc[zone] / 1000:.0f} → {value / 1000:.0f} °C")
    if after.throttled_bits is not None:
        parts.append(f"throttled 0x{after.throttled_bits:x}")
    if after.load1 is not None:
        parts.append(f"load {after.load1:.2f}")
    return ", ".join(parts) if parts else "says nothing of clock or temperature"
