"""LINDT on a real Flower deployment, all of it on this machine: TLS, node authentication, three hosts.

    python examples/flower-deployment/deploy.py

makes a throw-away CA, starts a SuperLink and three SuperNodes that hold two clients each, runs plan.toml until NFL is
detected and mended, prints the verdict, and stops what it started. Nothing leaves the machine.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from hosts import BIN, Deployment

from lindt.engines.flower.superlink import environment

HERE = Path(__file__).parent


def main(folder: Path, plan: Path, extra: list[str]) -> int:
    deployment = Deployment(folder)
    try:
        deployment.start_superlink()
        for name, clients in (("host-a", "0,1"), ("host-b", "2,3"), ("host-c", "4,5")):
            deployment.register(name)
            deployment.start_node(name, clients)
        print(f"SuperLink on {deployment.address} (TLS), three SuperNodes with registered keys; logs in {folder}")
        run = [
            *(BIN / "lindt", "run", plan, "--engine", "flower", "--out", folder / "run"),
            *("--superlink", deployment.address, "--root-certificates", deployment.keys / "ca.crt"),
            *extra,
        ]
        done = subprocess.run([str(word) for word in run], env=environment())
        for name in deployment.nodes:
            kept = sorted((folder / name / "private").glob("*/client-*/round-*.safetensors"))
            print(
                f"{name} keeps {len({path.parent for path in kept})} v_i, {sum(p.stat().st_size for p in kept)} bytes"
            )
        return done.returncode
    finally:
        deployment.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="keep certificates, logs and the run here; by default nowhere")
    parser.add_argument("--plan", type=Path, default=HERE / "plan.toml")
    given, extra = parser.parse_known_args()  # whatever else is for `lindt run`
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is stopped then, too
    if given.folder:
        given.folder.mkdir(parents=True)
        sys.exit(main(given.folder.resolve(), given.plan, extra))
    with tempfile.TemporaryDirectory(prefix="lindt-deployment-") as aside:
        sys.exit(main(Path(aside), given.plan, extra))
