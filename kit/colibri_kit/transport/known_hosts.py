"""The known_hosts files: which host keys are recorded, and what a new key means.

Reads OpenSSH's format: plain, hashed and wildcard names, ``[host]:port``, negation,
``@revoked``. Certificate authorities (``@cert-authority``) are not supported and are
skipped. The judgement is a pure function; see :func:`judge`.
"""

from __future__ import annotations

import base64
import binascii
import fnmatch
import hashlib
import hmac
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Verdict = Literal["known", "new-host", "new-type", "changed", "revoked"]


@dataclass(frozen=True)
class Entry:
    """One recorded key: the blob is the SSH wire form of the public key."""

    file: Path
    line: int
    marker: str
    names: str
    kind: str
    blob: bytes


def fingerprint(blob: bytes) -> str:
    """``SHA256:…`` of a public key's wire form, as ``ssh-keygen -lf`` prints it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def known_name(host: str, port: int) -> str:
    """The name under which a host is filed."""
    return host.lower() if port == 22 else f"[{host.lower()}]:{port}"


def load(files: Sequence[Path]) -> list[Entry]:
    """Every readable entry of the files; missing files and broken lines are passed over."""
    out: list[Entry] = []
    for file in files:
        try:
            text = file.read_text("utf-8", "replace")
        except OSError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            fields = line.split()
            if not fields or fields[0].startswith("#"):
                continue
            marker = fields.pop(0) if fields[0].startswith("@") else ""
            if len(fields) < 3 or marker == "@cert-authority":
                continue
            try:
                blob = base64.b64decode(fields[2], validate=True)
            except (ValueError, binascii.Error):
                continue
            out.append(Entry(file, number, marker, fields[0], fields[1], blob))
    return out


def matches(names: str, name: str) -> bool:
    """Does a known_hosts name field cover ``name`` (from :func:`known_name`)?"""
    if names.startswith("|1|"):
        try:
            salt, digest = (base64.b64decode(p, validate=True) for p in names[3:].split("|", 1))
        except (ValueError, binascii.Error):
            return False
        return hmac.compare_digest(hmac.new(salt, name.encode(), hashlib.sha1).digest(), digest)
    hit = False
    for pattern in names.lower().split(","):
        negated = pattern.startswith("!")
        # Brackets are literal in known_hosts; only * and ? are wildcards.
        glob = pattern.lstrip("!").replace("[", "[[]")
        if fnmatch.fnmatchcase(name, glob):
            if negated:
                return False
            hit = True
    return hit


def recorded(entries: Sequence[Entry], name: str) -> list[Entry]:
    return [e for e in entries if matches(e.names, name)]


def judge(mine: Sequence[Entry], kind: str, blob: bytes) -> Verdict:
    """What a key of type ``kind`` means, given a host's recorded entries.

    A key of a type that is not recorded is ``new-type``: usually the board grew a new
    key, but an impostor who lacks the recorded key looks the same.
    """
    if any(e.marker == "@revoked" and e.blob == blob for e in mine):
        return "revoked"
    good = [e for e in mine if not e.marker]
    if any(e.blob == blob for e in good):
        return "known"
    if any(e.kind == kind for e in good):
        return "changed"
    return "new-type" if good else "new-host"


def record(file: Path, name: str, kind: str, blob: bytes) -> None:
    """Appends one key; creates the file (0600) and its folder (0700)."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    line = f"{name} {kind} {base64.b64encode(blob).decode()}\n"
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT
    with os.fdopen(os.open(file, flags, 0o600), "r+b") as out:
        size = out.seek(0, os.SEEK_END)
        if size:
            out.seek(size - 1)
            if out.read(1) != b"\n":
                line = "\n" + line
        out.write(line.encode())
