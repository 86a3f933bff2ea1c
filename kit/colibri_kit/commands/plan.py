"""``colibri-kit plan``: what a model takes on a board, whether it fits, how fast it will be."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from colibri_kit.cli import VERBS, ui_options
from colibri_kit.commands.engine_options import CacheExperts
from colibri_kit.convert.choices import QUANT_NAMES

if TYPE_CHECKING:
    from colibri_kit.budget.report import Report
    from colibri_kit.ui import Ui

_REFUSED = 6  # PreflightError's


@click.command("plan", short_help=VERBS["plan"])
@ui_options
@click.argument("model", metavar="MODEL.coli|MODEL.gguf", type=click.Path(path_type=Path))
@click.option("--board", "board_name", default="host", show_default=True, help="Board profile.")
@click.option("--boards-dir", type=click.Path(path_type=Path), help="Look here for profiles first.")
@click.option("--budget", metavar="SIZE", help="Memory for the engine, as 1.2GiB; default: the profile's.")
@click.option("--ctx", type=click.IntRange(0, 1 << 24), default=0, help="Context length; 0 = the engine's.")
@click.option("--batch", type=click.IntRange(0, 4096), default=0, help="Prefill chunk; 0 = the engine's.")
@click.option("--threads", type=click.IntRange(0, 64), default=0, help="0 = the board's cores.")
@click.option("--kv", type=click.Choice(["f16", "f32", "q8_0"]), default="f16", show_default=True)
@click.option(
    "--weights",
    type=click.Choice(["arena", "mmap", "lazy", "preload"]),
    default="arena",
    show_default=True,
    help="Where experts live.",
)
@click.option("--cache-experts", type=CacheExperts(), help="Slots at most; 0 = only those in use; all.")
@click.option("--cache-policy", type=click.Choice(["slru", "lru", "lfu"]), default="slru", show_default=True)
@click.option("--hot-swap", is_flag=True, help="Room for a second set of dense weights.")
@click.option("--quant", type=click.Choice(QUANT_NAMES, case_sensitive=False), help="Of a GGUF: as convert.")
@click.option("--prompt-tokens", type=click.IntRange(1), default=128, show_default=True, help="A prompt's.")
@click.option(
    "--storage", type=click.FloatRange(0, min_open=True), metavar="MB/S", help="Instead of the profile's."
)
@click.option(
    "--routing",
    type=click.FloatRange(0, 4),
    metavar="ZIPF",
    help="Skew of expert choices: 0 = all alike, the hardest; default 0.7.",
)
@click.option(
    "--trace", type=click.Path(path_type=Path, dir_okay=False), help="Hit rate from a recorded trace."
)
def command(ui: Ui, model: Path, quant: str | None, **options: Any) -> None:
    """What MODEL takes on a board, line by line, whether it fits, and how fast it will be.

    Exit status 6 when it does not fit.
    """
    from colibri_kit.budget import report
    from colibri_kit.budget.phantom import phantom
    from colibri_kit.errors import UsageError

    with ExitStack() as stack:
        planned = not model.is_dir()
        folder = stack.enter_context(phantom(model, quant)) if planned else model
        if quant and not planned:
            raise UsageError("--quant is for a GGUF; a .coli model is what it is")
        slots = options.pop("cache_experts")
        options["cache_experts"] = None if slots in (None, "all") else int(slots)
        result = report.make(folder, **options)
    ui.result(_data(result, model, planned), _text(ui, result, model, planned))
    if result.verdict == "refuse":
        raise SystemExit(_REFUSED)


def _data(r: Report, model: Path, planned: bool) -> dict[str, Any]:
    s = r.speed
    return {
        "board": r.board.name,
        "model": str(model),
        "name": r.ledger.info["name"],
        "from_gguf": planned,
        "verdict": r.verdict,
        "weights": r.settings.weights,
        "ctx": r.ledger.info["ctx"],
        "batch": r.ledger.info["batch"],
        "threads": r.ledger.info["threads"],
        "kv": r.settings.kv,
        "budget_bytes": r.settings.budget,
        "budget_source": r.budget_source,
        "ledger": r.ledger.lines,
        "total_bytes": r.ledger.total,
        "largest": r.ledger.largest,
        "slots": r.ledger.slots,
        "records": r.ledger.records,
        "slot_bytes": r.ledger.slot_bytes,
        "slots_per_layer": r.slots_per_layer,
        "decode_tok_s": s.decode_tok_s,
        "prefill_tok_s": s.prefill_tok_s,
        "first_token_s": s.first_token_s,
        "prompt_tokens": r.prompt,
        "start_s": s.start_s,
        "not_predicted": s.why_not,
        "inputs": [asdict(i) for i in s.inputs],
        "advice": [asdict(a) for a in r.advice],
    }


def _text(ui: Ui, r: Report, model: Path, planned: bool) -> str:
    from colibri_kit.config import format_size

    info, led = r.ledger.info, r.ledger
    kind = "a GGUF, planned as convert would write it" if planned else f"{info['arch']}"
    lines = [
        f"{info['name']} ({kind}) on {r.board.title}",
        f"  ctx {info['ctx']}, batch {info['batch']}, {info['threads']} threads, "
        f"KV {r.settings.kv}, weights {r.settings.weights}",
        "",
        ui.table(
            ["line", "MiB"],
            [[name, f"{n / 2**20:10.1f}"] for name, n in (*led.lines.items(), ("total", led.total))],
        ),
        f"budget {format_size(r.settings.budget)} ({r.budget_source})",
    ]
    if led.records and r.settings.weights in ("arena", "preload"):
        lines.append(
            f"expert slots: {led.slots} of {led.records} records, {r.slots_per_layer:.1f} a layer "
            f"of {info['n_expert']}; a slot is {led.slot_bytes / 2**20:.2f} MiB"
        )
    lines += ["", f"verdict: {r.verdict}"]
    if r.verdict == "refuse":
        return "\n".join([*lines, *_refusal(r)])
    s = r.speed
    if s.decode_tok_s is not None and s.prefill_tok_s is not None:
        lines += [
            "",
            f"predicted  decode {s.decode_tok_s:.3g} tok/s, prefill {s.prefill_tok_s:.3g} tok/s",
            f"           first token after {s.first_token_s:.3g} s for a prompt of {r.prompt}; "
            f"start reads for {s.start_s:.3g} s",
        ]
    else:
        lines += ["", f"no speed predicted: {s.why_not}"]
    if r.verdict == "fits streaming":
        lines += [
            f"  {a.flag}: {a.slots} slots instead of {led.slots}" for a in r.advice if a.slots > led.slots
        ]
    lines += ["from", ui.table(["input", "", "", "source"], [_cells(i) for i in s.inputs])]
    return "\n".join(lines)


def _cells(i: Any) -> list[str]:
    return [f"  {i.name}", f"{i.value:.3g}", i.unit, i.source]


def _refusal(r: Report) -> list[str]:
    over = r.ledger.total - r.settings.budget
    line = r.ledger.largest
    size = r.ledger.lines[line] / 2**20
    out = [f"  {over / 2**20:.1f} MiB too much; the largest line is {line}: {size:.1f} MiB"]
    for a in r.advice:
        fits = "then it fits" if a.fits else "not enough alone"
        out.append(f"  {a.flag}: {a.saves / 2**20:.1f} MiB less, {fits}")
    if not any(a.fits for a in r.advice):
        out.append("  no flag makes it fit: a larger --budget, a smaller quantisation or another board")
    return out
