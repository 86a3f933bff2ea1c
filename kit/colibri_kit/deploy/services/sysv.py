"""A sysv init script for small systems without a supervisor (busybox init, old Debian): the engine
supervises itself."""

from __future__ import annotations

from colibri_kit.deploy.services import NAME, Rendered, Service

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
    arguments = " ".join(service.supervised)
    user = ":".join([service.user, *service.groups[:1]])
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
ENGINE={service.engine}
LOG={service.prefix}/log/engine.log
PIDFILE=/var/run/{NAME}.pid
LOG_MAX=16384 # KiB: what is longer at a start becomes engine.log.1

alive() {{ [ -f "$PIDFILE" ] && kill -0 "$(cat "$PIDFILE")" 2>/dev/null; }}

start() {{
    alive && return 0
    [ -x "$ENGINE" ] || {{ echo "no $ENGINE" >&2; return 5; }}
    ulimit -c 0
    ulimit -l unlimited 2>/dev/null
    mkdir -p /run/{NAME} && chown {service.user} /run/{NAME}
    if [ -f "$LOG" ] && [ "$(du -k "$LOG" | cut -f 1)" -gt "$LOG_MAX" ]; then mv -f "$LOG" "$LOG.1"; fi
    touch "$LOG" && chown {service.user} "$LOG"
    start-stop-daemon -S -b -m -p "$PIDFILE" -c {user} -x /bin/sh -- \\
        -c 'exec "$0" "$@" >>'"$LOG"' 2>&1' "$ENGINE" {arguments}
}}

stop() {{
    alive || return 0
    kill -TERM "$(cat "$PIDFILE")"
    n=0
    while alive && [ $n -lt {service.stop_seconds} ]; do sleep 1; n=$((n + 1)); done
    alive && kill -KILL "$(cat "$PIDFILE")"
    rm -f "$PIDFILE"
}}

case "$1" in
start) start ;;
stop) stop ;;
restart|force-reload) stop; start ;;
reload) alive && kill -HUP "$(cat "$PIDFILE")" ;;
status) if alive; then echo running; else echo stopped; exit 3; fi ;;
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
