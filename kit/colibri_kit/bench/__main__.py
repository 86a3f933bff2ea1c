"""``python -m colibri_kit.bench``: tokens a second against memory, next to llama.cpp."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from colibri_kit.cli import ui_options
from colibri_kit.errors import KitError, UsageError
from colibri_kit.ui import Ui

if TYPE_CHECKING:
    from colibri_kit.bench.cache import Row


@click.command()
@ui_options
@click.argument("coli", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("gguf", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option(
    "--llama", type=click.Path(path_type=Path, exists=True), required=True, help="llama.cpp's tree."
)
@click.option("--shares", default="25,50,75,100", show_default=True, help="Memory in percent of the model.")
@click.option("--storage", type=click.FloatRange(0), default=0, metavar="MB/S", help="Slow reads; 0 = as is.")
@click.option("--threads", type=click.IntRange(1, 64), default=1, show_default=True)
@click.option("--tokens", type=click.IntRange(1), default=48, show_default=True, help="Decoded and timed.")
@click.option("--warm", type=click.IntRange(0), default=16, show_default=True, help="Decoded before.")
@click.option("--timeout", type=click.FloatRange(1), default=1800, show_default=True, help="Seconds a run.")
def command(
    ui: Ui,
    coli: Path,
    gguf: Path,
    llama: Path,
    shares: str,
    storage: float,
    threads: int,
    tokens: int,
    warm: int,
    timeout: float,
) -> None:
    """COLI and GGUF are the same model. Both decode the same tokens under the same limit."""
    from colibri_kit.bench import cache

    try:
        wanted = [float(s) / 100 for s in shares.split(",")]
    except ValueError as err:
        raise UsageError(f"--shares {shares}: percentages, as 25,50") from err
    setting = cache.Setting(
        coli, gguf, llama, threads, tokens, warm, warm + tokens + 32, int(storage * 1e6), timeout
    )
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        driver = cache.build_driver(llama, Path(folder))
        for share in wanted:
            ui.note(f"measuring with {share:.0%} …")
            rows.append(cache.measure(setting, driver, share))
    ui.result(
        {"rows": [asdict(r) for r in rows], "threads": threads, "storage_mb_s": storage}, _text(ui, rows)
    )
    for row in rows:
        for why in row.failed:
            ui.warn(f"{row.share:.0%}: {why}")


def _text(ui: Ui, rows: list[Row]) -> str:
    def number(value: float | None, spec: str) -> str:
        return "failed" if value is None else f"{value:{spec}}"

    cells: list[list[Any]] = []
    for r in rows:
        e, m = r.engine_rate, r.llama_rate
        cells.append(
            [
                f"{r.share:.0%}",
                f"{r.limit / 2**20:.0f}",
                number(e, ".2f"),
                number(r.engine["hit_rate"] * 100 if r.engine else None, ".1f"),
                f"{r.engine['slots']}/{r.engine['records']}" if r.engine else "",
                number(m, ".2f"),
                number(e / m if e and m else None, ".2f"),
            ]
        )
    head = ["model", "limit MiB", "engine tok/s", "hits %", "slots", "llama.cpp tok/s", "times"]
    return ui.table(head, cells)


def main() -> None:
    try:
        command.main(standalone_mode=False)
    except click.ClickException as err:
        err.show()
        sys.exit(2)
    except KitError as err:
        Ui(as_json="--json" in sys.argv).error(err)
        sys.exit(err.exit_status)


if __name__ == "__main__":
    main()
