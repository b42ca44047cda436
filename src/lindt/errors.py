"""What bad input gets: one sentence that names the field, the value and the fix."""

from __future__ import annotations

import errno
import reprlib
from typing import Final, get_args

_SHORT: Final = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxdict, _SHORT.maxlist, _SHORT.maxtuple = 4, 12, 12, 12
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 200


class UserError(Exception):
    """Something the user can mend. The command line prints it and exits with 2, without a traceback."""


class PlanError(UserError, ValueError):
    """A field of a plan that cannot be: `environment.privacy.sigma = -1: ...`."""

    def __init__(self, field: str, value: object, fix: str) -> None:
        super().__init__(field, value, fix)
        self.field, self.value, self.fix = field, value, fix

    def __str__(self) -> str:
        return f"{one_line(self.field)} = {in_short(self.value)}: {self.fix}"

    def within(self, parent: str) -> PlanError:
        """The same error, seen from the table that holds the field."""
        return PlanError(f"{parent}.{self.field}" if self.field else parent, self.value, self.fix)


def require(holds: bool, field: str, value: object, fix: str) -> None:
    """`require(share < 0.5, "share", share, "trim less than half on each side")`."""
    if not holds:
        raise PlanError(field, value, fix)


def require_choice(field: str, value: object, choices: object) -> None:
    """Raise a PlanError unless the value is one of a Literal's: a misspelt word must not be taken for another."""
    known = get_args(choices)
    require(value in known, field, value, f"choose among {', '.join(map(str, known))}")


def require_type(name: str, value: object, kind: type, fix: str) -> None:
    """`require_type("plan", plan, Plan, "give a Plan, such as lindt.resolve('digits-nfl')")`."""
    if not isinstance(value, kind):
        raise UserError(f"{name}: it is of type {type(value).__name__}; {fix}")


def in_short(value: object) -> str:
    """A value as a sentence can show it: a table in a thousand others, or a million digits, would be no sentence."""
    try:
        return _SHORT.repr(value)
    except ValueError:  # a number of more digits than Python writes out
        return f"a {type(value).__name__} too long to show"


def one_line(text: str, most: int = 300) -> str:
    """What somebody else said, as part of a sentence: one line, not too long, nothing that would steer a terminal."""
    return " ".join("".join(c if c.isprintable() else " " for c in text[: 10 * most]).split())[:most]


# A full disk or a port in use is the user's to mend, whichever call met it.
_ANYWHERE: Final = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EADDRINUSE, errno.EADDRNOTAVAIL}
# These are the user's to mend where they name a path: without one they come from processes and sockets.
_AT_A_PATH: Final = {
    errno.EACCES,
    errno.EPERM,
    errno.ENOENT,
    errno.EISDIR,
    errno.ENOTDIR,
    errno.EEXIST,
    errno.ENOTEMPTY,
    errno.ENAMETOOLONG,
    errno.ELOOP,
}


def mendable(error: OSError) -> str | None:
    """The sentence for an error of the system that its user can mend. Any other is ours, and keeps its traceback."""
    if error.errno not in _ANYWHERE and (error.errno not in _AT_A_PATH or error.filename is None):
        return None
    where = f"{error.filename}: " if error.filename is not None else ""
    return f"{where}{error.strerror or error}"
