"""Carries a plan out. Every failure leaves the board in a state that the error names."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from colibri_kit.deploy import health, release, state, store
from colibri_kit.deploy.model import Parcel, Part
from colibri_kit.deploy.plan import Engine, Plan, Settings, size_text
from colibri_kit.errors import (
    HealthError,
    KitError,
    PreflightError,
    RollbackError,
    TransferError,
    VerifyError,
)
from colibri_kit.transport.base import ConnectionLost, Transport
from colibri_kit.ui import Ui


@dataclass(frozen=True)
class Outcome:
    """A deployment that ended well."""

    release: str
    previous: str | None
    changed: bool
    sent: store.Sent
    reused_bytes: int
    golden: str
    engine_version: str
    pruned: tuple[str, ...]
    state: str

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def stays(current: str | None) -> str:
    """The board's state when nothing was switched."""
    return f"board unchanged: {current} is current" if current else "board unchanged: no release is current"


@dataclass
class Deployment:
    """One run of one plan. Make it, then :meth:`run` it, holding no lock."""

    transport: Transport
    plan: Plan
    engine: Engine
    parcel: Parcel
    settings: Settings
    board_name: str
    ui: Ui
    keep: int = 3
    retry_bad: bool = False
    break_lock: bool = False
    health_timeout: float = 600.0
    service: str = "none"

    @property
    def _prefix(self) -> str:
        return self.plan.prefix

    def run(self) -> Outcome:
        """Raises PreflightError, TransferError, VerifyError, HealthError or RollbackError."""
        before = self.plan.previous
        try:
            release.make_prefix(self.transport, self._prefix)
            with state.Lock(self.transport, self._prefix, self.break_lock):
                now = store.stored(self.transport, self._prefix)
                if now.current != before:
                    raise PreflightError(
                        f"another deployment made {now.current} current meanwhile",
                        hint="repeat the command",
                        state=stays(now.current),
                        code="CK-DEPLOY-RACE",
                    )
                return self._locked(now.partial)
        except KeyboardInterrupt:
            self.ui.note(f"interrupted; {self._closing(before)}")
            raise
        except KitError as err:
            if err.state is None:
                err.state = self._closing(before)
            raise

    _switched = False
    _kept = 0

    def _closing(self, before: str | None) -> str:
        if self._switched:
            return f"{self.plan.release} is current but unchecked; before it was {before or 'none'}"
        kept = f"; {size_text(self._kept)} sent so far are kept, the next deploy sends the rest"
        return stays(before) + (kept if self._kept else "")

    def _locked(self, partial: dict[str, int]) -> Outcome:
        sent = self._send(partial)
        remembered = state.load(self.transport, self._prefix)
        if self.plan.same_as_current:
            return self._again(remembered, sent)
        version = self._make()
        before = self.plan.previous
        if self.retry_bad:
            remembered = remembered.forgiven(self.plan.content)
        state.save(self.transport, self._prefix, replace(remembered, pending=self.plan.release))
        self._switched = True
        release.switch(self.transport, self._prefix, self.plan.release)
        self.ui.detail(f"switched to {self.plan.release}")
        well = self._health(self.plan.release)
        if not well.ok:
            self._roll_back(remembered, well.reason)
        self._start_service(remembered)
        when = state.utc_now()
        state.save(self.transport, self._prefix, remembered.with_good(self.plan.release, before, when))
        state.log(
            self.transport,
            self._prefix,
            "deploy",
            release=self.plan.release,
            previous=before,
            bytes_sent=sent.bytes_sent,
            golden=well.golden,
        )
        self._switched = False
        pruned = self._prune()
        return self._outcome(sent, True, well.golden, version, pruned)

    def _again(self, remembered: state.State, sent: store.Sent) -> Outcome:
        """The board has this very release: only its health is in question."""
        current = self.plan.release
        version, why = health.version(self.transport, self._path(current))
        well = health.Health(False, why) if why else self._health(current)
        if not well.ok:
            self._switched = True
            self._roll_back(remembered, well.reason)
        good = remembered.with_good(current, remembered.previous, state.utc_now())
        state.save(self.transport, self._prefix, good)
        state.log(self.transport, self._prefix, "check", release=current, bytes_sent=sent.bytes_sent)
        return self._outcome(sent, False, well.golden, version, ())

    def _outcome(
        self, sent: store.Sent, changed: bool, golden: str, version: str, pruned: tuple[str, ...]
    ) -> Outcome:
        return Outcome(
            release=self.plan.release,
            previous=self.plan.previous if changed else None,
            changed=changed,
            sent=sent,
            reused_bytes=self.plan.reuse_bytes,
            golden=golden,
            engine_version=version,
            pruned=pruned,
            state=f"{self.plan.release} is current and well",
        )

    def _send(self, partial: dict[str, int]) -> store.Sent:
        """Verifies what is to be reused, sends what is missing or no longer hashes right."""
        blobs = store.Store(self.transport, self._prefix, self.ui.detail)
        todo: list[Part] = list(self.plan.send)
        if self.plan.reuse:
            with self.ui.progress("verify", self.plan.reuse_bytes) as bar:
                for part in self.plan.reuse:
                    if not blobs.intact(part):
                        self.ui.warn(f"{part.name} on the board is damaged or was tampered with: sent again")
                        blobs.drop(part)
                        blobs.sent.repaired += 1
                        todo.append(part)
                    bar.advance(part.size)
        total = sum(p.size for p in todo)
        self.ui.detail(f"to send: {len(todo)} file(s), {size_text(total)}")
        if todo:
            with self.ui.progress("send", total) as bar:
                for part in todo:
                    self._put(blobs, part, partial.get(part.sha256, 0), bar.advance)
        return blobs.sent

    def _put(self, blobs: store.Store, part: Part, partial: int, advance: Callable[[int], None]) -> None:
        try:
            blobs.put(part, partial, advance)
        except ConnectionLost as err:
            self._kept = blobs.sent.bytes_sent
            err.hint = "when the board answers again, repeat the command: it goes on where it stopped"
            raise
        except KeyboardInterrupt:
            self._kept = blobs.sent.bytes_sent
            raise
        except TransferError as err:
            if err.code == "CK-DEPLOY-FULL":
                done = f"; {blobs.sent.files_sent} whole file(s) are kept" if blobs.sent.files_sent else ""
                err.state = f"{stays(self.plan.previous)}; the partial file was removed{done}"
            raise

    def _path(self, name: str) -> str:
        return f"{self._prefix}/releases/{name}"

    def _make(self) -> str:
        """The release, made and able to start, not yet current. Returns the engine's version."""
        name = self.plan.release
        release.make(
            self.transport, self._prefix, name, self.engine.part, self.parcel.parts, self._document()
        )
        version, why = health.version(self.transport, self._path(name))
        if why:
            release.remove(self.transport, self._prefix, name)
            raise VerifyError(
                f"the engine does not start on {self.transport.describe()}: {why}",
                hint=f"build one for the board: colibri-kit build --board {self.board_name}",
                state=f"{stays(self.plan.previous)}; the new release was removed",
                code="CK-DEPLOY-START",
            )
        if self.service != "none" and not health.has_verb(self.transport, self._path(name), "serve"):
            release.remove(self.transport, self._prefix, name)
            raise PreflightError(
                "this engine has no `serve` verb, so there is nothing for a service to run",
                hint="deploy without --service; `colibri-kit run` uses the deployed release",
                state=f"{stays(self.plan.previous)}; the new release was removed",
                code="CK-DEPLOY-SERVICE",
            )
        over = health.memory(self.transport, self._path(name), self.settings)
        if over:
            release.remove(self.transport, self._prefix, name)
            raise PreflightError(
                f"{self.parcel.name} does not fit the memory of {self.transport.describe()}:\n{over}",
                hint="raise --budget if the board has the memory, lower --ctx, or use a smaller --quant",
                state=f"{stays(self.plan.previous)}; the new release was removed",
                code="CK-PREFLIGHT-BUDGET",
            )
        return version

    def _document(self) -> dict[str, Any]:
        from colibri_kit import __version__

        return {
            "id": self.plan.release,
            "content": self.plan.content,
            "created": state.utc_now(),
            "kit": __version__,
            "board": self.board_name,
            "engine": {"sha256": self.engine.part.sha256, "bytes": self.engine.part.size},
            "model": {
                "name": self.parcel.name,
                "model_id": self.parcel.model_id,
                "golden": self.parcel.golden,
                "bytes": self.parcel.size,
                "files": [{"name": p.name, "bytes": p.size, "sha256": p.sha256} for p in self.parcel.parts],
            },
            "settings": asdict(self.settings),
            "service": self.service,
        }

    def _start_service(self, remembered: state.State) -> None:
        """Installs and restarts the service; one that does not start is a release that is unwell."""
        if self.service == "none":
            return
        from colibri_kit.deploy.services import Service, install, memory_max, render

        who = install.user(self.transport)
        limit = memory_max(self.settings.budget)
        made = render(self.service, Service(self._prefix, who, self.settings, limit))
        assert made is not None
        try:
            install.install(self.transport, made)
        except ConnectionLost:
            raise
        except TransferError as err:
            self._roll_back(remembered, err.message)

    def _health(self, name: str) -> health.Health:
        self.ui.detail(f"checking {name}: golden and one token")
        return health.check(self.transport, self._path(name), self.settings, self.health_timeout)

    def _roll_back(self, remembered: state.State, reason: str) -> None:
        """Goes back and raises HealthError, or RollbackError when even that fails."""
        bad, target = self.plan.release, self.transport.describe()
        before = self.plan.previous
        if self.plan.same_as_current:  # it was well once: before it is what it replaced, if still there
            there = store.stored(self.transport, self._prefix).releases
            before = remembered.previous if remembered.previous in there else None
        after = remembered.with_bad(bad, self.plan.content, reason, state.utc_now())
        why = f"{bad} on {target} is unwell: {reason}"
        try:
            go_back(self.transport, self._prefix, before, self.health_timeout)
        except KitError as err:
            with contextlib.suppress(KitError):
                state.save(self.transport, self._prefix, after)
                state.log(self.transport, self._prefix, "rollback-failed", release=bad, reason=reason)
            raise RollbackError(
                f"{why}; going back failed too: {err.message}",
                hint="see: colibri-kit status, colibri-kit logs",
                state=err.state or f"uncertain: current may be {bad} or {before}",
            ) from err
        state.save(self.transport, self._prefix, replace(after, health="ok" if before else None))
        state.log(self.transport, self._prefix, "rolled-back", release=bad, reason=reason, current=before)
        raise HealthError(
            why,
            hint="see: colibri-kit logs; this release is remembered as bad on the board",
            state=f"rolled back to {before}, which is well"
            if before
            else "no release is current: there is no earlier one; the bad one was taken off",
        )

    def _prune(self) -> tuple[str, ...]:
        now = store.stored(self.transport, self._prefix)
        names = release.doomed(now.releases, self.keep, self.plan.release, self.plan.previous)
        release.prune(self.transport, self._prefix, names)
        return tuple(names)


