"""Debian packages through apt with private folders: nothing of the system's is read for writing.

The mirror and its keyring are taken from the machine's own apt configuration, the
proxy settings too; suites and architecture are ours. apt checks the signatures.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from colibri_kit.errors import PreflightError, TransferError

#: Names a Debian mirror where the machine has none (Ubuntu, or no apt configuration).
MIRROR_VARIABLE = "COLIBRI_DEBIAN_MIRROR"
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_DEFAULT_SUITE = "bookworm"
_SUITES = ("bookworm", "trixie", "forky")


@dataclass(frozen=True)
class Source:
    """One line of a sources.list: ``suites`` may be several, ``signed_by`` a keyring or empty."""

    uri: str
    suites: tuple[str, ...]
    components: tuple[str, ...]
    signed_by: str = ""


@dataclass(frozen=True)
class Debian:
    """Where Debian comes from: a suite's code name, the main mirror, and the security one if known."""

    suite: str
    uri: str
    security_uri: str
    signed_by: str

    def lines(self, *, backports: bool = False) -> str:
        """The text of a private sources.list."""
        opts = f"[signed-by={self.signed_by}] " if self.signed_by else ""
        rows = [
            f"deb {opts}{self.uri} {self.suite} main",
            f"deb {opts}{self.uri} {self.suite}-updates main",
        ]
        if self.security_uri:
            rows.append(f"deb {opts}{self.security_uri} {self.suite}-security main")
        if backports:
            rows.append(f"deb {opts}{self.uri} {self.suite}-backports main")
        return "\n".join(rows) + "\n"


def parse_list(text: str) -> list[Source]:
    """One-line style: ``deb [options] URI SUITE COMPONENT…``. Pure."""
    out = []
    for line in text.splitlines():
        match = re.fullmatch(r"\s*deb\s+(?:\[([^\]]*)\]\s+)?(\S+)\s+(\S+)((?:\s+[^#\s]+)*)\s*(?:#.*)?", line)
        if match:
            options = dict(o.split("=", 1) for o in (match.group(1) or "").split() if "=" in o)
            out.append(
                Source(
                    match.group(2),
                    (match.group(3),),
                    tuple(match.group(4).split()),
                    options.get("signed-by", ""),
                )
            )
    return out


def parse_deb822(text: str) -> list[Source]:
    """deb822 style (``.sources``). Pure."""
    out = []
    for block in re.split(r"\n\s*\n", re.sub(r"(?m)^#.*\n?", "", text)):
        found: dict[str, str] = {}
        key = ""
        for line in block.splitlines():
            if line[:1].isspace() and key:
                found[key] += "\n" + line.strip()
            elif ":" in line:
                key, _, value = line.partition(":")
                key = key.strip().lower()
                found[key] = value.strip()
        if "deb" not in found.get("types", "").split() or found.get("enabled", "yes").lower() == "no":
            continue
        signed = found.get("signed-by", "")
        if "\n" in signed or not signed.startswith("/"):
            signed = ""  # a key in the text itself: apt's trusted keys must do
        suites, parts = tuple(found.get("suites", "").split()), tuple(found.get("components", "").split())
        out += [Source(uri, suites, parts, signed) for uri in found.get("uris", "").split()]
    return out


def machine_sources(etc: Path = Path("/etc/apt")) -> list[Source]:
    """What the machine's apt is configured with."""
    out: list[Source] = []
    for path in [etc / "sources.list", *sorted((etc / "sources.list.d").glob("*"))]:
        try:
            text = path.read_text("utf-8", "replace")
        except OSError:
            continue
        if path.suffix == ".list":
            out += parse_list(text)
        elif path.suffix == ".sources":
            out += parse_deb822(text)
    return out


def find_debian(sources: Sequence[Source], mirror: str | None = None) -> Debian:
    """The Debian mirror among the machine's sources. Pure but for the keyring's presence.

    Args:
        mirror: ``URI`` or ``URI SUITE`` to use instead (from COLIBRI_DEBIAN_MIRROR).

    Raises:
        PreflightError: none is configured.
    """
    keyring = str(KEYRING) if KEYRING.is_file() else ""
    if mirror:
        uri, _, suite = mirror.strip().partition(" ")
        return Debian(suite.strip() or _DEFAULT_SUITE, uri, "", keyring)
    for source in sources:
        for suite in source.suites:
            if suite in _SUITES and "main" in source.components:
                security = [s.uri for s in sources if f"{suite}-security" in s.suites]
                return Debian(suite, source.uri, security[0] if security else "", source.signed_by or keyring)
    raise PreflightError(
        f"apt on this machine knows no Debian mirror with {', '.join(_SUITES)}; "
        "virtual boards are made of Debian",
        hint=f"{MIRROR_VARIABLE}='http://a-mirror/debian {_DEFAULT_SUITE}' colibri-kit board up …, "
        "and apt install debian-archive-keyring",
        state="nothing was changed",
        code="CK-VBOARD-MIRROR",
    )


