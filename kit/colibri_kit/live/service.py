"""What runs on a board as the service, and whether it answers."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from colibri_kit.errors import UnreachableError, UsageError
from colibri_kit.live.ask import NoAnswer, ask
from colibri_kit.transport.base import Transport, script
from colibri_kit.transport.ssh import SshTransport
from colibri_kit.transport.sshforward import Endpoint, ForwardRefused, parse_endpoint

DEFAULT = Endpoint("127.0.0.1", 8080)

#: Finds the definition that deploy installs. Only reads.
_SCRIPT = r"""
unit=/etc/systemd/system/$1.service init=/etc/init.d/$1
if [ -d /run/systemd/system ] && [ -f "$unit" ]; then
  echo "kind=systemd"; echo "active=$(systemctl is-active "$1.service" 2>/dev/null)"
  sed 's/^/definition=/' "$unit"
elif [ -f "$init" ]; then
  if [ -x /sbin/openrc-run ] && head -n 1 "$init" | grep -q openrc-run; then echo "kind=openrc"
  else echo "kind=sysv"; fi
  if "$init" status >/dev/null 2>&1; then echo "active=active"; else echo "active=inactive"; fi
  sed 's/^/definition=/' "$init"
fi
"""


@dataclass(frozen=True)
class Installed:
    """The service's definition on a board.

    Attributes:
        kind: systemd, openrc, sysv, or "" when deploy installed none.
        active: the service manager's word (``active``, ``failed``, …); "" when unknown.
        at: where it listens. prefix: the deployment's folder; "" when unknown.
    """

    kind: str = ""
    active: str = ""
    at: Endpoint = DEFAULT
    prefix: str = ""


def parse_installed(text: str) -> Installed:
    """From the script's output. Pure."""
    one: dict[str, str] = {}
    definition: list[str] = []
    for line in text.splitlines():
        key, _, value = line.partition("=")
        if key == "definition":
            definition.append(value)
        else:
            one[key] = value.strip()
    command = "\n".join(definition)
    prefix = re.search(r"(/[^\s\"'=]*)/current/colibri\b", command)
    return Installed(
        one.get("kind", ""), one.get("active", ""), _listens(command), prefix.group(1) if prefix else ""
    )


def _listens(command: str) -> Endpoint:
    """Where a definition's ``serve`` command listens, as seen from the board itself. Pure."""
    found = re.search(r"--listen[= ]\"?([^\s\"']+)", command)
    unix = re.search(r"--unix[= ]\"?(/[^\s\"']+)", command)
    if found is None or found.group(1) == "none":
        return Endpoint(unix.group(1)) if unix and found is not None else DEFAULT
    try:
        at = parse_endpoint(found.group(1))
    except UsageError:
        return DEFAULT
    any_address = {"0.0.0.0": "127.0.0.1", "::": "::1"}
    return Endpoint(any_address.get(at.host, at.host), at.port)


def installed(transport: Transport) -> Installed:
    """Asks the board."""
    from colibri_kit.deploy.services import NAME

    return parse_installed(transport.run(script(_SCRIPT, NAME), timeout=30).out.decode("utf-8", "replace"))


@dataclass(frozen=True)
class Health:
    """What ``/health`` says: ok, swapping, stopping or stuck; and the model's name."""

    status: str
    model: str


def health(transport: SshTransport, to: Endpoint, timeout: float = 15.0) -> Health:
    """The service's own word, over the forward.

    Raises:
        ForwardRefused: nothing listens there, or the server forwards none.
        UnreachableError: something else than our service listens there.
    """
    where = f"{to} on {transport.describe()}"
    try:
        answer = ask(transport.dial(to), ["/health"], token=None, timeout=timeout)[0]
        doc: Any = json.loads(answer.body)
        status, model = doc["status"], doc["model"]
        if not (isinstance(status, str) and isinstance(model, str) and "golden" in doc):
            raise ValueError
    except (NoAnswer, ValueError, KeyError, TypeError) as err:
        if isinstance(err, NoAnswer) and not err.sent:
            what = f"{where} takes connections but does not answer: {err.message}"
        else:
            what = f"what answers at {where} is not `colibri serve`"
        raise UnreachableError(
            what,
            hint="name the service's own address with --remote HOST:PORT or --remote /path/of.socket",
            state="nothing was changed",
            code="CK-SERVICE-ANSWER",
        ) from err
    return Health(plain(status), plain(model))


def explain(
    refused: ForwardRefused, found: Installed, host: str, remote: Endpoint | None = None
) -> UnreachableError:
    """``refused`` with what to do, by what is installed and where it was looked for (``remote``: where
    the user said). Pure."""
    if not refused.nothing_there:
        return refused
    if remote is not None and found.kind and remote != found.at:
        more = f"the {found.kind} service there listens at {found.at}"
        hint = "leave --remote out"
    elif not found.kind:
        more, hint = (
            "no service is installed there",
            (
                f"colibri-kit deploy --board NAME --service {host} MODEL.coli, or start `colibri serve` "
                "there; --remote when it listens elsewhere"
            ),
        )
    elif found.active == "active":
        more = "the service is started and may still be loading its model"
        hint = f"colibri-kit logs {host} --follow"
    else:
        more = f"the {found.kind} service is {found.active or 'not running'}"
        hint = f"colibri-kit logs {host}"
    return UnreachableError(
        f"{refused.message}; {more}", hint=hint, state="nothing was changed", code="CK-SERVICE-DOWN"
    )


def plain(text: str) -> str:
    """Without characters that would steer a terminal."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
