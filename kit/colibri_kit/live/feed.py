"""Looks at a service in the background, so that a key is heard while the board is slow."""

from __future__ import annotations

import queue
import threading
from types import TracebackType

from colibri_kit.errors import KitError
from colibri_kit.live.frame import Frame
from colibri_kit.live.watch import Lost, Watch


class Feed:
    """Looks every ``interval`` seconds while the block runs."""

    def __init__(self, watch: Watch, interval: float) -> None:
        self._watch, self._interval = watch, interval
        self._seen: queue.SimpleQueue[Frame | Lost | KitError] = queue.SimpleQueue()
        self._stop = threading.Event()

    def __enter__(self) -> Feed:
        threading.Thread(target=self._run, name="top", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            try:
                self._seen.put(self._watch.try_look())
            except KitError as err:  # what does not mend by itself
                self._seen.put(err)
                return

    def next(self) -> Frame | Lost | None:
        """What came last, None when nothing did. Raises what ended the looking."""
        try:
            seen = self._seen.get_nowait()
        except queue.Empty:
            return None
        if isinstance(seen, KitError):
            raise seen
        return seen
