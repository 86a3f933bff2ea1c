"""Releases on a board: planned, sent, checked, switched, and taken back when unwell."""
