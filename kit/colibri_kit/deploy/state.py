"""What a board remembers of its deployments: state.json, the log, and the lock."""

from __future__ import annotations

import getpass
import io
import json
import os
import socket
import uuid
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from typing import Any

from colibri_kit.errors import PreflightError, TransferError
from colibri_kit.transport.base import Transport, script

_BAD_KEPT = 32
_held: set[str] = set()


@dataclass(frozen=True)
class Bad:
    """A release that failed its health check."""

    release: str
    content: str
    reason: str
    when: str


@dataclass(frozen=True)
class State:
    """state.json. ``pending``: switched to, but its checks have not passed yet; ``before`` was current."""

    previous: str | None = None
    pending: str | None = None
    before: str | None = None
    good: tuple[str, ...] = ()
    bad: tuple[Bad, ...] = ()
    checked: str | None = None
    health: str | None = None

    def back(self, current: str | None) -> str | None:
        """The release to go back to from ``current``."""
        return self.before if self.before and self.pending == current else self.previous

    def with_good(self, release: str, previous: str | None, when: str) -> State:
        good = (*(g for g in self.good if g != release), release)[-16:]
        before = previous if previous != release else self.previous
        return replace(self, pending=None, before=None, previous=before, good=good, checked=when, health="ok")

    def with_bad(self, release: str, content: str, reason: str, when: str) -> State:
        kept = tuple(b for b in self.bad if b.content != content)
        bad = (*kept, Bad(release, content, reason, when))[-_BAD_KEPT:]
        good = tuple(g for g in self.good if g != release)
        return replace(self, pending=None, before=None, good=good, bad=bad)

    def forgiven(self, content: str) -> State:
        return replace(self, bad=tuple(b for b in self.bad if b.content != content))


