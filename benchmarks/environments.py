"""The environment of each peer, made once in LINDT_BENCH or the user's cache folder.

torch is installed first, with this repository's constraints: from a peer's own requirements pip would download
gigabytes for accelerators. The list of installed packages is stored with each environment in pins.txt.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"

# The steps of each installation, in order.
PINS: dict[str, list[list[str]]] = {
    "flower": [["torch", "setuptools"], ["flwr[simulation]==1.41.0", "ray==2.55.1"]],
    "pfl": [["torch", "setuptools"], ["pfl[pytorch]==0.6.0"]],
    "fedjax": [["jax==0.10.2", "jaxlib==0.10.2", "dm-haiku==0.0.17", "optax==0.2.8", "fedjax==0.0.17"]],
}


def folder() -> Path:
    chosen = os.environ.get("LINDT_BENCH")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lindt" / "bench"


def python_of(peer: str) -> Path:
    """The peer's interpreter; its environment is made if it does not exist, or has other pins."""
    home = folder() / peer
    python, asked = home / "bin" / "python", home / "asked.txt"
    wanted = "\n".join(" ".join(step) for step in PINS[peer]) + "\n" + CONSTRAINTS.read_text()
    if asked.exists() and asked.read_text() == wanted:
        return python
    sys.stderr.write(f"making the environment of {peer} in {home}\n")
    if not python.exists():
        venv.create(home, with_pip=True)
    for step in PINS[peer]:
        subprocess.run([python, "-m", "pip", "install", "--quiet", "-c", CONSTRAINTS, *step], check=True)
    frozen = subprocess.run([python, "-m", "pip", "freeze"], check=True, capture_output=True, text=True).stdout
    (home / "pins.txt").write_text(frozen)
    asked.write_text(wanted)
    return python


if __name__ == "__main__":
    for peer in PINS:
        python_of(peer)
