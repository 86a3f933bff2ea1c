"""Chat templates as parts: found, confirmed, and hostile ones declined."""

from __future__ import annotations

import time
from typing import Any

import pytest
from gguf_maker import CHATML

from colibri_kit.convert.chat import chat_parts, render_parts


def test_a_simple_template_becomes_parts_that_render_the_same() -> None:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    parts = chat_parts(CHATML, "<|im_start|>", "<|im_end|>", add_bos=False)
    assert parts["template"] == "parts" and parts["first"] == ""
    talk = [
        {"role": r, "content": t}
        for r, t in (("system", "S"), ("user", "U {{x}}"), ("assistant", "A"), ("user", "V"))
    ]
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    want = env.from_string(CHATML).render(messages=talk, add_generation_prompt=True)
    assert render_parts(parts, talk, True) == want


LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|h|>{{ m.role }}<|/h|>\n\n{{ m.content | trim }}<|eot|>"
    "{% endfor %}{% if add_generation_prompt %}<|h|>assistant<|/h|>\n\n{% endif %}"
)
EVERYBODY = {"system": True, "user": True, "assistant": True}
ANSWERS_TRIMMED = (
    "{% for m in messages %}<s>{{ m.role }}\n"
    "{{ m.content.strip() if m.role == 'assistant' else m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
DEFAULTED = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<s>system\nBe kind.</s>\n{% endif %}"
    "<s>{{ m.role }}\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
LAST_DIFFERS = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% if not loop.last %}{{ '\n' }}{% endif %}{% else %}"
    "{{ '\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def test_bos_default_system_and_trimming_are_found() -> None:
    parts = chat_parts(LLAMA3, "<B>", "", add_bos=False)
    assert (parts["template"], parts["first"], parts["trims"]) == ("parts", "<B>", EVERYBODY)
    assert chat_parts(LLAMA3, "<B>", "", add_bos=True)["first"] == ""
    assert chat_parts(ANSWERS_TRIMMED, "", "", add_bos=False)["trims"] == {"assistant": True}
    parts = chat_parts(DEFAULTED, "", "", add_bos=False)
    assert "trims" not in parts
    assert (parts["template"], parts["system_default"]) == ("parts", "Be kind.")
    assert parts["prefix"]["user"] == "<s>user\n" and parts["suffix"]["system"] == "</s>\n"
    parts = chat_parts(LAST_DIFFERS, "<B>", "<E>", add_bos=False)
    assert (parts["template"], parts["suffix"]["assistant"]) == ("parts", "<E>\n")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (None, "no chat template"),
        (7, "not text"),
        ("{{ messages", "TemplateSyntaxError"),
        ("hello", "does not repeat every message"),
        ("{% for m in messages %}{{ m.content | upper }}{% endfor %}", "re-rendering differs"),
        ("{% for m in messages %}<{{ m.role }}>{{ m.content.rstrip() }}</>{% endfor %}", "text of a message"),
        (
            "{% for m in messages %}<{{ m.role }}>{{ m.content.strip('\\n') }}</>{% endfor %}",
            "text of a message",
        ),
        ("{% for m in messages %}{{ loop.index }}{{ m.content }}{% endfor %}", ""),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ strftime_now('%d') }}", "date"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
        ("{{ messages.clear() }}", "SecurityError"),
        ("{{ cycler.__init__.__globals__.os.system('true') }}", "SecurityError"),
        ("{{ 'a' * 10**10 }}", "limits of time or memory"),
        ("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "limits of time or memory"),
        ("{% for i in range(9999) %}{% for j in range(9999) %}x{% endfor %}{% endfor %}", "renders more"),
    ],
)
def test_other_templates_are_declined_with_a_reason(template: Any, reason: str) -> None:
    parts = chat_parts(template, "<s>", "</s>", add_bos=False)
    assert parts["template"] == "none" and reason in parts["reason"]


def test_an_endless_template_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    from colibri_kit.convert import chat

    monkeypatch.setattr(chat, "TIMEOUT_S", 1.0)
    loops = "".join(f"{{% for x{i} in range(99999) %}}" for i in range(4)) + "{% endfor %}" * 4
    start = time.monotonic()
    assert "longer than 1 s" in chat_parts(loops, "", "", add_bos=False)["reason"]
    assert time.monotonic() - start < 10
