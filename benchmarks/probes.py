"""Single measurements: the cost of detection, the start of the command line, and growth with N, K and P."""

from __future__ import annotations

import json
import math
import os
import resource
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from types import MappingProxyType

HERE = Path(__file__).resolve().parent


def detection(clients: int, parameters: int) -> float:
    """Seconds for all that the server measures in a round whose step is known: w_div, Delta, clean, spread."""
    import torch

    from lindt.server.aggregation import ClippedUpdates
    from lindt.server.detection.divergence import measure

    torch.set_num_threads(1)
    torch.manual_seed(0)
    updates_KP, step_P, noise_P = torch.randn(clients, parameters), torch.randn(parameters), torch.zeros(parameters)
    taken = []
    for _ in range(11):
        start = perf_counter()
        measure(ClippedUpdates(updates_KP), step_P, noise_P, 0.0)
        taken.append(perf_counter() - start)
    return median(taken)


def growth(N: int, K: int, P: int) -> dict[str, float]:
    """A LINDT round of K among N clients, 20 samples each, on a model of about P parameters; N v_i are kept at most."""
    import torch
    from torch import nn

    import lindt
    from lindt.environment import Environment
    from lindt.environment.participation import Sampled
    from lindt.plan.plan import Alone, Scoring, Training

    torch.manual_seed(0)
    hidden = max(1, P // 75)
    x, y = torch.randn(20, 64), torch.randint(10, (20,))
    before = _peak()
    plan = lindt.Plan(
        rounds=1_000_000,
        training=Training(decay=1.0),
        environment=Environment(participation=Sampled(active_clients=K)),
        method=lindt.METHODS["lindt-always"],
        alone=Alone(private=False),
        scoring=Scoring(every=1_000_000, last=1),
    )
    problem = lindt.Problem(
        [((x, y), (x, y)) for _ in range(N)],
        lambda: nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10)),
    )
    rounds = lindt.federate(plan, problem=problem, preflight=False)
    next(rounds)
    taken = []
    for _ in range(5):
        start = perf_counter()
        next(rounds)
        taken.append(perf_counter() - start)
    return {"seconds": median(taken), "megabytes": max(_peak() - before, 0.1)}


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


SWEEPS = {
    "N": [(N, 10, 10_000) for N in (50, 200, 800)],
    "K": [(200, K, 10_000) for K in (10, 40, 160)],
    "P": [(20, 10, P) for P in (30_000, 300_000, 3_000_000)],
}


def sweep(letter: str) -> dict[str, object]:
    """Measure each point in a process of its own, as a process never returns all of its memory."""
    axis = "NKP".index(letter)
    points = [(sizes[axis], asked("growth", *sizes)) for sizes in SWEEPS[letter]]
    return {
        "points": points,
        "slope of seconds": slope([(size, found["seconds"]) for size, found in points]),
        "slope of megabytes": slope([(size, found["megabytes"]) for size, found in points]),
    }


def slope(points: list[tuple[float, float]]) -> float:
    """By least squares on logarithms: 1 is proportional, 0 does not grow."""
    xs, ys = [math.log(x) for x, _ in points], [math.log(y) for _, y in points]
    x_mean, y_mean = sum(xs) / len(xs), sum(ys) / len(ys)
    above = sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True))
    return above / sum((x - x_mean) ** 2 for x in xs)


def start_up(times: int = 5) -> dict[str, float]:
    lindt = str(Path(sys.executable).parent / "lindt")
    commands = {
        "lindt --help": [lindt, "--help"],
        "import lindt": [sys.executable, "-c", "import lindt"],
        "import lindt.server.federation": [sys.executable, "-c", "import lindt.server.federation"],
    }
    found = {name: median(_seconds(command) for _ in range(times)) for name, command in commands.items()}
    run = "lindt run digits-nfl --rounds 1"
    with TemporaryDirectory() as home:
        env = {"LINDT_CACHE": f"{home}/cache"}  # the first run trains the private models and is not counted
        taken = [_seconds([lindt, *run.split()[1:], "--out", f"{home}/{n}"], env) for n in range(times + 1)]
    return found | {run: median(taken[1:])}


def _seconds(command: list[str], env: Mapping[str, str] = MappingProxyType({})) -> float:
    start = perf_counter()
    subprocess.run(command, check=True, capture_output=True, env=os.environ | env)
    return perf_counter() - start


def asked(what: str, *sizes: int) -> dict[str, float]:
    """The result of a new process."""
    command = [sys.executable, str(HERE / "probes.py"), what, *map(str, sizes)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=env).stdout)


if __name__ == "__main__":
    given = [int(word) for word in sys.argv[2:]]
    answer = {"seconds": detection(*given)} if sys.argv[1] == "detection" else growth(*given)
    sys.stdout.write(json.dumps(answer))
