"""A hardened systemd unit."""

from __future__ import annotations

from colibri_kit.deploy.release import BOOT_GUARD
from colibri_kit.deploy.services import NAME, Rendered, Service


def render(service: Service) -> Rendered:
    """``/etc/systemd/system/colibri.service``.

    What is left out on purpose: no check before the start (``serve`` computes the golden itself
    before it takes a connection), and no device rules when a serial link is used: a device
    that is plugged in later would stay locked out, and ProtectClock= brings such rules along.
    """
    command = " ".join([service.engine, *service.arguments])
    guard = BOOT_GUARD.replace("%", "%%").replace("$", "$$")
    devices = "" if service.serial_link else "PrivateDevices=yes\nProtectClock=yes\n"
    groups = f"SupplementaryGroups={' '.join(service.groups)}\n" if service.groups else ""
    text = f"""\
[Unit]
Description=colibri Mixture-of-Experts engine
Documentation=file:{service.prefix}/current/release.json
After=network.target colibri-offload-gadget.service
# A release that cannot start must not be restarted for ever.
StartLimitIntervalSec=300
StartLimitBurst=4

[Service]
Type=notify
NotifyAccess=main
User={service.user}
{groups}WorkingDirectory={service.prefix}
RuntimeDirectory={NAME}
RuntimeDirectoryMode=0755
# As root: a release that was on trial when the power went is not started again.
ExecStartPre=+/bin/sh -c '{guard}' sh {service.prefix}
ExecStart={command}
ExecReload=/bin/kill -HUP $MAINPID
Restart={service.restart.replace("never", "no")}
RestartSec=5
# The command line, the model, the budget, the golden: another start changes none of them.
RestartPreventExitStatus=2 3 4 5
# Stopped while it was still loading.
SuccessExitStatus=143
# Loading takes as long as the storage needs.
TimeoutStartSec=infinity
TimeoutStopSec={service.stop_seconds}
WatchdogSec={service.watchdog}
# A stuck engine leaves no core of the size of its memory.
WatchdogSignal=SIGKILL
LimitCORE=0
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
ProtectHostname=yes
PrivateTmp=yes
{devices}RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6
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
            # Stopped and forgotten first: what is seen of it afterwards is of this start alone.
            ("systemctl", "stop", unit),
            ("systemctl", "reset-failed", unit),
            ("systemctl", "enable", unit),
            # Whether it comes up is asked of itself, and seen from its state: no waiting here.
            ("systemctl", "start", "--no-block", unit),
        ),
        remove=(("systemctl", "disable", "--now", unit),),
        stop_seconds=service.stop_seconds,
    )
