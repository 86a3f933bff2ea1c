"""Work that only root may do on a board: services."""

from __future__ import annotations

from colibri_kit.errors import PreflightError
from colibri_kit.transport.base import Transport, script


def missing(transport: Transport, what: str, *, state: str, otherwise: str = "") -> PreflightError:
    """The error for a login that is not root: ``what`` "needs root", and the way to it that is there.

    Args:
        otherwise: what can be done without root, for the hint.
    """
    sudo = transport.run(script("command -v sudo")).rc == 0
    way = "add --sudo" if sudo else "there is no sudo there: log in as root"
    return PreflightError(
        f"{what} needs root; this login is not",
        hint=f"{way}, or {otherwise}" if otherwise else way,
        state=state,
        code="CK-PREFLIGHT-ROOT",
    )


def need(transport: Transport, what: str, *, state: str) -> None:
    """Raises :func:`missing` unless the login is root."""
    if transport.run(["id", "-u"]).text != "0":
        raise missing(transport, what, state=state)
