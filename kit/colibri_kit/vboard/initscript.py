"""The guest's /init: mounts, modules, network, data disk, keys; then sshd, or systemd on a disk.

Kernel command line: ``ck.ssh=openssh|dropbear|none``, ``ck.init=none|systemd``,
``ck.time=SECONDS`` (boards without a clock), ``ck.host=NAME``. Progress goes to the
console as ``board: WORD`` lines, which `board up` shows.
"""

#: Who deploys: an ordinary user.
USER, UID = "board", 1000

INIT = r"""#!/bin/sh
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
/bin/busybox mkdir -p /proc /sys /dev /run /tmp /data /opt/colibri
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev 2>/dev/null
mkdir -p /dev/pts /dev/shm
mount -t devpts devpts /dev/pts
mount -t tmpfs -o mode=755 run /run
mkdir -p /run/sshd
exec </dev/console >/dev/console 2>&1
dmesg -n 1
say() { read -r up _ </proc/uptime; echo "board: $* (${up} s)"; }
option() { sed -n "s/.*ck\.$1=\([^ ]*\).*/\1/p" /proc/cmdline; }
say kernel $(uname -r)
for m in $(cat /mods/list); do insmod "/mods/$m.ko" 2>/dev/null || say "module $m failed"; done
now=$(option time); [ -n "$now" ] && [ "$(date +%s)" -lt "$now" ] && date -s "@$now" >/dev/null
hostname "$(option host)"
ip link set lo up

network() {
  n=0
  while [ $n -lt 400 ]; do
    for i in eth0 usb0; do
      if [ -e "/sys/class/net/$i" ]; then
        ip link set "$i" up; ip addr add 10.0.2.15/24 dev "$i"; ip route add default via 10.0.2.2
        say network "$i"; return
      fi
    done
    sleep 0.05; n=$((n+1))
  done
  say no network
}

disk() {  # LABEL: prints the device
  n=0
  while [ $n -lt 200 ]; do
    d=$(findfs "LABEL=$1" 2>/dev/null) && { echo "$d"; return; }
    sleep 0.05; n=$((n+1))
  done
}

data() {  # ROOT: the data disk at ROOT/data, part of it at ROOT/opt/colibri
  d=$(disk ck-data)
  mkdir -p "$1/data" "$1/opt/colibri"
  if [ -z "$d" ] || ! mount -t ext4 "$d" "$1/data"; then say no data disk; return; fi
  mkdir -p "$1/data/colibri"; chown 1000:1000 "$1/data" "$1/data/colibri"
  mount -o bind "$1/data/colibri" "$1/opt/colibri"
  say data disk "$d"
}

network
if [ "$(option init)" = systemd ]; then
  d=$(disk ck-root)
  mkdir -p /newroot
  if mount -t ext4 "$d" /newroot; then
    data /newroot
    cp /keys/machine-id /newroot/etc/machine-id
    hostname > /newroot/etc/hostname
    cp /keys/ssh_host_ed25519_key /newroot/etc/ssh/; chmod 600 /newroot/etc/ssh/ssh_host_ed25519_key
    for h in root home/board; do
      mkdir -p "/newroot/$h/.ssh"; cp /keys/authorized_keys "/newroot/$h/.ssh/"
      chmod 700 "/newroot/$h/.ssh"; chmod 600 "/newroot/$h/.ssh/authorized_keys"
    done
    chown -R 1000:1000 /newroot/home/board
    say systemd
    umount /proc /sys /dev/pts
    mount -o move /run /newroot/run
    mount -o move /dev /newroot/dev
    exec switch_root /newroot /lib/systemd/systemd
  fi
  say no root disk
fi
data ""
mkdir -p /etc/ssh /root/.ssh /home/board/.ssh /etc/dropbear
cp /keys/ssh_host_ed25519_key /etc/ssh/; chmod 600 /etc/ssh/ssh_host_ed25519_key
for h in /root /home/board; do
  cp /keys/authorized_keys "$h/.ssh/"; chmod 700 "$h" "$h/.ssh"; chmod 600 "$h/.ssh/authorized_keys"
done
chown -R 1000:1000 /home/board
keep() { while :; do "$@"; sleep 1; done; }
case "$(option ssh)" in
openssh) keep /usr/sbin/sshd -D -e 2>/run/sshd.log & ;;
dropbear)
  dropbearconvert openssh dropbear /etc/ssh/ssh_host_ed25519_key /etc/dropbear/hostkey >/dev/null 2>&1
  keep /usr/sbin/dropbear -F -E -s -r /etc/dropbear/hostkey -p 22 2>/run/sshd.log & ;;
esac
say ready
trap 'sync; poweroff -f' TERM
[ -x /autorun ] && /autorun
while :; do setsid cttyhack sh; sleep 1; done
"""

PASSWD = f"""root:x:0:0:root:/root:/bin/sh
daemon:x:1:1:daemon:/usr/sbin:/bin/false
sshd:x:100:65534::/run/sshd:/bin/false
{USER}:x:{UID}:{UID}::/home/{USER}:/bin/sh
nobody:x:65534:65534:nobody:/:/bin/false
"""

GROUP = f"root:x:0:\ndaemon:x:1:\ntty:x:5:\n{USER}:x:{UID}:\nnogroup:x:65534:\n"

# '*' and not '!': sshd without PAM takes the latter for a locked account.
SHADOW = f"root:*:19000:0:99999:7:::\nsshd:*:19000:0:99999:7:::\n{USER}:*:19000:0:99999:7:::\n"

SSHD_CONFIG = """HostKey /etc/ssh/ssh_host_ed25519_key
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
UseDNS no
PrintMotd no
MaxStartups 50
Subsystem sftp internal-sftp
PidFile none
"""
