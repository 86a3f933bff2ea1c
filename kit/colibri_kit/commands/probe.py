"""``colibri-kit probe``: what a model really does on a board."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from colibri_kit.cli import VERBS, ui_options
from colibri_kit.deploy.target import existing_prefix, opened, place, place_flags
from colibri_kit.errors import ConfigError, PreflightError, UsageError
from colibri_kit.transport.options import SshOptions
from colibri_kit.ui import Ui

if TYPE_CHECKING:
    from colibri_kit.probe.result import Result
    from colibri_kit.transport.base import Transport

_BASE_MAX = 256 << 20


@click.command(short_help=VERBS["probe"])
@click.argument("host", required=False, metavar="[HOST]")
@place_flags
@click.option("--latency", is_flag=True, help="Measure latency (the default).")
@click.option("--model", metavar="DIR", help="This .coli instead of the deployed release; a path on HOST.")
@click.option("--runs", type=click.IntRange(1, 1000), default=5, show_default=True, help="Runs.")
@click.option(
    "--tokens", type=click.IntRange(1, 100000), default=64, show_default=True, help="Tokens decoded a run."
)
@click.option(
    "--prompt-tokens", type=click.IntRange(1, 100000), default=32, show_default=True, help="Prompt of a run."
)
@click.option("--threads", type=click.IntRange(1, 64), help="Threads; default: as deployed.")
@click.option("--ctx", type=click.IntRange(1, 1 << 24), help="Context length; default: as deployed.")
@click.option("--offload", metavar="LINK", help="Experts over this link; default: as deployed.")
@click.option("--timeout", type=click.FloatRange(1), default=900, show_default=True, help="Seconds.")
@click.option(
    "--report", type=click.Path(path_type=Path, dir_okay=False), help="Write plots to this HTML file."
)
@click.option(
    "--compare", "base", type=click.Path(path_type=Path, dir_okay=False), help="An earlier --json output."
)
@click.option("--max-p99", type=click.FloatRange(0, min_open=True), metavar="MS", help="Fail above this.")
@click.option("--samples", is_flag=True, help="With --json: every sample too.")
@click.option("--dry-run", is_flag=True, help="Show the engine's command line; measure nothing.")
@ui_options
def command(
    ui: Ui,
    host: str | None,
    board: str | None,
    prefix: str | None,
    root: Path | None,
    ssh: SshOptions,
    latency: bool,
    model: str | None,
    report: Path | None,
    base: Path | None,
    max_p99: float | None,
    samples: bool,
    dry_run: bool,
    **options: Any,
) -> None:
    """Measure latency, speed and memory on a board.

    Routing latency of every layer and token, first token cold and warm, time of each
    token, tokens a second, memory, page faults, clock and throttling. HOST is a board
    with a deployed release; `--model DIR` alone measures on this machine.
    """
    del latency
    from colibri_kit.probe import act, plan, verdict
    from colibri_kit.probe import report as html

    if report is not None:
        html.require_matplotlib()
    old = _load_base(base) if base is not None else None
    with _target(ui, host, board, prefix, root, ssh, model, build=not dry_run) as (
        transport,
        engine,
        path,
        recorded,
    ):
        steps = plan.make_plan(
            engine, path, recorded=recorded, samples=samples or report is not None, **options
        )
        where = transport.describe()
        if dry_run:
            from colibri_kit.transport.base import sh_join

            argv = list(steps.argv)
            ui.result({"dry_run": True, "target": where, "argv": argv}, sh_join(argv))
            return
        ui.note(f"measuring on {where} …")
        result = act.run(transport, steps)
    warnings = verdict.warnings(result)
    changes = verdict.compare(old, result) if old is not None else []
    if old is not None:
        warnings += [f"not the same setting as {base}: {d}" for d in verdict.differences(old, result)]
    _say(ui, result, where, warnings, changes, samples)
    if report is not None:
        html.write(report, result, where, warnings, changes)
        ui.note(f"report: {report}")
    verdict.check_limit(result, max_p99)


def _say(ui: Ui, result: Result, where: str, warnings: list[str], changes: list[Any], samples: bool) -> None:
    from dataclasses import asdict

    from colibri_kit.probe import table

    text = table.render(result, where)
    if changes:
        text += "\n\n" + table.render_changes(changes)
    raw = {k: v for k, v in result.raw.items() if samples or k != "samples"}
    data: dict[str, Any] = {"target": where, "warnings": warnings, "probe": raw}
    if changes:
        data["compare"] = [{**asdict(c), "percent": c.percent} for c in changes]
    ui.result(data, text)
    for warning in warnings:
        ui.warn(warning)


@contextmanager
def _target(
    ui: Ui,
    host: str | None,
    board: str | None,
    prefix: str | None,
    root: Path | None,
    ssh: SshOptions,
    model: str | None,
    *,
    build: bool,
) -> Iterator[tuple[Transport, str, str, list[str]]]:
    """The open transport, engine and model there, and the options of the release."""
    if model is not None and host is None and root is None and prefix is None and board in (None, "host"):
        from colibri_kit.deploy import model as models
        from colibri_kit.transport.local import LocalTransport

        models.load(Path(model))
        yield LocalTransport(), _host_engine(ui) if build else "colibri", str(Path(model)), []
        return
    where = place(host, board, prefix, root, ssh)
    with opened(where, ui) as transport:
        base = existing_prefix(transport, where)
        from colibri_kit.deploy import act, release, store

        current = store.stored(transport, base).current
        if current is None:
            raise PreflightError(
                f"no release is current under {base} on {transport.describe()}",
                hint="deploy one first; see: colibri-kit status",
                state="nothing was measured",
                code="CK-NOT-DEPLOYED",
            )
        path = f"{base}/releases/{current}"
        recorded = act.settings_of(release.read(transport, base, current)).flags()
        yield transport, f"{path}/colibri", model or f"{path}/model.coli", recorded


def _host_engine(ui: Ui) -> str:
    """The engine for this machine, built when it is not yet."""
    from colibri_kit.config import load_board
    from colibri_kit.toolchain.engine import build_engine, plan_engine

    host = load_board("host")
    with ui.progress("compile", len(plan_engine(host).units), unit="files") as bar:
        return str(build_engine(host, advance=bar.advance).path)


def _load_base(path: Path) -> Result:
    """An earlier answer: this verb's ``--json`` or the engine's own.

    Raises:
        UsageError: it cannot be read. ConfigError: it is something else.
    """
    from colibri_kit.errors import EngineError
    from colibri_kit.probe import result

    try:
        if path.stat().st_size > _BASE_MAX:
            raise UsageError(f"{path} is larger than {_BASE_MAX} bytes")
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as err:
        raise UsageError(f"cannot read {path}: {err.strerror or err}") from err
    except ValueError as err:
        raise ConfigError(f"{path} is not JSON: {err}") from err
    try:
        return result.of_dict(raw["probe"] if isinstance(raw, dict) and "probe" in raw else raw)
    except EngineError as err:
        raise ConfigError(
            f"{path} is not the output of `colibri-kit probe --json`: {err.message}",
            code="CK-PROBE-BASE",
        ) from err
