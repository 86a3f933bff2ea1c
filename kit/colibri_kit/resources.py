"""Where the engine's sources, boards and recipes lie: in a wheel or in a checkout.

A wheel carries copies under ``colibri_kit/_data``; in a checkout (also an
editable install) the top-level folders themselves are used. Nothing else in
the kit may guess paths.
"""

from __future__ import annotations

import os
from pathlib import Path

from colibri_kit.errors import ConfigError

_PACKAGE = Path(__file__).resolve().parent


def root() -> Path:
    """The folder that holds ``native/``, ``boards/`` and ``recipes/``.

    Raises:
        ConfigError: the package was copied without its data.
    """
    for base in (_PACKAGE / "_data", _PACKAGE.parent.parent):
        if (base / "native" / "include" / "colibri.h").is_file():
            return base
    raise ConfigError(
        f"the engine's sources are missing beside {_PACKAGE}",
        hint="reinstall colibri-kit from its wheel, or run it from a checkout",
        code="CK-CONFIG-DATA",
    )


def native_dir() -> Path:
    """``native/``: the C sources."""
    return root() / "native"


def boards_dir() -> Path:
    """The board profiles that come with the kit."""
    return root() / "boards"


def recipes_dir() -> Path:
    """The recipes that come with the kit."""
    return root() / "recipes"


def cache_dir() -> Path:
    """``$XDG_CACHE_HOME/colibri-kit`` or ``~/.cache/colibri-kit``; created when missing.

    Raises:
        ConfigError: there is no home folder, or it cannot be written.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        path = (Path(base) if base.startswith("/") else Path.home() / ".cache") / "colibri-kit"
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as err:
        raise ConfigError(
            f"no folder for caches: {err}",
            hint="name a folder you may write: XDG_CACHE_HOME=/some/folder",
            code="CK-CONFIG-CACHE",
        ) from err
    return path
