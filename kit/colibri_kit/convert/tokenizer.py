"""A GGUF's tokenizer metadata as tokenizer.coli (docs/tokenizer.md) and manifest entry.

Byte-level BPE only (``tokenizer.ggml.model`` "gpt2"). Token types, end-of-generation
tokens and defaults follow llama.cpp (src/llama-vocab.cpp), against whose ids the tests
compare. Reads a mapping, opens no file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from colibri_kit.convert.container import KIND_TOKENIZER, Crc, crc32c, pack_head
from colibri_kit.convert.tokenizer_tables import (
    CONTROL,
    RSTRIP,
    SECTIONS,
    Vocabulary,
    build_payload,
)
from colibri_kit.errors import FormatError

_CODE = "CK-FORMAT-TOKENIZER"

# Pre-tokenizers: number in the file (native/text/pretok.c) and the names GGUF files give it.
_PRE_NAMES: dict[int, str] = {
    0: "default",
    1: "gpt-2 phi-2 olmo mpt jais trillion granite-docling exaone4 gigachat a.x-4.0 mellum",
    2: "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2",
    3: "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 dbrx smaug-bpe glm4 chatglm-bpe",
    4: "qwen2 deepseek-r1-qwen kormo f2llmv2 stablelm2 hunyuan megrez solar-open grok-2 "
    "bailingmoe bailingmoe2 llada-moe",
    5: "qwen35",
    6: "gpt-4o llama4 kanana2 talkie minimax-m2",
    7: "tekken",
    8: "falcon",
}
PRE_TOKENIZERS: dict[str, int] = {name: n for n, names in _PRE_NAMES.items() for name in names.split()}
# A word that is a token is taken whole, and BOS is added unless the file says otherwise.
_WHOLE_WORDS = set(
    ["llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken"]
)

_OTHER_MODELS = {
    "llama": "SentencePiece",
    "bert": "WordPiece",
    "t5": "SentencePiece Unigram",
    "rwkv": "RWKV",
    "gemma4": "SentencePiece-style BPE",
}

NORMAL, UNKNOWN, TYPE_CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

_EOG_TEXTS = set(
    [
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|flush|>",
        "<|calls|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "</s>",
        "<|eom_id|>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "<|end_of_text|>",
        "<end_of_utterance>",
        "<eos>",
        "<turn|>",
        "<|tool_response>",
        "<｜end▁of▁sentence｜>",
        "[e~[",
    ]
)
# Fill-in-the-middle tokens, used when the metadata does not name one; the last three end a generation.
_FIM: dict[str, tuple[str, ...]] = {
    "fim_pre": tuple(
        [
            "<|fim_prefix|>",
            "<fim-prefix>",
            "<fim_prefix>",
            "<｜fim▁begin｜>",
            "<PRE>",
            "▁<PRE>",
            "<|code_prefix|>",
            "<|prefix|>",
        ]
    ),
    "fim_suf": tuple(
        [
            "<|fim_suffix|>",
            "<fim-suffix>",
            "<fim_suffix>",
            "<｜fim▁hole｜>",
            "<SUF>",
            "▁<SUF>",
            "<|code_suffix|>",
            "<|suffix|>",
        ]
    ),
    "fim_mid": tuple(
        [
            "<|fim_middle|>",
            "<fim-middle>",
            "<fim_middle>",
            "<｜fim▁end｜>",
            "<MID>",
            "▁<MID>",
            "<|code_middle|>",
            "<|middle|>",
        ]
    ),
    "fim_pad": tuple(["<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"]),
    "fim_rep": tuple(["<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"]),
    "fim_sep": ("<|file_sep|>",),
}
_FIM_ENDS = ("fim_pad", "fim_rep", "fim_sep")
_ALWAYS_SHOWN = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")  # gpt-oss


@dataclass(frozen=True)
class ExportedTokenizer:
    """tokenizer.coli but for the model id, and the manifest's ``tokenizer`` object."""

    directory: bytes
    payload: bytes
    manifest: dict[str, Any]
    n_vocab: int
    entries: int = len(SECTIONS)

    def file_bytes(self, model_id: bytes, *, crc: Crc = crc32c) -> bytes:
        """The whole file; ``model_id`` has 16 bytes."""
        head = pack_head(
            KIND_TOKENIZER, 0, self.entries, self.directory, len(self.payload), model_id, crc=crc
        )
        return head + self.payload


