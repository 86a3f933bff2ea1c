"""A hardened systemd unit."""

from __future__ import annotations

from colibri_kit.deploy.services import NAME, Rendered, Service


def render(service: Service) -> Rendered:
    """``/etc/systemd/system/colibri.service``."""
    command = " ".join([service.engine, *service.arguments])
    text = f"""\
[Unit]
Description=colibri Mixture-of-Experts engine
Documentation=file:{service.prefix}/current/release.json
After=network.target
# A release that cannot start must not be restarted for ever.
StartLimitIntervalSec=300
StartLimitBurst=4

[Service]
Type=exec
User={service.user}
WorkingDirectory={service.prefix}
ExecStartPre={service.engine} check --model {service.prefix}/current/model.coli \
{" ".join(service.settings.flags())}
ExecStart={command}
Restart=on-failure
RestartSec=5
TimeoutStartSec=infinity
MemoryMax={service.memory_max}
MemorySwapMax=0
LimitMEMLOCK=infinity
NoNewPrivileges=yes
ProtectSystem=strict
ProtectHome=read-only
ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectKernelLogs=yes
ProtectControlGroups=yes
ProtectClock=yes
ProtectHostname=yes
PrivateTmp=yes
PrivateDevices=yes
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
LockPersonality=yes
MemoryDenyWriteExecute=yes
SystemCallArchitectures=native
CapabilityBoundingSet=
AmbientCapabilities=
UMask=0077

[Install]
WantedBy=multi-user.target
"""
    unit = f"{NAME}.service"
    return Rendered(
        path=f"/etc/systemd/system/{unit}",
        mode=0o644,
        text=text,
        install=(
            ("systemctl", "daemon-reload"),
            ("systemctl", "reset-failed", unit),
            ("systemctl", "enable", unit),
            ("systemctl", "restart", unit),
        ),
        remove=(("systemctl", "disable", "--now", unit),),
    )
