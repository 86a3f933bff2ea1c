"""The types of the ``tokenizer.*`` keys, checked before anybody relies on them.

GGUF lets a file give any key any type; a token id that is a string must be an error with
the key's name, not a surprise further in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from colibri_kit.errors import FormatError

_PREFIX = "tokenizer.ggml."


def check_tokenizer_keys(kv: Mapping[str, Any], file: str) -> None:
    """Raises FormatError when a key's value has a type that its name rules out."""
    for key, value in kv.items():
        if not key.startswith(_PREFIX):
            continue
        name = key[len(_PREFIX) :]
        if name.endswith("_token_id"):
            good, want = isinstance(value, int) and not isinstance(value, bool), "a whole number"
        elif name.startswith("add_") or name in ("remove_extra_whitespaces", "escape_whitespaces"):
            good, want = isinstance(value, bool), "a bool"
        elif name in ("model", "pre"):
            good, want = isinstance(value, str), "text"
        elif name in ("tokens", "merges"):
            good = isinstance(value, list) and all(isinstance(v, (str, bytes)) for v in value)
            want = "a list of strings"
        elif name == "token_type":
            kind = getattr(getattr(value, "dtype", None), "kind", "")
            good, want = kind in ("i", "u") and value.ndim == 1, "a list of whole numbers"
        else:
            continue
        if not good:
            raise FormatError(f"{file}: {key} is not {want}", code="CK-FORMAT-TOKENIZER", state="unchanged")
