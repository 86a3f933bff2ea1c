"""From a frame to lines on a terminal. Pure: what is drawn depends only on the arguments."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from colibri_kit.live.frame import Frame, Latency, Recent

if TYPE_CHECKING:
    from rich.text import Text

#: Smaller than this nothing is made to fit.
WIDTH, HEIGHT = 80, 24

_COLOURS = ("cyan", "green", "yellow", "magenta", "red", "blue", "bright_cyan", "bright_green")
_HEAT_COLOURS = (240, 22, 28, 34, 70, 106, 142, 178, 208, 196)
_STATE = {"ok": "bold green", "swapping": "bold yellow"}


@dataclass(frozen=True)
class Glyphs:
    """What curves and bars are made of: ``levels`` from least to most, ``fills`` for the ledger."""

    levels: str = "▁▂▃▄▅▆▇█"
    fills: str = "█▓▒░"
    rest: str = "·"
    dot: str = " · "
    dash: str = "–"
    degree: str = "°C"


ASCII = Glyphs(levels=".:-=+*#@", fills="#%=+", rest=".", dot=", ", dash="-", degree="C")


def draw(
    frame: Frame,
    where: str,
    width: int,
    height: int,
    *,
    lost: str | None = None,
    glyphs: Glyphs | None = None,
) -> list[Text]:
    """At most ``height`` lines (at least 24) of at most ``width`` columns (at least 80).

    Args:
        where: whose service it is. lost: why no newer figures come; they are drawn dim.
    """
    return _Picture(frame, where, max(width, WIDTH), max(height, HEIGHT), lost, glyphs or Glyphs()).lines()


def size(n: float) -> str:
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if n >= factor:
            return f"{n / factor:.{0 if n >= 100 * factor else 1}f} {unit}"
    return f"{n / 1024:.0f} KiB"


def seconds(s: float | None, dash: str = "–") -> str:
    if s is None:
        return dash
    if s < 0.01:
        return f"{s * 1000:.1f} ms"
    return f"{s * 1000:.0f} ms" if s < 1 else f"{s:.1f} s"


def span(s: float) -> str:
    if s < 120:
        return f"{s:.0f} s"
    if s < 7200:
        return f"{s / 60:.0f} min"
    return f"{s / 3600:.1f} h" if s < 172800 else f"{s / 86400:.1f} d"


def levels(values: Sequence[float], glyphs: Glyphs) -> str:
    """One glyph a value, the largest full; the lowest is zero's alone."""
    most = max(values, default=0.0)
    top = len(glyphs.levels) - 1
    return "".join(glyphs.levels[max(1, round(v / most * top)) if v > 0 else 0] for v in values)


