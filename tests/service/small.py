"""The tests' small model outside of pytest."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.service.rig import with_chat

DATA = Path(__file__).resolve().parents[1] / "data" / "engine" / "qwen3moe.t64.f32.gguf"


def small_chat_model(folder: Path) -> Path:
    """Converts it and gives it a chat template."""
    cmd = [sys.executable, "-m", "colibri_kit", "convert", str(DATA), "-o", str(folder / "plain.coli"), "-q"]
    subprocess.run(cmd, check=True, timeout=280)
    return with_chat(folder / "plain.coli", folder / "chat.coli")
