"""A model's chat template as fixed parts, when it is no more than that.

Boards have no Jinja. Most templates only put text before and after each message; then

    first + Σ (prefix[role] + text + suffix[role]) + generation

is the whole template, and the manifest stores the pieces. They are found by rendering
marked messages and confirmed by rendering other dialogues and comparing.

The template is foreign code: it runs in jinja2's immutable sandbox, in a process of its
own with limits on time, memory and output.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

TIMEOUT_S = 5.0
MAX_TEMPLATE = 256 * 1024
MAX_RENDERED = 64 * 1024
MAX_MEMORY = 512 * 1024 * 1024
MAX_PART = 1023  # bytes; the engine keeps parts in fixed buffers (native/model/chat.h)
_BOS = "\u2042BOS\u2042"  # stands for bos_token while parts are sought

Message = dict[str, str]
Render = Callable[[Sequence[Message], bool], str]


class _Undecomposable(Exception):
    """The template does more than put text around messages; str() says what."""


def chat_parts(template: Any, bos: str, eos: str, *, add_bos: bool) -> dict[str, Any]:
    """The manifest's ``chat`` object.

    Args:
        template: tokenizer.chat_template, or None.
        bos, eos: texts of those tokens, "" if there are none.
        add_bos: the tokenizer adds BOS itself; the template's own is dropped then.

    Returns:
        ``{"template": "parts", …}`` or ``{"template": "none", "reason": …}``; never raises
        for what the template does.
    """
    if template is None:
        return _none("the model has no chat template")
    if not isinstance(template, str) or len(template) > MAX_TEMPLATE:
        return _none(f"the chat template is not text of at most {MAX_TEMPLATE} characters")
    job = json.dumps({"template": template, "bos": bos, "eos": eos, "add_bos": add_bos})
    try:
        done = subprocess.run(
            [sys.executable, "-m", "colibri_kit.convert.chat"],
            input=job.encode(),
            capture_output=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return _none(f"the chat template ran longer than {TIMEOUT_S:.0f} s")
    if done.returncode != 0:
        return _none("the chat template broke its limits of time or memory")
    parts: dict[str, Any] = json.loads(done.stdout)
    return parts


def _none(reason: str) -> dict[str, Any]:
    return {"template": "none", "reason": reason}


def render_parts(parts: dict[str, Any], messages: Sequence[Message], generation: bool) -> str:
    """The text that the parts stand for; what the engine does too."""
    out = [parts["first"]]
    default = parts["system_default"]
    if default and (not messages or messages[0]["role"] != "system"):
        out += [parts["prefix"]["system"], default, parts["suffix"]["system"]]
    for m in messages:
        role = m["role"]
        text = m["content"].strip() if parts.get("trims", {}).get(role) else m["content"]
        out += [parts["prefix"][role], text, parts["suffix"][role]]
    return "".join(out) + (parts["generation"] if generation else "")


# ---- inside the worker -----------------------------------------------------


def decompose(render: Render, bos: str) -> dict[str, Any]:
    """Finds and confirms the parts.

    Args:
        render: the template.
        bos: what ``bos_token`` is in it: a mark that no template writes by itself.

    Raises:
        _Undecomposable: with the reason.
    """
    s, u, a, v = "\u2042Q1", "\u2042Q2", "\u2042Q3", "\u2042Q4"
    talk = _say(("user", u), ("assistant", a), ("user", v))
    with_system = [{"role": "system", "content": s}, *talk]
    head_s, gap_su, gap_ua, gap_av, tail_u = _split(render(with_system, False), (s, u, a, v))
    head_u = _split(render(talk[:1], False), (u,))[0]
    tail_a = _split(render(with_system[:3], False), (s, u, a))[-1]
    prefix_u = gap_av[len(tail_a) :] if gap_av.startswith(tail_a) else None
    if prefix_u is None or not (gap_su.endswith(prefix_u) and head_u.endswith(prefix_u)):
        # An assistant's last message ends differently; only those before a user's matter.
        prefix_u = _common_end(_common_end(gap_su, gap_av), head_u)
    before_u = _cut(head_u, prefix_u)
    first = before_u if head_s.startswith(before_u) else bos if head_s.startswith(bos) else ""
    parts: dict[str, Any] = {
        "template": "parts",
        "first": first,
        "system_default": "",
        "prefix": {
            "system": head_s[len(first) :],
            "user": prefix_u,
            "assistant": _strip_left(gap_ua, tail_u, "a user's message ends differently at the end"),
        },
        "suffix": {"system": _cut(gap_su, prefix_u), "user": tail_u, "assistant": _cut(gap_av, prefix_u)},
        "generation": _strip_left(
            render(with_system, True), render(with_system, False), "the generation prompt changes the rest"
        ),
    }
    parts["system_default"] = _default_system(before_u, parts)
    _confirm(render, parts)
    return parts


def _cut(text: str, end: str) -> str:
    return text[: len(text) - len(end)]


def _common_end(a: str, b: str) -> str:
    n = 0
    while n < min(len(a), len(b)) and a[-1 - n] == b[-1 - n]:
        n += 1
    return a[len(a) - n :]


def _default_system(head: str, parts: dict[str, Any]) -> str:
    """The system text that the template takes when the caller gives none; ``head`` is what
    stands before the first user prefix then."""
    head = _strip_left(head, parts["first"], "the beginning depends on the system message")
    if not head:
        return ""
    prefix, suffix = parts["prefix"]["system"], parts["suffix"]["system"]
    if len(head) <= len(prefix) + len(suffix) or not (head.startswith(prefix) and head.endswith(suffix)):
        raise _Undecomposable("the default system message has another form")
    return head[len(prefix) : len(head) - len(suffix)]


def _confirm(render: Render, parts: dict[str, Any]) -> None:
    """Other texts, other lengths: the parts must give the template's own rendering.

    Dialogues end with the user, as every prompt does. Sets ``trims`` for the roles whose text
    loses the white space around it: whoever fills the parts must take it off too.
    """
    dialogues = [
        _say(("system", "Be brief."), ("user", "One?"), ("assistant", "1"), ("user", "Two, then")),
        _say(("user", "Zwei \u00fcber drei"), ("assistant", "a\nb"), ("user", "x")),
        _say(("user", "Hello")),
    ]
    for messages in dialogues:
        if render(messages, True) != render_parts(parts, messages, True):
            raise _Undecomposable("it does more than put text around messages (re-rendering differs)")
    trims = {role: True for role in ("system", "user", "assistant") if _trims(render, parts, role)}
    if trims:
        parts["trims"] = trims
    spaced = _say(("system", _SPACED), ("user", _SPACED), ("assistant", _SPACED), ("user", _SPACED))
    if render(spaced, True) != render_parts(parts, spaced, True):
        raise _Undecomposable("it changes the text of messages")


#: White space of several kinds: a template's own ``strip('\n')`` is no trim.
_SPACED = " \t\u2003spaces around\u00a0 \n\n"


def _trims(render: Render, parts: dict[str, Any], role: str) -> bool:
    """Whether the template strips the texts of ``role``.

    Raises:
        _Undecomposable: it neither leaves nor strips them.
    """
    before: list[tuple[str, str]] = [] if role != "assistant" else [("user", "One")]
    after: list[tuple[str, str]] = [] if role == "user" else [("user", "Two")]

    def dialogue(text: str) -> list[Message]:
        return _say(*before, (role, text), *after)

    got = render(dialogue(_SPACED), True)
    if got == render_parts(parts, dialogue(_SPACED), True):
        return False
    if got == render_parts(parts, dialogue(_SPACED.strip()), True):
        return True
    raise _Undecomposable(f"it changes the text of a message ({role})")


def _check_parts(parts: dict[str, Any]) -> None:
    texts = [parts["first"], parts["system_default"], parts["generation"]]
    texts += [*parts["prefix"].values(), *parts["suffix"].values()]
    if any(len(t.encode()) > MAX_PART or "\0" in t for t in texts):
        raise _Undecomposable(f"a part is longer than {MAX_PART} bytes or holds a NUL")


def _fill_bos(parts: dict[str, Any], bos: str, *, add_bos: bool) -> dict[str, Any]:
    """The BOS mark becomes BOS's text; dropped at the beginning when the tokenizer adds it."""
    if add_bos and parts["first"] in (_BOS, bos):
        parts["first"] = ""
    for key, value in parts.items():
        if isinstance(value, dict):
            parts[key] = {k: t.replace(_BOS, bos) if isinstance(t, str) else t for k, t in value.items()}
        elif isinstance(value, str):
            parts[key] = value.replace(_BOS, bos)
    return parts


