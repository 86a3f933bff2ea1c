"""``colibri-kit boards``: lists board profiles, or shows one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from colibri_kit.cli import ui_options
from colibri_kit.errors import ConfigError
from colibri_kit.ui import Ui

if TYPE_CHECKING:
    from colibri_kit.config import Board


@click.command(short_help="List board profiles, or show one.")
@click.argument("name", required=False)
@click.option("--boards-dir", type=click.Path(path_type=Path), help="Look here for profiles first.")
@ui_options
def command(ui: Ui, name: str | None, boards_dir: Path | None) -> None:
    """List board profiles, or show one."""
    if name is not None:
        _show(ui, name, boards_dir)
    else:
        _list(ui, boards_dir)


def _data(board: Board, path: Path) -> dict[str, Any]:
    data = board.model_dump(mode="json")
    data["arch"], data["kernels"], data["file"] = board.arch, ["scalar", *board.kernels], str(path)
    return data


def _show(ui: Ui, name: str, boards_dir: Path | None) -> None:
    from colibri_kit.config import board_path, format_size, load_board

    board = load_board(name, boards_dir)
    path = board_path(name, boards_dir)
    disk = board.storage
    rows = [
        ("target", f"{board.target}, {board.mcpu}"),
        ("may use", ", ".join(board.isa) or "nothing beyond the baseline"),
        ("kernels", ", ".join(("scalar", *board.kernels))),
        ("memory", f"{format_size(board.ram)}, budget {format_size(board.budget)}, {board.cores} cores"),
        ("bandwidth", f"{board.memory_bandwidth_gb_s:g} GB/s ({board.memory_bandwidth_source})"),
        ("storage", f"{disk.kind}, {disk.read_mb_s:g} MB/s ({disk.source})"),
        ("deploys by", f"{board.transport}, service {board.service}, to {board.prefix or '-'}"),
        ("file", str(path)),
    ]
    text = f"{board.name}  {board.title}\n" + "\n".join(f"  {k:<11}{v}" for k, v in rows)
    ui.result(_data(board, path), text)


def _list(ui: Ui, boards_dir: Path | None) -> None:
    from colibri_kit.config import find_boards, format_size, load_board

    boards: list[dict[str, Any]] = []
    broken: list[dict[str, Any]] = []
    rows = []
    for name, path in find_boards(boards_dir).items():
        try:
            board = load_board(str(path))
        except ConfigError as err:
            broken.append({"name": name, "file": str(path), "error": err.as_json()})
            ui.warn(err.message)
            continue
        boards.append(_data(board, path))
        cells = (board.target, board.mcpu, format_size(board.budget), board.transport, board.title)
        rows.append((board.name, *cells))
    head = ("board", "target", "cpu", "budget", "transport", "what")
    ui.result({"boards": boards, "broken": broken}, ui.table(head, rows))
