"""Any transport, with every program run as root through sudo.

The password, when one is needed, goes in on stdin. It must never end up in a file
that is being uploaded, so the board first shows that sudo eats the line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from colibri_kit.errors import AuthError
from colibri_kit.transport.base import Chain, Completed, Reader, Sink, Transport, TransportBase, script

_MARK = b"colibri-kit\n"
_HINT = (
    "let the user run sudo without a password (as root, `visudo -f /etc/sudoers.d/colibri`: "
    "`USER ALL=(root) NOPASSWD: ALL`), or use a --prefix that the user may write"
)


class SudoTransport(TransportBase):
    """Wraps ``inner``: see :func:`with_sudo`."""

    def __init__(self, inner: Transport, password: str | None) -> None:
        self._inner = inner
        self._head = b"" if password is None else password.encode() + b"\n"
        flags = ["-n"] if password is None else ["-k", "-S", "-p", ""]
        self._sudo = ["sudo", *flags, "--", *script('exec "$@"')]

    def describe(self) -> str:
        return f"{self._inner.describe()} (sudo)"

    def close(self) -> None:
        self._inner.close()

    def _stdin(self, stdin: bytes | None) -> bytes | None:
        return stdin if not self._head else self._head + (stdin or b"")

    def run(self, argv: Sequence[str], *, stdin: bytes | None = None, timeout: float = 60.0) -> Completed:
        return self._inner.run([*self._sudo, *argv], stdin=self._stdin(stdin), timeout=timeout)

    def stream(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes | None = None,
        on_out: Sink,
        on_err: Sink | None = None,
        timeout: float | None = None,
    ) -> Completed:
        return self._inner.stream(
            [*self._sudo, *argv], stdin=self._stdin(stdin), on_out=on_out, on_err=on_err, timeout=timeout
        )

    def pipe(
        self,
        argv: Sequence[str],
        reader: Reader,
        size: int,
        *,
        progress: Callable[[int], None] | None = None,
    ) -> Completed:
        if not self._head:
            return self._inner.pipe([*self._sudo, *argv], reader, size, progress=progress)
        skip = len(self._head)

        def counted(n: int) -> None:
            nonlocal skip
            eaten = min(skip, n)
            skip -= eaten
            if progress is not None and n > eaten:
                progress(n - eaten)

        return self._inner.pipe(
            [*self._sudo, *argv], Chain(self._head, reader), len(self._head) + size, progress=counted
        )


def with_sudo(inner: Transport, ask: Callable[[], str | None]) -> Transport:
    """``inner`` as root: ``sudo -n`` when that works, else with the password ``ask()`` gives.

    Raises:
        AuthError: no sudo there, no password to be had, or a wrong one.
    """
    plain = inner.run(["sudo", "-n", "--", "sh", "-c", "id -u"], timeout=20)
    if plain.rc == 0 and plain.text == "0":
        return SudoTransport(inner, None)
    if plain.rc == 127 or "not found" in plain.err_text:
        raise AuthError(
            f"{inner.describe()} has no sudo",
            hint="log in as root, or use a --prefix that the user may write",
            state="nothing was changed",
            code="CK-SUDO-MISSING",
        )
    password = ask()
    if password is None:
        raise AuthError(
            f"sudo on {inner.describe()} wants a password and there is no terminal to ask on",
            hint=_HINT,
            state="nothing was changed",
            code="CK-SUDO-PASSWORD",
        )
    probe = inner.run(
        ["sudo", "-k", "-S", "-p", "", "--", "sh", "-c", "cat"],
        stdin=password.encode() + b"\n" + _MARK,
        timeout=30,
    )
    if probe.rc != 0 or probe.out != _MARK:
        raise AuthError(
            f"sudo on {inner.describe()} refused the password",
            hint=_HINT,
            state="nothing was changed",
            code="CK-SUDO-PASSWORD",
        )
    return SudoTransport(inner, password)