def grouped(rows: Sequence[str], n: int) -> list[tuple[int, int, str]]:
    """``rows`` of equal length folded to at most ``n``: (first, last, the greatest of each column)."""
    n = min(n, len(rows))
    cuts = [i * len(rows) // n for i in range(n + 1)] if n > 0 else []
    return [
        (a, b - 1, "".join(max(column) for column in zip(*rows[a:b], strict=True)))
        for a, b in itertools.pairwise(cuts)
    ]


class _Picture:
    def __init__(
        self, frame: Frame, where: str, width: int, height: int, lost: str | None, glyphs: Glyphs
    ) -> None:
        self.f, self.where, self.width, self.height = frame, where, width, height
        self.lost, self.g = lost, glyphs

    def text(self, *parts: str | tuple[str, str]) -> Text:
        """One line; a part is a string or (string, style)."""
        from rich.text import Text

        line = Text.assemble(*parts, no_wrap=True, overflow="ellipsis", end="\n")
        line.truncate(self.width, overflow="ellipsis" if self.g.levels[0] == "▁" else "crop")
        if self.lost is not None:
            line.stylize("dim")
        return line

    def lines(self) -> list[Text]:
        top = [self._title(), self._facts(), self._speed(), self._queue(), *self._latency(), *self._memory()]
        low = [*self._answers(), self._machine()]
        # What is left goes to experts and requests: a title each, the rest is theirs by halves.
        room = self.height - 1 - len(top) - len(low) - 2
        n_heat = min(len(self.f.experts.heat), max(2, room // 2))
        n_recent = min(len(self.f.recent), room - n_heat) if self.f.recent else 0
        n_heat = min(len(self.f.experts.heat), room - max(n_recent, 1))
        return [*top, *self._experts(n_heat), *low, *self._recent(n_recent), self._foot()]

    def _title(self) -> Text:
        f = self.f
        state = (f" {f.state} ", _STATE.get(f.state, "bold red") + " reverse")
        if self.lost is not None:
            state = (" lost, retrying ", "bold red reverse")
        release = f"{self.g.dot}{f.release}" if f.release else ""
        return self.text(state, "  ", (f.model, "bold"), f"{self.g.dot}{self.where}{release}")

    def _facts(self) -> Text:
        f = self.f
        threads = f"{f.threads} thread" + ("s" if f.threads != 1 else "")
        words = (f"up {span(f.uptime_s)}", f"golden {f.golden[:12]}", f"colibri {f.version}", f.isa, threads)
        return self.text(self.g.dot.join((*words, f"context {f.ctx}", f.arch)))

    def _speed(self) -> Text:
        f = self.f
        head = f"{f.tokens_per_s:8.1f} tok/s  "
        tail = f"  {f.tokens_answer} answered, {f.tokens_prompt} in prompts"
        curve = levels(f.speeds, self.g)[-max(8, self.width - len(head) - len(tail)) :]
        return self.text((head, "bold"), (curve, "green"), tail)

    def _queue(self) -> Text:
        f = self.f
        words = f"{f.active:8} computing of {f.sequences}{self.g.dot}{f.queued} waiting{self.g.dot}"
        words += f"room for {f.capacity} requests"
        prompt = f"{self.g.dot}prompt {f.prefill[0]} of {f.prefill[1]} tokens" if f.prefill[1] else ""
        return self.text((words, "yellow" if f.queued else ""), (prompt, "cyan"))

    def _latency(self) -> list[Text]:
        window = f"last {span(self.f.window_s)}" if self.f.window_s else "lately"
        head = (
            f"{'latency':<13}{window + ':  p50':>14}{'p99':>9}{'n':>7}{'start:  p50':>14}{'p99':>9}{'n':>7}"
        )
        return [self.text((head, "dim")), *(self._latency_row(x) for x in self.f.latency)]

    def _latency_row(self, x: Latency) -> Text:
        def pair(a: float | None, b: float | None, n: int) -> str:
            return f"{seconds(a, self.g.dash):>14}{seconds(b, self.g.dash):>9}{n:>7}"

        cells = pair(x.lately_p50, x.lately_p99, x.lately_count) + pair(x.p50, x.p99, x.count)
        room = self.width - 13 - len(cells) - 1
        # 5 ms to 300 s in 15 buckets; a narrow terminal has room for some: those in use.
        used = [i for i, n in enumerate(x.counts) if n]
        first = max(0, min(used[0], len(x.counts) - room)) if used else 0
        curve = levels([float(n) for n in x.counts[first : first + max(0, room)]], self.g) if used else ""
        return self.text(f"{x.name:<13}", cells, " ", (curve, "cyan"))

    def _memory(self) -> list[Text]:
        f = self.f
        whole = max(f.budget, f.planned, 1)
        head, tail = (
            "memory       ",
            f" {size(f.planned)} of {size(f.budget)}" if f.budget else size(f.planned),
        )
        room = self.width - len(head) - len(tail) - 1
        bar: list[tuple[str, str]] = []
        legend: list[tuple[str, str] | str] = [" " * 13]
        used = done = 0
        for i, (name, n) in enumerate(f.ledger):
            if not n:
                continue
            glyph, colour = self.g.fills[i % len(self.g.fills)], _COLOURS[i % len(_COLOURS)]
            used += n
            bar.append((glyph * (used * room // whole - done), colour))
            done = used * room // whole
            legend += [(glyph, colour), f" {name} {size(n)}  "]
        rest = (self.g.rest * (room - done), "dim")
        return [self.text(head, *bar, rest, tail), self.text(*legend)]

    def _experts(self, rows: int) -> list[Text]:
        e = self.f.experts
        rate = "nothing looked up yet" if e.hit_rate is None else f"{100 * e.hit_rate:.1f} % hits"
        if e.lately_hit_rate is not None:
            rate += f" ({100 * e.lately_hit_rate:.1f} % lately)"
        words = f"{rate}{self.g.dot}{e.slots} slots for {e.records}{self.g.dot}{size(e.bytes_read)} read"
        if e.read_bytes_per_s > 0:
            words += f", {size(e.read_bytes_per_s)}/s"
        if not e.heat:
            return [self.text("experts      ", words)]
        cells = min(len(e.heat[0]), self.width - 13)
        wide = max(1, min(4, (self.width - 13) // max(1, cells)))
        out = [self.text("experts      ", words)]
        for first, last, row in grouped(e.heat, rows):
            columns = grouped(list(row), cells)
            name = f"layer {first}" if first == last else f"layer {first}-{last}"
            out.append(self.text(f"{name:<13}", *(self._cell(c, wide) for _, _, c in columns)))
        return out

    def _cell(self, digit: str, wide: int) -> tuple[str, str]:
        n = int(digit)
        top = len(self.g.levels) - 1
        glyph = self.g.levels[(n - 1) * top // 8] if n else self.g.rest
        return glyph * wide, f"color({_HEAT_COLOURS[n]})"

    def _answers(self) -> list[Text]:
        a, o = self.f.answers, self.f.offload
        bad = [
            f"{n} {what}"
            for n, what in (
                (a.degraded, "degraded"), (a.zeros, "with experts left out"), (a.extra, "with extra experts"),
                (a.failed, "failed by an expert"), (a.unhealthy_experts, "experts unhealthy"),
            ) if n
        ]  # fmt: skip
        words = (", ".join(bad), "bold red") if bad else ("all as the model computes them", "green")
        turned = [
            f"{n} {what}"
            for n, what in ((a.queue_full, "queue full"), (a.late, "over deadline"), (a.cancelled, "left"),
                            (a.timeouts, "too slow")) if n
        ]  # fmt: skip
        out = [self.text("answers      ", words, self.g.dot + ", ".join(turned) if turned else "")]
        if o.state != "unused":
            trouble = ", ".join(f"{n} {kind}" for kind, n in o.trouble.items())
            style = "bold red" if o.state == "trouble" else "green" if o.state == "working" else ""
            counts = f"{o.experts} experts there, {o.local} computed here after all, {size(o.bytes_in)} back"
            out.append(
                self.text(
                    "offload      ",
                    (o.state, style),
                    (f" ({trouble})" if trouble else "", "yellow"),
                    f"{self.g.dot}{counts}",
                )
            )
        return out

    def _machine(self) -> Text:
        zones = "  ".join(f"{name} {c:.0f} {self.g.degree}" for name, c in self.f.temperature[:4])
        parts: list[str | tuple[str, str]] = ["machine      ", zones or "no thermal zones"]
        parts.append(f"{self.g.dot}{size(self.f.resident)} anonymous memory")
        if self.f.throttled is not None:
            words = ", ".join(self.f.throttled)
            parts += [self.g.dot, (words, "bold red") if words else ("not throttled", "green")]
        return self.text(*parts)

    def _recent(self, rows: int) -> list[Text]:
        if not self.f.recent:
            return [self.text("requests     none yet")]
        head = f"{'ended':>9} ago  {'kind':<12}{'status':<8}{'end':<12}{'prompt':>7}{'answer':>7}"
        head += f"{'first':>8}{'total':>8}"
        if self.width >= 90:
            head += f"{'tok/s':>9}"
        return [self.text((head, "dim")), *(self._request(r) for r in self.f.recent[:rows])]

    def _request(self, r: Recent) -> Text:
        kind = ("chat" if r.kind == "chat" else "text") + (" stream" if r.stream else "")
        first = seconds(r.first_token_ms / 1000) if r.first_token_ms > 0 else self.g.dash
        line = f"{span(r.ago_s):>9}      {kind:<12}"
        tail = f"{r.finish[:11]:<12}{r.prompt_tokens:>7}{r.completion_tokens:>7}"
        tail += f"{first:>8}{seconds(r.total_ms / 1000):>8}"
        if self.width >= 90:
            tail += f"{r.tokens_per_s:>9.1f}" if r.tokens_per_s is not None else f"{self.g.dash:>9}"
        return self.text(line, (f"{r.status:<8}", "" if r.status == 200 else "red"), tail)

    def _foot(self) -> Text:
        if self.lost is not None:
            return self.text((f"lost, retrying: {self.lost}", "bold red"))
        return self.text(("q or Ctrl-C leaves", "dim"))
