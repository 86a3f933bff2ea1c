"""Is a release well? Its engine must start, reproduce the golden, and give one token."""

from __future__ import annotations

import json
from dataclasses import dataclass

from colibri_kit.deploy.plan import Settings
from colibri_kit.transport.base import CommandTimeout, Completed, Transport

_PROMPT = b"The quick brown fox"
_MEANING = {
    126: "the board cannot execute it (wrong architecture, or mounted noexec)",
    127: "the engine is not there, or needs a loader the board lacks",
    132: "illegal instruction: the engine is built for another CPU",
    135: "bus error: the storage fails or a file was cut short while mapped",
    137: "it was killed (out of memory?)",
    139: "it crashed",
}


@dataclass(frozen=True)
class Health:
    """``reason`` is empty when well."""

    ok: bool
    reason: str = ""
    golden: str = ""


def explain(done: Completed) -> str:
    meaning = _MEANING.get(done.rc)
    return f"{meaning}; {done.why}" if meaning else done.why


def _run(transport: Transport, argv: list[str], stdin: bytes | None, timeout: float) -> Completed:
    """As ``transport.run``, but a program that is too slow is ended on the board, not left there."""
    out: list[bytes] = []
    done = transport.stream(argv, stdin=stdin, on_out=out.append, timeout=timeout)
    return Completed(done.rc, b"".join(out), done.err)


def version(transport: Transport, release_path: str, timeout: float = 60.0) -> tuple[str, str]:
    """The engine's version, or ("", why it does not start)."""
    try:
        done = transport.run([f"{release_path}/colibri", "version", "--json"], timeout=timeout)
    except CommandTimeout as err:
        return "", err.message
    if done.rc != 0:
        return "", explain(done)
    try:
        return str(json.loads(done.text)["version"]), ""
    except (ValueError, KeyError, TypeError):
        return "", f"it does not answer as an engine does: {done.text[:80]!r}"


def has_verb(transport: Transport, release_path: str, verb: str) -> bool:
    """Does the release's engine have this verb?"""
    return transport.run([f"{release_path}/colibri", verb, "--help"], timeout=30).rc == 0


def memory(transport: Transport, release_path: str, settings: Settings) -> str:
    """The engine's own plan on the board: empty when it fits, else the sum."""
    argv = [f"{release_path}/colibri", "plan", "--model", f"{release_path}/model.coli", *settings.flags()]
    done = transport.run(argv, timeout=120)
    return "" if done.rc != 4 else (done.text + "\n" + done.err_text).strip()


def check(transport: Transport, release_path: str, settings: Settings, timeout: float) -> Health:
    """Runs ``check`` and then one token, each within ``timeout`` seconds.

    Raises:
        ConnectionLost: the link went away, which says nothing about the release.
    """
    engine, model = f"{release_path}/colibri", f"{release_path}/model.coli"
    try:
        done = _run(transport, [engine, "check", "--model", model, *settings.flags()], None, timeout)
        if done.rc != 0:
            return Health(False, f"check failed: {explain(done)}")
        lines = [line for line in done.text.splitlines() if line.startswith("golden ok")]
        if not lines:
            return Health(False, "check ended well but did not say `golden ok`")
        golden = (lines[0].split() + [""] * 3)[2]
        argv = [engine, "run", "--model", model, *settings.flags(), "--prompt-file", "-", "-n", "1"]
        done = _run(transport, argv, _PROMPT, timeout)
    except CommandTimeout as err:
        return Health(False, err.message)
    if done.rc != 0:
        return Health(False, f"the first token failed: {explain(done)}")
    return Health(True, "", golden)
