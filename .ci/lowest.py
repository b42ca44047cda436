"""Print the lowest versions that pyproject.toml allows, as constraints for pip: all but torch, which has its own build.

python .ci/lowest.py > lowest.txt
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

# Those that the quick tests use. Flower is none of them: it asks for newer versions of rich, starlette and uvicorn than
# lindt does, and the quick suite itself runs with the lowest Flower that is allowed.
EXTRAS = ("simulation", "page", "figures", "parquet", "tensorboard")
REQUIREMENT = re.compile(r"([A-Za-z0-9_.-]+)(?:\[[\w,-]+\])?>=([\w.]+)")


def lowest(pyproject: str) -> dict[str, str]:
    """The lowest version of each dependency by name. Raises ValueError where one has no lower bound."""
    project = tomllib.loads(pyproject)["project"]
    wanted = [*project["dependencies"], *(one for extra in EXTRAS for one in project["optional-dependencies"][extra])]
    found: dict[str, str] = {}
    for requirement in wanted:
        match = REQUIREMENT.match(requirement)
        if match is None:
            raise ValueError(f"{requirement}: it has no lower bound; write it as name>=version")
        found[match[1]] = match[2]
    del found["torch"]
    return found


if __name__ == "__main__":
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    sys.stdout.write("".join(f"{name}=={version}\n" for name, version in lowest(text).items()))
