"""Measures what an engine does on a board: plan (what to run), act (run it), report (say it)."""
