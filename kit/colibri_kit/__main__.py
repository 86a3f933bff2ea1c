"""``python -m colibri_kit``."""

from colibri_kit.cli import main

main()