def go_back(transport: Transport, prefix: str, target: str | None, timeout: float) -> None:
    """Makes ``target`` current and checks it; with None takes ``current`` away.

    Raises:
        RollbackError: it is not well either; it is current all the same.
        TransferError: the board did not do it.
    """
    if target is None:
        release.unset(transport, prefix)
        return
    release.switch(transport, prefix, target)
    doc = release.read(transport, prefix, target)
    settings = settings_of(doc)
    well = health.check(transport, f"{prefix}/releases/{target}", settings, timeout)
    if not well.ok:
        raise RollbackError(
            f"{target} is unwell: {well.reason}", state=f"{target} is current, and is unwell as well"
        )


def settings_of(doc: dict[str, Any]) -> Settings:
    """The engine settings a release.json records; whatever is odd counts as not set."""
    raw = doc.get("settings")
    raw = raw if isinstance(raw, dict) else {}
    values: dict[str, Any] = {
        k: v for k in ("budget", "ctx", "threads") if isinstance(v := raw.get(k), int) and v > 0
    }
    for name in ("weights", "kv", "cache_experts", "cache_policy"):
        word = raw.get(name)
        if isinstance(word, str) and word.isascii() and word.replace("_", "").isalnum():
            values[name] = word
    link = raw.get("offload")
    if isinstance(link, str) and re.fullmatch(r"[\w./:@-]{1,120}", link, re.ASCII):
        values["offload"] = link
    return Settings(**values)
