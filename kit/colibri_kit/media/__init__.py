"""Media: what disks are, which may be erased, writing an image so that a half-written one never boots.

partitions.py and usedmap.py read images, disks.py reads this machine's disks, safety.py
judges (pure), medium.py opens, write.py writes and verifies, source.py unpacks.
"""
