"""Recipes: one deployment, that is a model on a board with its budget and service."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from colibri_kit.config.board import _Strict
from colibri_kit.config.scalars import Count, Size, Str


class Service(_Strict):
    """How the board runs the engine. memory_limit is bytes, None = budget plus a margin."""

    user: Str | None = Field(default=None, pattern=r"^[a-z_][a-z0-9_-]*\$?$")
    memory_limit: Size | None = None
    restart: Literal["always", "on-failure", "never"] = "on-failure"


class Check(_Strict):
    """A prompt the release must answer before it counts as healthy."""

    prompt: Str = "Hello"
    max_new: Count = 1
    expect: Str | None = None


class Recipe(_Strict):
    """One deployment. Sizes are bytes; None = the board's or the engine's default.

    Attributes:
        model: a ``.coli`` folder; a relative path counts from the recipe's folder.
        host: ``user@host[:port]`` for boards reached over a network.
        offload: the engine's link to a module (docs/offload.md).
    """

    name: Str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$")
    model: Str
    board: Str
    host: Str | None = None
    budget: Size | None = None
    ctx: Count | None = None
    threads: Count | None = None
    offload: Str | None = Field(default=None, pattern=r"^(/dev/|tty:/dev/|unix:/|tcp:[0-9.]+:)[\w./:@-]+$")
    service: Service = Service()
    check: Check = Check()
