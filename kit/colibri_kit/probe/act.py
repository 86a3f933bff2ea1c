"""Runs a probe over a transport."""

from __future__ import annotations

from typing import TYPE_CHECKING

from colibri_kit.errors import EngineError
from colibri_kit.probe import result
from colibri_kit.probe.plan import ProbePlan
from colibri_kit.probe.result import Result

if TYPE_CHECKING:
    from colibri_kit.transport.base import Transport

#: Exit statuses of the engine -> last part of the error's code.
_CODES = {2: "USAGE", 3: "FORMAT", 4: "BUDGET", 5: "GOLDEN", 6: "EXPERT"}


def run(transport: Transport, plan: ProbePlan) -> Result:
    """The measurement's result.

    Raises:
        EngineError: the engine did not start, failed, or answered nonsense.
        TransferError: the link was lost, or it took longer than the plan allows.
    """
    from colibri_kit.deploy.health import explain

    done = transport.run(plan.argv, timeout=plan.timeout)
    if done.rc == 130:
        raise KeyboardInterrupt
    if done.rc != 0:
        hint = None
        if done.rc == 2 and "unknown" in done.err_text:
            hint = "the board's engine is older than this kit: deploy again"
        raise EngineError(
            f"the probe on {transport.describe()} ended with status {done.rc}: {explain(done)}",
            hint=hint,
            state="nothing was changed",
            code=f"CK-ENGINE-{_CODES[done.rc]}" if done.rc in _CODES else "CK-ENGINE",
        )
    return result.parse(done.out)
