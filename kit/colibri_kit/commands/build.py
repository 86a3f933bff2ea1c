"""``colibri-kit build``: compiles the engine for a board."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from colibri_kit.cli import ui_options
from colibri_kit.ui import Ui

if TYPE_CHECKING:
    from colibri_kit.toolchain.engine import BuildResult, EnginePlan


@click.command(short_help="Compile the engine for a board.")
@click.option(
    "--board", required=True, metavar="NAME", help="A name of `colibri-kit boards`, or a profile's path."
)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="Default: build/colibri-BOARD."
)
@click.option("--boards-dir", type=click.Path(path_type=Path), help="Look here for profiles first.")
@click.option("--dry-run", is_flag=True, help="List what would be compiled; compile nothing.")
@ui_options
def command(ui: Ui, board: str, output: Path | None, boards_dir: Path | None, dry_run: bool) -> None:
    """Compile the engine for a board.

    The result is one static binary without symbols; FILE.debug beside it has
    them. The same sources give the same bytes on every machine.
    """
    from colibri_kit.config import load_board
    from colibri_kit.toolchain.engine import as_json, build_engine, plan_engine

    plan = plan_engine(load_board(board, boards_dir))
    target = output or Path("build") / plan.file_name
    if dry_run:
        _report_plan(ui, plan, target)
        return
    ui.detail(f"{len(plan.units)} files, build id {plan.build_id}")
    with ui.progress("compile", len(plan.units), unit="files") as bar:
        result = build_engine(plan.board, target, advance=bar.advance)
    for warning in result.warnings:
        ui.warn(warning)
    ui.result(as_json(result), _text(result, target))


def _report_plan(ui: Ui, plan: EnginePlan, target: Path) -> None:
    data = {
        "board": plan.board.name,
        "output": str(target),
        "build_id": plan.build_id,
        "link": list(plan.link_flags),
        "units": [{"source": u.source, "flags": list(u.flags)} for u in plan.units],
    }
    lines = [f"{u.source}  {' '.join(f for f in u.flags if f.startswith('-mcpu'))}" for u in plan.units]
    ui.result(
        data, "\n".join([*lines, f"-> {target} ({len(plan.units)} files, {plan.board.target}), dry run"])
    )


def _text(result: BuildResult, target: Path) -> str:
    kept = "unchanged, from the cache" if result.cached else f"{result.code_bytes_scanned} code bytes scanned"
    return (
        f"{target}  {result.size_bytes} bytes  {result.target} {result.mcpu}  "
        f"kernels {', '.join(result.kernels)}  ({kept})\nsha256 {result.sha256}"
    )
