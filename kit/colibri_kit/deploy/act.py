"""Carries a plan out. Every failure leaves the board in a state that the error names."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from colibri_kit.deploy import back, health, keeper, release, serving, state, store
from colibri_kit.deploy.model import Parcel, Part
from colibri_kit.deploy.plan import Engine, Plan, Settings, size_text
from colibri_kit.deploy.record import settings_of as settings_of
from colibri_kit.errors import (
    HealthError,
    KitError,
    PreflightError,
    RollbackError,
    TransferError,
    VerifyError,
)
from colibri_kit.offload import gadget
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
    """One run of one plan. Make it, then :meth:`run` it, holding no lock.

    Attributes:
        service: how the board keeps it running; None = it does not.
        check: what it has to answer before it counts as well.
        gadget: make the board's USB port a serial device, once nothing refuses any more.
    """

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
    service: serving.Spec | None = None
    check: health.Check = field(default_factory=health.Check)
    gadget: bool = False

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
            more = ": deploy again, or colibri-kit rollback" if self._switched else ""
            self.ui.note(f"interrupted; {self._closing(before)}{more}")
            raise
        except KitError as err:
            if err.state is None:
                err.state = self._closing(before)
            raise

    _switched = False
    _gadget_begun = False
    _kept = 0
    _before: str | None = None  # the release to go back to
    _installed: str | None = None  # kind of the service that is on the board

    def _closing(self, before: str | None) -> str:
        if self._switched:
            return f"{self.plan.release} is current but unchecked; before it was {before or 'none'}"
        kept = f"; {size_text(self._kept)} sent so far are kept, the next deploy sends the rest"
        port = f"; the USB gadget may be there ({gadget.UNIT_PATH})" if self._gadget_begun else ""
        return stays(before) + (kept if self._kept else "") + port

    def _locked(self, partial: dict[str, int]) -> Outcome:
        sent = self._send(partial)
        remembered = state.load(self.transport, self._prefix)
        before = self.plan.previous
        there = self._service_of(before)
        if before is not None and remembered.pending == before:  # what serves may be what it replaced
            older = remembered.back(before)
            before = older if older and release.read(self.transport, self._prefix, older) else before
            there = there or self._service_of(before)
        self._before = before
        self._installed = there.kind if there else None
        if self.plan.same_as_current:
            return self._again(remembered, sent)
        version = self._make()
        self._install_gadget()
        if self.retry_bad:
            remembered = remembered.forgiven(self.plan.content)
        state.save(
            self.transport, self._prefix, replace(remembered, pending=self.plan.release, before=before)
        )
        self._switched = True
        if before and self.service:  # the one without starts nothing at boot
            release.begin_trial(self.transport, self._prefix, before)
        release.switch(self.transport, self._prefix, self.plan.release)
        self.ui.detail(f"switched to {self.plan.release}")
        well = self._start()
        if not well.ok:
            self._roll_back(remembered, well.reason)
        release.end_trial(self.transport, self._prefix)
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
        self._install_gadget()
        version, why = health.version(self.transport, self._path(current))
        if why:
            well = health.Health(False, why)
        else:  # one that was cut off before its checks: an older process may answer in its place
            well = self._start() if remembered.pending == current else self._still_well()
        if not well.ok:
            self._switched = True
            self._roll_back(remembered, well.reason)
        release.end_trial(self.transport, self._prefix)
        good = remembered.with_good(current, remembered.back(current), state.utc_now())
        state.save(self.transport, self._prefix, good)
        state.log(self.transport, self._prefix, "check", release=current, bytes_sent=sent.bytes_sent)
        return self._outcome(sent, False, well.golden, version, ())

    def _service_of(self, name: str | None) -> serving.Spec | None:
        doc = release.read(self.transport, self._prefix, name) if name else {}
        return serving.of_release(doc)

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
            self.transport, self._prefix, name, self.engine.part, self.parcel.parts, self._document(),
            self.plan.beside,
        )  # fmt: skip
        version, why = health.version(self.transport, self._path(name))
        if why:
            release.remove(self.transport, self._prefix, name)
            raise VerifyError(
                f"the engine does not start on {self.transport.describe()}: {why}",
                hint=f"build one for the board: colibri-kit build --board {self.board_name}",
                state=f"{stays(self.plan.previous)}; the new release was removed",
                code="CK-DEPLOY-START",
            )
        if self.service and not health.can_serve(self.transport, self._path(name)):
            release.remove(self.transport, self._prefix, name)
            raise PreflightError(
                "this engine has no `serve --options` or no `health`: a service could not run or be asked",
                hint="build a newer engine, or deploy with --no-service; `colibri-kit run` uses it as it is",
                state=f"{stays(self.plan.previous)}; the new release was removed",
                code="CK-DEPLOY-SERVICE",
            )
        if self.service:
            self._can_install(name)
        over = health.memory(
            self.transport, self._path(name), self.settings, freed=self._installed is not None
        )
        if over:
            release.remove(self.transport, self._prefix, name)
            raise PreflightError(
                f"{self.parcel.name} does not fit the memory of {self.transport.describe()}:\n{over}",
                hint="raise --budget if the board has the memory, lower --ctx, or use a smaller --quant",
                state=f"{stays(self.plan.previous)}; the new release was removed",
                code="CK-PREFLIGHT-BUDGET",
            )
        return version

    def _can_install(self, name: str) -> None:
        """The service's user and token file, before anything is switched."""
        assert self.service is not None
        try:
            self._keeper(self.service).check_place(name)
        except PreflightError as err:
            release.remove(self.transport, self._prefix, name)
            err.state = f"{stays(self.plan.previous)}; the new release was removed"
            raise

    def _install_gadget(self) -> None:
        """The engine's link, before the engine is asked anything. Raises TransferError."""
        if not self.gadget:
            return
        self._gadget_begun = True
        try:
            self.ui.note(gadget.install(self.transport))
        except ConnectionLost:
            raise
        except TransferError as err:
            err.state = stays(self.plan.previous)
            if not self.plan.same_as_current:
                release.remove(self.transport, self._prefix, self.plan.release)
                err.state += "; the new release was removed"
            raise

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
            "service": self.service.as_json() if self.service else "none",
            "check": asdict(self.check),
        }

    def _keeper(self, spec: serving.Spec) -> keeper.Keeper:
        return keeper.Keeper(self.transport, self._prefix, spec, self.settings)

    def _start(self) -> health.Health:
        """The new release, current by now: its service is started and asked, or it is run once."""
        name = self.plan.release
        back.leave(self.transport, self._prefix, self._installed, self.service)
        if self.service is None:
            self._installed = None
            self.ui.note(f"checking {name}: golden and {self.check.max_new} token(s)")
            path = self._path(name)
            return health.check(self.transport, path, self.settings, self.health_timeout, self.check)
        self._installed = self.service.kind
        self.ui.note(f"starting the {self.service.kind} service and asking it: golden, then a token")
        golden = self.parcel.golden
        return self._keeper(self.service).bring_up(name, golden, self.check, self.health_timeout)

    def _still_well(self) -> health.Health:
        """The release that is current already; a service that is down is started once."""
        if self.service is not None:
            kept, name = self._keeper(self.service), self.plan.release
            well = kept.well_now(name, self.parcel.golden, self.check, self.health_timeout)
            if well.ok:
                return well
            self.ui.warn(f"the service is not well: {well.reason}; it is started again")
        return self._start()

    def _roll_back(self, remembered: state.State, reason: str) -> None:
        """Goes back and raises HealthError, or RollbackError when even that fails."""
        bad, target = self.plan.release, self.transport.describe()
        before = remembered.back(bad) if self.plan.same_as_current else self._before
        if before not in store.stored(self.transport, self._prefix).releases:
            before = None
        after = remembered.with_bad(bad, self.plan.content, reason, state.utc_now())
        why = f"{bad} on {target} is unwell: {reason}"
        try:
            back.go_back(self.transport, self._prefix, before, self.health_timeout, self._installed)
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
        names = release.doomed(now.releases, self.keep, self.plan.release, self._before)
        release.prune(self.transport, self._prefix, names)
        return tuple(names)
