"""Typed access to a GGUF's ``ARCH.*`` keys, remembering which ones somebody read.

A key that nobody read and that is not known to be harmless may change the result, so
the converter refuses it by name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from colibri_kit.errors import FormatError

if TYPE_CHECKING:
    from colibri_kit.gguf.reader import GgufFile

#: keys that cannot change a logit
HARMLESS = frozenset({
    "vocab_size", "expert_shared_count", "tensor_data_layout", "pooling_type",
    "rope.scaling.original_context_length", "rope.scaling.finetuned",
    "attention.layer_norm_epsilon", "expert_shared_feed_forward_length",
    "expert_feed_forward_length", "decoder_sparse_step", "classifier.output_labels",
})  # fmt: skip

#: key -> values under which it changes nothing; any other value is refused
NEUTRAL: dict[str, tuple[object, ...]] = {
    "expert_weights_scale": (0.0, 1.0),
    "expert_gating_func": (0, 1),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "leading_dense_block_count": (0,),
    "interleave_moe_layer_step": (0, 1),
    "moe_every_n_layers": (0, 1),
    "nextn_predict_layers": (0,),
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.temperature_length": (0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "use_parallel_residual": (False,),
    "rope.scaling.attn_factor": (1.0,),
    "embedding_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "logit_scale": (0.0, 1.0),
    "attention.scale": (0.0,),
    "swin_norm": (False,),
}


def unsupported(message: str, hint: str | None = None) -> FormatError:
    """A well-formed model that the engine cannot run."""
    return FormatError(message, code="CK-FORMAT-UNSUPPORTED", hint=hint, state="unchanged")


class HParams:
    """Reads ``arch.KEY``; every getter raises FormatError naming file and key."""

    def __init__(self, gguf: GgufFile, arch: str) -> None:
        self._gguf, self.arch = gguf, arch
        self._read: set[str] = set()

    def fail(self, key: str, what: str, hint: str | None = None) -> NoReturn:
        raise unsupported(f"{self._gguf.name}: {self.arch}.{key}: {what}", hint)

    def raw(self, key: str) -> Any:
        """The value or None; the key counts as read."""
        self._read.add(key)
        return self._gguf.kv.get(f"{self.arch}.{key}")

    def integer(self, key: str, default: int | None = None, *, low: int = 1, high: int = 1 << 31) -> int:
        """A whole number in [low, high). An array (one a layer) counts when all are equal."""
        value = self.raw(key)
        if value is not None and hasattr(value, "tolist"):
            values = value.tolist()
            if not values or any(v != values[0] for v in values):
                self.fail(key, "differs between layers, which the engine does not support")
            value = values[0]
        if value is None:
            if default is None:
                self.fail(key, "is missing")
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            self.fail(key, f"is {value!r}, not a whole number")
        if not low <= value < high:
            self.fail(key, f"is {value}, outside {low} … {high - 1}")
        return value

    def number(self, key: str, default: float | None = None, *, positive: bool = True) -> float:
        """A finite number; as the shortest decimal that is the same binary32."""
        value = self.raw(key)
        if value is None:
            if default is None:
                self.fail(key, "is missing")
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            self.fail(key, f"is {value!r}, not a finite number")
        if value < 0 or (positive and value == 0):
            self.fail(key, f"is {value!r}, which is not possible")
        return shortest(float(value))

    def flag(self, key: str, default: bool) -> bool:
        value = self.raw(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.fail(key, f"is {value!r}, not a bool")
        return value

    def text(self, key: str, default: str) -> str:
        value = self.raw(key)
        if value is None:
            return default
        if not isinstance(value, str):
            self.fail(key, f"is {value!r}, not text")
        return value

    def check_rest(self, ignore: Sequence[str]) -> list[str]:
        """Refuses every key that nobody read; returns the ignored ones that were present.

        Args:
            ignore: full key names that the user declared harmless.
        """
        ignored = []
        prefix = self.arch + "."
        for full in self._gguf.kv:
            key = full[len(prefix) :]
            if not full.startswith(prefix) or key in self._read or key in HARMLESS:
                continue
            value = self._gguf.kv[full]
            if full in ignore:
                ignored.append(full)
            elif key in NEUTRAL:
                if not isinstance(value, (bool, int, float)) or value not in NEUTRAL[key]:
                    self.fail(key, f"is {_show(value)}, which the engine does not support")
            elif key.startswith("rope.scaling.yarn_"):
                continue  # yarn itself is refused by rope.scaling.type
            else:
                self.fail(
                    key,
                    f"is {_show(value)}; this kit does not know the key, and it may change the result",
                    f"if you know that it does not matter: --ignore-key {full}",
                )
        return ignored


def _show(value: Any) -> str:
    text = repr(value.tolist() if hasattr(value, "tolist") else value)
    return text if len(text) <= 60 else text[:57] + "…"


def shortest(value: float) -> float:
    """The shortest decimal that reads back as the same binary32: 1e-05, not 9.99999974e-06."""
    import numpy as np

    with np.errstate(over="ignore"):
        return float(str(np.float32(value)))
