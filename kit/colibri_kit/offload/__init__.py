"""Experts computed at the other end of a cable: discovery, gadget set-up, measuring. See docs/offload.md."""
