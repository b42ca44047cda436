"""The quick Flower tests with the newest flwr on the index, or a named one, in an environment of its own.

    python tests/flower/newest.py                          # the newest
    python tests/flower/newest.py --version 1.40.0 tests/flower/test_detector.py

The environment, .venv-flower, has flwr alone, without its dependencies; everything else is that of the Python that runs
this. So a version that cannot be resolved today, because of a pin in its dependencies, is tested all the same. What
passes may stand in the range of flwr in pyproject.toml.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / ".venv-flower"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", help="of flwr; the newest by default")
    parser.add_argument("tests", nargs="*", default=["tests/flower", "tests/engines/flower"])
    asked = parser.parse_args()
    venv.create(HOME, with_pip=True, clear=True)
    paths = sysconfig.get_paths(vars={"base": str(HOME), "platbase": str(HOME)})
    site, python = Path(paths["purelib"]), str(HOME / "bin" / "python")
    (site / "lindt-base.pth").write_text(f"{ROOT / 'src'}\n{sysconfig.get_path('purelib')}\n")
    wanted = f"flwr=={asked.version}" if asked.version else "flwr"
    install = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--ignore-installed", wanted]
    subprocess.run(install, check=True)
    subprocess.run([python, "-c", "import flwr; print('flwr', flwr.__version__, flwr.__file__)"], check=True)
    return subprocess.run(
        [python, "-m", "pytest", "-q", "-m", "not slow and not torture", *asked.tests], cwd=ROOT, check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
