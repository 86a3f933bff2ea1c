"""Opening the way to a board: ssh_config, jump hosts, host keys, login.

fabric holds the connections and tunnels one through the other; its rule of accepting
any host key is replaced before anything is opened.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fabric
import paramiko

from colibri_kit.errors import KitError, UnreachableError
from colibri_kit.transport.ssh import SshTransport
from colibri_kit.transport.sshauth import Authenticator, HostKeyPolicy, HostKeyRule
from colibri_kit.transport.sshconfig import Hop, parse_target, resolve
from colibri_kit.transport.sshforward import ForwardingTransport

#: paramiko prints tracebacks of its own threads unless its logger has a handler.
logging.getLogger("paramiko").addHandler(logging.NullHandler())
logging.getLogger("paramiko").propagate = False


def _nothing(text: str) -> None:
    del text


def _no_secret(prompt: str) -> str | None:
    del prompt
    return None


@dataclass(frozen=True)
class SshSpec:
    """How to reach a board. ``target`` is ``[user@]host[:port]`` or an ssh_config alias.

    Attributes:
        port: wins over the target's own. identity: the one key file to offer.
        password, passphrase: called with a prompt at most once each; None = there is none.
        connect_timeout, stall_timeout: seconds.
        note: told what the user should know (a recorded host key).
    """

    target: str
    port: int | None = None
    identity: Path | None = None
    use_agent: bool = True
    ssh_config: Path | None = None
    host_keys: HostKeyRule = field(default_factory=HostKeyRule)
    password: Callable[[str], str | None] = _no_secret
    passphrase: Callable[[str], str | None] = _no_secret
    connect_timeout: float = 10.0
    stall_timeout: float = 30.0
    note: Callable[[str], None] = _nothing


def connect(spec: SshSpec) -> SshTransport:
    """Opens the way to a board, through its jump hosts.

    Raises:
        UnreachableError: no route, no answer, not SSH. AuthError: host key or login.
    """
    hops = resolve(parse_target(spec.target), config=spec.ssh_config, port=spec.port)
    done: list[fabric.Connection] = []
    try:
        for hop in hops:
            done.append(_open(hop, spec, done[-1] if done else None, last=hop is hops[-1]))
    except BaseException:
        for connection in reversed(done):
            with contextlib.suppress(Exception):
                connection.close()
        raise
    return SshTransport(done, hops[-1], spec.stall_timeout)


def _open(hop: Hop, spec: SshSpec, gateway: fabric.Connection | None, *, last: bool) -> fabric.Connection:
    # A pinned fingerprint and an explicit key belong to the board, not to the jump hosts.
    rule = (
        spec.host_keys
        if last
        else HostKeyRule(accept_new=spec.host_keys.accept_new, extra=spec.host_keys.extra)
    )
    policy = HostKeyPolicy(hop, rule, spec.note)
    login = Authenticator(
        hop,
        identity=spec.identity if last or not hop.identities else None,
        use_agent=spec.use_agent,
        password=spec.password,
        passphrase=spec.passphrase,
        note=spec.note,
    )
    kwargs: dict[str, Any] = {
        "auth_strategy": login,
        "transport_factory": _factory(policy),
        "banner_timeout": spec.connect_timeout,
        "auth_timeout": max(spec.connect_timeout, 30.0),
        "channel_timeout": spec.stall_timeout,
    }
    via: fabric.Connection | str | bool = gateway if gateway is not None else False
    if hop.proxy_command and gateway is None:
        via = hop.proxy_command
    sock: socket.socket | None = None
    if via is False:
        sock = _tcp(hop, spec)
        kwargs["sock"] = sock
    connection = fabric.Connection(
        host=hop.host,
        user=hop.user,
        port=hop.port,
        gateway=via,
        connect_timeout=max(1, int(spec.connect_timeout)),
        connect_kwargs=kwargs,
        config=fabric.Config(ssh_config=paramiko.SSHConfig(), lazy=True),
    )
    connection.client.set_missing_host_key_policy(policy)  # fabric's own accepts any key
    try:
        connection.open()
    except KitError:
        connection.client.close()
        raise
    except paramiko.ChannelException as err:
        raise UnreachableError(
            f"the jump host {_label_of(gateway)} cannot reach {hop.host}:{hop.port}: {err.text}",
            hint=f"on the jump host, try: nc -z {hop.host} {hop.port}",
            state="the board was not touched",
            code="CK-SSH-JUMP",
        ) from err
    except (paramiko.SSHException, EOFError, OSError) as err:
        connection.client.close()
        if sock is not None:
            sock.close()
        raise _not_ssh(hop, err) from err
    assert connection.transport is not None
    connection.transport.set_keepalive(15)
    return connection


def _label_of(connection: fabric.Connection | None) -> str:
    return f"{connection.user}@{connection.host}" if connection is not None else "?"


def _factory(policy: HostKeyPolicy) -> Callable[..., paramiko.Transport]:
    """Transports that propose the recorded key types first (all of them) and keep silent."""

    def make(sock: Any, **kwargs: Any) -> paramiko.Transport:
        transport = ForwardingTransport(sock, **kwargs)
        options = transport.get_security_options()
        first = [k for k in policy.recorded_kinds if k in options.key_types]
        options.key_types = [*first, *(k for k in options.key_types if k not in first)]
        return transport

    return make


def _tcp(hop: Hop, spec: SshSpec) -> socket.socket:
    where = f"{hop.host}:{hop.port}"
    code, hint = "CK-SSH-UNREACHABLE", f"is the board up? try: ping {hop.host}"
    try:
        sock = socket.create_connection((hop.host, hop.port), timeout=spec.connect_timeout)
    except socket.gaierror as err:
        why, code = f"the name {hop.host} cannot be resolved ({err.strerror})", "CK-SSH-NAME"
        hint = "check the spelling, or give the board's address"
    except TimeoutError:
        why = f"{where} did not answer within {spec.connect_timeout:.0f} s"
    except ConnectionRefusedError:
        why = f"{where} refuses connections: nothing listens there"
        hint = "is an SSH server running on the board, and is --port right?"
    except OSError as err:
        why = f"{where} cannot be reached: {err.strerror or err}"
    else:
        user_timeout = getattr(socket, "TCP_USER_TIMEOUT", None)
        if user_timeout is not None:
            sock.setsockopt(socket.IPPROTO_TCP, user_timeout, int(spec.stall_timeout * 1000))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock
    raise UnreachableError(why, hint=hint, state="the board was not touched", code=code)


def _not_ssh(hop: Hop, err: Exception) -> UnreachableError:
    text = str(err) or type(err).__name__
    hint = f"try: ssh -v -p {hop.port} {hop.user}@{hop.host} true"
    if "no acceptable host key" in text or isinstance(err, paramiko.ssh_exception.IncompatiblePeer):
        text = f"no common algorithms ({text})"
        hint = (
            "the board's SSH server is too old (it signs with SHA-1 only); update it, or give it an "
            "ed25519 key: ssh-keygen -t ed25519, or dropbearkey -t ed25519"
        )
    if text == "No existing session":  # paramiko's words for a server that was silent for too long
        return UnreachableError(
            f"{hop.label} takes connections, but its SSH server was silent for too long",
            hint="is it still booting, or very busy? repeat in a moment",
            state="the board was not touched",
            code="CK-SSH-UNREACHABLE",
        )
    return UnreachableError(
        f"{hop.label} answers, but not as an SSH server should: {text}",
        hint=hint,
        state="the board was not touched",
        code="CK-SSH-PROTOCOL",
    )
