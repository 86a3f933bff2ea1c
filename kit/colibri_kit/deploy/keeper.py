"""A release's service on a board: started, waited for until it is well, stopped.

Well means: a process that began after it was told to answers at the real endpoint, with the
golden of this release, and gives a token.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from colibri_kit.deploy import health
from colibri_kit.deploy.plan import Settings
from colibri_kit.deploy.services import NAME, Rendered, Service, install, of_spec, render
from colibri_kit.deploy.serving import Spec
from colibri_kit.errors import TransferError
from colibri_kit.transport.base import ConnectionLost, Transport, script

#: Seconds that a service may be neither up nor failed after it was told to start.
_SETTLE = 10.0
#: Seconds by which a process may seem older than the order to start it (rounding, slow links).
_SLACK = 2.0
_ASK_SECONDS = 10
_UNIT = f"{NAME}.service"

_LAST_WORDS = """
if [ "$1" = systemd ]; then journalctl -u colibri -n 20 -o cat --no-pager 2>/dev/null
else tail -n 20 "$2/log/engine.log" 2>/dev/null; fi
exit 0
"""


@dataclass(frozen=True)
class Keeper:
    """The service of one release under one prefix."""

    transport: Transport
    prefix: str
    spec: Spec
    settings: Settings

    def rendered(self) -> Rendered:
        """The definition for this board: its user and device group are looked up (and made).

        Raises:
            PreflightError: the service manager, the user or the token file is not there.
        """
        install.check_manager(self.transport, self.spec.kind)
        who = install.user(self.transport, self.spec.user)
        if self.spec.options.token_file:
            install.make_readable(self.transport, self.spec.options.token_file, who)
        groups = install.groups(self.transport, self.settings.offload)
        made = render(self.spec.kind, of_spec(self.prefix, who, self.settings, self.spec, groups))
        assert made is not None
        return made

    def check_place(self, release: str) -> None:
        """Could the service run this release, which is made but not current?

        Raises:
            PreflightError: manager, user, token file or folder would not have it.
        """
        self.rendered()
        install.check_runs(
            self.transport, install.user(self.transport, self.spec.user), self._engine(release)
        )

    def bring_up(self, release: str, golden: str, check: health.Check, timeout: float) -> health.Health:
        """Installs the definition, restarts the service, and waits until this release answers.

        Raises:
            ConnectionLost: the link went away, which says nothing about the release.
        """
        began = time.monotonic()
        try:
            install.install(self.transport, self.rendered())
        except ConnectionLost:
            raise
        except TransferError as err:
            return health.Health(False, err.message)
        return self.wait(release, golden, check, timeout, began)

    def well_now(self, release: str, golden: str, check: health.Check, timeout: float) -> health.Health:
        """Asks the service that runs: no restart, and no patience when it is down."""
        made = self.rendered()
        if self.transport.read(made.path) != made.text.encode():
            return health.Health(False, f"{made.path} is missing or another")
        return self.answers(release, golden, check, timeout)

    def answers(self, release: str, golden: str, check: health.Check, timeout: float) -> health.Health:
        """The verdict on whatever answers at the service's place. Changes nothing."""
        seen, why = health.ask(self.transport, self._engine(release), self._at, _ASK_SECONDS)
        if seen is None:
            return health.Health(False, why)
        return self._verdict(release, golden, check, timeout, seen)

    def seen(self) -> dict[str, Any]:
        """``uptime_s`` and ``golden`` of what answers, or None and ``why`` not. Needs no token."""
        at = self.spec.options.asked_at()[:2]
        seen, why = health.ask(self.transport, f"{self.prefix}/current/colibri", at, _ASK_SECONDS)
        if seen is not None:
            return {"uptime_s": seen.uptime, "golden": seen.golden, "why": ""}
        gone = self._gone(2 * _SETTLE)
        return {"uptime_s": None, "golden": None, "why": gone or f"it is starting: {why}"}

    def wait(
        self, release: str, golden: str, check: health.Check, timeout: float, began: float
    ) -> health.Health:
        """Polls until the service that was started at ``began`` (time.monotonic) is well or cannot be."""
        end, pause = time.monotonic() + timeout, 0.2
        while True:
            seen, why = health.ask(self.transport, self._engine(release), self._at, _ASK_SECONDS)
            if seen is not None:
                if seen.uptime <= time.monotonic() - began + _SLACK:
                    left = max(1.0, end - time.monotonic())
                    return self._verdict(release, golden, check, left, seen)
                why = f"a process that is {seen.uptime:.0f} s old answers, not the one just started"
            gone = self._gone(time.monotonic() - began)
            if gone:
                return health.Health(False, gone)
            if time.monotonic() > end:
                return health.Health(False, f"the service was not well within {timeout:.0f} s: {why}")
            time.sleep(pause)
            pause = min(2.0, pause * 1.5)

    def stop(self) -> bool:
        """Stops the service and removes its definition. False when there was none."""
        return remove(self.transport, self.prefix, self.spec.kind)

    @property
    def _at(self) -> list[str]:
        return self.spec.options.asked_at()

    def _engine(self, release: str) -> str:
        return f"{self.prefix}/releases/{release}/colibri"

    def _verdict(
        self, release: str, golden: str, check: health.Check, timeout: float, seen: health.Answer
    ) -> health.Health:
        if golden and seen.golden != golden:
            told = f"the service answers with golden {seen.golden[:12]}, {release} has {golden[:12]}"
            return health.Health(False, told)
        seconds = max(1, min(3600, int(timeout)))
        answer, why = health.ask(self.transport, self._engine(release), self._at, seconds, check)
        if answer is None:
            return health.Health(False, f"the service gave no token: {why}")
        unmet = check.unmet(answer.text)
        return health.Health(not unmet, unmet, seen.golden)

    def _gone(self, elapsed: float) -> str:
        """Why the service will not come up any more; empty while it may."""
        if self.spec.kind != "systemd":
            command = [f"/etc/init.d/{NAME}", "status"]
            if elapsed < _SETTLE or self.transport.run(command, timeout=30).rc == 0:
                return ""
            return self._with_words("the service has ended")
        keys = "ActiveState,SubState,Result,ExecMainStatus,NRestarts"
        done = self.transport.run(["systemctl", "show", _UNIT, "-p", keys], timeout=30)
        state = dict(line.split("=", 1) for line in done.text.splitlines() if "=" in line)
        active, sub = state.get("ActiveState", ""), state.get("SubState", "")
        if active == "failed" or sub == "auto-restart" or state.get("NRestarts", "0") not in ("", "0"):
            return self._with_words(f"the service fell: {_ended(state)}")
        if active == "inactive" and elapsed > _SETTLE:
            return self._with_words("the service has ended")
        return ""

    def _with_words(self, why: str) -> str:
        """``why`` and what the service itself said last."""
        done = self.transport.run(script(_LAST_WORDS, self.spec.kind, self.prefix), timeout=30)
        lines = [line for line in done.text.splitlines() if "error" in line.lower()]
        return f"{why}; it said: {lines[-1].strip()[:300]}" if lines else why


def _ended(state: dict[str, str]) -> str:
    """systemd's state in words. Pure."""
    result, status = state.get("Result", ""), state.get("ExecMainStatus", "0")
    if status not in ("", "0") and result in ("exit-code", "success", ""):
        meaning = health.ENDED.get(int(status)) if status.isdigit() else None
        return f"status {status}" + (f" ({meaning})" if meaning else "")
    return {
        "signal": f"signal {status}",
        "watchdog": "it made no progress, the watchdog killed it",
        "oom-kill": "out of memory: the service's limit is too low, or the board is too small",
        "start-limit-hit": "it fell too often",
    }.get(result, result or "no reason given")


def remove(transport: Transport, prefix: str, kind: str) -> bool:
    """Stops whatever service of this kind deploy installed and removes its definition."""
    made = render(kind, Service(prefix, "nobody", Settings(), 0))
    return made is not None and install.remove(transport, made)


def golden_of(doc: dict[str, Any]) -> str:
    """The golden that a release.json promises; "" when it has none."""
    model = doc.get("model")
    golden = model.get("golden") if isinstance(model, dict) else None
    return golden if isinstance(golden, str) else ""
