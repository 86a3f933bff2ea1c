"""Puts a service definition on a board and starts it, or takes it away."""

from __future__ import annotations

import io

from colibri_kit.deploy.services import Rendered
from colibri_kit.errors import TransferError
from colibri_kit.transport.base import Transport, script


def user(transport: Transport) -> str:
    """Who runs the engine: ``colibri`` where there is such a user, else ``nobody``. Never root."""
    return "colibri" if transport.run(["id", "-u", "colibri"]).rc == 0 else "nobody"


def install(transport: Transport, made: Rendered) -> None:
    """Writes the definition by rename, then enables and (re)starts the service.

    Raises:
        TransferError: the file cannot be written or a command fails.
    """
    data = made.text.encode()
    transport.put_stream(io.BytesIO(data), len(data), f"{made.path}.new", mode=made.mode)
    done = transport.run(["mv", "-f", f"{made.path}.new", made.path])
    if done.rc != 0:
        raise TransferError(f"cannot write {made.path}: {done.why}")
    for command in made.install:
        done = transport.run(command, timeout=120)
        # Nothing has failed yet on a first installation: then there is nothing to reset.
        if done.rc != 0 and "reset-failed" not in command:
            raise TransferError(f"`{' '.join(command)}` failed: {done.why}")


def remove(transport: Transport, made: Rendered) -> bool:
    """Stops the service and removes its definition. False when there was none."""
    if transport.run(script('[ -f "$1" ]', made.path)).rc != 0:
        return False
    for command in made.remove:
        transport.run(command, timeout=120)
    done = transport.run(["rm", "-f", made.path])
    if done.rc != 0:
        raise TransferError(f"cannot remove {made.path}: {done.why}")
    return True
