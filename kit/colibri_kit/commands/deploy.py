"""``colibri-kit deploy``: engine and weights onto a board, checked, or taken back."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

import click

from colibri_kit.cli import ui_options
from colibri_kit.commands.engine_options import memory_flags
from colibri_kit.deploy.target import Place, new_prefix, opened, place, place_flags
from colibri_kit.errors import PreflightError, UsageError
from colibri_kit.transport.options import SshOptions
from colibri_kit.ui import Ui

if TYPE_CHECKING:
    from colibri_kit.config.board import Board
    from colibri_kit.deploy.act import Outcome
    from colibri_kit.deploy.model import Parcel
    from colibri_kit.deploy.plan import Engine, Plan, Settings
    from colibri_kit.transport.base import Transport


class SizeParam(click.ParamType[int]):
    """``3GiB``, ``512M``, or a number of bytes."""

    name = "SIZE"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        import re

        text = str(value)
        found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([KMG]?)(?:i?B)?", text, re.IGNORECASE)
        if not found:
            self.fail(f"{text!r} is not a size such as 3GiB or 512MiB", param, ctx)
        power = {"": 0, "K": 1, "M": 2, "G": 3}[found.group(2).upper()]
        return int(float(found.group(1)) * 1024**power)


@click.command(short_help="Put engine and weights on a board, start them, check them.")
@click.argument("places", nargs=-1, metavar="[HOST] MODEL.coli", required=True)
@place_flags
@click.option(
    "--engine", type=click.Path(path_type=Path, dir_okay=False), help="Send this binary; default: build one."
)
@click.option("--budget", type=SizeParam(), help="Memory the engine may take; default: the board's.")
@click.option("--ctx", type=click.IntRange(1, 1 << 24), help="Context length in tokens.")
@click.option("--threads", type=click.IntRange(1, 1024), help="Threads; default: physical cores.")
@memory_flags
@click.option("--keep", type=click.IntRange(1, 1000), default=3, show_default=True, help="Releases to keep.")
@click.option("--offload", metavar="LINK", help="Experts may be computed at the end of this link.")
@click.option("--offload-gadget", is_flag=True, help="Also make the board's USB port a serial device.")
@click.option("--service", is_flag=True, help="Also install a service that starts the engine at boot.")
@click.option("--retry-bad", is_flag=True, help="Deploy a release that failed its checks before.")
@click.option("--break-lock", is_flag=True, help="Take over the lock of a dead deployment.")
@click.option(
    "--health-timeout", type=click.FloatRange(1), default=600.0, show_default=True, help="Seconds a check."
)
@click.option("--dry-run", is_flag=True, help="Show what would be sent and done; change nothing.")
@ui_options
def command(
    ui: Ui,
    places: tuple[str, ...],
    board: str | None,
    prefix: str | None,
    root: Path | None,
    ssh: SshOptions,
    engine: Path | None,
    budget: int | None,
    ctx: int | None,
    threads: int | None,
    weights: str | None,
    kv: str | None,
    cache_experts: str | None,
    cache_policy: str | None,
    offload: str | None,
    offload_gadget: bool,
    keep: int,
    service: bool,
    retry_bad: bool,
    break_lock: bool,
    health_timeout: float,
    dry_run: bool,
) -> None:
    """Put engine and weights on a board, start them, check them.

    HOST is [user@]host[:port] or an alias of ~/.ssh/config; leave it out when
    the board is this machine. Only what the board lacks is sent. A release
    that fails its checks is taken back.
    """
    from colibri_kit.deploy import model
    from colibri_kit.deploy.act import Deployment
    from colibri_kit.deploy.plan import Settings, check_engine

    if len(places) > 2:
        raise UsageError("deploy takes [HOST] MODEL.coli, nothing more")
    if board is None:
        raise UsageError("name the board: --board NAME", hint="see them with: colibri-kit boards")
    where = place(places[0] if len(places) == 2 else None, board, prefix, root, ssh)
    assert where.board is not None
    profile = where.board
    parcel = model.load(Path(places[-1]))
    settings = Settings(
        budget or profile.budget,
        ctx or 0,
        threads or 0,
        weights or "",
        kv or "",
        cache_experts or "",
        cache_policy or "",
        offload or ("/dev/ttyGS0" if offload_gadget else ""),
    )
    binary = _engine(ui, profile, engine)
    check_engine(profile, binary)
    if service and profile.service == "none":
        raise UsageError(f"board {profile.name} has no service manager: deploy without --service")
    with opened(where, ui) as transport:
        plan = _plan(ui, transport, where, binary, parcel, settings, retry_bad, keep, service)
        for warning in plan.warnings:
            ui.warn(warning)
        if dry_run:
            ui.result({"dry_run": True, **plan.as_json()}, _plan_text(plan, parcel))
            return
        ui.note(_plan_text(plan, parcel))
        if offload_gadget:
            from colibri_kit.offload.gadget import install

            ui.note(install(transport))
        outcome = Deployment(
            transport=transport,
            plan=plan,
            engine=binary,
            parcel=parcel,
            settings=settings,
            board_name=profile.name,
            ui=ui,
            keep=keep,
            retry_bad=retry_bad,
            break_lock=break_lock,
            health_timeout=health_timeout,
            service=profile.service if service else "none",
        ).run()
    _report(ui, plan, outcome)


def _engine(ui: Ui, board: Board, file: Path | None) -> Engine:
    """The given binary, or one built for the board."""
    import hashlib

    from colibri_kit.deploy import elf
    from colibri_kit.deploy.model import Part
    from colibri_kit.deploy.plan import Engine

    if file is None:
        from colibri_kit.toolchain.engine import build_engine, plan_engine

        units = len(plan_engine(board).units)
        with ui.progress("compile", units, unit="files") as bar:
            file = Path(build_engine(board, advance=bar.advance).path)
    try:
        data = file.read_bytes()
    except OSError as err:
        raise UsageError(f"cannot read the engine {file}: {err.strerror}") from err
    kind = elf.identify(data[: elf.HEAD_BYTES])
    if kind is None:
        raise UsageError(
            f"{file} is not an ELF executable",
            hint=f"build one: colibri-kit build --board {board.name} -o FILE",
        )
    part = Part("colibri", file, len(data), hashlib.sha256(data).hexdigest(), 0o555)
    return Engine(part, kind)


def _plan(
    ui: Ui,
    transport: Transport,
    where: Place,
    engine: Engine,
    parcel: Parcel,
    settings: Settings,
    retry_bad: bool,
    keep: int,
    service: bool,
) -> Plan:
    from colibri_kit.deploy import facts, plan, release, state, store

    assert where.board is not None
    prefix = new_prefix(transport, where, ui)
    found = facts.gather(transport, prefix)
    if service and found.uid != 0:
        raise PreflightError(
            f"installing a service needs root; we are {found.user} on {transport.describe()}",
            hint="add --sudo, or deploy without --service",
            state="nothing was sent or changed",
            code="CK-PREFLIGHT-ROOT",
        )
    held = store.stored(transport, prefix) if found.ours else plan.Stored({}, {}, (), None)
    remembered = state.load(transport, prefix) if found.ours else state.State()
    current = release.read(transport, prefix, held.current) if held.current else {}
    return plan.make(
        board=where.board,
        facts=found,
        where=transport.describe(),
        engine=engine,
        parcel=parcel,
        settings=settings,
        stored=held,
        current_content=current.get("content"),
        bad=[b.content for b in remembered.bad],
        retry_bad=retry_bad,
        keep=keep,
        now=datetime.now(timezone.utc),
    )


def _plan_text(plan: Plan, parcel: Parcel) -> str:
    from colibri_kit.deploy.plan import size_text

    rows = [
        ("board", f"{plan.board} on {plan.target}, {plan.prefix}"),
        ("model", f"{parcel.name}, {len(parcel.parts)} files, {size_text(parcel.size)}"),
        ("current", plan.previous or "none"),
        ("release", plan.release + (" (already current)" if plan.same_as_current else "")),
        *(("send", f"{p.name}  {size_text(p.size)}") for p in plan.send[:8]),
    ]
    if len(plan.send) > 8:
        rows.append(("send", f"… and {len(plan.send) - 8} more"))
    rows += [("step", step) for step in plan.steps]
    return "\n".join(f"{name:<8} {value}" for name, value in rows)


def _report(ui: Ui, plan: Plan, outcome: Outcome) -> None:
    from colibri_kit.deploy.plan import size_text

    sent = outcome.sent
    parts = [f"sent {size_text(sent.bytes_sent)} in {sent.files_sent} file(s)"]
    if sent.bytes_resumed:
        parts.append(f"resumed after {size_text(sent.bytes_resumed)}")
    if sent.repaired:
        parts.append(f"repaired {sent.repaired}")
    parts.append(f"golden ok {outcome.golden[:12]}")
    if outcome.pruned:
        parts.append(f"removed {len(outcome.pruned)} old release(s)")
    data = {"target": plan.target, "prefix": plan.prefix, **outcome.as_json()}
    word = "deployed" if outcome.changed else "already deployed"
    ui.result(data, f"{word}: {outcome.release} ({', '.join(parts)})\n{outcome.state}")
