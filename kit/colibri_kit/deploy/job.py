"""What goes before a deployment, for every verb that ends in one: the engine, the service, the plan."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from colibri_kit.deploy import elf, root, serving
from colibri_kit.deploy.health import Check
from colibri_kit.deploy.model import Parcel, Part
from colibri_kit.deploy.plan import Engine, Plan, Settings, size_text
from colibri_kit.errors import UsageError

if TYPE_CHECKING:
    from colibri_kit.config.board import Board
    from colibri_kit.config.recipe import Recipe
    from colibri_kit.deploy.target import Place
    from colibri_kit.transport.base import Transport
    from colibri_kit.ui import Ui


@dataclass(frozen=True)
class Wish:
    """What is to run on the board.

    Attributes:
        service: keep it running; None = as the current release has it.
        spec: how, when ``service`` is true.
        gadget: the board's USB port is made a serial device first.
    """

    engine: Engine
    parcel: Parcel
    settings: Settings
    service: bool | None = False
    spec: serving.Spec | None = None
    check: Check = field(default_factory=Check)
    retry_bad: bool = False
    keep: int = 3
    gadget: bool = False


@dataclass(frozen=True)
class Made:
    """A plan, and the service that it ends with (None = none)."""

    plan: Plan
    service: serving.Spec | None


def load_engine(ui: Ui, board: Board, file: Path | None) -> Engine:
    """The given binary, or one built for the board.

    Raises:
        UsageError: it cannot be read or is no program. BuildError: it cannot be built.
    """
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


def service_of(board: Board, parcel: Parcel, settings: Settings, recipe: Recipe | None) -> serving.Spec:
    """How the board keeps the engine running: by the recipe, else with the defaults.

    Raises:
        UsageError: the board has no service manager, or what is asked for would be refused by the engine.
    """
    from colibri_kit.deploy.services import memory_max

    if board.service == "none":
        raise UsageError(f"board {board.name} has no service manager: deploy without --service")
    spec = serving.Spec(board.service, watchdog=serving.watchdog_seconds(parcel.size, board))
    wanted = recipe.service if recipe is not None else None
    if wanted is not None:
        said = {k: v for k in wanted.options_keys() if (v := getattr(wanted, k)) is not None}
        spec = replace(
            spec,
            user=wanted.user or "",
            restart=wanted.restart,
            memory_max=wanted.memory_limit or 0,
            watchdog=wanted.watchdog or spec.watchdog,
            options=serving.ServeOptions(**said),
        )
    options = replace(spec.options, health_interval=serving.self_check_seconds(spec.watchdog))
    if options.outside and not options.token_file:
        raise UsageError(
            f"service.listen {options.listen} can be reached from outside: service.token_file is needed",
            hint="or listen on 127.0.0.1 and use: colibri-kit tunnel HOST",
        )
    return replace(spec, options=options, memory_max=spec.memory_max or memory_max(settings.budget))


def options_part(spec: serving.Spec, settings: Settings, folder: Path) -> Part:
    """The options file, written under ``folder`` for as long as the deployment takes."""
    data = spec.options_text(settings).encode()
    path = folder / serving.OPTIONS
    path.write_bytes(data)
    return Part(serving.OPTIONS, path, len(data), hashlib.sha256(data).hexdigest())


def make(ui: Ui, transport: Transport, where: Place, wish: Wish, folder: Path) -> Made:
    """Asks the board and plans. Changes nothing there.

    Args:
        folder: for files that are made on the way; must stay until the deployment is over.

    Raises:
        PreflightError: the deployment must not begin.
    """
    from colibri_kit.deploy import facts, plan, release, state, store
    from colibri_kit.deploy.target import new_prefix
    from colibri_kit.offload import gadget

    assert where.board is not None
    prefix = new_prefix(transport, where, ui)
    found = facts.gather(transport, prefix)
    held = store.stored(transport, prefix) if found.ours else plan.Stored({}, {}, (), None)
    remembered = state.load(transport, prefix) if found.ours else state.State()
    current = release.read(transport, prefix, held.current) if held.current else {}
    there = serving.of_release(current)
    spec = {True: wish.spec, False: None, None: there}[wish.service]
    if spec is not None and wish.service is None:
        ui.detail(f"the {spec.kind} service of {held.current} stays (--no-service takes it away)")
        spec = replace(spec, options_file=True)
    if (spec is not None or there is not None) and found.uid != 0:
        raise root.missing(
            transport,
            f"{'installing' if spec else 'removing'} a service on {transport.describe()}",
            state="nothing was sent or changed",
            otherwise="" if there else "deploy without --service",
        )
    if wish.gadget:
        gadget.check(transport)
    beside = (options_part(spec, wish.settings, folder),) if spec is not None else ()
    made = plan.make(
        board=where.board,
        facts=found,
        where=transport.describe(),
        engine=wish.engine,
        parcel=wish.parcel,
        settings=wish.settings,
        stored=held,
        current_content=current.get("content"),
        bad=[b.content for b in remembered.bad],
        retry_bad=wish.retry_bad,
        keep=wish.keep,
        now=datetime.now(timezone.utc),
        service=spec.as_json() if spec else None,
        beside=beside,
        first=(gadget.step(),) if wish.gadget else (),
    )
    return Made(made, spec)


def plan_text(made: Made, wish: Wish) -> str:
    """The plan for people."""
    plan, parcel = made.plan, wish.parcel
    rows = [
        ("board", f"{plan.board} on {plan.target}, {plan.prefix}"),
        ("model", f"{parcel.name}, {len(parcel.parts)} files, {size_text(parcel.size)}"),
        ("current", plan.previous or "none"),
        ("release", plan.release + (" (already current)" if plan.same_as_current else "")),
        *(("send", f"{p.name}  {size_text(p.size)}") for p in plan.send[:8]),
    ]
    if len(plan.send) > 8:
        rows.append(("send", f"… and {len(plan.send) - 8} more"))
    if made.service is not None:
        spec = made.service
        told = f"{spec.kind}, user {spec.user or 'colibri'}, at most {size_text(spec.memory_max)}"
        rows.append(("service", f"{told}, restart {spec.restart}, watchdog {spec.watchdog} s"))
        rows.append(("serve", " ".join(spec.options.address())))
        lines = spec.options_text(wish.settings).splitlines()
        rows += [("serve", line) for line in lines if not line.startswith("#")]
    asked = wish.check
    if asked.expect or asked != Check():
        more = f", with {asked.expect!r} in them" if asked.expect else ""
        rows.append(("check", f"{asked.max_new} token(s) after {asked.prompt!r}{more}"))
    rows += [("step", step) for step in plan.steps]
    return "\n".join(f"{name:<8} {value}" for name, value in rows)


def plan_json(made: Made, wish: Wish) -> dict[str, Any]:
    """The same for programs."""
    spec = made.service
    return {
        **made.plan.as_json(),
        "service": spec.as_json() if spec else None,
        "serve_options": spec.options_text(wish.settings).splitlines()[1:] if spec else [],
        "check": {"prompt": wish.check.prompt, "max_new": wish.check.max_new, "expect": wish.check.expect},
    }
