"""A conversion from start to finish: space, partial folder, files, golden, check, rename."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from colibri_kit.convert import build, manifest
from colibri_kit.convert.chat import chat_parts
from colibri_kit.convert.check import check_file, check_head, check_listing, check_model
from colibri_kit.errors import PreflightError, TransferError, VerifyError

if TYPE_CHECKING:
    from colibri_kit.convert.plan import Plan
    from colibri_kit.convert.tokenizer import ExportedTokenizer
    from colibri_kit.gguf.reader import GgufFile
    from colibri_kit.ui import Ui

_SLACK = 4 << 20  # manifest, tokenizer rounding, file system blocks


def check_target(out: Path, needed: int, *, force: bool) -> None:
    """Refuses an existing target without ``force``, a missing parent, and a full disk.

    Args:
        needed: bytes that will be written.
    """
    if os.path.lexists(out):
        if not force:
            raise PreflightError(
                f"{out} exists", hint="choose another -o, or replace it with --force", state="unchanged"
            )
        if out.is_symlink() or (out.is_dir() and not (out / manifest.NAME).exists() and any(out.iterdir())):
            raise PreflightError(
                f"{out} is not a .coli model; --force does not replace it", state="unchanged"
            )
    if not out.parent.is_dir():
        raise PreflightError(
            f"{out.parent} is not a folder", hint=f"mkdir -p {out.parent}", state="unchanged"
        )
    check_space(out.parent, needed + _SLACK)


def check_space(folder: Path, needed: int) -> None:
    """Raises PreflightError when the file system has less than ``needed`` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise PreflightError(
            f"{folder} has {free} bytes free; {needed} are needed ({needed - free} more)",
            hint="free some space or choose another -o",
            state="unchanged",
        )


def check_memory(needed: int) -> None:
    """Refuses early what the golden could not load: better now than after an hour of writing.

    The engine counts exactly when it opens the model; this only compares the weights with
    what Linux calls available. Elsewhere it says nothing.
    """
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
            if needed > available:
                raise PreflightError(
                    f"the golden needs the whole model in memory: {needed} bytes, {available} are available",
                    hint="convert on a larger machine, or let it swap with --over-budget",
                    state="unchanged",
                )


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM (service stop, timeout) unwinds as Ctrl-C does, so that clean-up runs."""

    def stop(_signal: int, _frame: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    old = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, old)


@contextmanager
def partial(out: Path, ui: Ui, *, folder: bool = True) -> Iterator[Path]:
    """A path beside ``out`` that is renamed by the caller, and removed when anything goes wrong.

    Raises:
        TransferError: the system refused a write (disk full, no permission).
    """
    path = out.with_name(f"{out.name}.partial-{os.getpid()}")
    try:
        if os.path.lexists(path):
            _remove(path)
        if folder:
            path.mkdir()
        with _terminable():
            yield path
    except BaseException as err:
        _remove(path)
        ui.note(f"removed {path.name}; {out.name} is unchanged")
        if isinstance(err, OSError):
            raise TransferError(
                f"{err.filename or path}: {err.strerror or err}: writing stopped", state="unchanged"
            ) from err
        raise


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def put_in_place(done: Path, out: Path) -> None:
    """Renames ``done`` to ``out``; an old ``out`` goes only after the new one stands."""
    old = None
    if os.path.lexists(out):
        old = out.with_name(f"{out.name}.old-{os.getpid()}")
        out.rename(old)
    try:
        done.rename(out)
    except BaseException:
        if old is not None:
            old.rename(out)
        raise
    sync_folder(out.parent)
    if old is not None:
        _remove(old)


def sync_folder(folder: Path) -> None:
    """Makes renames in ``folder`` durable where the system can."""
    if os.name != "posix":
        return
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sha256_file(path: Path, advance: Callable[[int], None]) -> str:
    """Hex sha256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while piece := stream.read(4 << 20):
            digest.update(piece)
            advance(len(piece))
    return digest.hexdigest()


def token_text(kv: dict[str, Any], name: str) -> str:
    """Text of the bos or eos token, "" if there is none."""
    token = kv.get(f"tokenizer.ggml.{name}_token_id")
    tokens = kv.get("tokenizer.ggml.tokens")
    if not isinstance(token, int) or not isinstance(tokens, list) or not 0 <= token < len(tokens):
        return ""
    return tokens[token] if isinstance(tokens[token], str) else ""


def run(
    gguf: GgufFile,
    plan: Plan,
    tokenizer: ExportedTokenizer,
    out: Path,
    threads: int,
    ui: Ui,
    *,
    over_budget: bool = False,
) -> dict[str, Any]:
    """Writes, checks and renames. ``out`` appears whole and verified, or not at all.

    Returns:
        Facts for the report: files, model id, golden, bytes.

    Raises:
        FormatError, EngineError, PreflightError: nothing but ``out``'s old state remains.
    """
    with partial(out, ui) as folder:
        with ui.progress("hash", gguf.size) as bar:
            source = {"file": gguf.path.name, "sha256": sha256_file(gguf.path, bar.advance)}
        with ui.progress("write", plan.read_bytes) as bar:
            written = build.write_weights(gguf, plan, folder, threads, bar.advance)
        written.append(build.write_tokenizer(tokenizer, folder))
        identity = build.model_id(written)
        build.write_heads(written, folder, identity)
        with ui.progress("check", sum(w.plan.size for w in written)) as bar:
            reports = [check_file(folder / w.plan.name, bar.advance) for w in written]
        for w, r in zip(written, reports, strict=True):
            if w.payload_sha256 != r.payload_sha256:
                raise VerifyError(
                    f"{w.plan.name} reads back other bytes than were written: bad disk or memory",
                    state="unchanged",
                )
        chat = chat_parts(
            gguf.kv.get("tokenizer.chat_template"),
            token_text(gguf.kv, "bos"),
            token_text(gguf.kv, "eos"),
            add_bos=bool(tokenizer.manifest["add_bos"]),
        )

        def document(golden: str | None) -> bytes:
            return manifest.make(
                plan.model,
                source=source,
                model_id=identity,
                quant=plan.type_counts(),
                tokenizer=tokenizer.manifest,
                chat=chat,
                files=[r.fact for r in reports],
                golden=golden,
            )

        _write(folder / manifest.NAME, document(None))
        golden = compute_golden(folder, threads, ui, over_budget=over_budget)
        _write(folder / manifest.NAME, document(golden))
        final = manifest.read(folder)
        check_listing(folder, final)
        for r in reports:
            check_head(r.fact.name, r.header, final)
        check_model(final, reports)
        sync_folder(folder)
        put_in_place(folder, out)
    return {
        "model": str(out),
        "name": plan.model.name,
        "arch": plan.model.arch,
        "model_id": identity.hex(),
        "golden": golden,
        "bytes": sum(r.fact.bytes for r in reports),
        "files": len(reports) + 1,
        "quant": plan.type_counts(),
        "chat": chat["template"],
        "chat_reason": chat.get("reason"),
    }


def compute_golden(folder: Path, threads: int, ui: Ui, *, over_budget: bool = False) -> str:
    """Runs the engine on the fixed tokens; the model must fit this machine's memory."""
    from colibri_kit.native import Engine

    ui.detail("computing the golden")
    with Engine(folder, ctx=32, threads=threads, over_budget=over_budget) as engine:
        return engine.golden()


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
