"""Checks of this machine and of a board: each finding with its remedy."""
