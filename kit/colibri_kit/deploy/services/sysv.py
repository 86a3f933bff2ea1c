"""A sysv init script for small systems without a supervisor (busybox init, old Debian)."""

from __future__ import annotations

from colibri_kit.deploy.services import NAME, Rendered, Service


def render(service: Service) -> Rendered:
    """``/etc/init.d/colibri``. The engine holds its budget itself; ulimit guards the rest."""
    arguments = " ".join(service.arguments)
    flags = " ".join(service.settings.flags())
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
MODEL={service.prefix}/current/model.coli
LOG={service.prefix}/log/engine.log
PIDFILE=/var/run/{NAME}.pid

alive() {{ [ -f "$PIDFILE" ] && kill -0 "$(cat "$PIDFILE")" 2>/dev/null; }}

start() {{
    alive && return 0
    "$ENGINE" check --model "$MODEL" {flags} >>"$LOG" 2>&1 || return 1
    ulimit -c 0
    touch "$LOG" && chown {service.user} "$LOG"
    start-stop-daemon -S -b -m -p "$PIDFILE" -c {service.user} -x /bin/sh -- \\
        -c 'exec "$0" "$@" >>'"$LOG"' 2>&1' "$ENGINE" {arguments}
}}

stop() {{
    alive || return 0
    start-stop-daemon -K -p "$PIDFILE" -s TERM
    n=0
    while alive && [ $n -lt 10 ]; do sleep 1; n=$((n + 1)); done
    alive && kill -KILL "$(cat "$PIDFILE")"
    rm -f "$PIDFILE"
}}

case "$1" in
start) start ;;
stop) stop ;;
restart) stop; start ;;
status) if alive; then echo running; else echo stopped; exit 3; fi ;;
*) echo "usage: $0 start|stop|restart|status" >&2; exit 2 ;;
esac
"""
    return Rendered(
        path=f"/etc/init.d/{NAME}",
        mode=0o755,
        text=text,
        install=((f"/etc/init.d/{NAME}", "restart"),),
        remove=((f"/etc/init.d/{NAME}", "stop"),),
    )
