"""Board profiles and recipes: strict YAML in, frozen models out.

from colibri_kit.config import load_board, load_recipe, find_boards
"""

from colibri_kit.config.board import Board, Storage
from colibri_kit.config.find import board_path, find_boards, load_board, load_recipe
from colibri_kit.config.recipe import Check, Recipe, Service
from colibri_kit.config.scalars import format_size, parse_size

__all__ = [
    "Board",
    "Check",
    "Recipe",
    "Service",
    "Storage",
    "board_path",
    "find_boards",
    "format_size",
    "load_board",
    "load_recipe",
    "parse_size",
]
