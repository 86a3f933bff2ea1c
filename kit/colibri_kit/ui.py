"""The only place that prints.

Results go to stdout, progress and notes to stderr. With ``--json`` stdout holds
exactly one JSON object. Progress bars appear only on a terminal; elsewhere one
plain line each tenth.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from colibri_kit.errors import KitError


class Progress(Protocol):
    """Handle that long work advances; see :meth:`Ui.progress`."""

    def advance(self, amount: int) -> None: ...


class _Silent:
    def advance(self, amount: int) -> None:
        del amount


class _Lines:
    """One plain stderr line each tenth: for logs and pipes."""

    def __init__(self, label: str, total: int) -> None:
        self._label, self._total, self._done, self._tenth = label, max(total, 1), 0, 0
        self._start = time.monotonic()

    def advance(self, amount: int) -> None:
        self._done += amount
        tenth = min(10, self._done * 10 // self._total)
        if tenth > self._tenth:
            self._tenth = tenth
            secs = time.monotonic() - self._start
            print(f"{self._label}  {tenth * 10} %  {secs:.1f} s", file=sys.stderr, flush=True)


class Screen:
    """The whole terminal, redrawn in place; see :meth:`Ui.screen`."""

    def __init__(self, console: Console, live: Live, keys: int | None) -> None:
        self._console, self._live, self._keys = console, live, keys

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines, now; whatever COLUMNS said when the shell started."""
        import os

        try:
            now = os.get_terminal_size(sys.stdout.fileno())
        except (OSError, ValueError):
            now = os.terminal_size((0, 0))
        if now.columns > 0 and now.lines > 0:  # a serial console may say 0
            self._console.width, self._console.height = now.columns, now.lines
        return self._console.width, self._console.height

    def show(self, lines: Sequence[Text]) -> None:
        from rich.console import Group

        self._live.update(Group(*lines), refresh=True)

    def keys(self, seconds: float) -> str:
        """What is typed, waiting for it at most so long; without arrows and the like.

        Raises:
            TerminalGone: the window was closed or the line cut: nobody looks any more.
        """
        if self._keys is None:
            time.sleep(seconds)
            return ""
        import os
        import re
        import select

        if not select.select([self._keys], [], [], seconds)[0]:
            return ""
        try:
            typed = os.read(self._keys, 64).decode("utf-8", "replace")
        except OSError as err:
            raise TerminalGone from err
        if not typed:
            raise TerminalGone
        return re.sub(r"\x1b(\[[0-9;?]*[ -/]*[@-~]|O.|)", "", typed)


class TerminalGone(Exception):
    """The terminal of :class:`Screen` hung up; there is nothing left to write to."""


