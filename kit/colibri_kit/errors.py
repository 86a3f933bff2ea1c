"""The exception tree. Only these reach the user without a traceback.

KitError
├── UsageError         2   the command line is wrong
├── ConfigError        3   a board or recipe file is wrong
├── UnreachableError   4   no such board, or it does not answer
├── AuthError          5   host key, password or key refused
├── PreflightError     6   refused before anything was changed
├── TransferError      7   bytes did not arrive
├── VerifyError        8   bytes arrived or lie there wrong
│   └── FormatError    8   a GGUF or .coli file is malformed, unknown or hostile
├── HealthError        9   the new release is unwell; rolled back
├── RollbackError     10   rolling back failed too
├── LimitError        11   a measured figure exceeds a given limit
├── BuildError        12   the compiler or the instruction scan refused
└── EngineError       13   the C engine reported an error
Interrupted          130   Ctrl-C
"""

from __future__ import annotations


class KitError(Exception):
    """An error for the user's eyes: what happened, the state things are in, the next command.

    Args:
        message: what happened, one or more sentences.
        hint: the next thing to do, preferably a command to type.
        state: what condition board, disk or file are left in ("unchanged", …).
        code: stable short code (``CK-FORMAT-003``); also the anchor in docs/errors.md.
    """

    exit_status = 1
    default_code = "CK-INTERNAL"

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        state: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.state = state
        self.code = code or self.default_code

    def as_json(self) -> dict[str, object]:
        """The ``error`` object of ``--json`` output."""
        return {
            "code": self.code,
            "message": self.message,
            "hint": self.hint,
            "state": self.state,
            "exit_status": self.exit_status,
        }


class UsageError(KitError):
    exit_status = 2
    default_code = "CK-USAGE"


class ConfigError(KitError):
    exit_status = 3
    default_code = "CK-CONFIG"


class UnreachableError(KitError):
    exit_status = 4
    default_code = "CK-UNREACHABLE"


class AuthError(KitError):
    exit_status = 5
    default_code = "CK-AUTH"


class PreflightError(KitError):
    exit_status = 6
    default_code = "CK-PREFLIGHT"


class TransferError(KitError):
    exit_status = 7
    default_code = "CK-TRANSFER"


class VerifyError(KitError):
    exit_status = 8
    default_code = "CK-VERIFY"


class FormatError(VerifyError):
    default_code = "CK-FORMAT"


class HealthError(KitError):
    exit_status = 9
    default_code = "CK-HEALTH"


class RollbackError(KitError):
    exit_status = 10
    default_code = "CK-ROLLBACK"


class LimitError(KitError):
    exit_status = 11
    default_code = "CK-LIMIT"


class BuildError(KitError):
    exit_status = 12
    default_code = "CK-BUILD"


class EngineError(KitError):
    exit_status = 13
    default_code = "CK-ENGINE"
