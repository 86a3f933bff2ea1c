"""What a recipe makes of a release's service, and what is refused with its place in the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_deploy_service import RECIPES, SETTINGS, parcel, rendered, spec_of

from colibri_kit.config import load_board, load_recipe
from colibri_kit.config.recipe import Service as Wanted
from colibri_kit.deploy import job, plan, serving
from colibri_kit.errors import ConfigError, UsageError


@pytest.mark.parametrize("name", sorted(p.name for p in RECIPES.glob("*.yaml")))
def test_shipped_recipes_load(name: str) -> None:
    recipe, model = load_recipe(str(RECIPES / name))
    assert model.is_absolute()
    if recipe.service is not None:
        assert rendered(spec_of(name)).text


def test_every_key_of_the_service_reaches_the_engine() -> None:
    """Each key that is an option of `serve` is a line of the options file, or a word of the command."""
    values: dict[str, Any] = {
        "listen": "127.0.0.1:9", "unix": "/run/colibri/s", "token_file": "/etc/t", "allow_host": ("a", "b"),
        "log": "json", "hot_swap": True, "lock": True, "body": 4096,
    }  # fmt: skip
    keys = Wanted.options_keys()
    options = serving.ServeOptions(**{key: values.get(key, 7) for key in keys})
    text = serving.Spec("systemd", options).options_text(plan.Settings(ctx=512, kv="q8_0"))
    words = [*text.splitlines()[1:], " ".join(options.address())]
    assert sorted(words) == sorted(
        ["ctx 512", "kv q8_0", "--listen 127.0.0.1:9 --unix /run/colibri/s", "token-file /etc/t",
         "allow-host a", "allow-host b", "log json", "hot-swap", "lock", "body 4096", "health-interval 30",
         *(f"{key.replace('_', '-')} 7" for key in keys if key not in values)]
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("service: {listn: 127.0.0.1:1}", "unknown key 'service.listn'; did you mean 'listen'"),
        ("service: {listen: board.local:80}", "service.listen"),
        ("service: {listen: none}", "nobody able to ask"),
        ("service: {unix: /tmp/x.sock}", "service.unix"),
        ("service: {unix: /run/colibri/../x}", "service.unix"),
        ("service: {token_file: tokens}", "service.token_file"),
        ('service: {token_file: "/etc/a b"}', "service.token_file"),
        ("service: {allow_host: ['a b']}", "service.allow_host"),
        ("service: {sequences: 33}", "a batch of at least as many"),
        ("service: {sequences: 65, batch: 256}", "service.sequences"),
        ("service: {queue: 0}", "service.queue"),
        ("service: {body: 512}", "service.body"),
        ("service: {body: 1KiB, drain: 1h}", "service.drain: expected a whole number"),
        ("service: {watchdog: 1}", "service.watchdog"),
        ("service: {restart: sometimes}", "service.restart"),
        ("service: {lock: yes}", "service.lock: expected true or false"),
        ("weights: fast", "weights"),
        ("cache_experts: some", "cache_experts"),
        ("check: {expekt: x}", "did you mean 'expect'"),
        ("check: {max_new: 513}", "check.max_new"),
    ],
)
def test_wrong_recipes_are_refused_with_their_place(text: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(f"name: r\nmodel: m.coli\nboard: rpi4\n{text}\n")
    with pytest.raises(ConfigError) as caught:
        load_recipe(str(path))
    assert told in caught.value.message and f"{path}:4:" in caught.value.message


@pytest.mark.parametrize(
    ("weights", "more", "told"),
    [
        ("preload", {"cache_policy": "lfu"}, "cache_policy goes with weights arena, not preload"),
        ("mmap", {"cache_experts": "0"}, "cache_experts goes with weights arena, not mmap"),
        ("lazy", {"cache_experts": "all", "cache_policy": "lru"}, "cache_experts goes with weights arena"),
    ],
)
def test_what_the_engine_would_refuse_is_refused_here(weights: str, more: dict[str, str], told: str) -> None:
    """Half from the recipe, half from the command line: before anything is sent."""
    from colibri_kit.commands.deploy import _settings

    recipe, _ = load_recipe(str(RECIPES / "a53-plc.yaml"))
    names = ("budget", "ctx", "threads", "weights", "kv", "cache_experts", "cache_policy", "offload")
    given: dict[str, Any] = dict.fromkeys(names)
    half = recipe.model_copy(update=more)
    with pytest.raises(UsageError, match=told):
        _settings({**given, "weights": weights}, half, 0, False)
    assert _settings({**given, "weights": "arena"}, half, 0, False).weights == "arena"
    assert (
        _settings({**given, "weights": weights, **dict.fromkeys(more)}, recipe, 0, False).weights == weights
    )


def test_outside_needs_a_token() -> None:
    found, _ = load_recipe(str(RECIPES / "rpi4-gateway.yaml"))
    assert found.service is not None
    bare = found.model_copy(update={"service": found.service.model_copy(update={"token_file": None})})
    with pytest.raises(UsageError, match="token_file is needed"):
        job.service_of(load_board("rpi4"), parcel(), SETTINGS, bare)
    for listen, outside in [
        ("127.0.0.1:1", False), ("127.8.0.1:1", False), ("[::1]:1", False), ("localhost:1", False),
        ("none", False), ("0.0.0.0:1", True), ("[::]:1", True), ("10.0.0.1:1", True),
    ]:  # fmt: skip
        assert serving.ServeOptions(listen=listen).outside is outside, listen
    with pytest.raises(UsageError, match="no service manager"):
        job.service_of(load_board("host"), parcel(), SETTINGS, None)


def test_watchdog_outlasts_one_piece_of_a_prompt() -> None:
    """4 GB: a Pi 4's card reads them in 97.6 s; 32 tokens through them take 34.6 s of its memory."""
    pi = load_board("rpi4")
    assert serving.watchdog_seconds(4 * 10**9, pi) == 240  # 30 + 1.5 * 132.2 = 228, in whole minutes
    assert serving.watchdog_seconds(10**6, pi) == 60
    assert serving.watchdog_seconds(10**12, pi) == 3600
    assert spec_of("rpi4-gateway.yaml").watchdog == 600
    # Three checks of the engine's own are no sooner.
    for seconds in (2, 60, 61, 240, 3600):
        assert 3 * serving.self_check_seconds(seconds) >= seconds
