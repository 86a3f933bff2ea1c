"""The ``colibri-kit`` command: finds the verb's module, runs it, maps errors to exit statuses.

No logic lives here. Verbs load lazily so that ``--help`` stays fast: a verb's
one-line help is repeated in ``VERBS`` and a test holds the two equal.
"""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import click

from colibri_kit import __version__
from colibri_kit.errors import KitError, UsageError
from colibri_kit.ui import Ui

#: verb -> one-line help. The module is commands/<verb>.py (dashes become underscores).
VERBS: dict[str, str] = {
    "board": "Bring virtual boards up and down.",
    "boards": "List board profiles, or show one.",
    "build": "Compile the engine for a board.",
    "convert": "Turn a GGUF into a checked .coli model.",
    "demo": "Take a small model from GGUF to a measured engine on this machine.",
    "deploy": "Put engine and weights on a board, start them, check them.",
    "detect": "Show media, serial ports and boards within reach.",
    "doctor": "Check this machine, or a board, and name a remedy for each fault.",
    "flash": "Write a card, an image, or a board over its serial line.",
    "inspect": "Show what a GGUF or .coli model holds.",
    "logits": "Run token ids through a model and save the logits.",
    "logs": "Show a board's engine log.",
    "offload": "Compute experts for a board over a cable, or measure it.",
    "plan": "Show what a model takes on a board, and whether it fits.",
    "probe": "Measure latency, speed and memory on a board.",
    "rollback": "Go back to the previous release on a board.",
    "run": "Generate text, here or on a board.",
    "status": "Show which release a board runs and how it is.",
    "top": "Watch a board's service live.",
    "trace": "Draw hit rates from recorded expert choices.",
    "tunnel": "Bring a board's service to a port of this machine.",
    "undeploy": "Remove the engine and its releases from a board.",
    "upcycle": "Make a Mixture-of-Experts GGUF from a dense one.",
    "verify": "Check every byte and the golden of a .coli model.",
}

F = TypeVar("F", bound=Callable[..., Any])


class LazyGroup(click.Group):
    """Lists verbs from VERBS; imports a verb's module only to run it."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(VERBS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in VERBS:
            return None
        module = importlib.import_module(f"colibri_kit.commands.{name.replace('-', '_')}")
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl(sorted(VERBS.items()))


def ui_options(func: F) -> F:
    """``--json``, ``-q`` and ``-v``: every verb has them; the verb takes ``ui: Ui`` first."""

    @click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
    @click.option("-q", "--quiet", is_flag=True, help="No notes, no progress.")
    @click.option("-v", "--verbose", is_flag=True, help="Say each step.")
    def wrapper(as_json: bool, quiet: bool, verbose: bool, **kwargs: Any) -> Any:
        ui = Ui(as_json=as_json, quiet=quiet, verbose=verbose)
        click.get_current_context().find_root().obj = ui
        return func(ui, **kwargs)

    wrapper.__name__ = func.__name__
    wrapper.__doc__ = func.__doc__
    params = getattr(func, "__click_params__", [])
    wrapper.__click_params__ = wrapper.__click_params__ + params  # type: ignore[attr-defined]
    return wrapper  # type: ignore[return-value]


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="colibri-kit")
def root() -> None:
    """Deploy Mixture-of-Experts models to small boards."""


def main(argv: list[str] | None = None) -> None:
    """Entry point: runs the verb and exits with the status that docs/errors.md lists."""
    try:
        root.main(args=argv, prog_name="colibri-kit", standalone_mode=False)
    except click.exceptions.Exit as stop:
        sys.exit(stop.exit_code)
    except click.ClickException as err:
        ui = _current_ui(argv)
        if ui.as_json:
            ui.error(_usage(err))
        else:
            err.show()
        sys.exit(2)
    except (click.Abort, KeyboardInterrupt):
        _current_ui(argv).interrupted()
        sys.exit(130)
    except KitError as err:
        ui = _current_ui(argv)
        ui.error(err)
        sys.exit(err.exit_status)


def _usage(err: click.ClickException) -> UsageError:
    """What click says of a command line, as the kit's own error. Pure."""
    context = getattr(err, "ctx", None)  # click has none where it cannot tell whose option it was
    path = context.command_path if context is not None else "colibri-kit"
    return UsageError(err.format_message(), hint=f"{path} --help", state="nothing was done")


def _current_ui(argv: list[str] | None) -> Ui:
    args = sys.argv[1:] if argv is None else argv
    return Ui(as_json="--json" in itertools.takewhile(lambda arg: arg != "--", args))
