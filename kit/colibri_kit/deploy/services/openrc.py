"""An OpenRC service. The engine supervises itself: it sees a stuck engine and knows which ends no
restart helps; supervise-daemon sees neither, and two supervisors would restart each other's work."""

from __future__ import annotations

from colibri_kit.deploy.services import NAME, Rendered, Service, shell


def render(service: Service) -> Rendered:
    """``/etc/init.d/colibri``. The memory limit is cgroup v2's, where OpenRC has it."""
    text = f"""\
#!/sbin/openrc-run
description="colibri Mixture-of-Experts engine"
extra_started_commands="reload"
description_reload="Read the options, tokens and, with hot-swap, the weights again"
rc_cgroup_settings="memory.max {service.memory_max}"

{shell.functions(service)}
depend() {{
    use localmount
    after net
}}

start() {{
    ebegin "Starting $RC_SVCNAME"
    engine_start
    eend $?
}}

stop() {{
    ebegin "Stopping $RC_SVCNAME"
    engine_stop
    eend $?
}}

reload() {{
    ebegin "Reloading $RC_SVCNAME"
    engine_reload
    eend $?
}}

status() {{
    if alive; then einfo "status: started"; return 0; fi
    if service_started; then eerror "status: crashed"; return 32; fi
    einfo "status: stopped"
    return 3
}}
"""
    return Rendered(
        path=f"/etc/init.d/{NAME}",
        mode=0o755,
        text=text,
        install=(
            ("rc-update", "add", NAME, "default"),
            # A service that fell counts as started: stopped and forgotten first.
            ("rc-service", "--ifstarted", NAME, "stop"),
            ("rc-service", NAME, "zap"),
            ("rc-service", NAME, "start"),
        ),
        remove=(("rc-service", NAME, "stop"), ("rc-update", "del", NAME, "default")),
        stop_seconds=service.stop_seconds,
    )
