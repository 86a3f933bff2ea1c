"""Ways to a board: SSH, or this machine. :func:`open_transport` makes the right one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from colibri_kit.transport.base import Completed, Transport

if TYPE_CHECKING:
    from colibri_kit.transport.options import SshOptions

__all__ = ["Completed", "Transport", "open_transport"]


def open_transport(
    host: str | None, options: SshOptions, note: Callable[[str], None] = lambda text: None
) -> Transport:
    """A way to ``host`` (``[user@]host[:port]``), or to this machine when it is None.

    Args:
        options: what the command line said about SSH; see transport/options.py.
        note: told what the user should know, such as a recorded host key.

    Raises:
        UnreachableError, AuthError, UsageError, ConfigError.
    """
    if host is None:
        from colibri_kit.transport.local import LocalTransport

        return LocalTransport()
    from colibri_kit.transport.sshconnect import connect

    transport: Transport = connect(options.spec(host, note))
    if options.sudo:
        from colibri_kit.transport.sudo import with_sudo

        try:
            return with_sudo(transport, options.sudo_password)
        except BaseException:
            transport.close()
            raise
    return transport
