"""What every test starts from."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """Ctrl-C works in what tests start, also when they run in a shell's background, which ignores it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
