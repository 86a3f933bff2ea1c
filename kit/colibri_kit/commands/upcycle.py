"""upcycle: a dense GGUF -> a Mixture-of-Experts GGUF."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from colibri_kit.cli import VERBS, ui_options

if TYPE_CHECKING:
    from colibri_kit.ui import Ui


@click.command("upcycle", help=VERBS["upcycle"])
@ui_options
@click.argument("source", metavar="DENSE.gguf", type=click.Path(path_type=Path))
@click.option("--experts", type=int, default=8, show_default=True, help="Experts in each layer.")
@click.option("--used", type=int, default=2, show_default=True, help="Experts used for a token.")
@click.option(
    "--noise", type=click.FloatRange(0, 10), default=0.0, show_default=True,
    help="Noise on each expert, relative to the weights' root mean square.",
)  # fmt: skip
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True)
@click.option(
    "--router-scale", type=click.FloatRange(0, 10), default=0.02, show_default=True,
    help="Standard deviation of the router's weights.",
)  # fmt: skip
@click.option(
    "--dtype", type=click.Choice(["keep", "f32"]), default="keep", show_default=True,
    help="keep: each tensor's own type. f32: all as F32.",
)  # fmt: skip
@click.option("--name", help="general.name of the result.")
@click.option("--threads", type=click.IntRange(0, 1024), default=0, help="0 = all cores.")
@click.option(
    "-o", "--output", required=True, metavar="MOE.gguf", type=click.Path(path_type=Path)
)  # fmt: skip
@click.option("--force", is_flag=True, help="Replace MOE.gguf once the new one is complete.")
@click.option("--dry-run", is_flag=True, help="Show what would be written; write nothing.")
def command(
    ui: Ui,
    source: Path,
    experts: int,
    used: int,
    noise: float,
    seed: int,
    router_scale: float,
    dtype: str,
    name: str | None,
    threads: int,
    output: Path,
    force: bool,
    dry_run: bool,
) -> None:
    from colibri_kit.convert import job, upcycle
    from colibri_kit.errors import PreflightError, UsageError
    from colibri_kit.gguf.reader import GgufFile

    if output.suffix != ".gguf":
        raise UsageError(f"{output}: the output's name must end in .gguf", hint=f"-o {output.name}.gguf")
    recipe = upcycle.Recipe(experts, used, noise, seed, router_scale, dtype == "f32")
    with GgufFile(source) as gguf:
        plan = upcycle.make_plan(gguf, recipe, name)
        data: dict[str, Any] = {
            "model": str(output), "experts": experts, "used": used, "noise": noise, "seed": seed,
            "bytes": plan.size, "tensors": len(plan.items),
        }  # fmt: skip
        if dry_run:
            rows = upcycle.plan_rows(plan)
            cells = [
                [r["name"], " × ".join(map(str, r["shape"])), r["from"], r["to"], r["bytes"]] for r in rows
            ]
            table = ui.table(["tensor", "shape", "from", "to", "bytes"], cells)
            ui.result(
                {"dry_run": True, **data, "tensors": rows},
                f"{table}\n\nwould write {output}: {plan.size / 1e6:.1f} MB",
            )
            return
        if output.exists() and (not force or not output.is_file() or output.samefile(source)):
            raise PreflightError(
                f"{output} exists" + (" and is not replaced" if force else ""),
                hint="choose another -o" + ("" if force else ", or replace it with --force"),
                state="unchanged",
            )
        if not output.parent.is_dir():
            raise PreflightError(f"{output.parent} is not a folder", state="unchanged")
        job.check_space(output.parent, plan.size)
        with job.partial(output, ui, folder=False) as part:
            with ui.progress("write", plan.size) as bar:
                upcycle.write(gguf, plan, part, threads, bar.advance)
            upcycle.check_written(part, plan)
            part.replace(output)
            job.sync_folder(output.parent)
    ui.result(
        data,
        f"wrote {output}: {plan.size / 1e6:.1f} MB, {experts} experts, {used} used"
        + (f", noise {noise}" if noise else ", every expert a copy of the dense FFN"),
    )
