"""Logging in: at most four keys, then a password; and the host key's judgement.

Both are objects that paramiko's client calls while it connects. What they refuse they
say as a :class:`~colibri_kit.errors.KitError` with the next command to type.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paramiko

from colibri_kit.errors import AuthError
from colibri_kit.transport import known_hosts
from colibri_kit.transport.sshconfig import Hop

#: Servers hang up after a few (OpenSSH: six) failed tries; stop before that.
MAX_KEYS = 4

_UNCHANGED = "the board was not touched"


@dataclass(frozen=True)
class HostKeyRule:
    """What to do with keys that are not on record.

    Attributes:
        accept_new: record the key of a host that has none on record.
        fingerprint: ``SHA256:…``; the key must have it, and is then recorded.
        extra: a known_hosts file read besides the hop's own, and written first.
    """

    accept_new: bool = False
    fingerprint: str | None = None
    extra: Path | None = None


class HostKeyPolicy(paramiko.MissingHostKeyPolicy):
    """Judges every key, known or not: the client's own lists stay empty on purpose.

    paramiko's client compares with the first recorded key type only and calls another
    type an attack; fabric's default accepts anything. So neither is asked.
    """

    def __init__(self, hop: Hop, rule: HostKeyRule, note: Callable[[str], None]) -> None:
        self._hop, self._rule, self._note = hop, rule, note
        self._name = known_hosts.known_name(hop.key_alias or hop.host, 22 if hop.key_alias else hop.port)
        self._files = ((rule.extra,) if rule.extra else ()) + hop.known_hosts
        self._mine = known_hosts.recorded(known_hosts.load(self._files), self._name)

    @property
    def recorded_kinds(self) -> list[str]:
        """Key types on record for the host, to be proposed to it first."""
        kinds: list[str] = []
        for entry in self._mine:
            if not entry.marker:
                more = ["rsa-sha2-512", "rsa-sha2-256"] if entry.kind == "ssh-rsa" else [entry.kind]
                kinds += [k for k in more if k not in kinds]
        return kinds

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        del client, hostname
        kind, blob = key.get_name(), key.asbytes()
        print_ = known_hosts.fingerprint(blob)
        verdict = known_hosts.judge(self._mine, kind, blob)
        wanted = self._rule.fingerprint
        if verdict in ("revoked", "changed"):
            raise self._refused(verdict, kind, print_)
        if wanted is not None and wanted.rstrip("=") != print_:
            raise AuthError(
                f"{self._hop.label} shows host key {print_} ({kind}), not {wanted}",
                hint="read the fingerprint again on the board's own console: "
                "ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub",
                state=_UNCHANGED,
                code="CK-SSH-FINGERPRINT",
            )
        if verdict == "known":
            return
        allowed = wanted is not None or (self._rule.accept_new and verdict == "new-host")
        if not allowed or not self._files:
            raise self._refused(verdict, kind, print_)
        known_hosts.record(self._files[0], self._name, kind, blob)
        self._note(f"host key {print_} ({kind}) of {self._name} recorded in {self._files[0]}")

    def _refused(self, verdict: known_hosts.Verdict, kind: str, print_: str) -> AuthError:
        label = self._hop.label
        lines = [f"{known_hosts.fingerprint(e.blob)} ({e.kind}, {e.file}:{e.line})" for e in self._mine]
        check = (
            f"compare {print_} with the board's console (ssh-keygen -lf /etc/ssh/ssh_host_*_key.pub), then "
        )
        if verdict == "new-host":
            return AuthError(
                f"{label} is not a known host; it shows the {kind} key {print_}",
                hint=f"{check}repeat the command with --host-key-fingerprint {print_} "
                "(or with --accept-new-host-key on a network you trust)",
                state=_UNCHANGED,
                code="CK-SSH-UNKNOWN-HOST",
            )
        if verdict == "new-type":
            return AuthError(
                f"{label} is a known host, but shows a key of a new type: {kind} {print_}. "
                f"On record: {'; '.join(lines)}. A board that got another kind of key looks like this; "
                "so does an impostor who lacks the recorded key",
                hint=f"{check}repeat the command with --host-key-fingerprint {print_}",
                state=_UNCHANGED,
                code="CK-SSH-NEW-KEY-TYPE",
            )
        if verdict == "revoked":
            return AuthError(
                f"{label} shows the key {print_}, which is marked @revoked in known_hosts",
                hint="do not use this board before you know why its key was revoked",
                state=_UNCHANGED,
                code="CK-SSH-REVOKED",
            )
        entry = next(e for e in self._mine if not e.marker and e.kind == kind)
        return AuthError(
            f"the host key of {label} has CHANGED: it shows {print_} ({kind}), "
            f"on record is {'; '.join(lines)}. "
            "Either the board was re-flashed, or something stands between you and it",
            hint=f"if it was re-flashed: ssh-keygen -R '{self._name}' -f '{entry.file}', "
            f"{check}repeat the command with --host-key-fingerprint {print_}",
            state=_UNCHANGED,
            code="CK-SSH-CHANGED-KEY",
        )


class Authenticator:
    """An object with the ``authenticate`` that paramiko's ``auth_strategy`` wants.

    Args:
        hop: whom to log in as, and which key files may be offered.
        identity: offer only this key.
        password: gives the password, or None when there is none to be had. Asked once,
            only when the server takes passwords and no key did.
        passphrase: the same for an encrypted key file.
    """

    def __init__(
        self,
        hop: Hop,
        *,
        identity: Path | None,
        use_agent: bool,
        password: Callable[[str], str | None],
        passphrase: Callable[[str], str | None],
        note: Callable[[str], None],
    ) -> None:
        self._hop, self._identity, self._use_agent = hop, identity, use_agent
        self._password, self._passphrase, self._note = password, passphrase, note
        self._locked: list[str] = []

    def get_sources(self) -> Iterator[Any]:  # part of paramiko's interface
        return iter(())

    def authenticate(self, transport: paramiko.Transport) -> list[str]:
        """Logs in or raises AuthError. Returns the names of what was tried."""
        user = self._hop.user
        try:
            transport.auth_none(user)
            self._note(f"warning: {self._hop.label} let us in without any password or key")
            return ["none"]
        except paramiko.BadAuthenticationType as err:
            allowed = set(err.allowed_types)
        except paramiko.AuthenticationException:
            allowed = {"publickey", "password", "keyboard-interactive"}
        tried: list[str] = []
        if "publickey" in allowed:
            for name, key in self._keys():
                tried.append(name)
                try:
                    left = transport.auth_publickey(user, key)
                except paramiko.BadAuthenticationType as err:
                    allowed = set(err.allowed_types)
                    break
                except paramiko.AuthenticationException:
                    continue
                if not left:
                    return tried
                allowed = set(left)  # the key was right but is only the first of two factors
                break
        if allowed & {"password", "keyboard-interactive"}:
            secret = self._password(f"password of {self._hop.label}: ")
            if secret is not None:
                tried.append("password")
                with contextlib.suppress(paramiko.AuthenticationException):
                    left = transport.auth_password(user, secret)
                    if not left:
                        return tried
        raise self._refused(tried, sorted(allowed))

    def _keys(self) -> Iterator[tuple[str, paramiko.PKey]]:
        """Agent keys, then key files, at most MAX_KEYS; an explicit identity alone."""
        count = 0
        if self._identity is not None:
            key = self._load(self._identity, must=True)
            if key is not None:
                yield str(self._identity), key
            return
        files = [p for p in self._hop.identities if p.is_file()]
        if self._use_agent:
            named = {blob for p in files if (blob := _public_blob(p)) is not None}
            with contextlib.suppress(paramiko.SSHException, OSError):
                agent = paramiko.Agent()
                keys = list(agent.get_keys())
                # Keys the config names go first; with IdentitiesOnly, no others.
                keys.sort(key=lambda k: k.asbytes() not in named)
                for agent_key in keys:
                    if self._hop.identities_only and agent_key.asbytes() not in named:
                        continue
                    if count == MAX_KEYS:
                        return
                    count += 1
                    yield f"agent key {known_hosts.fingerprint(agent_key.asbytes())}", agent_key
        for path in files:
            if count == MAX_KEYS:
                return
            key = self._load(path, must=False)
            if key is not None:
                count += 1
                yield str(path), key

    def _load(self, path: Path, *, must: bool) -> paramiko.PKey | None:
        why: str
        try:
            return paramiko.PKey.from_path(path)
        except (paramiko.PasswordRequiredException, TypeError):  # TypeError: OpenSSH's own format
            phrase = self._passphrase(f"passphrase of {path}: ")
            if phrase is None:
                why = "it has a passphrase and there is no terminal to ask on (ssh-agent would do)"
            else:
                try:
                    # The stubs say str; the code behind them needs bytes.
                    secret: Any = phrase.encode()
                    return paramiko.PKey.from_path(path, secret)
                except (paramiko.SSHException, ValueError, TypeError):
                    why = "wrong passphrase"
        except OSError as err:
            why = err.strerror or str(err)
        except (paramiko.SSHException, ValueError) as err:
            why = str(err) or type(err).__name__
        except Exception as err:  # paramiko's UnknownKeyType is no SSHException
            why = f"not a private key of a known type ({type(err).__name__})"
        if must:
            raise AuthError(f"cannot use the key {path}: {why}", state=_UNCHANGED, code="CK-SSH-KEY")
        self._locked.append(f"{path} ({why})")
        return None

    def _refused(self, tried: list[str], allowed: list[str]) -> AuthError:
        label = self._hop.label
        if tried and tried[-1] == "password":
            return AuthError(
                f"{label} refused the password" + (f" and {len(tried) - 1} key(s)" if len(tried) > 1 else ""),
                hint=f"check user and password with: ssh {_ssh_args(self._hop)}",
                state=_UNCHANGED,
                code="CK-SSH-PASSWORD",
            )
        offered = ", ".join(tried) or "no key (none found)"
        skipped = f"; not usable: {', '.join(self._locked)}" if self._locked else ""
        return AuthError(
            f"{label} refused to log us in; offered: {offered}{skipped}; it takes: {', '.join(allowed)}",
            hint="name a key with --identity FILE, or give the password with --password-file FILE or "
            f"COLIBRI_SSH_PASSWORD; to install a key: ssh-copy-id {_ssh_args(self._hop)}",
            state=_UNCHANGED,
            code="CK-SSH-AUTH",
        )


def _ssh_args(hop: Hop) -> str:
    return (f"-p {hop.port} " if hop.port != 22 else "") + f"{hop.user}@{hop.host}"


def _public_blob(private: Path) -> bytes | None:
    """The public key beside a private one, to find it in the agent without its passphrase."""
    import base64

    try:
        fields = private.with_name(private.name + ".pub").read_text().split()
        return base64.b64decode(fields[1])
    except (OSError, ValueError, IndexError):
        return None