class PrivateApt:
    """apt for one suite and architecture, with every folder under ``folder``.

    Args:
        arch: Debian's name: ``amd64`` or ``arm64``.
        host: resolve against what is installed on this machine, so that only
            missing packages are fetched; else against an empty system.
    """

    def __init__(
        self, folder: Path, debian: Debian, arch: str, *, backports: bool = False, host: bool = False
    ) -> None:
        for tool in ("apt-get", "dpkg-deb"):
            if shutil.which(tool) is None:
                raise PreflightError(
                    f"virtual boards are made of Debian packages, and {tool} is not here",
                    hint="use a Debian machine or container",
                    state="nothing was changed",
                    code="CK-VBOARD-APT",
                )
        self.folder, self.debian, self.arch, self.backports = folder, debian, arch, backports
        for sub in ("lists/partial", "cache/archives/partial", "state", "none"):
            (folder / sub).mkdir(parents=True, exist_ok=True)
        (folder / "sources.list").write_text(debian.lines(backports=backports))
        status = Path("/var/lib/dpkg/status") if host else folder / "state" / "status"
        if not host:
            status.write_text("")
        self._config = folder / "apt.conf"
        self._config.write_text(self._settings(status))

    def _settings(self, status: Path) -> str:
        """Only what reaches a mirror is taken over from the system; hooks and folders are not."""
        env = {k: v for k, v in os.environ.items() if k != "APT_CONFIG"}
        done = subprocess.run(["apt-config", "dump"], capture_output=True, text=True, check=False, env=env)
        wanted = re.compile(
            r"Acquire::(?:https?|ftp|Retries|ForceIPv[46]|Check-Valid-Until)\b\S* \"[^\"]+\";"
        )
        kept = [line for line in done.stdout.splitlines() if wanted.fullmatch(line)]
        f = self.folder
        own = {
            "Dir::Etc::main": "/dev/null",
            "Dir::Etc::parts": f / "none",
            "Dir::Etc::sourcelist": f / "sources.list",
            "Dir::Etc::sourceparts": f / "none",
            "Dir::Etc::preferences": "/dev/null",
            "Dir::Etc::preferencesparts": f / "none",
            "Dir::State": f / "state",
            "Dir::State::lists": f / "lists",
            "Dir::State::status": status,
            "Dir::Cache": f / "cache",
            "Dir::Cache::archives": f / "cache" / "archives",
            "Dir::Cache::pkgcache": "",
            "Dir::Cache::srcpkgcache": "",
            "Acquire::GzipIndexes": "true",
            "APT::Architecture": self.arch,
            "APT::Sandbox::User": "",
            "Acquire::Languages": "none",
            "Debug::NoLocking": "1",
        }
        kept += [f'{key} "{value}";' for key, value in own.items()]
        kept += ["#clear APT::Architectures;", f'APT::Architectures:: "{self.arch}";']
        return "\n".join(kept) + "\n"

    def _run(self, *argv: str, cwd: Path | None = None) -> str:
        env = {
            **os.environ,
            "APT_CONFIG": str(self._config),
            "LC_ALL": "C",
            "DEBIAN_FRONTEND": "noninteractive",
        }
        try:
            done = subprocess.run(
                argv, capture_output=True, text=True, errors="replace", env=env, cwd=cwd,
                stdin=subprocess.DEVNULL, timeout=900, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as err:
            raise TransferError(f"`{argv[0]} {argv[1]}` did not end within 15 minutes") from err
        if done.returncode != 0:
            words = [w for w in done.stderr.splitlines() if w.startswith("E:")] or done.stderr.splitlines()
            raise TransferError(
                f"`{argv[0]} {argv[1]}` failed: {'; '.join(words[-3:]) or done.returncode}",
                hint="does `apt-get update` work on this machine?",
                code="CK-VBOARD-APT",
            )
        return done.stdout

    def update(self) -> None:
        """Fetches the package lists; apt verifies their signatures."""
        self._run("apt-get", "update", "-q")

    def resolve(self, names: Sequence[str]) -> list[str]:
        """``name=version`` of the packages and all that they need, sorted; recommends left out."""
        release = ["-t", f"{self.debian.suite}-backports"] if self.backports else []
        text = self._run("apt-get", "install", "-s", "-y", "--no-install-recommends", *release, *names)
        found = re.findall(r"(?m)^Inst (\S+?)(?::\w+)? (?:\[[^\]]*\] )?\((\S+) ", text)
        return sorted(f"{name}={version}" for name, version in found)

    def download(self, packages: Sequence[str], into: Path) -> list[Path]:
        """Fetches ``name=version`` packages into a folder; apt checks their hashes."""
        into.mkdir(parents=True, exist_ok=True)
        before = {p.name for p in into.glob("*.deb")}
        self._run("apt-get", "download", "-q", *packages, cwd=into)
        return sorted(p for p in into.glob("*.deb") if p.name not in before)
