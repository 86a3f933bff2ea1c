"""What offloading gives on a link: measured, over a link that is there or one modelled by a throttle.

Three figures decide: what an expert costs here (computing it, or reading it first), what it costs at the
module, and what its row costs on the link. The engine measures all three while it runs; this runs it with
and without the link, and, if asked, with every fixed share, to show whether it chose well.
"""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from colibri_kit.errors import EngineError, UsageError

if TYPE_CHECKING:
    from colibri_kit.native import Engine

_START_S = 300.0
_WARM = 8  # tokens before the clock starts: averages settle


@dataclass(frozen=True)
class Setting:
    """What is measured.

    Attributes:
        link: the engine's ``--offload``; None = a module on this machine behind a throttle.
        bytes_s, delay_s: of the throttle, each way.
        storage_bytes_s: storage modelled this slow (all readers together); None = as it is.
        cache_experts: slots; None = all that fit.
        sweep: also every fixed share of the experts of a token.
    """

    model: Path
    engine: Path
    link: str | None = None
    bytes_s: float = 30e6
    delay_s: float = 100e-6
    storage_bytes_s: float | None = None
    cache_experts: int | None = None
    tokens: int = 48
    threads: int = 0
    sweep: bool = False


@dataclass(frozen=True)
class Split:
    """Decoding with a fixed share of the experts at the module."""

    percent: int
    tok_s: float


@dataclass(frozen=True)
class Result:
    """Rates are tokens a second and bytes a second; times nanoseconds, 0 = not measured.

    Attributes:
        row_bytes: what one expert adds to the link, both ways; a layer's activations go once.
        remote_share: part of the expert look-ups that the module computed, when the engine chose.
        late, taken_back: layers whose deadline passed; experts sent, computed here after all.
        read_ns: reading one missing expert, from the run without a link.
        break_even_bytes_s: the link rate above which one expert gains by going: computed here, and
            read here first. None = at no rate, or not measured.
    """

    latency_ns: int
    link_bytes_s: int
    expert_here_ns: int
    expert_there_ns: int
    read_ns: int
    row_bytes: int
    local_tok_s: float
    offload_tok_s: float
    speedup: float
    remote_share: float
    late: int
    taken_back: int
    break_even_cached_bytes_s: float | None
    break_even_missing_bytes_s: float | None
    splits: tuple[Split, ...]

    @property
    def verdict(self) -> str:
        """One line for whoever has to decide; a difference of 5 % is noise."""
        if self.remote_share == 0.0:
            return "no: this board is faster alone, and the engine sends nothing"
        if self.speedup < 1.05:
            return (
                f"hardly: {self.remote_share:.0%} of the experts go, for {self.speedup:.2f} times the speed"
            )
        return f"yes: {self.speedup:.2f} times the speed"

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.verdict}


class SlowStorage:
    """An ``io_hook`` that makes reads take as long as a medium of ``bytes_s`` would, whoever reads."""

    def __init__(self, bytes_s: float) -> None:
        self._bytes_s, self._free, self._lock = bytes_s, 0.0, threading.Lock()

    def __call__(self, shard: int, offset: int, size: int) -> int:
        del shard, offset
        with self._lock:
            self._free = max(self._free, time.monotonic()) + size / self._bytes_s
            until = self._free
        time.sleep(max(0.0, until - time.monotonic()))
        return 0


@contextlib.contextmanager
def module(engine: Path, model: Path, path: Path, threads: int = 0) -> Iterator[None]:
    """``colibri expertd`` on a Unix socket at ``path`` while the block runs.

    Raises:
        EngineError: it ended before it listened; its last words are in the message.
    """
    argv = [str(engine), "expertd", "--model", str(model), "--listen", f"unix:{path}"]
    argv += ["--threads", str(threads)] if threads else []
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    last = ""
    try:
        for line in process.stderr:
            last = line.strip()
            if "listening" in last:
                break
        else:
            raise EngineError(f"the module did not start: {last}")
        drain = threading.Thread(target=process.stderr.read, daemon=True)
        drain.start()
        yield
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def link(setting: Setting) -> Iterator[str]:
    """The link to measure: the one given, or a module of our own behind a throttle."""
    if setting.link is not None:
        yield setting.link
        return
    from colibri_kit.offload.relay import Throttle

    with tempfile.TemporaryDirectory(prefix="colibri-offload-") as name:
        near, far = Path(name) / "near", Path(name) / "far"
        with (
            module(setting.engine, setting.model, far, setting.threads),
            Throttle(near, far, setting.bytes_s, setting.delay_s),
        ):
            yield f"unix:{near}"


