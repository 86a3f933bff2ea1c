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
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
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
            print(json.dumps(data, ensure_ascii=False, sort_keys=False))
        elif text is not None:
            print(text)

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
