"""Where ``user@host:port`` leads: ssh_config resolved to a list of hops.

OpenSSH's own ``ssh -G`` does the reading when an ssh binary exists: it knows
``Include``, ``Match`` and every default. paramiko's reader is the fallback.
"""

from __future__ import annotations

import getpass
import re
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

from colibri_kit.errors import ConfigError, UsageError

_MAX_HOPS = 4


@dataclass(frozen=True)
class Hop:
    """One SSH server on the way.

    Attributes:
        alias: what the user typed. host, port, user: where that leads.
        identities: private key files in the order to offer them.
        identities_only: offer no agent keys that are not named.
        known_hosts: files to read, the first one is written.
        key_alias: the name host keys are filed under, when not the host's.
        proxy_command: a command whose stdin and stdout are the connection.
    """

    alias: str
    host: str
    port: int
    user: str
    identities: tuple[Path, ...] = ()
    identities_only: bool = False
    known_hosts: tuple[Path, ...] = ()
    key_alias: str | None = None
    proxy_command: str | None = None

    @property
    def label(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.user}@{host}" + (f":{self.port}" if self.port != 22 else "")


@dataclass(frozen=True)
class Target:
    user: str | None
    host: str
    port: int | None


def parse_target(text: str) -> Target:
    """``[user@]host[:port]``, ``[user@][v6-address]:port`` or a bare IPv6 address.

    Raises:
        UsageError: it is none of these.
    """
    user: str | None = None
    rest = text
    if "@" in text:
        user, rest = text.rsplit("@", 1)
    port: int | None = None
    bracket = re.fullmatch(r"\[([0-9A-Fa-f:.%\w]+)\](?::(\d+))?", rest)
    if bracket:
        host, port_text = bracket.group(1), bracket.group(2)
    elif rest.count(":") == 1:
        host, port_text = rest.split(":")
    else:
        host, port_text = rest, None
    if port_text is not None:
        port = int(port_text) if port_text.isascii() and port_text.isdigit() else 0
        if not 0 < port < 65536:
            raise UsageError(f"'{text}': the port must be 1 to 65535")
    # A leading dash would be read as an option by ssh; white space and control
    # characters are never part of a name.
    if not host or host.startswith("-") or (user is not None and (not user or user.startswith("-"))):
        raise UsageError(f"'{text}' is not [user@]host[:port]")
    if not bracket and re.search(r"[\[\]]", host):
        raise UsageError(f"'{text}' is not [user@]host[:port]")
    if re.search(r"[\s\x00-\x1f/\\'\"$`;&|<>()]", text):
        raise UsageError(f"'{text}' is not [user@]host[:port]")
    return Target(user, host, port)


def resolve(target: Target, *, config: Path | None = None, port: int | None = None) -> list[Hop]:
    """The hops from here to the target, the target last.

    Args:
        config: an ssh_config to use in place of the user's and the system's.
        port: wins over the target's and the config's.
    """
    if config is not None and not config.is_file():
        raise ConfigError(f"no such ssh config: {config}")
    return _resolve(replace(target, port=port or target.port), config, 0)


def _resolve(target: Target, config: Path | None, depth: int) -> list[Hop]:
    if depth > _MAX_HOPS:
        raise ConfigError(f"ssh config: more than {_MAX_HOPS} jumps, or a ProxyJump that leads to itself")
    found = _openssh(target, config) if shutil.which("ssh") else _paramiko(target, config)

    def one(key: str, default: str = "") -> str:
        return found.get(key, [default])[0]

    host = one("hostname", target.host)
    proxy = one("proxycommand")
    hop = Hop(
        alias=target.host,
        host=host,
        port=target.port or int(one("port", "22")),
        user=target.user or one("user") or getpass.getuser(),
        identities=tuple(_path(p) for p in found.get("identityfile", []) if p != "none"),
        identities_only=one("identitiesonly") == "yes",
        known_hosts=_known(found),
        key_alias=one("hostkeyalias") or None,
        proxy_command=proxy if proxy and proxy != "none" else None,
    )
    jumps = one("proxyjump")
    if not jumps or jumps == "none":
        return [hop]
    path: list[Hop] = []
    for number, jump in enumerate(jumps.split(",")):
        jump_target = parse_target(jump.strip().removeprefix("ssh://"))
        hops = _resolve(jump_target, config, depth + 1)
        # Only the first jump may itself be reached through others; the rest are
        # reached from the jump before them, as ssh does it.
        path += hops if number == 0 else hops[-1:]
    return [*path, hop]


def _known(found: dict[str, list[str]]) -> tuple[Path, ...]:
    names: list[str] = []
    for key in ("userknownhostsfile", "globalknownhostsfile"):
        for value in found.get(key, []):
            names += value.split()
    return tuple(_path(n) for n in names if n not in ("none", "/dev/null"))


def _path(text: str) -> Path:
    return Path(text.strip('"')).expanduser()


def _openssh(target: Target, config: Path | None) -> dict[str, list[str]]:
    argv = ["ssh", "-G"]
    if config is not None:
        argv += ["-F", str(config)]
    if target.port:
        argv += ["-p", str(target.port)]
    if target.user:
        argv += ["-l", target.user]
    try:
        done = subprocess.run([*argv, "--", target.host], capture_output=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as err:
        raise ConfigError(f"`ssh -G {target.host}` failed: {err}") from err
    if done.returncode != 0:
        why = done.stderr.decode("utf-8", "replace").strip()
        raise ConfigError(f"ssh config: {why}", hint=f"try: ssh -G {target.host}")
    found: dict[str, list[str]] = {}
    for line in done.stdout.decode("utf-8", "replace").splitlines():
        key, _, value = line.partition(" ")
        found.setdefault(key.lower(), []).append(value.strip())
    return found


def _paramiko(target: Target, config: Path | None) -> dict[str, list[str]]:
    import paramiko

    found: dict[str, list[str]] = {}
    file = config or Path.home() / ".ssh" / "config"
    if file.is_file():
        try:
            lookup = paramiko.SSHConfig.from_path(str(file)).lookup(target.host)
        except paramiko.ConfigParseError as err:
            raise ConfigError(f"{file}: {err}") from err
        for key, value in lookup.items():
            found[key] = list(value) if isinstance(value, list) else [str(value)]
    found.setdefault("userknownhostsfile", ["~/.ssh/known_hosts"])
    found.setdefault("globalknownhostsfile", ["/etc/ssh/ssh_known_hosts"])
    found.setdefault("identityfile", [f"~/.ssh/id_{kind}" for kind in ("ed25519", "ecdsa", "rsa")])
    return found
