"""LINDT on a real Flower deployment, all of it on this machine: TLS, node authentication, three hosts.

    python examples/flower-deployment/deploy.py

makes a temporary CA, starts a SuperLink and three SuperNodes with two clients each, runs plan.toml, in which NFL is
detected and recovery follows, prints the verdict, and stops what it started. All of it stays on this machine.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from hosts import BIN, Deployment

from lindt.engines.flower.superlink import environment

HERE = Path(__file__).parent
HOSTS = {"host-a": ["0,1"], "host-b": ["2,3"], "host-c": ["4,5"]}


@contextmanager
def deployed(folder: Path, hosts: Mapping[str, Sequence[str]] = HOSTS) -> Iterator[Deployment]:
    """A SuperLink and a SuperNode with a registered key for each host, stopped at the end of the block.

    Of each host: its clients, and further entries of its node config.
    """
    deployment = Deployment(folder)
    try:
        deployment.start_superlink()
        for name, (clients, *extra) in hosts.items():
            deployment.register(name)
            deployment.start_node(name, clients, *extra)
        yield deployment
    finally:
        deployment.stop()


def play(deployment: Deployment, plan: Path, extra: Sequence[str]) -> int:
    """Run the plan with `lindt run` into the folder `run`, and print what each host keeps. Returns the exit code."""
    run = [
        *(BIN / "lindt", "run", plan, "--engine", "flower", "--out", deployment.folder / "run"),
        *("--superlink", deployment.address, "--root-certificates", deployment.keys / "ca.crt"),
        *extra,
    ]
    done = subprocess.run([str(word) for word in run], env=environment())
    for name in deployment.nodes:
        kept = sorted((deployment.folder / name / "private").glob("*/client-*/round-*.safetensors"))
        print(f"{name} keeps {len({path.parent for path in kept})} v_i, {sum(p.stat().st_size for p in kept)} bytes")
    return done.returncode


def main(folder: Path, plan: Path, extra: Sequence[str]) -> int:
    with deployed(folder) as found:
        print(
            f"SuperLink on {found.address} (TLS), {len(HOSTS)} SuperNodes with registered keys; logs in {folder}",
            flush=True,  # before what `lindt run` prints
        )
        return play(found, plan, extra)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="keep certificates, logs and the run here; by default nowhere")
    parser.add_argument("--plan", type=Path, default=HERE / "plan.toml")
    given, extra = parser.parse_known_args()  # other arguments are passed to `lindt run`
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the started processes are stopped then, too
    if given.folder:
        given.folder.mkdir(parents=True)
        sys.exit(main(given.folder.resolve(), given.plan, extra))
    with tempfile.TemporaryDirectory(prefix="lindt-deployment-") as aside:
        sys.exit(main(Path(aside), given.plan, extra))
