"""The SSH options that every verb with a HOST takes, and what they turn into."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from colibri_kit.errors import UsageError

if TYPE_CHECKING:
    from colibri_kit.transport.sshconnect import SshSpec

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class SshOptions:
    """What the command line said. Secrets come from files, the environment or a terminal."""

    port: int | None = None
    identity: Path | None = None
    no_agent: bool = False
    ssh_config: Path | None = None
    known_hosts: Path | None = None
    accept_new_host_key: bool = False
    host_key_fingerprint: str | None = None
    password_file: Path | None = None
    sudo: bool = False
    sudo_password_file: Path | None = None
    connect_timeout: float = 10.0
    stall_timeout: float = 30.0

    def spec(self, host: str, note: Callable[[str], None]) -> SshSpec:
        from colibri_kit.transport.sshauth import HostKeyRule
        from colibri_kit.transport.sshconnect import SshSpec

        config = self.ssh_config
        if re.search(r"(^|@)@", host):
            from colibri_kit.vboard.runtime import alias

            found = alias(host)  # @NAME: a virtual board, which has an ssh_config of its own
            if found is not None:
                host, config = found
        mark = self.host_key_fingerprint
        if mark is not None and not re.fullmatch(r"SHA256:[A-Za-z0-9+/]{43}=?", mark):
            raise UsageError(
                "--host-key-fingerprint wants SHA256: and 43 characters, as ssh-keygen -lf prints it"
            )
        return SshSpec(
            target=host,
            port=self.port,
            identity=self.identity.expanduser() if self.identity else None,
            use_agent=not self.no_agent,
            ssh_config=config,
            host_keys=HostKeyRule(
                self.accept_new_host_key, mark, self.known_hosts.expanduser() if self.known_hosts else None
            ),
            password=lambda prompt: secret(self.password_file, "COLIBRI_SSH_PASSWORD", prompt),
            passphrase=lambda prompt: secret(None, "COLIBRI_SSH_PASSPHRASE", prompt),
            connect_timeout=self.connect_timeout,
            stall_timeout=self.stall_timeout,
            note=note,
        )

    def sudo_password(self) -> str | None:
        return secret(self.sudo_password_file, "COLIBRI_SUDO_PASSWORD", "sudo password on the board: ")


def secret(file: Path | None, variable: str, prompt: str) -> str | None:
    """From the file, else the environment, else the terminal, else None."""
    if file is not None:
        try:
            return file.expanduser().read_text().rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as err:
            raise UsageError(f"cannot read {file}: {err}") from err
    if variable in os.environ:
        return os.environ[variable]
    if not sys.stdin.isatty():
        return None
    import getpass

    return getpass.getpass(prompt)


_PATH = click.Path(path_type=Path, dir_okay=False)

_OPTIONS = [
    click.option("--port", type=click.IntRange(1, 65535), help="SSH port; wins over HOST:PORT."),
    click.option("--identity", "-i", type=_PATH, help="Offer only this private key."),
    click.option("--no-agent", is_flag=True, help="Do not ask the SSH agent for keys."),
    click.option("--ssh-config", type=_PATH, help="Use this file in place of ~/.ssh/config."),
    click.option("--known-hosts", type=_PATH, help="Known host keys, besides the user's; new ones go here."),
    click.option("--accept-new-host-key", is_flag=True, help="Record the key of a host never seen before."),
    click.option("--host-key-fingerprint", metavar="SHA256:…", help="The host key must have this one."),
    click.option("--password-file", type=_PATH, help="Read the SSH password from this file."),
    click.option("--sudo", is_flag=True, help="Work as root on the board."),
    click.option("--sudo-password-file", type=_PATH, help="Read the sudo password from this file."),
    click.option(
        "--connect-timeout", type=click.FloatRange(0.1), default=10.0, show_default=True, help="Seconds."
    ),
    click.option(
        "--stall-timeout",
        type=click.FloatRange(0.5),
        default=30.0,
        show_default=True,
        help="Give up when no byte moves for so many seconds.",
    ),
]


def ssh_options(func: F) -> F:
    """Adds the SSH options; the verb takes them as one ``ssh: SshOptions``."""
    names = {f.name for f in fields(SshOptions)}

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        mine = {name: kwargs.pop(name) for name in names}
        return func(*args, ssh=SshOptions(**mine), **kwargs)

    wrapper.__name__, wrapper.__doc__ = func.__name__, func.__doc__
    wrapper.__click_params__ = list(getattr(func, "__click_params__", []))  # type: ignore[attr-defined]
    for option in reversed(_OPTIONS):
        wrapper = option(wrapper)
    return wrapper  # type: ignore[return-value]
