"""The shell functions that init scripts have in common. They need sh and any start-stop-daemon
(dpkg's, busybox', OpenRC's): only the short options that all three have are used."""

from __future__ import annotations

from colibri_kit.deploy.release import BOOT_GUARD
from colibri_kit.deploy.services import NAME, Service


def functions(service: Service) -> str:
    """``alive``, ``engine_start``, ``engine_stop``, ``engine_reload``; ``$PIDFILE`` and ``$LOG`` are set.

    A number in ``$PIDFILE`` that the kernel has given to another program by now is not ours: that
    one is neither taken for the engine nor stopped. Told twice to stop, the engine's supervisor
    ends a service that hangs; killed itself, it could not.
    """
    user = ":".join([service.user, *service.groups[:1]])
    return f"""\
ENGINE={service.engine}
LOG={service.prefix}/log/engine.log
PIDFILE=/run/{NAME}.pid

alive() {{
    [ -f "$PIDFILE" ] || return 1
    {{ tr '\\0' ' ' <"/proc/$(cat "$PIDFILE")/cmdline"; }} 2>/dev/null | grep -qF "$ENGINE"
}}

# A release that was on trial when the power went is not started again. $1: the folder
boot_guard() {{ {BOOT_GUARD}; }}

engine_start() {{
    alive && return 0
    boot_guard "{service.prefix}"
    [ -x "$ENGINE" ] || {{ echo "no $ENGINE" >&2; return 5; }}
    ulimit -c 0
    ulimit -l unlimited 2>/dev/null
    mkdir -p /run/{NAME} && chown {service.user} /run/{NAME}
    touch "$LOG" && chown {service.user} "$LOG"
    rm -f "$PIDFILE"
    start-stop-daemon -S -b -m -p "$PIDFILE" -c {user} -x /bin/sh -- \\
        -c 'exec "$0" "$@" >>'"$LOG"' 2>&1' "$ENGINE" {" ".join(service.supervised)}
}}

engine_stop() {{
    alive || return 0
    for seconds in {service.stop_seconds} 5; do
        kill -TERM "$(cat "$PIDFILE")"
        n=0
        while alive && [ $n -lt $seconds ]; do sleep 1; n=$((n + 1)); done
        alive || break
    done
    alive && kill -KILL "$(cat "$PIDFILE")"
    rm -f "$PIDFILE"
}}

engine_reload() {{ alive && kill -HUP "$(cat "$PIDFILE")"; }}
"""
