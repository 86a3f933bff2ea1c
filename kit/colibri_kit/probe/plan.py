"""What to run for a probe. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ProbePlan:
    """One probe: the engine's command line and how long it may take (seconds)."""

    argv: tuple[str, ...]
    timeout: float


def make_plan(
    engine: str,
    model: str,
    *,
    recorded: Sequence[str] = (),
    runs: int,
    tokens: int,
    prompt_tokens: int,
    threads: int | None,
    ctx: int | None,
    samples: bool,
    timeout: float,
    offload: str | None = None,
) -> ProbePlan:
    """Args:
    engine, model: paths on the board.
    recorded: option, value, option, value … that the release runs with; what is given here
        by name takes their place.
    samples: ask for every sample too (reports need them).
    offload: a link as the board names it (docs/offload.md).
    """
    own: dict[str, str] = {}
    if threads is not None:
        own["--threads"] = str(threads)
    if ctx is not None:
        own["--ctx"] = str(ctx)
    if offload is not None:
        own["--offload"] = offload
    settings = {**dict(zip(recorded[::2], recorded[1::2], strict=True)), **own}
    argv = [engine, "probe", "--model", model, "--json"]
    argv += ["--runs", str(runs), "--tokens", str(tokens), "--prompt-tokens", str(prompt_tokens)]
    argv += [word for pair in settings.items() for word in pair]
    if samples:
        argv.append("--samples")
    return ProbePlan(tuple(argv), timeout)
