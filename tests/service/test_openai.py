"""The `openai` package against the real binary; texts compared with `colibri run`, numbers with numpy."""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path

import engine_build as eb
import numpy as np
import openai
import pytest

from tests.service.rig import Service, with_chat

PROMPT = "The board is small"
SAMPLING = {"temperature": 0.8, "top_p": 0.9, "seed": 11}
OURS = {"top_k": 30, "min_p": 0.02, "repeat_penalty": 1.2}


@pytest.fixture(scope="module")
def client(service: Service) -> openai.OpenAI:
    return openai.OpenAI(base_url=service.url + "/v1", api_key="not-needed", max_retries=0)


def run_text(model: Path, prompt: str, n: int, *options: str, **s: float) -> str:
    """What `colibri run` says: the loop in core/generate.c, one sequence, no server."""
    words = [f"--{k.replace('_', '-').replace('temperature', 'temp')}={v}" for k, v in s.items()]
    return eb.ok_json("run", "--model", model, "--prompt", prompt, "-n", str(n), *words, *options)["text"]


@pytest.mark.parametrize("seed", [12, 13, 14])
def test_completion_is_what_run_says(client: openai.OpenAI, model: Path, seed: int) -> None:
    s = {**SAMPLING, "seed": seed}
    got = client.completions.create(model="colibri", prompt=PROMPT, max_tokens=40, extra_body=OURS, **s)
    assert got.choices[0].text == run_text(model, PROMPT, 40, **s, **OURS)
    assert got.usage is not None
    ids = eb.ok("tokenize", "--model", model, stdin=PROMPT.encode()).stdout.split()
    assert got.usage.prompt_tokens == len(ids)
    assert got.usage.total_tokens == len(ids) + got.usage.completion_tokens


@pytest.mark.parametrize("seed", range(6))
def test_seeds_and_greedy_as_run(client: openai.OpenAI, model: Path, seed: int) -> None:
    s = {"temperature": 0.0 if seed == 0 else 1.3, "top_p": 1.0, "seed": seed}
    got = client.completions.create(model="colibri", prompt=f"{seed} pi", max_tokens=60, **s)
    assert got.choices[0].text == run_text(model, f"{seed} pi", 60, top_k=0, min_p=0, **s)


def test_chat_renders_the_template(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model="colibri",
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "!"}]},
            {"role": "assistant", "content": "Yes?"},
            {"role": "user", "content": "Grüße 🐦"},
        ],
        max_completion_tokens=30,
        **SAMPLING,
    )
    rendered = "<|s|>Be brief.\n<|u|>Hi!\n<|a|>Yes?\n<|u|>Grüße 🐦\n<|a|>"
    plain = client.completions.create(model="colibri", prompt=rendered, max_tokens=30, **SAMPLING)
    assert chat.choices[0].message.content == plain.choices[0].text
    assert chat.choices[0].message.role == "assistant"
    assert chat.usage == plain.usage


