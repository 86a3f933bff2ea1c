"""A board's SSH identity, made here and kept, so that its key is pinned before the first contact.

``~/.config/colibri-kit/boards/HOSTNAME/`` (XDG) holds the private host key (0600) and a
known_hosts file. Flashing the same hostname again uses the same key: to ssh it is the
same board.
"""

from __future__ import annotations

import base64
import os
import struct
from dataclasses import dataclass
from pathlib import Path

from colibri_kit.errors import ConfigError
from colibri_kit.transport.known_hosts import fingerprint

_KIND = b"ssh-ed25519"


@dataclass(frozen=True)
class HostKey:
    """An Ed25519 key: 32 bytes of seed, 32 of public key."""

    seed: bytes
    public: bytes

    @property
    def blob(self) -> bytes:
        """The public key's wire form (RFC 8709)."""
        return _string(_KIND) + _string(self.public)

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.blob)

    @property
    def line(self) -> str:
        """``ssh-ed25519 AAAA…``"""
        return f"{_KIND.decode()} {base64.b64encode(self.blob).decode()}"

    def openssh(self) -> bytes:
        """The private key as OpenSSH keeps it."""
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

        key = Ed25519PrivateKey.from_private_bytes(self.seed)
        return key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())

    def dropbear(self) -> bytes:
        """dropbear's own file format: the type, then seed and public key as one string of 64 bytes."""
        return _string(_KIND) + _string(self.seed + self.public)


def _string(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data


def config_dir() -> Path:
    base = os.environ.get("XDG_CONFIG_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".config") / "colibri-kit"


def from_seed(seed: bytes) -> HostKey:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    key = Ed25519PrivateKey.from_private_bytes(seed)
    return HostKey(seed, key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw))


def load_or_make(hostname: str, *, renew: bool = False) -> tuple[HostKey, bool]:
    """The host key of ``hostname`` and whether it is new.

    Raises:
        ConfigError: the folder cannot be used, or the file there is no key.
    """
    folder = config_dir() / "boards" / hostname
    file = folder / "ssh_host_ed25519_seed"
    try:
        if file.is_file() and not renew:
            seed = base64.b64decode(file.read_text().strip(), validate=True)
            if len(seed) != 32:
                raise ConfigError(
                    f"{file} holds no host key", hint="repeat with --new-host-key", code="CK-FLASH-KEY"
                )
            return from_seed(seed), False
        seed = os.urandom(32)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = file.with_name(file.name + ".new")
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as out:
            out.write(base64.b64encode(seed).decode() + "\n")
        temporary.replace(file)
    except (OSError, ValueError) as err:
        raise ConfigError(
            f"cannot keep the host key in {folder}: {err}",
            hint="set XDG_CONFIG_HOME to a folder you may write, or repeat with --new-host-key",
            code="CK-FLASH-KEY",
        ) from err
    return from_seed(seed), True


def pin(hostname: str, address: str, key: HostKey) -> Path:
    """Writes the board's known_hosts file anew: its name, NAME.local and a static address."""
    names = [hostname, f"{hostname}.local"]
    if "/" in address:
        names.append(address.partition("/")[0])
    file = config_dir() / "boards" / hostname / "known_hosts"
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file.write_text(f"{','.join(names)} {key.line}\n")
    except OSError as err:
        raise ConfigError(f"cannot write {file}: {err.strerror}", code="CK-FLASH-KEY") from err
    return file
