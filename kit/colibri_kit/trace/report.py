"""The curves as one self-contained HTML file; the plot is SVG, drawn here."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from colibri_kit.errors import UsageError

if TYPE_CHECKING:
    from colibri_kit.trace.curves import Point

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
pre { background: #f4f4f2; padding: 1rem; overflow-x: auto; } svg { max-width: 100%; }
"""
_COLOURS = ("#9a3412", "#3b7a57", "#3b5a9a")
_W, _H, _LEFT, _BOTTOM = 760, 380, 60, 50


def write(path: Path, title: str, text: str, points: Sequence[Point], records: int) -> None:
    """Writes the report beside its place and renames it.

    Raises:
        UsageError: it cannot be written.
    """
    body = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{html.escape(title)}</h1>\n"
        f"{svg(points, records)}\n<pre>{html.escape(text)}</pre></body></html>\n"
    )
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_text(body, encoding="utf-8")
        part.replace(path)
    except OSError as err:
        raise UsageError(f"cannot write {path}: {err.strerror or err}") from err


def svg(points: Sequence[Point], records: int) -> str:
    """Hit rate over cache size, one line a policy; the diagonal is what chance gives."""

    def x(slots: float) -> float:
        return _LEFT + slots / records * (_W - _LEFT - 20)

    def y(rate: float) -> float:
        return _H - _BOTTOM - rate * (_H - _BOTTOM - 20)

    out = [f'<svg viewBox="0 0 {_W} {_H}" role="img" aria-label="hit rate over cache size" font-size="13">']
    for i in range(0, 101, 20):
        here, there = y(i / 100), x(records * i / 100)
        out.append(f'<path d="M{_LEFT} {here:.1f}H{_W - 20}" stroke="#ddd"/>')
        out.append(f'<text x="{_LEFT - 8}" y="{here + 4:.1f}" text-anchor="end">{i} %</text>')
        out.append(f'<text x="{there:.1f}" y="{_H - 28}" text-anchor="middle">{records * i // 100}</text>')
    out.append(f'<text x="{(_W + _LEFT) / 2}" y="{_H - 8}" text-anchor="middle">expert slots</text>')
    out.append(
        f'<path d="M{x(0):.1f} {y(0):.1f}L{x(records):.1f} {y(1):.1f}" stroke="#999" stroke-dasharray="4"/>'
    )
    policies = list(dict.fromkeys(p.policy for p in points))
    for k, policy in enumerate(policies):
        line = [(x(p.slots), y(p.rate.hit_rate)) for p in points if p.policy == policy]
        path = "L".join(f"{a:.1f} {b:.1f}" for a, b in line)
        colour = _COLOURS[k % len(_COLOURS)]
        out.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        out += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{colour}"/>' for a, b in line]
        out.append(f'<text x="{_LEFT + 20}" y="{30 + 18 * k}" fill="{colour}">{html.escape(policy)}</text>')
    return "".join([*out, "</svg>"])
