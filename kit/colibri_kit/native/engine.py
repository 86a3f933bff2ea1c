"""One loaded model in this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from colibri_kit.errors import EngineError, UsageError
from colibri_kit.native import binding
from colibri_kit.native.options import options

FINISH = ("length", "eog", "stop", "cancel", "context")
NO_TOKEN = 0xFFFFFFFF
_EBUDGET = -4


def _ledger(ffi: Any, lib: Any, raw: Any) -> dict[str, Any]:
    lines = {ffi.string(lib.cb_ledger_name(i)).decode(): int(n) for i, n in enumerate(raw.bytes)}
    return {
        "lines": lines,
        "total": int(raw.total),
        "budget": int(raw.budget),
        "available": int(raw.available),
        "slots": int(raw.slots),
        "records": int(raw.records),
        "slot_bytes": int(raw.slot_bytes),
    }


def _info(ffi: Any, raw: Any) -> dict[str, Any]:
    out = binding.plain_dict(ffi, raw)
    for key in ("bos", "eos"):
        out[key] = None if out[key] == NO_TOKEN else out[key]
    out["add_bos"] = bool(out["add_bos"])
    return out


def plan(model_dir: str | os.PathLike[str], **settings: Any) -> dict[str, Any]:
    """What a model would take, without loading it.

    Args:
        settings: as :func:`colibri_kit.native.options.options` takes them.

    Returns:
        ``{"fits": bool, "message": str, "ledger": {…}, "info": {…}}`` with the ledger as
        :meth:`Engine.ledger` gives it; sizes in bytes.

    Raises:
        FormatError, UsageError, EngineError: the model or an option is wrong.
    """
    ffi, lib = binding.load()
    opt, _keep = options(ffi, model_dir, **settings)
    ledger, info, err = (ffi.new(f"struct {n} *") for n in ("cb_ledger", "cb_info", "cb_err"))
    rc = lib.cb_plan(opt, ledger, info, err)
    if rc != _EBUDGET:
        binding.raise_for(ffi, rc, err, f"planning {model_dir}")
    return {
        "fits": rc == 0,
        "message": ffi.string(err.msg).decode("utf-8", "replace"),
        "ledger": _ledger(ffi, lib, ledger),
        "info": _info(ffi, info),
    }


class Engine:
    """One model, one session. Use as a context manager; not for two threads at once.

    Args:
        settings: ctx, threads, budget (bytes), batch, isa, kv, over_budget, weights,
            cache_experts, on_bad, …: as :func:`colibri_kit.native.options.options` takes them.

    Raises:
        FormatError: the model's files are damaged. PreflightError: it does not fit (the sum is
        in the message). UsageError, EngineError: an option is wrong, or the system refused.
    """

    def __init__(self, model_dir: str | os.PathLike[str], **settings: Any) -> None:
        self._handle: Any = None
        self._ffi, self._lib = binding.load()
        opt, self._keep = options(self._ffi, model_dir, **settings)
        out, self._err = self._ffi.new("struct cb_engine **"), self._ffi.new("struct cb_err *")
        self._check(self._lib.cb_engine_open(opt, out, self._err), f"opening {model_dir}")
        self._handle = out[0]
        info = self.info()
        self._n_vocab, self._n_moe, self._n_used = (
            info["n_vocab"], info["n_moe_layer"], info["n_expert_used"],
        )  # fmt: skip

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Frees everything; closing twice is fine."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self._lib.cb_engine_close(handle)

    def __del__(self) -> None:
        self.close()

    @property
    def _e(self) -> Any:
        if self._handle is None:
            raise EngineError("the engine is closed")
        return self._handle

    def _check(self, rc: int, doing: str) -> None:
        binding.raise_for(self._ffi, rc, self._err, doing)

    def info(self) -> dict[str, Any]:
        """``struct cb_info`` as a dict; bos and eos are None where the model has none."""
        raw = self._ffi.new("struct cb_info *")
        self._lib.cb_engine_info(self._e, raw)
        return _info(self._ffi, raw)

    def ledger(self) -> dict[str, Any]:
        """``{"lines": {name: bytes}, "total", "budget", "available", "slots", "records", "slot_bytes"}``."""
        raw = self._ffi.new("struct cb_ledger *")
        self._lib.cb_engine_ledger(self._e, raw)
        return _ledger(self._ffi, self._lib, raw)

    def reset(self) -> None:
        """Position 0; counters stay."""
        self._lib.cb_reset(self._e)

    def swap(self, model_dir: str | os.PathLike[str]) -> None:
        """Takes over another release of the same geometry; needs ``hot_swap``. The session starts anew.

        Raises:
            KitError: the new one is damaged, different or fails its golden; the old one stays.
        """
        rc = self._lib.cb_swap(self._e, os.fsencode(Path(model_dir)), self._err)
        self._check(rc, f"taking over {model_dir}")

    def position(self) -> int:
        """Tokens in the session."""
        return int(self._lib.cb_position(self._e))

    def _tokens(self, tokens: Sequence[int] | npt.NDArray[np.int32]) -> tuple[Any, int, Any]:
        wide = np.asarray(tokens, dtype=np.int64).reshape(-1)
        ids = np.ascontiguousarray(wide, dtype=np.int32)
        if not np.array_equal(wide, ids):
            raise UsageError("a token id does not fit in 32 bits")
        return self._ffi.from_buffer("int32_t[]", ids), len(ids), ids

    def eval(
        self,
        tokens: Sequence[int] | npt.NDArray[np.int32],
        want_all: bool = True,
        want_experts: bool = True,
    ) -> tuple[npt.NDArray[np.float32] | None, npt.NDArray[np.int32] | None]:
        """Runs T tokens from the current position.

        Returns:
            Logits ``[T, n_vocab]`` float32, and chosen experts in rank order ``[n_moe_layer, T,
            n_expert_used]`` int32; None for what was not wanted.
        """
        pointer, n, _keep = self._tokens(tokens)
        logits = np.empty((n, self._n_vocab), np.float32) if want_all else None
        experts = np.empty((self._n_moe, n, self._n_used), np.int32) if want_experts else None
        all_out, experts_out = self._ffi.NULL, self._ffi.NULL
        if logits is not None and logits.size:
            all_out = self._ffi.from_buffer("float[]", logits)
        if experts is not None and experts.size:
            experts_out = self._ffi.from_buffer("int32_t[]", experts)
        rc = self._lib.cb_eval(self._e, pointer, n, all_out, experts_out, self._err)
        self._check(rc, "evaluating tokens")
        return logits, experts

    def logits(self) -> npt.NDArray[np.float32]:
        """The last token's logits ``[n_vocab]``, a copy."""
        raw = self._ffi.buffer(self._lib.cb_logits(self._e), self._n_vocab * 4)
        return np.frombuffer(raw, np.float32).copy()

    def golden(self) -> str:
        """Hex sha256 of the fixed tokens' logits, as computed here and now."""
        out = self._ffi.new("char[65]")
        self._check(self._lib.cb_golden(self._e, out, self._err), "computing the golden")
        return str(self._ffi.string(out).decode())

    def encode(self, text: str | bytes, special: bool = True, strict: bool = True) -> list[int]:
        """Token ids of a text; special tokens in it become their ids when special is set.

        Raises:
            UsageError: not UTF-8 (names the byte offset).
        """
        raw = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else bytes(text)
        cap = len(raw) + 16
        ids = self._ffi.new("int32_t[]", cap)
        n = self._lib.cb_encode(
            self._e, self._ffi.from_buffer(raw), len(raw), int(special), int(strict), ids, cap, self._err
        )
        self._check(n, "encoding the text")
        return [int(i) for i in ids[0:n]]

    def decode(self, ids: Sequence[int], special: bool = False) -> bytes:
        """The bytes of the tokens, one after the other; control tokens only when special is set."""
        size = self._ffi.new("size_t *")
        out = bytearray()
        for i in ids:
            if not 0 <= int(i) < self._n_vocab:
                raise UsageError(f"token {i} is not in the vocabulary of {self._n_vocab}")
            data = self._lib.cb_token_bytes(self._e, int(i), int(special), size)
            if data != self._ffi.NULL:
                out += self._ffi.buffer(data, size[0])[:]
        return bytes(out)

    def is_eog(self, token: int) -> bool:
        """Whether a token ends a generation."""
        return bool(self._lib.cb_is_eog(self._e, token))

    def generate(
        self,
        prompt_ids: Sequence[int],
        max_new: int,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repeat_penalty: float = 1.0,
        repeat_last_n: int = 64,
        seed: int = 0,
        stop: Sequence[str] = (),
        on_text: Callable[[str], bool | None] | None = None,
    ) -> tuple[list[int], str, dict[str, Any]]:
        """Generates from the current position; greedy unless temperature is above 0.

        Args:
            on_text: called with each piece of text; returning True stops.

        Returns:
            Generated ids, their text, and ``{"n_prompt", "n_gen", "finish", "ns_first",
            "ns_total"}``.
        """
        ffi = self._ffi
        pointer, n, _keep = self._tokens(prompt_ids)
        sampling = ffi.new("struct cb_sampling *")
        self._lib.cb_sampling_default(sampling)
        sampling.temperature, sampling.top_k, sampling.top_p = temperature, top_k, top_p
        sampling.min_p, sampling.repeat_penalty = min_p, repeat_penalty
        sampling.repeat_last_n, sampling.seed = repeat_last_n, seed
        stops = [ffi.new("char[]", s.encode()) for s in stop]
        stop_list = ffi.new("char *[]", stops) if stops else ffi.NULL
        ids: list[int] = []
        pieces: list[bytes] = []
        failed: list[BaseException] = []

        def take(_ud: Any, text: Any, size: int, token: int) -> int:
            if token >= 0:
                ids.append(token)
            if size:
                pieces.append(ffi.buffer(text, size)[:])
                if on_text is not None:
                    return int(bool(on_text(pieces[-1].decode("utf-8", "replace"))))
            return 0

        def broken(_kind: Any, err: BaseException, _tb: Any) -> int:
            failed.append(err)
            return 1

        callback = ffi.callback("cb_text_fn", take, error=1, onerror=broken)
        result = ffi.new("struct cb_gen_result *")
        rc = self._lib.cb_generate(
            self._e, pointer, n, max_new, sampling, stop_list, len(stops), callback, ffi.NULL,
            result, self._err,
        )  # fmt: skip
        if failed:
            raise failed[0]
        self._check(rc, "generating")
        facts = binding.plain_dict(ffi, result)
        facts["finish"] = FINISH[facts["finish"]]
        return ids, b"".join(pieces).decode("utf-8", "replace"), facts

    def counters(self) -> dict[str, int]:
        """``struct cb_counters`` as a dict; times in nanoseconds."""
        raw = self._ffi.new("struct cb_counters *")
        self._lib.cb_engine_counters(self._e, raw)
        return binding.plain_dict(self._ffi, raw)

    def offload(self) -> dict[str, Any]:
        """``struct cb_offload_info`` as a dict: how the link to a module is."""
        raw = self._ffi.new("struct cb_offload_info *")
        self._lib.cb_engine_offload(self._e, raw)
        return binding.plain_dict(self._ffi, raw)

    def route_ns(self) -> list[int]:
        """Routing time of the last eval, nanoseconds for each MoE layer."""
        return [int(self._lib.cb_route_ns(self._e)[i]) for i in range(self._n_moe)]

    def last_experts(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """Experts and their weights of the last token, each ``[n_moe_layer, n_expert_used]``."""
        shape, size = (self._n_moe, self._n_used), self._n_moe * self._n_used * 4
        if not size:
            return np.empty(shape, np.int32), np.empty(shape, np.float32)
        experts = np.frombuffer(self._ffi.buffer(self._lib.cb_last_experts(self._e), size), np.int32)
        weights = np.frombuffer(self._ffi.buffer(self._lib.cb_last_weights(self._e), size), np.float32)
        return experts.reshape(shape).copy(), weights.reshape(shape).copy()