def _ids(n: int, n_vocab: int) -> list[int]:
    return [(i * 2654435761 + 12345) % 2**32 % n_vocab for i in range(n)]


def decode(engine: Engine, tokens: int) -> float:
    """Tokens a second over fixed tokens, one at a time, after a few to warm up."""
    ids = _ids(_WARM + tokens, int(engine.info()["n_vocab"]))
    engine.reset()
    for token in ids[:_WARM]:
        engine.eval([token], want_all=False, want_experts=False)
    start = time.monotonic()
    for token in ids[_WARM:]:
        engine.eval([token], want_all=False, want_experts=False)
    return tokens / (time.monotonic() - start)


def _open(setting: Setting, **more: Any) -> Engine:
    from colibri_kit.native import Engine

    hook = SlowStorage(setting.storage_bytes_s) if setting.storage_bytes_s else None
    return Engine(
        setting.model,
        threads=setting.threads,
        batch=1,
        ctx=max(64, setting.tokens + _WARM),
        cache_experts=setting.cache_experts,
        io_hook=hook,
        **more,
    )


def _local(setting: Setting) -> tuple[float, int, int]:
    """(tokens a second, ns waited for a missing expert, experts of a token)."""
    with _open(setting) as engine:
        before = engine.counters()
        rate = decode(engine, setting.tokens)
        after = engine.counters()
        misses = after["misses"] - before["misses"]
        waited = after["ns_wait"] - before["ns_wait"]
        return rate, waited // misses if misses else 0, int(engine.info()["n_expert_used"])


def _break_even(row_bytes: int, saved_ns: int, there_ns: int) -> float | None:
    """Bytes a second at which a row's transfer takes what it saves."""
    return row_bytes * 1e9 / (saved_ns - there_ns) if saved_ns > there_ns > 0 else None


def run(setting: Setting) -> Result:
    """Measures.

    Raises:
        UsageError: the model is dense.
        EngineError: nobody answers on the link.
    """
    local, read_ns, used = _local(setting)
    if used == 0:
        raise UsageError(f"{setting.model} is dense: it has no experts to offload")
    with link(setting) as name:
        with _open(setting, offload=name) as engine:
            before = engine.counters()
            rate = decode(engine, setting.tokens)
            how, after = engine.offload(), engine.counters()
            row_bytes = int(engine.info()["n_embd"]) * 4 + 8
        if after["offload_connects"] == 0:
            raise EngineError(f"nobody answers on {name}: {how['why']}")
        splits = tuple(
            Split(100 * k // used, _share(setting, name, 100 * k // used))
            for k in range(used + 1)
            if setting.sweep
        )
    remote = after["offload_experts"] - before["offload_experts"]
    looked = sum(after[k] - before[k] for k in ("hits", "misses")) + remote
    here, there = int(how["expert_here_ns"]), int(how["expert_there_ns"])
    return Result(
        latency_ns=how["latency_ns"],
        link_bytes_s=how["bytes_s"],
        expert_here_ns=here,
        expert_there_ns=there,
        read_ns=read_ns,
        row_bytes=row_bytes,
        local_tok_s=local,
        offload_tok_s=rate,
        speedup=rate / local,
        remote_share=remote / looked if looked else 0.0,
        late=after["offload_late"] - before["offload_late"],
        taken_back=after["offload_local"] - before["offload_local"],
        break_even_cached_bytes_s=_break_even(row_bytes, here, there),
        break_even_missing_bytes_s=_break_even(row_bytes, here + read_ns, there) if read_ns else None,
        splits=splits,
    )


def _share(setting: Setting, name: str, percent: int) -> float:
    with _open(setting, offload=name, offload_share=percent, offload_deadline_ms=60000) as engine:
        return decode(engine, setting.tokens)