def utc_now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def load(transport: Transport, prefix: str) -> State:
    """The board's state; a missing or damaged file is an empty state."""
    raw = transport.read(f"{prefix}/state.json")
    try:
        doc = json.loads(raw or b"{}")
        bad = tuple(
            Bad(**{k: str(b[k]) for k in ("release", "content", "reason", "when")}) for b in doc["bad"]
        )
        return State(
            previous=doc.get("previous"),
            pending=doc.get("pending"),
            before=doc.get("before"),
            good=tuple(map(str, doc.get("good", ()))),
            bad=bad,
            checked=doc.get("checked"),
            health=doc.get("health"),
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return State()


def save(transport: Transport, prefix: str, state: State) -> None:
    """Replaces state.json by rename."""
    write_file(transport, f"{prefix}/state.json", _dump({"format": 1, **asdict(state)}))


def write_file(transport: Transport, path: str, data: bytes) -> None:
    transport.put_stream(io.BytesIO(data), len(data), f"{path}.new")
    done = transport.run(["mv", "-f", f"{path}.new", path])
    if done.rc != 0:
        raise TransferError(f"cannot write {path}: {done.why}")


def _dump(doc: dict[str, Any]) -> bytes:
    return json.dumps(doc, ensure_ascii=False, indent=1).encode() + b"\n"


# The service's definition is new on the board's disk too: without sync, up to half a minute of it is not.
_LOG = 'mkdir -p "$1/log" && cat >> "$1/log/deploys.jsonl" || exit 1; sync 2>/dev/null; exit 0'


def log(transport: Transport, prefix: str, event: str, **more: object) -> None:
    """Appends one line to log/deploys.jsonl. What it tells of outlives a power cut from now on."""
    entry = {"time": utc_now(), "event": event, "by": f"{getpass.getuser()}@{socket.gethostname()}", **more}
    line = json.dumps(entry, ensure_ascii=False).encode() + b"\n"
    done = transport.run(script(_LOG, prefix), stdin=line)
    if done.rc != 0:
        raise TransferError(f"cannot write the log under {prefix}: {done.why}")


# ``tell``: the owner, then `old` for a lock from before the board's last start, then its age in seconds.
# What a power cut leaves of it may be empty files.
_TELL = """
boot=$(cat /proc/sys/kernel/random/boot_id 2>/dev/null)
tell() {
  [ -s "$1/lock/boot" ] || sleep 1
  cat "$1/lock/owner" 2>/dev/null; echo
  if [ -f "$1/lock/boot" ] && [ "$(cat "$1/lock/boot")" != "$boot" ]; then echo old; else echo now; fi
  now=$(date +%s); since=$(cat "$1/lock/since" 2>/dev/null)
  case $since in '' | *[!0-9]*) since=$now ;; esac
  echo $(( now - since ))
}
"""
_LOCK = (
    _TELL
    + """
if mkdir "$1/lock" 2>/dev/null; then
  echo "$boot" > "$1/lock/boot"
  cat > "$1/lock/owner" && date +%s > "$1/lock/since"; exit
fi
[ -d "$1/lock" ] || exit 45
tell "$1"
exit 44
"""
)
_HOLDER = _TELL + '[ ! -d "$1/lock" ] || tell "$1"'

# Removes the lock whose owner begins with this line: by now it may be another deployment's.
_UNLOCK = """
owner=; { IFS= read -r owner <"$1/lock/owner"; } 2>/dev/null
[ "$owner" != "$2" ] || rm -rf "$1/lock"
"""


@dataclass(frozen=True)
class Holder:
    """Who holds the lock of a place.

    Attributes:
        who: ``user@host since TIME``. age: seconds by the board's clock; "?" when unknown.
        stale: of a deployment that no longer runs. line: what the owner wrote.
    """

    who: str
    age: str
    stale: bool
    line: str


def _parse_holder(text: str) -> Holder:
    lines = text.splitlines()
    age = lines[-1] if len(lines) > 1 else "?"
    line = lines[0].replace("\0", "") if len(lines) > 2 else ""  # an empty file leaves no line
    try:
        owner = json.loads(lines[0])
        who = f"{owner['user']}@{owner['host']} since {owner['time']}"
        stale = owner["host"] == socket.gethostname() and not _alive(int(owner["pid"]), owner["token"])
    except (ValueError, KeyError, TypeError, IndexError):
        who, stale = "an unknown owner", False
    return Holder(who, age, stale or lines[-2:-1] == ["old"], line)


def holder(transport: Transport, prefix: str) -> Holder | None:
    """Who deploys to ``prefix`` now, or last was cut off there; None: nobody. Only reads."""
    text = transport.run(script(_HOLDER, prefix)).text
    return _parse_holder(text) if text else None


@dataclass
class Lock:
    """At most one deployment at a time: a folder that only one mkdir can make.

    A lock left by a deployment from this machine that is no longer running (the link was
    cut, so nobody could remove it), or from before the board's last start, which no deployment
    outlives, is taken over; any other is refused, naming its owner.
    """

    transport: Transport
    prefix: str
    force: bool = False
    token: str = field(default_factory=lambda: uuid.uuid4().hex)
    _owner: str = ""  # what we wrote into it

    def __enter__(self) -> Lock:
        for _ in range(2):
            owner = {
                "user": getpass.getuser(),
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "token": self.token,
                "time": utc_now(),
            }
            self._owner = json.dumps(owner)
            done = self.transport.run(script(_LOCK, self.prefix), stdin=self._owner.encode())
            if done.rc == 0:
                _held.add(self.token)
                return self
            if done.rc != 44:
                raise PreflightError(
                    f"cannot lock {self.prefix}: {done.why}", state="nothing was sent or changed"
                )
            self._contend(done.text)
        raise self._busy("another deployment", "?")

    def _contend(self, text: str) -> None:
        found = _parse_holder(text)
        if not (found.stale or self.force):
            raise self._busy(found.who, found.age)
        self.transport.run(script(_UNLOCK, self.prefix, found.line))

    def _busy(self, who: str, age: str) -> PreflightError:
        return PreflightError(
            f"{self.prefix} on {self.transport.describe()} is locked by {who} ({age} s ago)",
            hint="wait for it; if it is dead, repeat the command with --break-lock",
            state="nothing was sent or changed",
            code="CK-DEPLOY-LOCKED",
        )

    def __exit__(self, *exc: object) -> None:
        _held.discard(self.token)
        try:
            self.transport.run(script(_UNLOCK, self.prefix, self._owner), timeout=20)
        except TransferError:
            return  # the link is gone; the next deployment from here takes the lock over


def _alive(pid: int, token: str) -> bool:
    if pid == os.getpid():
        return token in _held
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
