"""Virtual boards: QEMU guests with real kernels, made from Debian packages without root.

apt.py fetches, packages.py unpacks and keeps, cpio.py, guest.py and rootfs.py put a
guest together, machine.py writes QEMU's command line, runtime.py knows what runs,
act.py brings boards up and down.
"""