def export_tokenizer(kv: Mapping[str, object], *, crc: Crc = crc32c) -> ExportedTokenizer:
    """The tokenizer in GGUF metadata.

    Args:
        kv: values as str, bytes, int, bool, lists or numpy arrays. Tokens and merges are in
            GPT-2's byte alphabet, special tokens in plain text.

    Raises:
        FormatError: another kind of tokenizer, an unknown pre-tokenizer, or metadata that
            contradicts itself.
    """
    vocabulary = read_vocabulary(kv)
    directory, payload = build_payload(vocabulary, crc)
    manifest: dict[str, Any] = {"eog": sorted(vocabulary.eog), "add_bos": vocabulary.add_bos}
    if vocabulary.bos is not None:
        manifest["bos"] = vocabulary.bos
    if vocabulary.eos is not None:
        manifest["eos"] = vocabulary.eos
    return ExportedTokenizer(directory, payload, manifest, vocabulary.n_vocab)


def read_vocabulary(kv: Mapping[str, object]) -> Vocabulary:
    """The metadata as pieces, merges and special tokens; see :func:`export_tokenizer`."""
    pre, name = _pre_tokenizer(kv)
    texts = _texts(kv)
    types = _types(kv, len(texts))
    id_of = {text: i for i, text in enumerate(texts)}
    if len(id_of) != len(texts):
        twice = next(t for i, t in enumerate(texts) if id_of[t] != i)
        raise _bad(f"token {twice!r} appears twice in the vocabulary")
    eog = _adjust_types(kv, texts, types, id_of)
    decoded = [_from_alphabet(t) for t in texts]
    raw = [_raw(t, d, k) for t, d, k in zip(texts, decoded, types, strict=True)]
    exact = {t: i for i, t in enumerate(texts) if decoded[i] == raw[i]}
    pieces, merges, byte_ids = _merges(kv, raw, exact)
    whole = name in _WHOLE_WORDS
    bos = _token_id(kv, "bos", len(texts))
    add_bos = kv.get("tokenizer.ggml.add_bos_token", whole)
    return Vocabulary(
        pre=pre,
        pieces=pieces,
        types=types,
        byte_ids=byte_ids,
        merges=merges,
        special=_special(kv, texts, types),
        words=list(exact.values()) if whole else [],
        ignore_merges=whole,
        add_bos=bool(add_bos) and bos is not None,
        bos=bos,
        eos=_token_id(kv, "eos", len(texts)),
        unk=_token_id(kv, "unknown", len(texts)),
        eog=sorted(eog),
    )


# ---- metadata ---------------------------------------------------------------


def _bad(what: str, hint: str | None = None) -> FormatError:
    return FormatError(f"tokenizer: {what}", code=_CODE, hint=hint)


def _text(value: object) -> str:
    """str or bytes as str; bytes that are no UTF-8 survive as surrogates."""
    if isinstance(value, str):
        if value.isascii() or not any("\ud800" <= c <= "\udfff" for c in value):
            return value
        return _utf8(value).decode("utf-8", "surrogateescape")
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value).decode("utf-8", "surrogateescape")
    raise _bad(f"expected a string, found {type(value).__name__}")


def _pre_tokenizer(kv: Mapping[str, object]) -> tuple[int, str]:
    model = _text(kv.get("tokenizer.ggml.model", ""))
    if model != "gpt2":
        kind = _OTHER_MODELS.get(model)
        raise _bad(
            f"model {model!r}{f' ({kind})' if kind else ''} is not supported, only 'gpt2' (byte-level BPE)",
            "choose a model with a byte-level BPE tokenizer: Qwen, SmolLM, OLMoE, Granite, Llama 3",
        )
    name = _text(kv.get("tokenizer.ggml.pre", "default")) or "default"
    if name not in PRE_TOKENIZERS:
        raise _bad(
            f"unknown pre-tokenizer {name!r}",
            "known are: " + ", ".join(sorted(PRE_TOKENIZERS)),
        )
    return PRE_TOKENIZERS[name], name


def _strings(kv: Mapping[str, object], key: str) -> list[str]:
    values = kv.get(key)
    if values is None or isinstance(values, (str, bytes, int, float)):
        raise _bad(f"{key} is missing or not a list")
    return [_text(v) for v in cast(Iterable[object], values)]


def _texts(kv: Mapping[str, object]) -> list[str]:
    texts = _strings(kv, "tokenizer.ggml.tokens")
    if not 0 < len(texts) <= 1 << 24:
        raise _bad(f"{len(texts)} tokens")
    return [t or f"[EMPTY_{i}]" for i, t in enumerate(texts)]


def _types(kv: Mapping[str, object], n: int) -> list[int]:
    """Token types; llama.cpp's "undefined" shows and matches nothing, as "unused"."""
    values = kv.get("tokenizer.ggml.token_type")
    if values is None:
        return [NORMAL] * n
    types = [int(v) for v in cast(Iterable[Any], values)]
    if len(types) < n:
        raise _bad(f"{len(types)} token types for {n} tokens")
    return [t if NORMAL <= t <= BYTE else UNUSED for t in types[:n]]


