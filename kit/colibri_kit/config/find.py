"""Finds board profiles and recipes by name or path.

A name is looked for in ``--boards-dir`` (or ``$COLIBRI_BOARDS_DIR``), then in
``./boards``, then among the kit's own. The first found wins.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from colibri_kit import resources
from colibri_kit.config import loader
from colibri_kit.config.board import Board
from colibri_kit.config.recipe import Recipe
from colibri_kit.errors import ConfigError


def _folders(extra: Path | None, env: str, local: str, own: Path) -> list[Path]:
    out = [extra] if extra else []
    if os.environ.get(env):
        out.append(Path(os.environ[env]))
    out += [Path(local), own]
    return [p for p in out if p.is_dir()]


def _is_path(name: str) -> bool:
    return "/" in name or name.endswith((".yaml", ".yml"))


def find_boards(boards_dir: Path | None = None) -> dict[str, Path]:
    """Name -> file of every profile in sight, sorted by name; nothing is parsed."""
    if boards_dir is not None and not boards_dir.is_dir():
        raise ConfigError(f"no such folder: {boards_dir}")
    found: dict[str, Path] = {}
    for folder in _folders(boards_dir, "COLIBRI_BOARDS_DIR", "boards", resources.boards_dir()):
        for file in sorted(folder.glob("*.yaml")):
            found.setdefault(file.stem, file)
    return dict(sorted(found.items()))


def board_path(name: str, boards_dir: Path | None = None) -> Path:
    """The file of a board given by name or by path.

    Raises:
        ConfigError: no such board; the hint lists near names.
    """
    if _is_path(name):
        return Path(name)
    boards = find_boards(boards_dir)
    if name in boards:
        return boards[name]
    close = difflib.get_close_matches(name, boards, 1, 0.5)
    more = f"; did you mean '{close[0]}'?" if close else ""
    raise ConfigError(
        f"unknown board '{name}'{more}",
        hint=f"known boards: {', '.join(boards)}",
        code="CK-CONFIG-BOARD",
    )


def load_board(name: str, boards_dir: Path | None = None) -> Board:
    """Loads and checks a board profile by name or path.

    Raises:
        ConfigError: not found, or wrong; every error with file:line:col.
    """
    path = board_path(name, boards_dir)
    doc = loader.read(path)
    board = loader.validate(doc, Board)
    if board.name != path.stem:
        raise ConfigError(f"{doc.where(('name',))}: name: '{board.name}' differs from the file name")
    return board


def load_recipe(name: str, boards_dir: Path | None = None) -> tuple[Recipe, Path]:
    """Loads a recipe by name or path and checks that its board exists.

    Returns:
        The recipe, and the absolute path of its model.

    Raises:
        ConfigError: not found, or wrong; every error with file:line:col.
    """
    if _is_path(name):
        path = Path(name)
    else:
        folders = _folders(None, "COLIBRI_RECIPES_DIR", "recipes", resources.recipes_dir())
        found = [f / f"{name}.yaml" for f in folders if (f / f"{name}.yaml").is_file()]
        if not found:
            raise ConfigError(f"unknown recipe '{name}'", code="CK-CONFIG-RECIPE")
        path = found[0]
    doc = loader.read(path)
    recipe = loader.validate(doc, Recipe)
    try:
        board_path(recipe.board, boards_dir)
    except ConfigError as err:
        raise ConfigError(
            f"{doc.where(('board',))}: board: {err.message}", hint=err.hint, code=err.code
        ) from err
    return recipe, (path.parent / Path(recipe.model).expanduser()).resolve()