def _say(*turns: tuple[str, str]) -> list[Message]:
    return [{"role": role, "content": text} for role, text in turns]


def _split(text: str, marks: Sequence[str]) -> list[str]:
    """The text between the marks, each of which must occur once and in order."""
    out, rest = [], text
    for mark in marks:
        before, found, rest = rest.partition(mark)
        if not found or text.count(mark) != 1:
            raise _Undecomposable("it does not repeat every message once, in order")
        out.append(before)
    return [*out, rest]


def _strip_left(text: str, start: str, why: str) -> str:
    if not text.startswith(start):
        raise _Undecomposable(why)
    return text[len(start) :]


def _renderer(template: str, bos: str, eos: str) -> Render:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)

    def refuse(message: object) -> None:
        raise _Undecomposable(f"it refuses such a dialogue: {str(message)[:80]}")

    env.globals["raise_exception"] = refuse
    env.globals["strftime_now"] = lambda _format: refuse("it writes today's date")
    env.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    compiled = env.from_string(template)

    def render(messages: Sequence[Message], generation: bool) -> str:
        out, size = [], 0
        values = {"messages": list(messages), "bos_token": bos, "eos_token": eos, "tools": None}
        for piece in compiled.generate(add_generation_prompt=generation, **values):
            out.append(piece)
            size += len(piece)
            if size > MAX_RENDERED:
                raise _Undecomposable(f"it renders more than {MAX_RENDERED} characters")
        return "".join(out)

    return render


def _limit() -> None:
    try:
        import resource
    except ImportError:  # Windows: the timeout alone
        return
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (int(TIMEOUT_S), int(TIMEOUT_S) + 1))


def _worker() -> None:
    from jinja2 import TemplateError

    job = json.loads(sys.stdin.buffer.read())
    _limit()
    try:
        parts = decompose(_renderer(job["template"], _BOS, job["eos"]), _BOS)
        parts = _fill_bos(parts, job["bos"], add_bos=job["add_bos"])
        _check_parts(parts)
    except _Undecomposable as err:
        parts = _none(str(err))
    except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as err:
        parts = _none(f"the chat template fails: {type(err).__name__}: {str(err)[:120]}")
    except (MemoryError, RecursionError):
        parts = _none("the chat template broke its limits of time or memory")
    sys.stdout.write(json.dumps(parts))


if __name__ == "__main__":
    _worker()
