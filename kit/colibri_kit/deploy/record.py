"""What a release.json says of how its engine is run. A board's file is read with suspicion. Pure."""

from __future__ import annotations

import re
from typing import Any

from colibri_kit.deploy.health import Check
from colibri_kit.deploy.plan import Settings


def settings_of(doc: dict[str, Any]) -> Settings:
    """The engine settings a release.json records; whatever is odd counts as not set."""
    raw = doc.get("settings")
    raw = raw if isinstance(raw, dict) else {}
    values: dict[str, Any] = {
        k: v for k in ("budget", "ctx", "threads") if isinstance(v := raw.get(k), int) and v > 0
    }
    for name in ("weights", "kv", "cache_experts", "cache_policy"):
        word = raw.get(name)
        if isinstance(word, str) and word.isascii() and word.replace("_", "").isalnum():
            values[name] = word
    link = raw.get("offload")
    if isinstance(link, str) and re.fullmatch(r"[\w./:@-]{1,120}", link, re.ASCII):
        values["offload"] = link
    return Settings(**values)


def check_of(doc: dict[str, Any]) -> Check:
    """What the release has to answer."""
    raw = doc.get("check")
    raw = raw if isinstance(raw, dict) else {}
    default = Check()
    prompt, count, expect = raw.get("prompt"), raw.get("max_new"), raw.get("expect")
    return Check(
        prompt[:2000] if isinstance(prompt, str) and prompt else default.prompt,
        min(count, 512) if type(count) is int and count > 0 else default.max_new,
        expect[:2000] if isinstance(expect, str) else default.expect,
    )
