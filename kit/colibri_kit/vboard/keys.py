"""Keys of one virtual board, and the files that make ssh and the kit trust it."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from colibri_kit.vboard.initscript import USER
from colibri_kit.vboard.runtime import Place


def _new_key(path: Path, comment: str) -> None:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as out:
        out.write(private)
    path.with_name(path.name + ".pub").write_bytes(public + b" " + comment.encode() + b"\n")


def make(place: Place) -> None:
    """Makes what is missing: host key, login key, machine id. They last until the board is purged."""
    for path, comment in ((place.host_key, place.name), (place.identity, f"{USER}@{place.name}")):
        if not path.is_file() or not path.with_name(path.name + ".pub").is_file():
            _new_key(path, comment)
    if not place.machine_id.is_file():
        place.machine_id.write_text(uuid.uuid4().hex)


def _quoted(path: Path) -> str:
    return f'"{path}"'


def write_ssh(place: Place, port: int) -> None:
    """known_hosts and ssh_config for the port of this start."""
    kind, blob = place.host_key.with_name(place.host_key.name + ".pub").read_text().split()[:2]
    place.known_hosts.write_text(f"{place.name},[127.0.0.1]:{port} {kind} {blob}\n")
    place.ssh_config.write_text(
        f"Host {place.name}\n"
        "  HostName 127.0.0.1\n"
        f"  Port {port}\n"
        f"  User {USER}\n"
        f"  HostKeyAlias {place.name}\n"
        f"  UserKnownHostsFile {_quoted(place.known_hosts)}\n"
        "  GlobalKnownHostsFile /dev/null\n"
        "  StrictHostKeyChecking yes\n"
        f"  IdentityFile {_quoted(place.identity)}\n"
        "  IdentitiesOnly yes\n"
        "  LogLevel ERROR\n"
    )
