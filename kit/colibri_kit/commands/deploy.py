"""``colibri-kit deploy``: engine and weights onto a board, checked, or taken back."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from colibri_kit.cli import ui_options
from colibri_kit.commands.engine_options import memory_flags
from colibri_kit.commands.sizes import Size
from colibri_kit.deploy.target import opened, place, place_flags
from colibri_kit.errors import UsageError
from colibri_kit.transport.options import SshOptions
from colibri_kit.ui import Ui

if TYPE_CHECKING:
    from colibri_kit.config.recipe import Recipe
    from colibri_kit.deploy.act import Outcome
    from colibri_kit.deploy.plan import Plan, Settings


@click.command(short_help="Put engine and weights on a board, start them, check them.")
@click.argument("places", nargs=-1, metavar="[HOST] MODEL.coli|RECIPE.yaml")
@click.option("--recipe", "recipe_name", metavar="NAME|FILE", help="In place of MODEL.coli: what and where.")
@place_flags
@click.option(
    "--engine", type=click.Path(path_type=Path, dir_okay=False), help="Send this binary; default: build one."
)
@click.option("--budget", type=Size(), help="Memory the engine may take; default: the board's.")
@click.option("--ctx", type=click.IntRange(1, 1 << 24), help="Context length in tokens.")
@click.option("--threads", type=click.IntRange(1, 1024), help="Threads; default: physical cores.")
@memory_flags
@click.option("--keep", type=click.IntRange(1, 1000), default=3, show_default=True, help="Releases to keep.")
@click.option("--offload", metavar="LINK", help="Experts may be computed at the end of this link.")
@click.option("--offload-gadget", is_flag=True, help="Also make the board's USB port a serial device.")
@click.option(
    "--service/--no-service",
    default=None,
    help="Keep the engine running, from boot on; default: by the recipe, else as it is now.",
)
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
    recipe_name: str | None,
    board: str | None,
    prefix: str | None,
    root: Path | None,
    ssh: SshOptions,
    engine: Path | None,
    offload_gadget: bool,
    keep: int,
    service: bool | None,
    retry_bad: bool,
    break_lock: bool,
    health_timeout: float,
    dry_run: bool,
    **given: Any,
) -> None:
    """Put engine and weights on a board, start them, check them.

    HOST is [user@]host[:port] or an alias of ~/.ssh/config; leave it out when
    the board is this machine. Only what the board lacks is sent. A release
    that fails its checks is taken back. A recipe says all of it in a file;
    options here win over it.
    """
    import tempfile

    from colibri_kit.deploy import job, model
    from colibri_kit.deploy.act import Deployment
    from colibri_kit.deploy.health import Check
    from colibri_kit.deploy.plan import check_engine

    recipe, folder, host = _what(places, recipe_name)
    board = board or (recipe.board if recipe else None)
    if board is None:
        raise UsageError("name the board: --board NAME", hint="see them with: colibri-kit boards")
    if recipe is not None and host is None and root is None:
        host = recipe.host
    where = place(host, board, prefix, root, ssh)
    assert where.board is not None
    profile = where.board
    parcel = model.load(folder)
    settings = _settings(given, recipe, profile.budget, offload_gadget)
    if service is None and recipe is not None:
        service = recipe.service is not None
    spec = job.service_of(profile, parcel, settings, recipe) if service else None
    asked = recipe.check if recipe is not None else None
    check = Check(asked.prompt, asked.max_new, asked.expect or "") if asked else Check()
    binary = job.load_engine(ui, profile, engine)
    check_engine(profile, binary)
    wish = job.Wish(binary, parcel, settings, service, spec, check, retry_bad, keep, offload_gadget)
    with opened(where, ui) as transport, tempfile.TemporaryDirectory(prefix="colibri-deploy-") as scratch:
        made = job.make(ui, transport, where, wish, Path(scratch))
        for warning in made.plan.warnings:
            ui.warn(warning)
        if dry_run:
            ui.result({"dry_run": True, **job.plan_json(made, wish)}, job.plan_text(made, wish))
            return
        ui.note(job.plan_text(made, wish))
        outcome = Deployment(
            transport=transport,
            plan=made.plan,
            engine=binary,
            parcel=parcel,
            settings=settings,
            board_name=profile.name,
            ui=ui,
            keep=keep,
            retry_bad=retry_bad,
            break_lock=break_lock,
            health_timeout=health_timeout,
            service=made.service,
            check=check,
            gadget=offload_gadget,
        ).run()
    _report(ui, made.plan, outcome)


def _what(places: tuple[str, ...], name: str | None) -> tuple[Recipe | None, Path, str | None]:
    """The recipe if there is one, the model's folder, and HOST.

    Raises:
        UsageError: too much or too little was given. ConfigError: the recipe is wrong.
    """
    from colibri_kit.config import load_recipe

    if name is None and places and places[-1].endswith((".yaml", ".yml")):
        *rest, name = places
        places = tuple(rest)
    if name is not None:
        if len(places) > 1:
            raise UsageError("deploy takes [HOST] and a recipe, nothing more")
        recipe, folder = load_recipe(name)
        return recipe, folder, places[0] if places else None
    if len(places) not in (1, 2):
        raise UsageError(
            "deploy takes [HOST] MODEL.coli or [HOST] RECIPE.yaml, nothing more and nothing less"
        )
    return None, Path(places[-1]), places[0] if len(places) == 2 else None


def _settings(given: dict[str, Any], recipe: Recipe | None, budget: int, gadget: bool) -> Settings:
    """What the engine is told: the command line, else the recipe, else the board's budget and its own
    defaults.

    Raises:
        UsageError: the engine there would refuse it.
    """
    from colibri_kit.deploy.plan import Settings

    names = ("budget", "ctx", "threads", "weights", "kv", "cache_experts", "cache_policy", "offload")
    said = {name: given[name] or (getattr(recipe, name) if recipe is not None else None) for name in names}
    said["budget"] = said["budget"] or budget
    if gadget:
        from colibri_kit.offload.gadget import DEVICE

        said["offload"] = said["offload"] or DEVICE
    if said["weights"] not in (None, "arena"):
        slots = [n for n in ("cache_experts", "cache_policy") if said[n] not in (None, "slru")]
        if slots:
            raise UsageError(f"{slots[0]} goes with weights arena, not {said['weights']}")
    return Settings(**{name: value for name, value in said.items() if value})


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
