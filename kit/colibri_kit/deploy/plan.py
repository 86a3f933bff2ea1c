"""What a deployment will do, decided from facts before anything is changed. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from colibri_kit.deploy import elf
from colibri_kit.deploy.facts import Facts
from colibri_kit.deploy.model import Parcel, Part
from colibri_kit.errors import PreflightError

if TYPE_CHECKING:
    from colibri_kit.config.board import Board

_MIB = 1 << 20
_NOTHING = "nothing was sent or changed"

#: Our name of an instruction set -> words the kernel prints in /proc/cpuinfo.
_CPU_WORDS = {
    "sse41": ("sse4_1",),
    "avx2": ("avx2", "fma", "f16c"),
    "neon": ("asimd",),
    "crc": ("crc32",),
    "lse": ("atomics",),
    "fp16": ("fphp", "asimdhp"),
    "dotprod": ("asimddp",),
    "rdm": ("asimdrdm",),
    "rcpc": ("lrcpc",),
    "crypto": ("aes", "sha2"),
    "i8mm": ("i8mm",),
    "bf16": ("bf16",),
}


@dataclass(frozen=True)
class Settings:
    """What the engine is told at start; 0 or "" = its own choice. budget in bytes.

    weights, kv, cache_experts, cache_policy, offload: the engine's words (docs/engine-cli.md).
    """

    budget: int = 0
    ctx: int = 0
    threads: int = 0
    weights: str = ""
    kv: str = ""
    cache_experts: str = ""
    cache_policy: str = ""
    offload: str = ""

    def flags(self) -> list[str]:
        """The engine's options for ``run``, ``check`` and ``plan``."""
        pairs = (
            ("--budget", self.budget),
            ("--ctx", self.ctx),
            ("--threads", self.threads),
            ("--weights", self.weights),
            ("--kv", self.kv),
            ("--cache-experts", self.cache_experts),
            ("--cache-policy", self.cache_policy),
            ("--offload", self.offload),
        )
        return [word for name, value in pairs if value for word in (name, str(value))]


@dataclass(frozen=True)
class Engine:
    """An engine binary to deploy: the file and what it is built for."""

    part: Part
    kind: elf.Kind


@dataclass(frozen=True)
class Stored:
    """What the prefix on the board holds: finished blobs and partial ones, name -> bytes."""

    blobs: dict[str, int]
    partial: dict[str, int]
    releases: tuple[str, ...]
    current: str | None


@dataclass(frozen=True)
class Plan:
    """The steps of one deployment. Sizes in bytes. ``beside``: files that stand beside the engine."""

    board: str
    target: str
    prefix: str
    release: str
    content: str
    send: tuple[Part, ...]
    reuse: tuple[Part, ...]
    resume_bytes: int
    previous: str | None
    same_as_current: bool
    warnings: tuple[str, ...]
    steps: tuple[str, ...]
    beside: tuple[Part, ...] = ()

    @property
    def send_bytes(self) -> int:
        return sum(p.size for p in self.send)

    @property
    def reuse_bytes(self) -> int:
        return sum(p.size for p in self.reuse)

    def as_json(self) -> dict[str, object]:
        return {
            "board": self.board,
            "target": self.target,
            "prefix": self.prefix,
            "release": self.release,
            "content": self.content,
            "send": [{"name": p.name, "bytes": p.size, "sha256": p.sha256} for p in self.send],
            "send_bytes": self.send_bytes,
            "reuse": [{"name": p.name, "bytes": p.size, "sha256": p.sha256} for p in self.reuse],
            "reuse_bytes": self.reuse_bytes,
            "resume_bytes": self.resume_bytes,
            "previous": self.previous,
            "same_as_current": self.same_as_current,
            "warnings": list(self.warnings),
            "steps": list(self.steps),
        }


def size_text(n: int) -> str:
    """Bytes for people: ``17 B``, ``4.2 KiB``, ``135.0 MiB``."""
    value = float(n)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{n} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError


def content_id(
    engine: Part, parcel: Parcel, settings: Settings, service: dict[str, Any] | None = None
) -> str:
    """sha256 over everything that makes a release what it is (not its time).

    Args:
        service: how it is kept running; None = it is not.
    """
    what: dict[str, Any] = {
        "engine": engine.sha256,
        "files": sorted((p.name, p.sha256) for p in parcel.parts),
        "settings": asdict(settings),
    }
    if service is not None:
        what["service"] = service
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()


