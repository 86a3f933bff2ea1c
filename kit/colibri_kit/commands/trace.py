"""``colibri-kit trace``: hit rates for each policy and cache size, from recorded expert choices."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from colibri_kit.cli import VERBS, ui_options

if TYPE_CHECKING:
    from colibri_kit.trace.curves import Point
    from colibri_kit.trace.file import Trace
    from colibri_kit.ui import Ui

_POLICIES = ("slru", "lru", "lfu")


@click.command("trace", short_help=VERBS["trace"])
@ui_options
@click.argument("recording", metavar="TRACE", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--slots", metavar="N,…", help="Cache sizes in experts; default: shares of all.")
@click.option("--policy", type=click.Choice(_POLICIES), multiple=True, help="Default: all three.")
@click.option("--pin", type=click.IntRange(1), help="Also: the N most used experts, for --pin-file.")
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="Where --pin writes.")
@click.option("--report", type=click.Path(path_type=Path, dir_okay=False), help="Draw into this HTML file.")
def command(
    ui: Ui,
    recording: Path,
    slots: str | None,
    policy: tuple[str, ...],
    pin: int | None,
    output: Path | None,
    report: Path | None,
) -> None:
    """Replay TRACE, which `colibri run --trace-experts` wrote, through the expert cache.

    Each policy and cache size gives a hit rate. With --pin the N most used experts are held in
    every replay, and written as the file that `--pin-file` takes.
    """
    from colibri_kit.errors import UsageError
    from colibri_kit.trace import curves
    from colibri_kit.trace import report as page
    from colibri_kit.trace.file import read

    if (pin is None) != (output is None):
        raise UsageError("--pin and -o go together")
    trace = read(recording)
    wanted = _sizes(slots, trace) if slots else curves.sizes(trace)
    pairs = curves.pins(trace, pin) if pin else []
    if len(pairs) + trace.n_used > max(wanted):
        raise UsageError(
            f"--pin {len(pairs)} leaves no room in {max(wanted)} slots for the {trace.n_used} of a token"
        )
    held = [(il - trace.first_layer) * trace.n_expert + e for il, e in pairs]
    wanted = [n for n in wanted if n >= len(held) + trace.n_used] if held else wanted
    points = curves.curves(trace, policy or _POLICIES, wanted, held)
    if output is not None:
        _write_pins(output, pairs, recording)
    text = _text(ui, trace, points, len(held))
    if report is not None:
        page.write(report, f"Expert cache, {recording.name}", text, points, trace.n_layer * trace.n_expert)
    ui.result(_data(trace, points, pairs), text)


def _sizes(text: str, trace: Trace) -> list[int]:
    from colibri_kit.errors import UsageError

    total = trace.n_layer * trace.n_expert
    try:
        out = sorted({int(s) for s in text.split(",")})
    except ValueError:
        out = []
    if not out or out[0] < 1 or out[-1] > total:
        raise UsageError(f"--slots {text}: whole numbers from 1 to {total}, as 64,128,256")
    return out


def _write_pins(path: Path, pairs: Sequence[tuple[int, int]], source: Path) -> None:
    from colibri_kit.errors import UsageError

    lines = [f"# the {len(pairs)} most used experts of {source.name}: layer expert"]
    try:
        path.write_text(
            "\n".join([*lines, *(f"{il} {e}" for il, e in pairs)]) + "\n", encoding="ascii", errors="replace"
        )
    except OSError as err:
        raise UsageError(f"cannot write {path}: {err.strerror or err}") from err


def _data(trace: Trace, points: Sequence[Point], pairs: Sequence[tuple[int, int]]) -> dict[str, Any]:
    from colibri_kit.trace.curves import coverage, repeats

    return {
        "tokens": trace.n_token,
        "chunks": int(trace.starts.sum()),
        "n_moe_layer": trace.n_layer,
        "n_expert": trace.n_expert,
        "n_used": trace.n_used,
        "first_layer": trace.first_layer,
        "model_id": trace.model_id.hex(),
        "repeats": repeats(trace),
        "coverage_half": coverage(trace, 0.5),
        "pinned": [list(p) for p in pairs],
        "curves": [
            {
                "policy": p.policy,
                "slots": p.slots,
                "hits": p.rate.hits,
                "misses": p.rate.misses,
                "hit_rate": p.rate.hit_rate,
            }
            for p in points
        ],
    }


def _text(ui: Ui, trace: Trace, points: Sequence[Point], pinned: int) -> str:
    from colibri_kit.trace.curves import coverage, repeats

    total = trace.n_layer * trace.n_expert
    policies = list(dict.fromkeys(p.policy for p in points))
    rate = {(p.policy, p.slots): p.rate.hit_rate for p in points}
    rows = [
        [n, f"{100 * n / total:6.1f}", *(f"{100 * rate[p, n]:6.1f}" for p in policies)]
        for n in sorted({p.slots for p in points})
    ]
    head = f"{trace.n_token} tokens in {int(trace.starts.sum())} chunks, {trace.n_layer} MoE layers of "
    head += f"{trace.n_expert} experts, {trace.n_used} used; model id {trace.model_id.hex()}"
    lines = [
        head,
        f"the token before used {100 * repeats(trace):.1f} % of a token's experts too; the most used "
        f"half of all experts serves {100 * coverage(trace, 0.5):.1f} % of the look-ups",
    ]
    if pinned:
        lines.append(f"{pinned} experts pinned")
    return "\n".join([*lines, "", ui.table(["slots", "% of all", *(f"{p} %" for p in policies)], rows)])