class Ui:
    """Everything the user sees goes through one of these.

    Args:
        as_json: print one JSON object on stdout instead of text.
        quiet: no notes and no progress.
        verbose: show :meth:`detail` lines; hides bars so that they do not mix.
    """

    def __init__(self, *, as_json: bool = False, quiet: bool = False, verbose: bool = False) -> None:
        self.as_json, self.quiet, self.verbose = as_json, quiet, verbose

    def result(self, data: dict[str, Any], text: str | None = None) -> None:
        """The verb's answer: ``data`` under ``--json``, else ``text``."""
        if self.as_json:
            print(json.dumps(data, ensure_ascii=False, sort_keys=False), flush=True)
        elif text is not None:
            print(text, flush=True)

    def stream(self, text: str) -> None:
        """Text as it is generated: stdout, no newline added; nothing under ``--json``."""
        if not self.as_json:
            sys.stdout.write(text)
            sys.stdout.flush()

    def note(self, text: str) -> None:
        if not self.quiet:
            print(text, file=sys.stderr, flush=True)

    def warn(self, text: str) -> None:
        print(f"warning: {text}", file=sys.stderr, flush=True)

    def detail(self, text: str) -> None:
        if self.verbose:
            print(text, file=sys.stderr, flush=True)

    def error(self, err: KitError) -> None:
        """What happened, the state, the next command; the JSON object too under ``--json``."""
        if self.as_json:
            print(json.dumps({"error": err.as_json()}, ensure_ascii=False))
        print(f"error {err.code}: {err.message}", file=sys.stderr)
        if err.state:
            print(f"  state: {err.state}", file=sys.stderr)
        if err.hint:
            print(f"  next:  {err.hint}", file=sys.stderr)

    def interrupted(self) -> None:
        """Ctrl-C ended the verb: said on stderr; an error object too under ``--json``."""
        if self.as_json:
            error = {
                "code": "CK-INTERRUPTED",
                "message": "interrupted",
                "hint": None,
                "state": None,
                "exit_status": 130,
            }
            print(json.dumps({"error": error}), flush=True)
        print("interrupted", file=sys.stderr)

    @staticmethod
    def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
        """Plain aligned text; a column whose cells are all numbers is right-aligned."""
        cells = [[str(c) for c in row] for row in rows]
        width = [max([len(h)] + [len(r[i]) for r in cells]) for i, h in enumerate(head)]
        num = [bool(rows) and all(isinstance(r[i], (int, float)) for r in rows) for i in range(len(head))]

        def line(row: Sequence[str]) -> str:
            out = [c.rjust(w) if n else c.ljust(w) for c, w, n in zip(row, width, num, strict=True)]
            return "  ".join(out).rstrip()

        return "\n".join([line(head), *map(line, cells)])

    @property
    def on_terminal(self) -> bool:
        return sys.stdout.isatty()

    @property
    def draws_blocks(self) -> bool:
        """Whether stdout can carry ▁ to █."""
        return (sys.stdout.encoding or "").lower().replace("-", "") in ("utf8", "utf8sig", "utf16")

    @staticmethod
    def size() -> tuple[int, int]:
        """Columns and lines of the terminal; 80 and 24 where there is none."""
        import shutil

        return shutil.get_terminal_size((80, 24))

    def picture(self, lines: Sequence[Text]) -> None:
        """Drawn lines as the verb's answer: in colour on a terminal only."""
        from rich.console import Console

        console = Console(file=sys.stdout, width=max([80, *(line.cell_len for line in lines)]))
        for line in lines:
            console.print(line)

    @contextmanager
    def screen(self) -> Iterator[Screen]:
        """The terminal for a live picture; left as it was at the end.

        When the terminal hangs up the block ends as if its reader had left.
        """
        import errno

        from rich.console import Console
        from rich.live import Live

        console = Console()
        try:
            with (
                _single_keys() as keys,
                Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live,
            ):
                yield Screen(console, live, keys)
        except (TerminalGone, OSError) as err:
            if isinstance(err, OSError) and err.errno != errno.EIO:
                raise
            _write_nowhere()

    @contextmanager
    def progress(self, label: str, total: int, *, unit: str = "B") -> Iterator[Progress]:
        """``with ui.progress("write", n_bytes) as bar: bar.advance(k)``."""
        if self.quiet or self.as_json:
            yield _Silent()
        elif not sys.stderr.isatty() or self.verbose:
            yield _Lines(label, total)
        else:
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                DownloadColumn,
                MofNCompleteColumn,
                TextColumn,
                TimeRemainingColumn,
                TransferSpeedColumn,
            )
            from rich.progress import Progress as Bar

            cols = [DownloadColumn(), TransferSpeedColumn()] if unit == "B" else [MofNCompleteColumn()]
            with Bar(
                TextColumn("{task.description}"),
                BarColumn(),
                *cols,
                TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            ) as bar:
                task = bar.add_task(label, total=total)

                class _Rich:
                    def advance(self, amount: int) -> None:
                        bar.advance(task, amount)

                yield _Rich()


@contextmanager
def _single_keys() -> Iterator[int | None]:
    """stdin giving each key at once, unseen; None where that cannot be had. Ctrl-C stays."""
    try:
        import termios
        import tty

        keys = sys.stdin.fileno()
        before = termios.tcgetattr(keys)
    except (ImportError, OSError, ValueError, termios.error):
        yield None
        return
    try:
        tty.setcbreak(keys)
        yield keys
    finally:
        with suppress(termios.error):  # it hung up
            termios.tcsetattr(keys, termios.TCSADRAIN, before)


def _write_nowhere() -> None:
    """What is still buffered for a terminal that is gone must not fail at the end."""
    import os

    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
