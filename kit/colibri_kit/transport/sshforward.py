"""Connections through a board's SSH server to a port or Unix socket on the board.

TCP goes over ``direct-tcpip`` channels, Unix sockets over OpenSSH's
``direct-streamlocal@openssh.com``, which paramiko does not know.
"""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass
from typing import Any

import paramiko

from colibri_kit.errors import UnreachableError, UsageError

_STREAMLOCAL = "direct-streamlocal@openssh.com"


@dataclass(frozen=True)
class Endpoint:
    """Where to on the board: host and port, or the path of a Unix socket (then port is 0)."""

    host: str
    port: int = 0

    @property
    def is_unix(self) -> bool:
        return self.port == 0

    def __str__(self) -> str:
        if self.is_unix:
            return self.host
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_endpoint(text: str) -> Endpoint:
    """``HOST:PORT``, ``[IPV6]:PORT``, ``PORT`` (on the board's loopback) or ``/path/of.socket``.

    Raises:
        UsageError: it is none of these.
    """
    if text.startswith("/") and "\0" not in text and len(text.encode()) < 108:
        return Endpoint(text)
    found = re.fullmatch(r"(?:(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+)):)?([0-9]{1,5})", text)
    if found is None or not 1 <= int(found.group(3)) <= 65535:
        raise UsageError(
            f"{text!r} is no address on the board: give HOST:PORT, [IPV6]:PORT, a port, "
            "or the absolute path of a Unix socket (at most 107 bytes)"
        )
    return Endpoint(found.group(1) or found.group(2) or "127.0.0.1", int(found.group(3)))


class ForwardRefused(UnreachableError):
    """The SSH server would not connect us. ``nothing_there`` tells why: the address does not
    take connections (or, for a Unix socket, the login may not use it), or it forwards none."""

    default_code = "CK-FORWARD-REFUSED"

    def __init__(self, message: str, *, nothing_there: bool, hint: str | None = None) -> None:
        super().__init__(message, hint=hint, state="nothing was changed")
        self.nothing_there = nothing_there


class ForwardingTransport(paramiko.Transport):
    """paramiko's, with ``direct-streamlocal`` channels."""

    _pending = threading.local()

    def open_streamlocal(self, path: str, timeout: float) -> paramiko.Channel:
        """A channel to the Unix socket ``path`` on the board; errors as ``open_channel``."""
        self._pending.path = path
        try:
            return self.open_channel(_STREAMLOCAL, timeout=timeout)
        finally:
            self._pending.path = None

    def _send_user_message(self, data: Any) -> None:
        # open_channel sends exactly one message from its own thread: the request to open,
        # to which this type of channel adds the path and two reserved fields.
        path = getattr(self._pending, "path", None)
        if path is not None:
            self._pending.path = None
            data.add_string(path)
            data.add_string("")
            data.add_int(0)
        super()._send_user_message(data)  # type: ignore[misc]  # not in the stubs


def dial(transport: ForwardingTransport, to: Endpoint, label: str, timeout: float) -> paramiko.Channel:
    """Connects to ``to`` from the board.

    Raises:
        ForwardRefused: see there. paramiko.SSHException, EOFError, OSError: the link broke.
    """
    try:
        if to.is_unix:
            return transport.open_streamlocal(to.host, timeout)
        return transport.open_channel("direct-tcpip", (to.host, to.port), ("127.0.0.1", 0), timeout=timeout)
    except paramiko.ChannelException as err:
        if err.code == 2:  # SSH_OPEN_CONNECT_FAILED
            why = f"nothing listens at {to}"
            if to.is_unix:  # OpenSSH does not tell these apart
                why = f"no socket {to}, or the login or AllowStreamLocalForwarding may not use it"
            raise ForwardRefused(f"{label}: {why}", nothing_there=True) from err
        what = "Unix sockets" if to.is_unix else "connections"
        if err.code == 3 and to.is_unix:  # SSH_OPEN_UNKNOWN_CHANNEL_TYPE
            hint = "dropbear cannot: let the service listen on 127.0.0.1 too"
            raise ForwardRefused(
                f"the SSH server on {label} knows no forwarding to Unix sockets",
                nothing_there=False,
                hint=hint,
            ) from err
        option = "AllowStreamLocalForwarding" if to.is_unix else "AllowTcpForwarding"
        raise ForwardRefused(
            f"the SSH server on {label} forwards no {what} ({err.text or f'reason {err.code}'})",
            nothing_there=False,
            hint=f"allow it there: `{option} yes` in sshd_config; dropbear without -j; "
            "no `no-port-forwarding` or `restrict` before the key in authorized_keys",
        ) from err
