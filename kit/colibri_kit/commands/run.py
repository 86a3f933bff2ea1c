"""``colibri-kit run``: generate text with a model here, or with a board's release."""

from __future__ import annotations

import codecs
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from colibri_kit.cli import ui_options
from colibri_kit.commands.engine_options import memory_flags, stream_flags
from colibri_kit.commands.sizes import Size
from colibri_kit.deploy.target import existing_prefix, opened, place, place_flags
from colibri_kit.errors import EngineError, KitError, UsageError
from colibri_kit.transport.options import SshOptions
from colibri_kit.ui import Ui

#: Exit statuses of the engine (its `--help`) -> what the kit's error is called.
_ENGINE_CODES = {2: "USAGE", 3: "FORMAT", 4: "BUDGET", 5: "GOLDEN", 6: "EXPERT"}
_PROMPT_MAX = 16 << 20


@click.command(short_help="Generate text, here or on a board.")
@click.argument("target", required=False, metavar="[MODEL.coli | HOST]")
@place_flags
@click.option("-p", "--prompt", metavar="TEXT", help="The prompt; it travels on stdin, not in argv.")
@click.option("-f", "--prompt-file", metavar="FILE", help="Read the prompt from FILE, - for stdin.")
@click.option(
    "--engine", type=click.Path(path_type=Path, dir_okay=False), help="Use this engine (local models)."
)
@click.option("--chat", is_flag=True, help="Put the prompt into the model's chat template.")
@click.option("--system", metavar="TEXT", help="System message (with --chat).")
@click.option(
    "-n", "--n-predict", type=click.IntRange(1, 1 << 24), metavar="N", help="Most tokens to generate."
)
@click.option("--ctx", type=click.IntRange(1, 1 << 24), help="Context length in tokens.")
@click.option("--threads", type=click.IntRange(1, 1024), help="Threads; default: physical cores.")
@click.option("--budget", type=Size(), help="Memory the engine may take.")
@memory_flags
@stream_flags
@click.option(
    "--temp", type=click.FloatRange(0, 100), metavar="X", help="Temperature; 0 = the likeliest token."
)
@click.option("--top-k", type=click.IntRange(0, 1 << 24), metavar="N", help="Only the N likeliest; 0 = all.")
@click.option("--top-p", type=click.FloatRange(0, 1), metavar="X", help="Only the likeliest that make up X.")
@click.option(
    "--min-p", type=click.FloatRange(0, 1), metavar="X", help="Only those X times as likely as the best."
)
@click.option("--repeat-penalty", type=click.FloatRange(0.01, 100), metavar="X", help="1 = none.")
@click.option("--seed", type=click.IntRange(0, 2**64 - 1), metavar="N", help="Same seed, same text.")
@click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; up to four times.")
@click.option("--trace", is_flag=True, help="Show the experts of every layer and token, on stderr.")
@click.option("--no-strict-utf8", is_flag=True, help="Take a prompt that is not UTF-8.")
@click.option("--dry-run", is_flag=True, help="Show the engine's command line; run nothing.")
@ui_options
def command(
    ui: Ui,
    target: str | None,
    board: str | None,
    prefix: str | None,
    root: Path | None,
    ssh: SshOptions,
    prompt: str | None,
    prompt_file: str | None,
    engine: Path | None,
    dry_run: bool,
    **options: Any,
) -> None:
    """Generate text, here or on a board.

    MODEL.coli is a folder on this machine; anything else is a HOST that has a
    deployed release. Ctrl-C ends the engine too, wherever it runs.
    """
    text = _prompt(prompt, prompt_file)
    flags = _flags(options) + (["--json"] if ui.as_json else [])
    if target is not None and _is_model(target):
        _local(ui, Path(target), engine, flags, text, dry_run)
        return
    if engine is not None:
        raise UsageError("--engine goes with a model on this machine; a board uses its release's own")
    where = place(target, board, prefix, root, ssh)
    with opened(where, ui) as transport:
        base = existing_prefix(transport, where)
        from colibri_kit.deploy import act, release, store
        from colibri_kit.errors import PreflightError

        current = store.stored(transport, base).current
        if current is None:
            raise PreflightError(
                f"no release is current under {base} on {transport.describe()}",
                hint="deploy one first; see: colibri-kit status",
                state="nothing was run",
                code="CK-NOT-DEPLOYED",
            )
        path = f"{base}/releases/{current}"
        recorded = act.settings_of(release.read(transport, base, current)).flags()
        argv = [f"{path}/colibri", "run", "--model", f"{path}/model.coli"]
        argv += ["--prompt-file", "-", *_unless_given(recorded, flags), *flags]
        _go(ui, transport, argv, text, dry_run)


def _is_model(target: str) -> bool:
    """A path, not a host: it exists, ends in .coli, or has a slash that no host has."""
    return Path(target).exists() or target.rstrip("/").endswith(".coli") or "/" in target


