"""Recipes: one deployment, that is a model on a board with its budget and service."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from colibri_kit.config.board import _Strict
from colibri_kit.config.scalars import Bool, Count, Size, Str

Seconds = Annotated[Count, Field(le=86400)]
#: A path on the board: it stands in unit files and in the engine's options.
BoardPath = Annotated[Str, Field(pattern=r"^/[A-Za-z0-9._/@+-]+$", max_length=200)]


class Service(_Strict):
    """How the board keeps the engine running, and the limits of `colibri serve` (docs/service.md).

    None = the engine's default. Times are seconds, sizes bytes.

    Attributes:
        memory_limit: of the whole service; None = the budget plus a margin.
        watchdog: without progress for so long it is killed; None = by the board's storage and memory.
        unix: a socket below /run/colibri, the folder that the service gets.
        token_file: on the board; it is not sent.
        batch: prompt tokens computed together.
    """

    user: Str | None = Field(default=None, pattern=r"^[a-z_][a-z0-9_-]*\$?$")
    memory_limit: Size | None = None
    restart: Literal["always", "on-failure", "never"] = "on-failure"
    watchdog: Count | None = Field(default=None, ge=2, le=3600)
    listen: Str | None = Field(
        default=None, pattern=r"^(none|(localhost|[0-9.]+|\[[0-9a-fA-F:.]+\]):[0-9]{1,5})$"
    )
    unix: Str | None = Field(default=None, pattern=r"^/run/colibri/[A-Za-z0-9._-]{1,60}$")
    token_file: BoardPath | None = None
    allow_host: tuple[Annotated[Str, Field(pattern=r"^[A-Za-z0-9._-]+$", max_length=255)], ...] = Field(
        default=(), max_length=16
    )
    sequences: Count | None = Field(default=None, le=64)
    queue: Count | None = Field(default=None, le=1024)
    connections: Count | None = Field(default=None, le=1024)
    body: Size | None = Field(default=None, ge=1024, le=1 << 24)
    batch: Count | None = Field(default=None, le=256)
    io_timeout: Seconds | None = Field(default=None, le=3600)
    idle_timeout: Seconds | None = None
    deadline: Seconds | None = None
    drain: Seconds | None = None
    log: Literal["text", "json"] | None = None
    hot_swap: Bool | None = None
    lock: Bool | None = None

    @staticmethod
    def options_keys() -> tuple[str, ...]:
        """Those that are options of `colibri serve`, by the same name with dashes."""
        own = ("user", "memory_limit", "restart", "watchdog")
        return tuple(name for name in Service.model_fields if name not in own)

    @model_validator(mode="after")
    def _agree(self) -> Service:
        if self.listen == "none" and self.unix is None:
            raise ValueError("listen: none leaves nobody able to ask; give unix as well")
        if self.sequences is not None and self.sequences > (self.batch or 32):
            raise ValueError(f"sequences: {self.sequences} need a batch of at least as many")
        return self


class Check(_Strict):
    """A prompt the release must answer before it counts as healthy; ``expect`` must be in the answer."""

    prompt: Str = "Hello"
    max_new: Count = Field(default=1, le=512)
    expect: Str | None = None


class Recipe(_Strict):
    """One deployment. Sizes are bytes; None = the board's or the engine's default.

    Attributes:
        model: a ``.coli`` folder; a relative path counts from the recipe's folder.
        host: ``user@host[:port]`` for boards reached over a network.
        weights, kv, cache_experts, cache_policy: the engine's words (docs/engine-cli.md).
        offload: the engine's link to a module (docs/offload.md).
        service: None = no process stays running.
    """

    name: Str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$")
    model: Str
    board: Str
    host: Str | None = None
    budget: Size | None = None
    ctx: Count | None = None
    threads: Count | None = None
    weights: Literal["arena", "mmap", "lazy", "preload"] | None = None
    kv: Literal["f16", "f32", "q8_0"] | None = None
    cache_experts: Str | None = Field(default=None, pattern=r"^(all|[0-9]{1,8})$")
    cache_policy: Literal["slru", "lru", "lfu"] | None = None
    offload: Str | None = Field(default=None, pattern=r"^(/dev/|tty:/dev/|unix:/|tcp:[0-9.]+:)[\w./:@-]+$")
    service: Service | None = None
    check: Check = Check()
