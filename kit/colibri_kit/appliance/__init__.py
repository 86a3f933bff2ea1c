"""The appliance: an SD image that boots straight into the engine.

platforms.py knows boards, pieces.py fetches Debian's packages, settings.py and identity.py are
what the user chose, boot.py writes the boot files, initramfs.py and filesystems.py make the
parts, build.py puts the image together; base.py adds the engine to somebody else's image.
"""
