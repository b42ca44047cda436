"""The user's own task, by name: `--task package.module:function`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from lindt.errors import UserError
from lindt.problem import Problem


def load_task(name: str) -> Problem:
    """`package.module:function`, the user's own code: it comes from the command line, never from a plan."""
    module, colon, function = name.partition(":")
    if not colon or not module or not function:
        raise UserError(f"--task {name}: write it as package.module:function")
    sys.path.insert(0, str(Path.cwd()))
    try:
        loaded = importlib.import_module(module)
    except (ImportError, SyntaxError, TypeError, ValueError) as error:
        raise UserError(f"--task {name}: {error}; run it from the folder that holds the module") from None
    finally:
        sys.path.pop(0)
    found = getattr(loaded, function, None)
    if not callable(found):
        raise UserError(f"--task {name}: {module} has no function {function}")
    problem = found()
    if not isinstance(problem, Problem):
        raise UserError(f"--task {name}: it returned a {type(problem).__name__}; return a lindt.Problem")
    return problem
