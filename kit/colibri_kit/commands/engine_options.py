"""Options that are handed to the engine as they are (docs/engine-cli.md)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


class CacheExperts(click.ParamType[str]):
    """``N``, ``0`` or ``all``."""

    name = "N|0|all"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(value)
        if text != "all" and not (text.isascii() and text.isdigit() and len(text) < 9):
            self.fail(f"{text!r} is not a number of experts, 0 (only those in use) or all", param, ctx)
        return text


_MEMORY: tuple[Decorator, ...] = (
    click.option(
        "--weights", type=click.Choice(["arena", "mmap", "lazy", "preload"]), help="Where experts live."
    ),
    click.option("--kv", type=click.Choice(["f16", "f32", "q8_0"]), help="Type of the key/value cache."),
    click.option("--cache-experts", type=CacheExperts(), help="Slots at most; 0 = only experts in use."),
    click.option(
        "--cache-policy", type=click.Choice(["slru", "lru", "lfu"]), help="Which expert gives up its slot."
    ),
)
_STREAM: tuple[Decorator, ...] = (
    click.option("--batch", type=click.IntRange(1, 256), help="Prompt tokens computed together."),
    click.option("--readers", type=click.IntRange(1, 16), help="Threads that read experts."),
    click.option("--buffered", is_flag=True, help="Read through the page cache."),
    click.option("--no-lookahead", is_flag=True, help="Read no expert before it is asked for."),
    click.option("--lazy-block", type=click.IntRange(1, 64), metavar="MIB", help="With --weights lazy."),
    click.option(
        "--on-bad-expert",
        type=click.Choice(["fail", "next"]),
        help="A damaged expert: fail, or the next-ranked one answers (lossy).",
    ),
    click.option(
        "--on-miss",
        type=click.Choice(["wait", "zeros"]),
        help="An expert not there yet: wait, or leave it out (lossy).",
    ),
    click.option(
        "--extra-expert-below",
        type=float,
        metavar="T",
        help="One more expert when the top router logit is below T (lossy).",
    ),
    click.option(
        "--token-deadline", type=click.IntRange(1), metavar="MS", help="Report a token slower than this."
    ),
    click.option("--offload", metavar="LINK", help="Experts may be computed at the end of this link."),
    click.option("--pin-file", metavar="FILE", help="Experts that keep their slots; a path on the board."),
    click.option(
        "--trace-experts", metavar="FILE", help="Record every token's experts; a path on the board."
    ),
)


def _apply(options: tuple[Decorator, ...], command: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(options):
        command = option(command)
    return command


def memory_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options that a release records: weights, kv, cache_experts, cache_policy."""
    return _apply(_MEMORY, command)


def stream_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """Those of one run."""
    return _apply(_STREAM, command)