def release_id(now: datetime, content: str) -> str:
    """``r20261130-083012-1a2b3c``: sorts by time, tells twins apart."""
    return f"r{now:%Y%m%d-%H%M%S}-{content[:6]}"


def _refuse(why: str, hint: str, code: str) -> PreflightError:
    return PreflightError(why, hint=hint, state=_NOTHING, code=f"CK-PREFLIGHT-{code}")


def check_engine(board: Board, engine: Engine) -> None:
    """Refuses an engine file that is not for the board. Raises PreflightError."""
    if engine.kind.arch != board.arch or engine.kind.bits != 64:
        raise _refuse(
            f"{engine.part.path} is an engine for {engine.kind}, board {board.name} is {board.arch}",
            f"build the right one: colibri-kit build --board {board.name} -o FILE",
            "ENGINE",
        )


def check_board(board: Board, facts: Facts, where: str) -> None:
    """Refuses a machine that is not the board the user named. Raises PreflightError."""
    seen = facts.userland.arch if facts.userland else facts.uname
    if seen != board.arch:
        told = "" if seen == facts.uname else f" (its kernel says {facts.uname})"
        raise _refuse(
            f"board {board.name} is {board.arch}, but {where} runs {facts.userland or seen} programs{told}",
            "name the right --board; see: colibri-kit boards",
            "ARCH",
        )
    if facts.userland and facts.userland.bits != 64:
        raise _refuse(
            f"{where} has a {facts.userland.bits}-bit system; the engine needs a 64-bit one",
            "install the 64-bit system on the board",
            "ARCH",
        )
    lacking = [
        isa
        for isa in board.isa
        if facts.cpu_flags and not all(w in facts.cpu_flags for w in _CPU_WORDS.get(isa, ()))
    ]
    if lacking:
        raise _refuse(
            f"the CPU of {where} lacks {', '.join(lacking)}, which board {board.name} names",
            "name the right --board; see: colibri-kit boards",
            "CPU",
        )
    if facts.missing_tools:
        raise _refuse(
            f"{where} lacks the program(s) {', '.join(facts.missing_tools)}",
            "install coreutils, or a busybox that has them",
            "TOOLS",
        )


def check_place(facts: Facts, where: str) -> list[str]:
    """Refuses a prefix that cannot hold releases. Returns warnings. Raises PreflightError."""
    prefix = facts.prefix
    if "ro" in facts.mount_options:
        raise _refuse(
            f"{facts.mount} on {where}, which would hold {prefix}, is mounted read-only",
            f"on the board: mount -o remount,rw {facts.mount}; or name a writable folder with --prefix",
            "READONLY",
        )
    if not facts.writable:
        raise _refuse(
            f"user {facts.user} may not write {facts.near} on {where}, so {prefix} cannot be used",
            "name a folder of the user's with --prefix, or work as root with --sudo",
            "WRITE",
        )
    if "noexec" in facts.mount_options:
        raise _refuse(
            f"{facts.mount} on {where} is mounted noexec: no program can run from {prefix}",
            "name a folder on another file system with --prefix",
            "NOEXEC",
        )
    if facts.filled and not facts.ours:
        raise _refuse(
            f"{prefix} on {where} holds other things; colibri-kit wants a folder of its own",
            "name a new or empty folder with --prefix",
            "FOREIGN",
        )
    warnings = []
    if facts.fstype in ("tmpfs", "ramfs", "overlay"):
        warnings.append(f"{facts.mount} on {where} is {facts.fstype}: releases may not survive a reboot")
    if abs(facts.clock_skew) > 120:
        warnings.append(f"the clock of {where} differs by {facts.clock_skew:+.0f} s from this machine's")
    return warnings


def check_space(facts: Facts, need: int, where: str) -> None:
    """Refuses when ``need`` bytes and 10 % do not fit. Raises PreflightError."""
    wanted = need + need // 10
    if need and wanted > facts.disk_free:
        raise _refuse(
            f"{facts.mount} on {where} has {size_text(facts.disk_free)} free; "
            f"{size_text(need)} must be sent, and 10 % must stay free ({size_text(wanted)})",
            "free some space there, keep fewer releases (--keep 1), or use another --prefix",
            "SPACE",
        )