def _token_id(kv: Mapping[str, object], name: str, n: int) -> int | None:
    value = kv.get(f"tokenizer.ggml.{name}_token_id")
    if value is None:
        return None
    number = int(cast(Any, value))
    if not 0 <= number < n:
        raise _bad(f"{name}_token_id is {number}, but there are {n} tokens")
    return number


def _adjust_types(
    kv: Mapping[str, object], texts: list[str], types: list[int], id_of: Mapping[str, int]
) -> set[int]:
    """Makes tokens that look like control tokens such (in place); returns what ends a generation."""
    n = len(texts)
    eog = {id_of[t] for t in _EOG_TEXTS if t in id_of}
    for i in eog:
        types[i] = TYPE_CONTROL
    for name, candidates in _FIM.items():
        old = {"fim_pre": "prefix", "fim_suf": "suffix", "fim_mid": "middle"}.get(name, name)
        token = _token_id(kv, name, n)
        token = _token_id(kv, old, n) if token is None else token
        if token is None:
            token = next((id_of[t] for t in candidates if t in id_of), None)
            if token is not None:
                types[token] = TYPE_CONTROL
        if token is not None and name in _FIM_ENDS:
            eog.add(token)
    for name in ("eos", "eot", "eom"):
        token = _token_id(kv, name, n)
        if token is not None:
            eog.add(token)
    for t in _ALWAYS_SHOWN:
        if t in id_of:
            types[id_of[t]] = USER_DEFINED
    found = {texts[i] for i in eog}
    calls = found & {"<|call|>", "<|calls|>"}
    if "<|end|>" in found and (({"<|return|>"} <= found and calls) or ({"<|flush|>"} <= found and calls)):
        eog.discard(id_of["<|end|>"])  # harmony: ends a message, not the answer
        types[id_of["<|end|>"]] = USER_DEFINED
    return eog


def _special(kv: Mapping[str, object], texts: list[str], types: list[int]) -> dict[int, int]:
    """Flags of the tokens that are looked for before the text is cut into words."""
    name = _text(kv.get("general.name", "")).lower()
    strip = RSTRIP if "phi-3" in name or "phi3" in name else 0
    kept = {"<unk>", "<s>", "<|endoftext|>"}
    return {
        i: (0 if types[i] == USER_DEFINED else CONTROL) | (0 if texts[i] in kept else strip)
        for i in range(len(types))
        if types[i] in (UNKNOWN, TYPE_CONTROL, USER_DEFINED)
    }


# ---- GPT-2's byte alphabet ----------------------------------------------------


def byte_alphabet() -> list[str]:
    """The character that stands for each byte: itself when printable, else U+0100 and on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(b) if b in printable else chr(next(others)) for b in range(256)]


_ALPHABET = byte_alphabet()
# Characters below U+0100 outside the alphabet must not pass for bytes.
_TO_BYTES = {i: "\uffff" for i in range(256)} | {ord(c): chr(b) for b, c in enumerate(_ALPHABET)}


def _from_alphabet(text: str) -> bytes | None:
    """The bytes that a token's characters stand for, or None when one is no byte."""
    try:
        return text.translate(_TO_BYTES).encode("latin-1")
    except UnicodeEncodeError:
        return None


def _utf8(text: str) -> bytes:
    """The bytes that _text() read, or those of a str with lone surrogates."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")


def _raw(text: str, decoded: bytes | None, kind: int) -> bytes:
    """What a token prints: special tokens their text, the others the bytes they stand for."""
    if kind == BYTE and len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        try:
            return bytes([int(text[3:5], 16)])
        except ValueError:
            raise _bad(f"byte token {text!r}") from None
    if decoded is None or kind in (UNKNOWN, TYPE_CONTROL, USER_DEFINED):
        return _utf8(text)
    return decoded


def _merges(
    kv: Mapping[str, object], raw: list[bytes], exact: Mapping[str, int]
) -> tuple[list[bytes], list[tuple[int, int, int] | None], list[int]]:
    """(pieces, merges, piece of each byte). Strings that are no token become pieces behind them."""
    pieces, number = list(raw), dict(exact)

    def piece(text: str) -> int | None:
        found = number.get(text)
        if found is None:
            data = _from_alphabet(text)
            if not data:
                return None
            found = number[text] = len(pieces)
            pieces.append(data)
        return found

    byte_ids = [cast(int, piece(c)) for c in _ALPHABET]
    merges: list[tuple[int, int, int] | None] = []
    for line in _strings(kv, "tokenizer.ggml.merges"):
        at = line.find(" ", 1)
        if at < 0:
            raise _bad(f"merge {line!r} does not have two parts")
        left, right = line[:at], line[at + 1 :]
        a, b, c = piece(left), piece(right), piece(left + right)
        # A part outside the byte alphabet never occurs in a text.
        merges.append(None if a is None or b is None or c is None else (a, b, c))
    return pieces, merges, byte_ids
