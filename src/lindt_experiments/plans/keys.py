"""Keys of plans by content: a plan in two tables runs once, and runs with the same private models share them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from functools import cache
from typing import Any

from lindt.plan.file import to_dict
from lindt.plan.plan import Plan

# Fields that were added after results were stored, with the value at which they have no effect: with that value a field
# is left out of the key, so that stored results stay valid.
ADDED: dict[str, object] = {"alone.stretch": 1.0, "alone.with_validation": False, "detection": {"kind": "delta"}}


@cache
def content_key(plan: Plan) -> str:
    """A hash of all that decides a run's numbers: the plan's tables without its name."""
    tables = {name: table for name, table in to_dict(plan).items() if name != "name"}
    if not plan.detection.reports:  # no V_i is held out, so that this field has no effect
        tables["alone"] = {name: value for name, value in tables["alone"].items() if name != "with_validation"}
    return _hashed(tables)


def private_group(plan: Plan) -> str:
    """Runs with the same group train the same private models, which are cached by content."""
    plain = replace(plan.alone, stretch=1.0, with_validation=False)
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
