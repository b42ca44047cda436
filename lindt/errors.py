"""What bad input gets: one sentence that names the field, the value and the fix."""

from __future__ import annotations


class UserError(Exception):
    """Something the user can mend. The command line prints it and exits with 2, without a traceback."""


class PlanError(UserError, ValueError):
    """A field of a plan that cannot be: `environment.privacy.sigma = -1: ...`."""

    def __init__(self, field: str, value: object, fix: str) -> None:
        super().__init__(field, value, fix)
        self.field, self.value, self.fix = field, value, fix

    def __str__(self) -> str:
        return f"{self.field} = {self.value!r}: {self.fix}"

    def within(self, parent: str) -> PlanError:
        """The same error, seen from the table that holds the field."""
        return PlanError(f"{parent}.{self.field}" if self.field else parent, self.value, self.fix)


def require(holds: bool, field: str, value: object, fix: str) -> None:
    """`require(share < 0.5, "share", share, "trim less than half on each side")`."""
    if not holds:
        raise PlanError(field, value, fix)
