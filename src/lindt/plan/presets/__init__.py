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
    The file is parsed first, so that its own mistakes are named as they stand in it; overrides then change the whole
    tables of that plan, which are parsed anew. Without overrides there is one plan, parsed once.
    """
    from lindt.plan.file import from_dict, override, to_dict, with_fields

    if task:
        from lindt.plan.problem import import_task

        import_task(task)
    parsed = from_dict(table_of(plan))
    given = {name: value for name, value in flags.items() if value is not None}
    if not overrides:
        return with_fields(parsed, given)
    table = to_dict(parsed)
    for assignment in overrides:
        table = override(table, assignment)
    return from_dict(table | given)
