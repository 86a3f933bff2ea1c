"""What to make of a result: warnings, limits, comparison with an earlier one. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from colibri_kit.errors import LimitError
from colibri_kit.probe.result import Machine, Offload, Result

#: https://www.raspberrypi.com/documentation/computers/os.html#get_throttled
_THROTTLED = {
    0: "under-voltage",
    1: "ARM frequency capped",
    2: "throttled",
    3: "soft temperature limit active",
}
#: A p99 above this many medians is called noise.
NOISE = 3.0
#: A load per CPU above this before the measurement means that others compute too.
BUSY = 0.5
#: A clock this far below the maximum under load is worth a word.
SLOW = 0.9


def warnings(result: Result) -> list[str]:
    """Reasons not to trust the figures, in words; empty when there are none."""
    out = [*_throttling(result), *_noise(result), *_link(result)]
    before, after = result.before.rss_anon, result.after.rss_anon
    if before is not None and after is not None and after != before:
        out.append(f"anonymous memory changed by {after - before:+d} bytes while measuring")
    if result.major_faults:
        out.append(
            f"{result.major_faults:.2f} major page faults a token: the board reads memory back from storage"
        )
    return out


def _throttling(result: Result) -> list[str]:
    out: list[str] = []
    before, after = result.machine_before, result.machine_after
    if after.throttled_bits is not None:
        now = [name for bit, name in _THROTTLED.items() if after.throttled_bits >> bit & 1]
        new = after.throttled_bits & ~(before.throttled_bits or 0)
        since = [name for bit, name in _THROTTLED.items() if new >> (bit + 16) & 1]
        if now:
            out.append(f"the board is throttled now: {', '.join(now)}")
        elif since:
            out.append(f"the board throttled while measuring: {', '.join(since)}")
    if before.throttle_count is not None and after.throttle_count is not None:
        events = after.throttle_count - before.throttle_count
        if events > 0:
            out.append(f"the CPU throttled {events} times while measuring")
    if _slow(after):
        ghz, most = max(after.cpu_khz) / 1e6, (after.cpu_khz_max or 0) / 1e6
        out.append(
            f"the fastest CPU ran at {ghz:.2f} of {most:.2f} GHz after measuring"
            + (f" (governor {after.governor})" if after.governor else "")
        )
    return out


def _slow(machine: Machine) -> bool:
    return bool(machine.cpu_khz and machine.cpu_khz_max and max(machine.cpu_khz) < SLOW * machine.cpu_khz_max)


def _noise(result: Result) -> list[str]:
    out: list[str] = []
    token = result.token
    if token.p50 > 0 and token.p99 > NOISE * token.p50:
        out.append(f"noisy: the 99th percentile of a token is {token.p99 / token.p50:.1f} times the median")
    cpus = len(result.raw["machine"]["before"]["cpu_khz"])
    load = result.machine_before.load1
    if load is not None and cpus and load > BUSY * cpus:
        out.append(f"the load average was {load:.2f} on {cpus} CPUs before measuring: others compute too")
    return out


def _link(result: Result) -> list[str]:
    """The output never depends on the link, the figures do."""
    link = result.offload
    if link is None:
        return []
    why = f": {link.why}" if link.why else ""
    if link.state == "down" and not link.experts:
        return [f"the offload link was down{why}"]
    if link.trouble:
        what = ", ".join(f"{name} {n}" for name, n in link.trouble.items())
        return [f"trouble on the offload link ({what}){why}"]
    return []


def check_limit(result: Result, max_p99_ms: float | None) -> None:
    """Raises LimitError when the 99th percentile of a token is above ``max_p99_ms``."""
    if max_p99_ms is not None and result.token.p99 / 1e6 > max_p99_ms:
        raise LimitError(
            f"the 99th percentile of a token is {result.token.p99 / 1e6:.2f} ms, the limit {max_p99_ms:g} ms",
            hint="see the warnings above; --report shows the whole distribution",
            state="nothing was changed",
            code="CK-LIMIT-P99",
        )


@dataclass(frozen=True)
class Change:
    """One figure before and now; ``better`` is None when nothing changed."""

    name: str
    unit: str
    base: float
    now: float
    better: bool | None

    @property
    def percent(self) -> float:
        return 100.0 * (self.now - self.base) / self.base if self.base else 0.0


def compare(base: Result, now: Result) -> list[Change]:
    """Figure by figure, in the order of the table."""

    def row(name: str, unit: str, old: float, new: float, *, more_is_better: bool = False) -> Change:
        better = None if old == new else (new > old) == more_is_better
        return Change(name, unit, old, new, better)

    out = []
    if base.route is not None and now.route is not None:
        out.append(row("routing p50", "us", base.route.p50 / 1e3, now.route.p50 / 1e3))
        out.append(row("routing p99", "us", base.route.p99 / 1e3, now.route.p99 / 1e3))
    out += [
        row("token p50", "ms", base.token.p50 / 1e6, now.token.p50 / 1e6),
        row("token p99", "ms", base.token.p99 / 1e6, now.token.p99 / 1e6),
        row("first token warm p50", "ms", base.first.p50 / 1e6, now.first.p50 / 1e6),
        row("first token cold", "ms", base.cold_ns / 1e6, now.cold_ns / 1e6),
        row("prefill", "tok/s", base.prefill.p50, now.prefill.p50, more_is_better=True),
        row("decode", "tok/s", base.decode.p50, now.decode.p50, more_is_better=True),
    ]
    if base.after.peak is not None and now.after.peak is not None:
        out.append(row("peak memory", "MiB", base.after.peak / 2**20, now.after.peak / 2**20))
    return out + _compare_links(base.offload, now.offload)


def _compare_links(base: Offload | None, now: Offload | None) -> list[Change]:
    """The link's figures, when both runs had one; more or fewer experts there is neither better nor worse."""
    if base is None or now is None:
        return []

    def fewer(name: str, unit: str, old: float, new: float) -> Change:
        return Change(name, unit, old, new, None if old == new else new < old)

    trouble = sorted(base.trouble.keys() | now.trouble.keys())
    return [
        Change("experts there", "", base.experts, now.experts, None),
        fewer("sent but computed here", "", base.local, now.local),
        fewer("link latency", "ms", base.latency_ns / 1e6, now.latency_ns / 1e6),
        Change("link rate", "MB/s", base.bytes_s / 1e6, now.bytes_s / 1e6,
               None if base.bytes_s == now.bytes_s else now.bytes_s > base.bytes_s),
        *(fewer(f"link: {t}", "", base.trouble.get(t, 0), now.trouble.get(t, 0)) for t in trouble),
    ]  # fmt: skip


def differences(base: Result, now: Result) -> list[str]:
    """Why the two cannot be compared number by number: "threads 2, was 1" …"""
    out = []
    for name in ("model_id", "isa", "threads", "kv", "prompt_tokens", "tokens"):
        old, new = getattr(base, name), getattr(now, name)
        if old != new:
            out.append(f"{name.replace('_', ' ')} {new}, was {old}")
    if (base.offload is None) != (now.offload is None):
        out.append(
            "with an offload link, was without" if now.offload else "without an offload link, was with"
        )
    return out
