"""An OpenRC service. The engine supervises itself: it sees a stuck engine and knows which ends no
restart helps; supervise-daemon sees neither, and two supervisors would restart each other's work."""

from __future__ import annotations

from colibri_kit.deploy.services import NAME, Rendered, Service


def render(service: Service) -> Rendered:
    """``/etc/init.d/colibri``. The memory limit is cgroup v2's, where OpenRC has it."""
    user = ":".join([service.user, *service.groups[:1]])
    text = f"""\
#!/sbin/openrc-run
description="colibri Mixture-of-Experts engine"
command="{service.engine}"
command_args="{" ".join(service.supervised)}"
command_user="{user}"
command_background=yes
pidfile="/run/{NAME}.pid"
directory="{service.prefix}"
output_log="{service.prefix}/log/engine.log"
error_log="{service.prefix}/log/engine.log"
retry="TERM/{service.stop_seconds}/KILL/5"
rc_ulimit="-c 0 -l unlimited"
rc_cgroup_settings="memory.max {service.memory_max}"
extra_started_commands="reload"
description_reload="Read the options, tokens and, with hot-swap, the weights again"

depend() {{
    need localmount
    after net
}}

start_pre() {{
    checkpath -d -m 0755 -o "{service.user}" "/run/{NAME}"
    checkpath -f -m 0644 -o "{service.user}" "{service.prefix}/log/engine.log"
}}

reload() {{
    ebegin "Reloading $RC_SVCNAME"
    start-stop-daemon --signal HUP --pidfile "$pidfile"
    eend $?
}}
"""
    return Rendered(
        path=f"/etc/init.d/{NAME}",
        mode=0o755,
        text=text,
        install=(("rc-update", "add", NAME, "default"), ("rc-service", NAME, "restart")),
        remove=(("rc-service", NAME, "stop"), ("rc-update", "del", NAME, "default")),
        stop_seconds=service.stop_seconds,
    )
