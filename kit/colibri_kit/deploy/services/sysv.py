"""A sysv init script for small systems without a supervisor (busybox init, old Debian): the engine
supervises itself."""

from __future__ import annotations

from colibri_kit.deploy.services import NAME, Rendered, Service, shell

#: At boot: Debian's links, or the folder of S files that busybox' rcS goes through.
_ENABLE = """
if command -v update-rc.d >/dev/null 2>&1; then update-rc.d "$1" defaults
elif [ -f /etc/init.d/rcS ]; then ln -sf "$1" "/etc/init.d/S99$1"
fi
"""
_DISABLE = """
rm -f "/etc/init.d/S99$1"
if command -v update-rc.d >/dev/null 2>&1; then update-rc.d -f "$1" remove; fi
"""


def render(service: Service) -> Rendered:
    """``/etc/init.d/colibri``. The engine holds its budget itself; ulimit guards the rest."""
    text = f"""\
#!/bin/sh
### BEGIN INIT INFO
# Provides:          {NAME}
# Required-Start:    $local_fs $network
# Required-Stop:     $local_fs
# Default-Start:     2 3 4 5
# Default-Stop:      0 1 6
# Short-Description: colibri Mixture-of-Experts engine
### END INIT INFO
{shell.functions(service)}
case "$1" in
start) engine_start ;;
stop) engine_stop ;;
restart|force-reload) engine_stop; engine_start ;;
reload) engine_reload ;;
status)
    if alive; then echo running; exit 0; fi
    if [ -f "$PIDFILE" ]; then echo fallen; exit 1; fi
    echo stopped
    exit 3
    ;;
*) echo "usage: $0 start|stop|restart|reload|status" >&2; exit 2 ;;
esac
"""
    return Rendered(
        path=f"/etc/init.d/{NAME}",
        mode=0o755,
        text=text,
        install=(("sh", "-c", _ENABLE, "sh", NAME), (f"/etc/init.d/{NAME}", "restart")),
        remove=((f"/etc/init.d/{NAME}", "stop"), ("sh", "-c", _DISABLE, "sh", NAME)),
        stop_seconds=service.stop_seconds,
    )
