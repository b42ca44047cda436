"""Plans by content: the same plan in two tables runs once, and runs that share private models know of each other."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from functools import cache
from typing import Any

from lindt.plan.file import to_dict
from lindt.plan.plan import Plan

# Fields that were added after results were kept, with the value at which they change nothing: such a field is left
# out of the key, so that what was kept stays good.
ADDED: dict[str, object] = {"alone.stretch": 1.0, "detection": {"kind": "delta"}}


@cache
def content_key(plan: Plan) -> str:
    """What decides a run's numbers, hashed: the plan's tables without its name."""
    return _hashed({name: table for name, table in to_dict(plan).items() if name != "name"})


def private_group(plan: Plan) -> str:
    """Runs with the same group train the same private models, which are cached by content."""
    plain = replace(plan.alone, stretch=1.0)
    return _hashed(to_dict([plan.data, plan.model, plan.training, plain, plan.seed, plan.threads]))


def _hashed(tables: Any) -> str:
    return hashlib.sha256(json.dumps(_settled(tables), sort_keys=True).encode()).hexdigest()


def _settled(tables: Any) -> Any:
    if not isinstance(tables, dict):
        return tables
    found = {key: dict(table) if isinstance(table, dict) else table for key, table in tables.items()}
    for path, neutral in ADDED.items():
        table, _, field = path.partition(".")
        if not field and found.get(table) == neutral:
            del found[table]
        if isinstance(found.get(table), dict) and found[table].get(field) == neutral:
            del found[table][field]
    return found