def check_memory(parcel: Parcel, settings: Settings, board: Board, facts: Facts, where: str) -> None:
    """Refuses a model that cannot fit: a lower bound, the engine's own plan is exact.

    Raises:
        PreflightError: with the sum.
    """
    ctx = settings.ctx or min(parcel.ctx_train or 4096, 4096)
    streamed = settings.weights != "preload"  # experts may stay on storage
    weights = sum(
        p.size
        for p in parcel.parts
        if p.name not in ("manifest.json", "tokenizer.coli")
        and not (streamed and p.name.startswith("experts-"))
    )
    tokenizer = sum(p.size for p in parcel.parts if p.name == "tokenizer.coli")
    cache = parcel.kv_bytes_per_token * ctx  # F16
    if settings.kv == "q8_0":
        cache = cache * 17 // 32
    total = weights + tokenizer + cache
    budget = settings.budget or board.budget
    rows = f"weights {weights} + tokenizer {tokenizer} + KV cache of {ctx} tokens {cache} = {total} bytes"
    if total > budget:
        raise _refuse(
            f"{parcel.name} needs at least {size_text(total)}, the budget is {size_text(budget)}: {rows}",
            "raise --budget if the board has the memory, lower --ctx, or convert with a smaller --quant",
            "BUDGET",
        )
    if facts.ram and total > facts.ram:
        raise _refuse(
            f"{parcel.name} needs at least {size_text(total)}, {where} has {size_text(facts.ram)}: {rows}",
            "lower --ctx, or convert with a smaller --quant",
            "RAM",
        )


def make(
    *,
    board: Board,
    facts: Facts,
    where: str,
    engine: Engine,
    parcel: Parcel,
    settings: Settings,
    stored: Stored,
    current_content: str | None,
    bad: Sequence[str],
    retry_bad: bool,
    keep: int,
    now: datetime,
    service: dict[str, Any] | None = None,
    beside: tuple[Part, ...] = (),
    first: tuple[str, ...] = (),
) -> Plan:
    """The plan, or the reason why there is none.

    Args:
        service: what the board keeps running (:meth:`Spec.as_json`), None = nothing.
        beside: files that go beside the engine.
        current_content: content id of the release that is current on the board.
        bad: content ids that failed their health checks on this board.
        first: what else is done once nothing refuses any more, before the release is switched to.

    Raises:
        PreflightError: the deployment must not begin.
    """
    check_engine(board, engine)
    check_board(board, facts, where)
    warnings = check_place(facts, where)
    check_memory(parcel, settings, board, facts, where)
    content = content_id(engine.part, parcel, settings, service)
    if content in bad and not retry_bad:
        raise _refuse(
            f"this very release (content {content[:12]}) failed its health check on {where} before",
            "see why with: colibri-kit logs; deploy it all the same with --retry-bad",
            "BAD",
        )
    unique = {p.sha256: p for p in (engine.part, *beside, *parcel.parts)}
    send = tuple(p for p in unique.values() if stored.blobs.get(p.sha256) != p.size)
    reuse = tuple(p for p in unique.values() if stored.blobs.get(p.sha256) == p.size)
    resume = sum(min(stored.partial.get(p.sha256, 0), p.size) for p in send)
    need = sum(p.size for p in send) - resume
    check_space(facts, need, where)
    same = current_content == content and stored.current is not None
    release = stored.current if same and stored.current else release_id(now, content)
    steps = [f"send {len(send)} file(s), {size_text(need)}; reuse {len(reuse)}"]
    steps.append("verify every file on the board by its sha256")
    if not same:
        steps += [f"make releases/{release}", "run its engine once"]
    steps += first
    if not same:
        steps.append(f"switch current to {release}")
    steps.append(_check_step(service, same))
    if not same:
        steps.append(f"keep the newest {keep} release(s)")
    return Plan(
        board=board.name,
        target=where,
        prefix=facts.prefix,
        release=release,
        content=content,
        send=send,
        reuse=reuse,
        resume_bytes=resume,
        previous=stored.current,
        same_as_current=same,
        warnings=tuple(warnings),
        steps=tuple(steps),
        beside=beside,
    )


def _check_step(service: dict[str, Any] | None, same: bool) -> str:
    back = "" if same else "; go back if unwell"
    if service is None:
        return f"check: golden, then one token{back}"
    verb = "ask" if same else "restart"
    return f"{verb} the {service['kind']} service; it must answer with the golden, then one token{back}"
