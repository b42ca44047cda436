"""Plans by name: TOML files beside this one, and how the command line resolves a plan."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lindt.errors import UserError

FOLDER = Path(__file__).parent


DEFAULT = "digits-nfl"


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def table_of(plan: str) -> dict[str, Any]:
    """The tables of a preset, or of a TOML file."""
    from lindt.plan.file import from_toml

    path = FOLDER / f"{plan}.toml" if plan in names() else Path(plan)
    try:
        return from_toml(path.read_text(encoding="utf-8"), str(plan))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise UserError(f"plan {plan!r}: {reason}; name a TOML file or one of {', '.join(names())}") from None


def resolve(plan: str, overrides: Sequence[str] = (), *, task: str | None = None, **flags: int | None) -> Any:
    """A plan from a preset or a file, with `--set` overrides and the flags that stand for a field.

    `task` is the user's own `package.module:function`. Its module is imported first: the plan may name its components.
    """
    from lindt.plan.file import from_dict, override, to_dict

    if task:
        from lindt.plan.problem import import_task

        import_task(task)
    table = table_of(plan)
    from_dict(table)  # its own mistakes first, named as they stand in the file
    table = to_dict(from_dict(table))
    for assignment in overrides:
        table = override(table, assignment)
    table |= {name: value for name, value in flags.items() if value is not None}
    return from_dict(table)
