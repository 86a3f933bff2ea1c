"""An OpenRC service, supervised by supervise-daemon."""

from __future__ import annotations

from colibri_kit.deploy.services import NAME, Rendered, Service


def render(service: Service) -> Rendered:
    """``/etc/init.d/colibri``. The memory limit is cgroup v2's, where OpenRC has it."""
    text = f"""\
#!/sbin/openrc-run
description="colibri Mixture-of-Experts engine"
supervisor=supervise-daemon
command="{service.engine}"
command_args="{" ".join(service.arguments)}"
command_user="{service.user}"
directory="{service.prefix}"
output_log="{service.prefix}/log/engine.log"
error_log="{service.prefix}/log/engine.log"
respawn_delay=5
respawn_max=4
respawn_period=300
no_new_privs=yes
rc_cgroup_settings="memory.max {service.memory_max}"

depend() {{
    need localmount
    after net
}}

start_pre() {{
    "{service.engine}" check --model "{service.prefix}/current/model.coli" \
{" ".join(service.settings.flags())}
}}
"""
    return Rendered(
        path=f"/etc/init.d/{NAME}",
        mode=0o755,
        text=text,
        install=(("rc-update", "add", NAME, "default"), ("rc-service", NAME, "restart")),
        remove=(("rc-service", NAME, "stop"), ("rc-update", "del", NAME, "default")),
    )