def test_chat_trims_what_the_template_trims(plain: Path, tmp_path: Path) -> None:
    """By role, as Jinja's trim: what Python's str.strip() takes off, also when it came in parts."""
    space = "".join(c for c in map(chr, range(0x110000)) if c.isspace())
    near = "\u200b\u2060\ufeff\u180e"  # look like white space, and are none
    trims = {"system": True, "user": True}
    model = with_chat(plain, tmp_path / "trims.coli", trims=trims)
    texts = [("system", f"{space}Be brief.{space}"), ("user", f"{space}{near} a{space}b {near}{space}"),
             ("assistant", " kept "), ("user", space), ("user", "no space")]  # fmt: skip
    rendered = (
        "".join(f"<|{role[0]}|>{text.strip() if role in trims else text}\n" for role, text in texts) + "<|a|>"
    )
    with Service(model, "--ctx", "512") as s:
        parts = [
            {"type": "text", "text": part}
            for part in (space[:5], space[5:], f"{near} a{space}b {near}", space)
        ]
        messages = [{"role": role, "content": text} for role, text in texts]
        for content in (messages[1]["content"], parts):
            messages[1]["content"] = content
            ask = {"messages": messages, "max_tokens": 5, "seed": 1, "temperature": 0}
            _, chat = s.post("/v1/chat/completions", ask)
            _, same = s.post(
                "/v1/completions", {"prompt": rendered, "max_tokens": 5, "seed": 1, "temperature": 0}
            )
            assert chat["choices"][0]["message"]["content"] == same["choices"][0]["text"]
            assert chat["usage"] == same["usage"]
    system, user = texts[0][1], texts[1][1]
    told = run_text(model, user, 5, "--chat", f"--system={system}", "--ctx=512", temperature=0)
    rendered = f"<|s|>{system.strip()}\n<|u|>{user.strip()}\n<|a|>"
    assert told == run_text(model, rendered, 5, "--ctx=512", temperature=0)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_stream_is_the_same_answer(client: openai.OpenAI, seed: int) -> None:
    ask = {"model": "colibri", "messages": [{"role": "user", "content": "Hello"}], "seed": seed}
    whole = client.chat.completions.create(max_tokens=80, **ask)
    parts = list(
        client.chat.completions.create(
            max_tokens=80, stream=True, stream_options={"include_usage": True}, **ask
        )
    )
    assert "".join(p.choices[0].delta.content or "" for p in parts[:-1]) == whole.choices[0].message.content
    assert parts[0].choices[0].delta.role == "assistant"
    assert [p.choices[0].finish_reason for p in parts[:-2]] == [None] * (len(parts) - 2)
    assert parts[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert (parts[-1].choices, parts[-1].usage) == ([], whole.usage)
    assert len({p.id for p in parts}) == 1


def test_async_together_is_as_one_by_one(service: Service) -> None:
    """More at once than sequences: batches of all sizes, and a queue."""

    async def ask(client: openai.AsyncOpenAI, seed: int) -> str:
        got = await client.completions.create(
            model="colibri", prompt="word " * (seed * 7 + 1), max_tokens=70, seed=seed
        )
        return got.choices[0].text

    async def all_of_them(together: bool) -> list[str]:
        async with openai.AsyncOpenAI(base_url=service.url + "/v1", api_key="x", max_retries=0) as client:
            if together:
                return list(await asyncio.gather(*(ask(client, i) for i in range(10))))
            return [await ask(client, i) for i in range(10)]

    serial = asyncio.run(all_of_them(False))
    assert asyncio.run(all_of_them(True)) == serial
    assert len(set(serial)) == 10


def test_async_stream(service: Service) -> None:
    async def read() -> str:
        async with openai.AsyncOpenAI(base_url=service.url + "/v1", api_key="x") as client:
            stream = await client.completions.create(
                model="colibri", prompt=PROMPT, max_tokens=30, stream=True, seed=5
            )
            return "".join([p.choices[0].text async for p in stream])

    assert asyncio.run(read()) == service.complete(PROMPT, max_tokens=30, seed=5)["choices"][0]["text"]


# ---- stop ------------------------------------------------------------------


def find_border(service: Service) -> tuple[int, str, str]:
    """(seed, text, a stop string that is the end of one token and the start of the next)."""
    for seed in range(60):
        choice = service.complete(PROMPT, max_tokens=60, seed=seed, logprobs=0)["choices"][0]
        tokens, text = choice["logprobs"]["tokens"], choice["text"]
        for left, right in itertools.pairwise(tokens[6:]):
            words = left.strip().isalpha() and right.strip().isalpha() and len(left) > 1 < len(right)
            stop = left[-1] + right[:1]
            if words and text.count(stop) == 1:
                return seed, text, stop
    raise AssertionError("no seed gives two words in a row")


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_across_token_borders(service: Service, client: openai.OpenAI, stream: bool) -> None:
    seed, text, stop = find_border(service)
    cut = text.index(stop)
    ask = {
        "model": "colibri",
        "prompt": PROMPT,
        "max_tokens": 60,
        "seed": seed,
        "stop": ["never there", stop],
    }
    if stream:
        parts = list(client.completions.create(stream=True, **ask))
        got, reason = "".join(p.choices[0].text for p in parts), parts[-1].choices[0].finish_reason
    else:
        one = client.completions.create(**ask)
        got, reason = one.choices[0].text, one.choices[0].finish_reason
    assert (got, reason) == (text[:cut], "stop")
    short = service.complete(PROMPT, max_tokens=60, seed=seed, stop=stop, logprobs=1)["choices"][0]
    tokens = [t for t in short["logprobs"]["tokens"] if not t.startswith(("bytes:", "<"))]
    assert got.endswith(tokens[-1][:-1]) or got.endswith(tokens[-1])  # it may reach into the stop string


# ---- logprobs --------------------------------------------------------------


def log_softmax(model: Path, ids: list[int], tmp_path: Path) -> np.ndarray:
    """float64 [n][n_vocab] of the logits that the tool writes."""
    np.save(tmp_path / "ids.npy", np.array(ids, np.int32))
    eb.ok("logits", "--model", model, "--tokens", tmp_path / "ids.npy", "-o", tmp_path / "l.npy")
    x = np.load(tmp_path / "l.npy").astype(np.float64)
    x -= x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def test_logprobs_are_the_models(
    service: Service, client: openai.OpenAI, model: Path, tmp_path: Path
) -> None:
    ids = [5, 17, 300, 44, 9]
    greedy: list[int] = []
    for _ in range(4):
        greedy.append(int(log_softmax(model, ids + greedy, tmp_path)[-1].argmax()))
    rows = log_softmax(model, ids + greedy, tmp_path)[len(ids) - 1 : -1]
    got = (
        client.completions.create(model="colibri", prompt=ids, max_tokens=4, temperature=0, logprobs=5)
        .choices[0]
        .logprobs
    )
    assert got is not None and got.token_logprobs is not None and got.top_logprobs is not None
    want = [rows[i][t] for i, t in enumerate(greedy)]
    assert np.allclose(got.token_logprobs, want, atol=2e-6)
    for i, top in enumerate(got.top_logprobs):
        assert np.allclose(list(top.values()), np.sort(rows[i])[::-1][:5], atol=2e-6)


def test_chat_logprobs(client: openai.OpenAI) -> None:
    ask = {"model": "colibri", "messages": [{"role": "user", "content": "Hi"}], "seed": 3, "max_tokens": 20}
    choice = client.chat.completions.create(logprobs=True, top_logprobs=4, **ask).choices[0]
    assert choice.logprobs is not None and choice.logprobs.content is not None
    raw = b"".join(bytes(t.bytes or []) for t in choice.logprobs.content)
    assert raw.decode(errors="replace").count("�") <= (choice.message.content or "").count("�")
    for t in choice.logprobs.content:
        assert len(t.top_logprobs) == 4
        values = [x.logprob for x in t.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert t.logprob <= values[0] <= 0
        assert np.exp(values).sum() <= 1
    parts = list(client.chat.completions.create(logprobs=True, top_logprobs=4, stream=True, **ask))
    streamed = [t for p in parts if p.choices[0].logprobs for t in p.choices[0].logprobs.content or []]
    assert streamed == choice.logprobs.content


def test_offsets_count_characters(service: Service) -> None:
    choice = service.complete(PROMPT, max_tokens=60, seed=4, logprobs=1)["choices"][0]
    offsets, tokens, text = choice["logprobs"]["text_offset"], choice["logprobs"]["tokens"], choice["text"]
    assert offsets[0] == 0 and offsets == sorted(offsets)
    for at, token in zip(offsets, tokens, strict=True):
        if not token.startswith(("bytes:", "<")):  # control tokens have a name, but no text
            assert text[at : at + len(token)] == token


# ---- limits and refusals ------------------------------------------------------


def test_max_tokens_and_the_context(client: openai.OpenAI) -> None:
    for n in (1, 2, 17):
        got = client.completions.create(model="colibri", prompt=[7], max_tokens=n, temperature=0)
        assert got.usage is not None
        if got.choices[0].finish_reason == "length":
            assert got.usage.completion_tokens == n
    got = client.completions.create(model="colibri", prompt=[7] * 510, max_tokens=50, seed=1)
    assert got.usage is not None and got.usage.completion_tokens <= 3
    with pytest.raises(openai.BadRequestError, match="context of 512") as caught:
        client.completions.create(model="colibri", prompt="a b" * 700, max_tokens=1)
    assert caught.value.code == "context_length_exceeded"


def test_models(client: openai.OpenAI) -> None:
    (one,) = client.models.list().data
    assert client.models.retrieve(one.id) == one
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")
    assert client.completions.create(model=one.id, prompt="x", max_tokens=1).model == one.id
    with pytest.raises(openai.NotFoundError, match="there is no model"):
        client.completions.create(model="gpt-4", prompt="x")


REFUSED = [
    ("n", {"n": 2}),
    ("best_of", {"best_of": 3}),
    ("echo", {"echo": True}),
    ("suffix", {"suffix": "x"}),
    ("logit_bias", {"logit_bias": {"5": 1}}),
    ("frequency_penalty", {"frequency_penalty": 0.5}),
    ("presence_penalty", {"presence_penalty": -1}),
    ("temperature", {"temperature": 2.5}),
    ("temperature", {"temperature": "hot"}),
    ("top_p", {"top_p": 1.01}),
    ("top_k", {"top_k": -1}),
    ("min_p", {"min_p": 7}),
    ("repeat_penalty", {"repeat_penalty": 0}),
    ("seed", {"seed": -3}),
    ("seed", {"seed": 1.5}),
    ("max_tokens", {"max_tokens": 0}),
    ("max_tokens", {"max_tokens": 1e3}),
    ("stop", {"stop": ["a", "b", "c", "d", "e"]}),
    ("stop", {"stop": ""}),
    ("stop", {"stop": "x" * 65}),
    ("stop", {"stop": [1]}),
    ("logprobs", {"logprobs": 6}),
    ("logprobs", {"logprobs": True}),
    ("stream", {"stream": "yes"}),
    ("stream_options", {"stream_options": {"include_usage": True}}),
    ("stream_options", {"stream": True, "stream_options": {"other": 1}}),
    ("prompt", {"prompt": ["a", "b"]}),
    ("prompt", {"prompt": []}),
    ("prompt", {"prompt": ""}),
    ("prompt", {"prompt": {}}),
    ("prompt", {"prompt": [1, 2, 512]}),
    ("prompt", {"prompt": [1, "a"]}),
    ("messages", {"messages": []}),
    ("max_completion_tokens", {"max_completion_tokens": 4}),
    ("nonsense", {"nonsense": None}),
]


@pytest.mark.parametrize(("field", "more"), REFUSED)
def test_what_is_not_supported_is_refused_by_name(service: Service, field: str, more: dict) -> None:
    status, doc = service.post(
        "/v1/completions", {"model": "colibri", "prompt": "x", "max_tokens": 2, **more}
    )
    assert status == 400
    error = doc["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == field
    assert field in error["message"] or "prompt" in error["message"] or "stop" in error["message"]


@pytest.mark.parametrize(
    ("field", "number", "words"),
    [
        ("seed", "-1", "seed is not a whole number from 0 up"),
        ("max_tokens", "1e1", "max_tokens is not a whole number in plain digits"),
        ("temperature", "0." + "1" * 70, "temperature has 72 characters, at most 63 are read"),
    ],
)
def test_numbers_that_are_not_read_are_told_why(
    service: Service, field: str, number: str, words: str
) -> None:
    status, doc = service.post("/v1/completions", f'{{"prompt": "x", "{field}": {number}}}'.encode())
    assert status == 400 and doc["error"]["message"].startswith(words), doc


CHAT_REFUSED = [
    ("messages", {"messages": []}),
    ("messages", {"messages": "hi"}),
    ("messages", {"messages": [5]}),
    ("messages.role", {"messages": [{"role": "tool", "content": "x"}]}),
    ("messages.role", {"messages": [{"content": "x"}]}),
    ("messages.content", {"messages": [{"role": "user"}]}),
    ("messages.content", {"messages": [{"role": "user", "content": 5}]}),
    (
        "messages.content",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
    ),
    ("messages", {"messages": [{"role": "user", "content": "x", "tool_calls": [1]}]}),
    ("tools", {"tools": [{"type": "function"}]}),
    ("tool_choice", {"tool_choice": "auto"}),
    ("response_format", {"response_format": {"type": "json_object"}}),
    ("logprobs", {"logprobs": 2}),
    ("top_logprobs", {"top_logprobs": 2}),
    ("top_logprobs", {"logprobs": True, "top_logprobs": 21}),
    ("top_logprobs", {"logprobs": True, "top_logprobs": 20, "max_tokens": 500}),
    ("max_completion_tokens", {"max_tokens": 3, "max_completion_tokens": 4}),
    ("prompt", {"prompt": "x"}),
    ("reasoning_effort", {"reasoning_effort": "high"}),
]


@pytest.mark.parametrize(("field", "more"), CHAT_REFUSED)
def test_chat_refusals(service: Service, field: str, more: dict) -> None:
    ask = {"messages": [{"role": "user", "content": "x"}], **more}
    status, doc = service.post("/v1/chat/completions", ask)
    assert (status, doc["error"]["param"]) == (400, field), doc


def test_neutral_and_harmless_fields_are_taken(service: Service) -> None:
    more = {
        "n": 1, "logit_bias": {}, "frequency_penalty": 0, "presence_penalty": 0.0, "user": "me", "seed": 1,
        "response_format": {"type": "text"}, "tools": [], "store": False, "metadata": {"a": "b"},
        "stop": None,
    }  # fmt: skip
    status, doc = service.post(
        "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3, **more}
    )
    assert status == 200, doc
    assert set(doc["colibri"]) >= {"degraded", "zeros", "extra", "seed"}


def test_a_model_without_template_says_so(plain: Path) -> None:
    with Service(plain) as s:
        status, doc = s.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})
    assert status == 400
    assert "no chat template" in doc["error"]["message"]


# ---- UTF-8 -------------------------------------------------------------------


def test_utf8_is_never_cut(service: Service) -> None:
    """Random weights give stray bytes and whole characters; every event alone is UTF-8."""
    from tests.service.rig import parse, request

    seen = 0
    for seed in range(12):
        ask = {"prompt": "é", "max_tokens": 120, "seed": seed, "temperature": 1.6}
        whole = service.complete(**ask)["choices"][0]["text"]
        body = json.dumps({**ask, "stream": True}).encode()
        status, data = parse(service.raw(request("POST", "/v1/completions", body)))
        assert status == 200
        events = [e.removeprefix(b"data: ") for e in data.split(b"\n\n") if e.startswith(b"data: ")]
        assert events[-1] == b"[DONE]"
        texts = [json.loads(e.decode("utf-8"))["choices"][0]["text"] for e in events[:-1]]
        assert "".join(texts) == whole
        seen += sum(ord(c) > 127 and c != "�" for c in whole)
    assert seen > 0
