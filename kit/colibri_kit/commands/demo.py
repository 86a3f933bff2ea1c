"""``colibri-kit demo``: the whole way from a GGUF to a measured engine, on this machine."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from colibri_kit.cli import VERBS, ui_options
from colibri_kit.errors import KitError
from colibri_kit.ui import Ui

if TYPE_CHECKING:
    from colibri_kit.config import Recipe

EXPERTS, USED = 8, 2


class StepError(KitError):
    """A step's own command failed; it has printed why. Carries its exit status."""

    default_code = "CK-DEMO-STEP"

    def __init__(self, message: str, status: int, hint: str) -> None:
        super().__init__(message, hint=hint)
        self.exit_status = status if status > 0 else 1


@click.command("demo", help=VERBS["demo"])
@click.option("--dry-run", is_flag=True, help="Name the steps; do nothing.")
@ui_options
def command(ui: Ui, dry_run: bool) -> None:
    from colibri_kit.config import load_recipe

    recipe, model = load_recipe("demo")
    steps = _steps(ui, recipe, model)
    if dry_run:
        names = [name for name, _act in steps]
        text = "\n".join(f"{i}. {name}" for i, name in enumerate(names, 1))
        ui.result({"dry_run": True, "steps": names}, text)
        return
    began, report = time.monotonic(), []
    for i, (name, act) in enumerate(steps, 1):
        ui.note(f"\n[{i}/{len(steps)}] {name}")
        start = time.monotonic()
        said = act()
        seconds = time.monotonic() - start
        report.append({"step": name, "seconds": round(seconds, 2), "result": said})
        ui.note(f"      {said}, {seconds:.1f} s")
    total = time.monotonic() - began
    ui.result(
        {"steps": report, "seconds": round(total, 2), "model": str(model), "board": recipe.board},
        f"\ndemo done in {total:.1f} s. Try:  {_typed()} run --board {recipe.board} -p 'Once upon a time'",
    )


def _typed() -> str:
    """What to type for this program: make puts a folder on PATH that its caller's shell has not."""
    own = Path(sys.argv[0])
    if own.name == "colibri-kit" and own.is_relative_to(Path.cwd()):
        return str(own.relative_to(Path.cwd()))
    return "colibri-kit"


def _steps(ui: Ui, recipe: Recipe, model: Path) -> list[tuple[str, Callable[[], str]]]:
    """Name and action of each step; an action returns what it did in a few words."""
    from colibri_kit import demo

    made = demo.Made()
    moe = demo.folder() / "smollm2-moe.gguf"

    def engine() -> str:
        from colibri_kit.config import load_board
        from colibri_kit.toolchain import build_engine, build_library, plan_engine

        board = load_board(recipe.board)
        with ui.progress("compile", len(plan_engine(board).units), unit="files") as bar:
            result = build_engine(board, advance=bar.advance)
        build_library()
        return f"{result.size_bytes} bytes, {'from the cache' if result.cached else 'compiled and scanned'}"

    def fetch() -> str:
        path, downloaded = demo.fetch_gguf()
        return f"{path.name}, {'downloaded' if downloaded else 'already here'}, sha256 as pinned"

    def upcycle() -> str:
        source, _downloaded = demo.fetch_gguf()
        key = made.key(("upcycle", demo.SHA256, str(EXPERTS), str(USED), demo.code_key()))
        if made.fresh(moe, key):
            return "up to date"
        flags = ("--experts", str(EXPERTS), "--used", str(USED), "--force", "-o", str(moe))
        _verb(ui, "upcycle", str(source), *flags)
        made.record(moe, key)
        return f"{EXPERTS} experts, {USED} used, each a copy of the dense layer"

    def convert() -> str:
        from colibri_kit.toolchain import build_library

        parts = ("convert", demo.SHA256, str(EXPERTS), str(USED), demo.code_key(), build_library().name)
        key = made.key(parts)
        if made.fresh(model, key):
            return "up to date"
        model.parent.mkdir(parents=True, exist_ok=True)
        _verb(ui, "convert", str(moe), "--force", "-o", str(model))
        made.record(model, key)
        return f"{model.name}, verified, with its golden"

    def deploy() -> str:
        flags = ["--board", recipe.board]
        flags += ["--budget", f"{recipe.budget}B"] if recipe.budget else []
        flags += ["--ctx", str(recipe.ctx)] if recipe.ctx else []
        _verb(ui, "deploy", *flags, str(model))
        return "checked: its logits have the golden's bits"

    def text() -> str:
        count = str(recipe.check.max_new)
        _verb(ui, "run", "--board", recipe.board, "-p", recipe.check.prompt, "-n", count, show=True)
        return f"{count} tokens, greedy"

    def probe() -> str:
        _verb(ui, "probe", "--board", recipe.board, "--latency", "--runs", "3", show=True)
        return "measured here, now"

    return [
        (f"build the engine for board {recipe.board}", engine),
        (f"get SmolLM2-135M-Instruct (GGUF, {demo.SIZE_BYTES / 1e6:.0f} MB)", fetch),
        (f"make a Mixture of Experts of it: {EXPERTS} experts, {USED} used", upcycle),
        ("convert the GGUF to .coli", convert),
        (f"deploy to board {recipe.board}, start-up checks", deploy),
        (f"generate from {recipe.check.prompt!r}", text),
        ("measure: probe --latency", probe),
    ]


def _verb(ui: Ui, verb: str, *args: str, show: bool = False) -> None:
    """Runs another verb as a process of its own; its result is shown when asked for, its notes under -v.

    Raises:
        StepError: it failed; it has said why on stderr.
    """
    command: list[str] = [sys.executable, "-m", "colibri_kit", verb, *args]
    hidden = not show or ui.as_json
    notes: dict[str, Any] = {"stdout": subprocess.DEVNULL if hidden else None}
    if not ui.verbose and verb != "run":
        command.append("--quiet")
    done = subprocess.run(command, stdin=subprocess.DEVNULL, check=False, **notes)
    if done.returncode == 130:
        raise KeyboardInterrupt
    if done.returncode != 0:
        raise StepError(
            f"colibri-kit {verb} ended with status {done.returncode}",
            done.returncode,
            "the lines above say why; run the demo again, finished steps are skipped",
        )
