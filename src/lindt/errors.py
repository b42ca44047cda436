"""The errors for bad input: one sentence that names the field, the value and the fix."""

from __future__ import annotations

import errno
import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import UnionType
from typing import Final, get_args

_SHORT: Final = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxdict, _SHORT.maxlist, _SHORT.maxtuple = 4, 12, 12, 12
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 200


class UserError(Exception):
    """An error that the user can correct. The command line prints it and exits with 2, without a traceback.

    Examples:
        >>> import lindt
        >>> try:
        ...     lindt.resolve("no-such-preset")
        ... except lindt.UserError as error:
        ...     print(str(error).partition(";")[0])
        plan 'no-such-preset': No such file or directory
    """

    def __str__(self) -> str:
        return plain(super().__str__(), "\n\t")  # names in it may come from a file that the user does not trust

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows: the lines of the user's code, and the sentence, without lindt's own lines."""
        from lindt.user_code import user_traceback  # it imports this module

        said = f"{type(self).__name__}: {self}"
        return [*user_traceback(self.__cause__).splitlines(), *(user_traceback(self) or said).splitlines()]


class PlanError(UserError, ValueError):
    """A field of a plan with a wrong value: `environment.privacy.sigma = -1: ...`.

    Args:
        field: The field, with the tables that hold it.
        value: The value that was given.
        fix: What to give instead.

    Examples:
        >>> import lindt
        >>> try:
        ...     lindt.resolve("digits-nfl", ["training.epochs=0"])
        ... except lindt.PlanError as error:
        ...     print(error)
        training.epochs = 0: train for at least 1 epoch
    """

    def __init__(self, field: str, value: object, fix: str) -> None:
        super().__init__(field, value, fix)
        self.field, self.value, self.fix = field, value, fix

    def __str__(self) -> str:
        return plain(f"{one_line(self.field)} = {in_short(self.value)}: {self.fix}", "\n\t")

    def within(self, parent: str) -> PlanError:
        """The same error, with the name of the table that holds the field before it."""
        return PlanError(f"{parent}.{self.field}" if self.field else parent, self.value, self.fix)


class MissingExtraError(UserError, ModuleNotFoundError):
    """A package of an extra is not installed: `pip install 'lindt[simulation]'`. It is an ImportError, too."""


# The packages of each extra, by the names under which they are imported. An error names the first extra with a package.
EXTRAS: Final = {
    "simulation": ("torch", "numpy", "safetensors", "sklearn", "scipy", "dp_accounting", "PIL"),
    "figures": ("matplotlib",),
    "page": ("starlette", "uvicorn", "anyio", "h11"),
    "flower": ("flwr", "numpy", "safetensors"),
}


def missing_extra(error: ModuleNotFoundError) -> MissingExtraError | None:
    """The error for a package that an extra installs; None for any other package, whose import is a mistake in code."""
    package = (error.name or "").partition(".")[0]
    for extra, packages in EXTRAS.items():
        if package in packages:
            named = "Flower" if extra == "flower" else package
            return MissingExtraError(f"{named} is not installed; pip install 'lindt[{extra}]'", name=error.name)
    return None


@contextmanager
def naming_extras() -> Iterator[None]:
    """Raise a MissingExtraError where an import inside fails because an extra is not installed."""
    try:
        yield
    except MissingExtraError:
        raise
    except ModuleNotFoundError as error:
        if (missing := missing_extra(error)) is None:
            raise
        raise missing from None


def require(holds: bool, field: str, value: object, fix: str) -> None:
    """`require(share < 0.5, "share", share, "trim less than half on each side")`."""
    if not holds:
        raise PlanError(field, value, fix)


def require_choice(field: str, value: object, choices: object) -> None:
    """Raise a PlanError unless the value is one of a Literal's: a misspelt word must not be taken for another."""
    known = get_args(choices)
    require(value in known, field, value, f"choose among {', '.join(map(str, known))}")


def require_type(name: str, value: object, kind: type | UnionType, fix: str) -> None:
    """`require_type("plan", plan, Plan, "give a Plan, such as lindt.resolve('digits-nfl')")`."""
    if not isinstance(value, kind):
        raise UserError(f"{name}: it is of type {type(value).__name__}; {fix}")


def in_short(value: object) -> str:
    """A value as text that fits into a sentence: deep tables and long numbers are shortened."""
    try:
        return _SHORT.repr(value)
    except ValueError:  # a number of more digits than Python writes out
        return f"a {type(value).__name__} too long to show"


def plain(text: str, allowed: str = "") -> str:
    """Text for a terminal or a page: control characters, except the `allowed` ones, are shown as escapes.

    Names in a stranger's files may contain commands to a terminal.
    """
    shown = (
        c if c.isprintable() or c in allowed else c.encode("unicode_escape", "surrogatepass").decode() for c in text
    )
    return "".join(shown)


def one_line(text: str, most: int = 300) -> str:
    """Text from outside as part of a sentence: one line, of limited length, without control characters."""
    return " ".join("".join(c if c.isprintable() else " " for c in text[: 10 * most]).split())[:most]


# The user can correct these in every case, such as a full disk or a port in use.
_ANYWHERE: Final = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EADDRINUSE, errno.EADDRNOTAVAIL}
# The user can correct these where they name a path; without a path they come from processes and sockets.
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
    """The sentence for a system error that the user can correct; None for any other, which keeps its traceback."""
    if error.errno not in _ANYWHERE and (error.errno not in _AT_A_PATH or error.filename is None):
        return None
    where = f"{error.filename}: " if error.filename is not None else ""
    return f"{where}{error.strerror or error}"


def is_interrupt(error: BaseException | None) -> bool:
    """Whether an exception is Ctrl-C or comes from it: a module of C that is being imported makes it an ImportError."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__cause__ or (error.__context__ if isinstance(error, ImportError) else None)
    return False
