"""Is a release well? Its engine must start, reproduce the golden, and give one token."""

from __future__ import annotations

import json
from dataclasses import dataclass

from colibri_kit.deploy.plan import Settings
from colibri_kit.transport.base import CommandTimeout, Completed, Transport

#: Exit statuses of `colibri serve` that say why (docs/engine-cli.md, docs/service.md).
ENDED = {
    1: "an error while it ran",
    2: "its options are wrong",
    3: "its model files are missing or damaged",
    4: "it does not fit the memory",
    5: "its golden does not match",
    6: "an expert cannot be used",
    7: "it made no progress",
    8: "it fell too often in a row",
    203: "the service manager cannot execute it",
    209: "the service manager cannot write its output",
    216: "it has no such group",
    217: "it has no such user",
    226: "the service manager cannot confine it",
}
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


@dataclass(frozen=True)
class Check:
    """What a release is asked: ``max_new`` tokens after ``prompt``, with ``expect`` in them."""

    prompt: str = "The quick brown fox"
    max_new: int = 1
    expect: str = ""

    def unmet(self, text: str) -> str:
        """Empty when the answer will do."""
        if self.expect and self.expect not in text:
            return f"the answer to {self.prompt!r} is {text[:120]!r}, without {self.expect!r}"
        return ""


@dataclass(frozen=True)
class Answer:
    """What `colibri health` heard: seconds since that process began, golden, and the text."""

    uptime: float
    golden: str
    text: str


def ask(
    transport: Transport, engine: str, at: list[str], timeout: int, check: Check | None = None
) -> tuple[Answer | None, str]:
    """Asks a service on the board through its real endpoint, as a client does.

    Args:
        at: options that say where it listens. check: also have this answered.

    Returns:
        The answer, or None and why there is none.

    Raises:
        ConnectionLost: the link went away.
    """
    argv = [engine, "health", "--json", *at, "--timeout", str(timeout)]
    if check is not None:
        argv += ["--prompt", check.prompt, "-n", str(check.max_new)]
    try:
        done = _run(transport, argv, None, timeout + 30)
    except CommandTimeout as err:
        return None, err.message
    if done.rc != 0:
        return None, explain(done).removeprefix("colibri health: error: ")
    try:
        doc = json.loads(done.text)
        return Answer(float(doc["uptime_s"]), str(doc["golden"]), str(doc["text"] or "")), ""
    except (ValueError, KeyError, TypeError):
        return None, f"`colibri health` does not answer as it should: {done.text[:80]!r}"


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


def can_serve(transport: Transport, release_path: str) -> bool:
    """Does the release's engine serve from an options file, and can it be asked?"""
    done = transport.run([f"{release_path}/colibri", "serve", "--help"], timeout=30)
    return done.rc == 0 and b"--options" in done.out and has_verb(transport, release_path, "health")


def memory(transport: Transport, release_path: str, settings: Settings, *, freed: bool = False) -> str:
    """The engine's own plan on the board: empty when it fits, else the sum.

    Args:
        freed: another engine of ours runs there and will have ended before this one starts: what
            the machine has left now does not count, the budget does.
    """
    argv = [f"{release_path}/colibri", "plan", "--model", f"{release_path}/model.coli", *settings.flags()]
    done = transport.run(argv, timeout=120)
    if done.rc != 4:
        return ""
    if freed:
        told = transport.run([*argv, "--json"], timeout=120)
        try:
            ledger = json.loads(told.text)["ledger"]
            if settings.budget and ledger["total"] <= settings.budget:
                return ""
        except (ValueError, KeyError, TypeError):
            pass
    return (done.text + "\n" + done.err_text).strip()


def check(
    transport: Transport, release_path: str, settings: Settings, timeout: float, wanted: Check | None = None
) -> Health:
    """Runs ``check`` and then a prompt (one token unless more is wanted), each within ``timeout`` seconds.

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
        what = wanted or Check()
        count = str(what.max_new)
        argv = [engine, "run", "--model", model, *settings.flags(), "--prompt-file", "-", "-n", count]
        done = _run(transport, argv, what.prompt.encode(), timeout)
    except CommandTimeout as err:
        return Health(False, err.message)
    if done.rc != 0:
        return Health(False, f"the first token failed: {explain(done)}")
    unmet = what.unmet(done.text)
    return Health(not unmet, unmet, golden)
