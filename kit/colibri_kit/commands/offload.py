"""``colibri-kit offload``: this machine as a module for a board, and what a link would give."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from colibri_kit.cli import VERBS, ui_options
from colibri_kit.errors import EngineError, UsageError
from colibri_kit.ui import Ui

if TYPE_CHECKING:
    from colibri_kit.offload.bench import Result

_MODEL = click.Path(path_type=Path, file_okay=False, exists=True)
_ENGINE = click.Path(path_type=Path, dir_okay=False, exists=True)


@click.group(short_help=VERBS["offload"])
def command() -> None:
    """Compute experts for a board at the other end of a cable, or measure whether that pays."""


def _engine(ui: Ui, given: Path | None) -> Path:
    if given is not None:
        return given.resolve()
    from colibri_kit.config import load_board
    from colibri_kit.toolchain.engine import build_engine, plan_engine

    host = load_board("host")
    with ui.progress("compile", len(plan_engine(host).units), unit="files") as bar:
        return Path(build_engine(host, advance=bar.advance).path)


@command.command("serve")
@click.option("--model", type=_MODEL, required=True, help="The .coli that the board runs too.")
@click.option("--serial", metavar="TTY", help="The board's serial device here, as /dev/ttyACM0.")
@click.option("--listen", metavar="LINK", help="Or unix:PATH or tcp:ADDRESS:PORT.")
@click.option("--threads", type=click.IntRange(1, 64), help="Threads; default: physical cores.")
@click.option("--engine", type=_ENGINE, help="Use this engine instead of building one.")
@click.option("--dry-run", is_flag=True, help="Show the command line; run nothing.")
@ui_options
def serve(
    ui: Ui,
    model: Path,
    serial: str | None,
    listen: str | None,
    threads: int | None,
    engine: Path | None,
    dry_run: bool,
) -> None:
    """Be the module: compute experts for the board at the other end, until Ctrl-C."""
    if (serial is None) == (listen is None):
        raise UsageError("give either --serial TTY or --listen LINK")
    link = ["--device", serial] if serial is not None else ["--listen", str(listen)]
    argv = [str(_engine(ui, engine)), "expertd", "--model", str(model), *link]
    argv += ["--threads", str(threads)] if threads else []
    if dry_run:
        from colibri_kit.transport.base import sh_join

        ui.result({"dry_run": True, "argv": argv}, sh_join(argv))
        return
    _run(ui, [*argv, *(["--json"] if ui.as_json else [])])


def _run(ui: Ui, argv: list[str]) -> None:
    """The engine in the foreground: what it says is passed on, Ctrl-C reaches it too."""
    import json
    import subprocess

    last = ""
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    while True:
        try:
            for line in process.stderr:
                last = line.rstrip()
                ui.note(last)
            break
        except KeyboardInterrupt:
            process.terminate()
    out = process.stdout.read()
    if process.wait() != 0:
        raise EngineError(f"the module ended with status {process.returncode}: {last}")
    if ui.as_json:
        ui.result(json.loads(out))


@command.command("bench")
@click.option("--model", type=_MODEL, required=True, help="A .coli with experts.")
@click.option("--link", metavar="LINK", help="A module that runs: /dev/ttyACM0, unix:PATH, tcp:ADDRESS:PORT.")
@click.option("--rate", type=click.FloatRange(0.001), default=30.0, show_default=True, metavar="MB/S",
              help="Without --link: the rate of the modelled link.")  # fmt: skip
@click.option("--delay", type=click.FloatRange(0), default=0.1, show_default=True, metavar="MS",
              help="Without --link: its delay, each way.")  # fmt: skip
@click.option("--storage", type=click.FloatRange(0.001), metavar="MB/S", help="Model storage this slow.")
@click.option("--cache-experts", type=click.IntRange(0), metavar="N", help="Expert slots; default: all.")
@click.option("--tokens", type=click.IntRange(1, 4000), default=48, show_default=True, help="Tokens decoded.")
@click.option("--threads", type=click.IntRange(1, 64), help="Threads; default: physical cores.")
@click.option("--sweep", is_flag=True, help="Measure every fixed split as well.")
@click.option("--engine", type=_ENGINE, help="Use this engine for the module instead of building one.")
@ui_options
def bench(
    ui: Ui,
    model: Path,
    link: str | None,
    rate: float,
    delay: float,
    storage: float | None,
    cache_experts: int | None,
    tokens: int,
    threads: int | None,
    sweep: bool,
    engine: Path | None,
) -> None:
    """Measure latency and rate of a link, decoding with and without it, and its break-even."""
    from colibri_kit.offload import bench as bench_act

    setting = bench_act.Setting(
        model=model,
        engine=engine or model if link is not None else _engine(ui, engine),
        link=link,
        bytes_s=rate * 1e6,
        delay_s=delay / 1e3,
        storage_bytes_s=storage * 1e6 if storage else None,
        cache_experts=cache_experts,
        tokens=tokens,
        threads=threads or 0,
        sweep=sweep,
    )
    result = bench_act.run(setting)
    ui.result(result.as_json(), _text(result))


def _text(r: Result) -> str:
    lines = [
        f"link      latency {r.latency_ns / 1e6:.3f} ms, {r.link_bytes_s / 1e6:.1f} MB/s; "
        f"{r.row_bytes} bytes an expert's row",
        f"expert    here {r.expert_here_ns / 1e3:.0f} us, there {r.expert_there_ns / 1e3:.0f} us"
        + (f", reading a missing one {r.read_ns / 1e3:.0f} us" if r.read_ns else ""),
        f"decode    {r.local_tok_s:.2f} tok/s alone, {r.offload_tok_s:.2f} tok/s with the link: "
        f"{r.remote_share:.0%} of the experts there",
        f"pays      {r.verdict}",
    ]
    if r.late or r.taken_back:
        lines.append(f"trouble   {r.late} layers late, {r.taken_back} experts sent but computed here")
    for what, value in (
        ("cached", r.break_even_cached_bytes_s),
        ("missing", r.break_even_missing_bytes_s),
    ):
        if value is not None:
            lines.append(f"          above {value / 1e6:.3g} MB/s for an expert that is {what} here")
    if r.break_even_cached_bytes_s is None:
        lines.append("          at no rate for an expert that is cached here: this board computes it sooner")
    lines += [f"split     {s.percent:3d} % there: {s.tok_s:.2f} tok/s" for s in r.splits]
    return "\n".join(lines)
