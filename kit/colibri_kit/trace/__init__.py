"""Recorded expert choices: the file format, the cache simulator, hit-rate curves, pin lists."""
