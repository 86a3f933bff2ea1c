"""The engine's ``probe --json`` object, checked and typed. Times in ns, sizes in bytes."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from typing import Any

from colibri_kit.errors import EngineError
from colibri_kit.probe.stats import Summary

SCHEMA = 1


@dataclass(frozen=True)
class Rate:
    """Tokens a second: the slowest run, the median run, the fastest."""

    min: float
    p50: float
    max: float


@dataclass(frozen=True)
class Machine:
    """What /sys said at one moment; None or empty where it says nothing."""

    cpu_khz: tuple[int, ...]
    cpu_khz_max: int | None
    governor: str | None
    temperature_mc: dict[str, int]
    throttled_bits: int | None
    throttle_count: int | None
    load1: float | None


@dataclass(frozen=True)
class Memory:
    """rss_anon, rss_file, peak at one moment; None where the system does not tell."""

    rss_anon: int | None
    rss_file: int | None
    peak: int | None


@dataclass(frozen=True)
class Offload:
    """What the link of ``--offload`` did during the runs (docs/offload.md names each counter).

    Attributes:
        module: who answers there, why: the last trouble; None = nobody, none.
        latency_ns, bytes_s: of the link; 0 = not measured.
        connects: greetings during the runs: each is a reconnect, the first came before them.
        experts: computed there; ``local``: sent there, computed here after all.
    """

    state: str
    why: str | None
    module: str | None
    latency_ns: int
    bytes_s: int
    experts: int
    local: int
    bytes_out: int
    bytes_in: int
    wait_ns: int
    connects: int
    late: int
    dropped: int
    cut: int
    crc: int
    garbage: int
    gaps: int
    refused: int
    errors: int
    wrong: int

    @property
    def trouble(self) -> dict[str, int]:
        """What went wrong, by counter; empty when nothing did."""
        names = ("late", "dropped", "cut", "crc", "garbage", "gaps", "refused", "errors", "wrong")
        return {name: getattr(self, name) for name in names if getattr(self, name)}


@dataclass(frozen=True)
class Result:
    """One probe. ``route`` is None for a dense model, ``offload`` without a link."""

    raw: dict[str, Any]
    model: str
    model_id: str
    isa: str
    threads: int
    ctx: int
    kv: str
    runs: int
    tokens: int
    prompt_tokens: int
    load_ns: int
    golden_ns: int
    cold_ns: int
    first: Summary
    token: Summary
    route: Summary | None
    prefill: Rate
    decode: Rate
    minor_faults: float | None
    major_faults: float | None
    before: Memory
    after: Memory
    ledger: dict[str, int | None]
    machine_before: Machine
    machine_after: Machine
    offload: Offload | None = None
    samples: dict[str, list[int]] = field(default_factory=dict)


def parse(text: str | bytes) -> Result:
    """Reads the engine's answer.

    Raises:
        EngineError: it is not JSON, of another schema, or lacks something.
    """
    try:
        raw = json.loads(text)
    except ValueError as err:
        raise EngineError(f"the probe's answer is not JSON: {err}", code="CK-PROBE-ANSWER") from err
    return of_dict(raw)


def of_dict(raw: Any) -> Result:
    """As :func:`parse`, of a decoded object."""
    if not isinstance(raw, dict) or raw.get("schema") != SCHEMA:
        raise EngineError(
            f"the probe's answer is not of schema {SCHEMA}",
            hint="engine and kit differ in version: build and deploy the engine again",
            code="CK-PROBE-ANSWER",
        )
    try:
        return _result(raw)
    except (KeyError, TypeError, ValueError, AttributeError) as err:
        raise EngineError(
            f"the probe's answer lacks something or has a wrong type: {err}", code="CK-PROBE-ANSWER"
        ) from err


def _result(raw: dict[str, Any]) -> Result:
    memory, machine = raw["memory"], raw["machine"]
    return Result(
        raw=raw,
        model=str(raw["model"]["name"]),
        model_id=str(raw["model"]["model_id"]),
        isa=str(raw["isa"]),
        threads=int(raw["threads"]),
        ctx=int(raw["ctx"]),
        kv=str(raw["kv"]),
        runs=int(raw["runs"]),
        tokens=int(raw["tokens"]),
        prompt_tokens=int(raw["prompt_tokens"]),
        load_ns=int(raw["cold"]["load_ns"]),
        golden_ns=int(raw["cold"]["golden_ns"]),
        cold_ns=int(raw["cold"]["first_token_ns"]),
        first=_summary(raw["first_token_ns"]),
        token=_summary(raw["token_ns"]),
        route=None if raw["route_ns"] is None else _summary(raw["route_ns"]),
        prefill=_rate(raw["prefill_tok_s"]),
        decode=_rate(raw["decode_tok_s"]),
        minor_faults=_float(raw["minor_faults_per_token"]),
        major_faults=_float(raw["major_faults_per_token"]),
        before=_memory(memory["before"]),
        after=_memory(memory["after"]),
        ledger={str(k): _int(v) for k, v in memory["ledger"].items()},
        machine_before=_machine(machine["before"]),
        machine_after=_machine(machine["after"]),
        offload=_offload(raw.get("offload")),
        samples={str(k): [int(x) for x in v] for k, v in raw.get("samples", {}).items()},
    )


def _summary(raw: dict[str, Any]) -> Summary:
    return Summary(*(int(raw[k]) for k in ("n", "min", "p50", "p90", "p99", "max")))


def _rate(raw: dict[str, Any]) -> Rate:
    return Rate(*(float(raw[k]) for k in ("min", "p50", "max")))


def _memory(raw: dict[str, Any]) -> Memory:
    return Memory(*(_int(raw[k]) for k in ("rss_anon", "rss_file", "peak")))


def _offload(raw: dict[str, Any] | None) -> Offload | None:
    if raw is None:  # no link, or an engine from before it
        return None
    words = {"state", "why", "module"}
    numbers = {f.name: int(raw[f.name]) for f in fields(Offload) if f.name not in words}
    why, module = (None if raw[k] is None else str(raw[k]) for k in ("why", "module"))
    return Offload(state=str(raw["state"]), why=why, module=module, **numbers)


def _machine(raw: dict[str, Any]) -> Machine:
    zones: dict[str, int] = {}
    for zone in raw["temperature_mc"]:
        name = str(zone["zone"])
        while name in zones:
            name += "'"
        zones[name] = int(zone["value"])
    return Machine(
        cpu_khz=tuple(int(k) for k in raw["cpu_khz"] if k is not None),
        cpu_khz_max=_int(raw["cpu_khz_max"]),
        governor=None if raw["governor"] is None else str(raw["governor"]),
        temperature_mc=zones,
        throttled_bits=_int(raw["throttled_bits"]),
        throttle_count=_int(raw["throttle_count"]),
        load1=_float(raw["load1"]),
    )


def _int(value: Any) -> int | None:
    return None if value is None else int(value)


def _float(value: Any) -> float | None:
    return None if value is None else float(value)