def _local(ui: Ui, model: Path, engine: Path | None, flags: list[str], text: bytes, dry_run: bool) -> None:
    from colibri_kit.deploy import model as models
    from colibri_kit.transport.local import LocalTransport

    models.load(model)
    if engine is None:
        from colibri_kit.config import load_board
        from colibri_kit.toolchain.engine import build_engine, plan_engine

        host = load_board("host")
        with ui.progress("compile", len(plan_engine(host).units), unit="files") as bar:
            engine = Path(build_engine(host, advance=bar.advance).path)
    argv = [str(engine.resolve()), "run", "--model", str(model), "--prompt-file", "-", *flags]
    _go(ui, LocalTransport(), argv, text, dry_run)


def _prompt(prompt: str | None, prompt_file: str | None) -> bytes:
    """The prompt's bytes. Emptiness and UTF-8 are the engine's to judge, with its own words."""
    if (prompt is None) == (prompt_file is None):
        raise UsageError("give either --prompt TEXT or --prompt-file FILE (- for stdin)")
    if prompt is not None:
        return prompt.encode("utf-8", "surrogateescape")
    assert prompt_file is not None
    try:
        if prompt_file == "-":
            data = sys.stdin.buffer.read(_PROMPT_MAX + 1)
        else:
            with Path(prompt_file).open("rb") as handle:
                data = handle.read(_PROMPT_MAX + 1)
    except OSError as err:
        raise UsageError(f"cannot read the prompt {prompt_file}: {err.strerror}") from err
    if len(data) > _PROMPT_MAX:
        raise UsageError(f"the prompt is larger than {_PROMPT_MAX} bytes")
    return data


def _flags(options: dict[str, Any]) -> list[str]:
    """The engine's command line from ours; what was not said is left to the engine."""
    flags: list[str] = []
    for name, value in options.items():
        word = "--" + name.replace("_", "-")
        if value is None or value is False:
            continue
        if value is True:
            flags.append(word)
        elif isinstance(value, tuple):
            flags += [w for item in value for w in (word, item)]
        else:
            flags += [word, str(value)]
    return flags


def _unless_given(recorded: list[str], flags: list[str]) -> list[str]:
    pairs = zip(recorded[::2], recorded[1::2], strict=True)
    return [word for name, value in pairs if name not in flags for word in (name, value)]


class _Notes:
    """stderr, line by line as it comes; the last line is held back: it may be the error."""

    def __init__(self, sink: Callable[[str], None]) -> None:
        self._sink, self._tail, self.last = sink, b"", ""

    def __call__(self, piece: bytes) -> None:
        *lines, self._tail = (self._tail + piece).split(b"\n")
        for line in lines:
            self._push(line)

    def _push(self, line: bytes) -> None:
        if self.last:
            self._sink(self.last)
        self.last = line.decode("utf-8", "replace")

    def end(self) -> str:
        """The last line, which was not shown yet."""
        if self._tail:
            self._push(self._tail)
        return self.last


class _Utf8:
    """Bytes in, whole characters out: a packet may end inside one."""

    def __init__(self, sink: Callable[[str], None]) -> None:
        self._decoder, self._sink = codecs.getincrementaldecoder("utf-8")("replace"), sink

    def __call__(self, piece: bytes) -> None:
        self._sink(self._decoder.decode(piece))


def _go(ui: Ui, transport: Any, argv: list[str], text: bytes, dry_run: bool) -> None:
    import json

    from colibri_kit.deploy.health import explain
    from colibri_kit.transport.base import Completed, sh_join

    if dry_run:
        ui.result({"dry_run": True, "target": transport.describe(), "argv": argv}, sh_join(argv))
        return
    whole: list[bytes] = []
    notes = _Notes(ui.note)
    to_screen = _Utf8(ui.stream)

    def out(piece: bytes) -> None:
        if ui.as_json:
            whole.append(piece)
        else:
            to_screen(piece)

    done = transport.stream(argv, stdin=text, on_out=out, on_err=notes)
    last = notes.end()
    if done.rc != 0:
        why = explain(Completed(done.rc, b"".join(whole), last.encode()))
        raise _failed(transport.describe(), done.rc, why)
    if last:
        ui.note(last)
    if ui.as_json:
        try:
            doc = json.loads(b"".join(whole))
        except ValueError as err:
            raise EngineError(f"the engine's answer is not JSON: {err}") from err
        ui.result({"target": transport.describe(), **doc})


def _failed(where: str, rc: int, why: str) -> KitError:
    if rc == 130:
        raise KeyboardInterrupt
    code = f"CK-ENGINE-{_ENGINE_CODES[rc]}" if rc in _ENGINE_CODES else "CK-ENGINE"
    return EngineError(f"the engine on {where} ended with status {rc}: {why}", code=code)
