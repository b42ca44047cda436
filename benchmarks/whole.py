"""The paper's CIFAR federation over whole rounds: time, its parts, and the memory of all processes.

    .venv/bin/python benchmarks/whole.py fedavg          # 20 rounds, 2 workers
    .venv/bin/python benchmarks/whole.py lindt

100 clients in their default allocation, 20 attackers, clipping and noise, scores every 10th round, a checkpoint after
each, on CIFAR-10 itself (`lindt data fetch cifar10`). Private models are left out: they are trained once and cached.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import mean
from typing import Any

from lockstep import Meter

ROUNDS, PAPERS_ROUNDS = 20, 500
WHERE: dict[str, float] = {"forward, backward, update": 0.0, "scoring": 0.0}  # seconds, when in process


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method", choices=("fedavg", "lindt"))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--workers", type=int, default=2, help="0: in this process, and the engine's share is printed")
    parser.add_argument("--plan", default="cifar-nfl")
    options = parser.parse_args()
    sys.stdout.write(json.dumps(measure(options.method, options.rounds, options.workers, options.plan)) + "\n")


def measure(method: str, rounds: int, workers: int, name: str = "cifar-nfl") -> dict[str, Any]:
    from lindt.engines.inprocess import InProcess
    from lindt.engines.processes.engine import Processes
    from lindt.plan.file import resolve
    from lindt.plan.problem import problem_for
    from lindt.resources import keep_memory
    from lindt.runs.about import about_run
    from lindt.runs.store import Store
    from lindt.server.federation import begin, play_round

    plan = resolve(name, [f"method={method}", "alone.private=false", "scoring.last=1"], rounds=rounds)
    problem = problem_for(plan)
    keep_memory()  # as `lindt run` does
    training: list[float] = []
    scoring: list[float] = []
    memory: list[float] = []
    with tempfile.TemporaryDirectory() as aside:
        store = Store.create(Path(aside) / "run", plan, about_run(plan, problem, None))
        place = {"run": store.run, "folder": store.private, "cache": Path(aside) / "cache"}
        engine = Processes(plan, problem, workers=workers, **place) if workers else InProcess(plan, problem, **place)
        state = begin(plan, problem, store.run)
        # Reading the memory size takes 24 ms, which in process would count as time of the engine.
        watch = sampled(memory) if workers else timed()
        meter = Meter()
        try:
            with watch:
                state, result = play_round(state, plan, problem, engine)  # workers start, memory is first touched
                store.append(state, result, 0.0)
                for key in WHERE:
                    WHERE[key] = 0.0
                begun = time.perf_counter()
                after_first = len(memory)
                while state.round < rounds:
                    start = time.perf_counter()
                    state, result = play_round(state, plan, problem, engine)
                    taken = time.perf_counter() - start
                    store.append(state, result, taken)
                    (scoring if result.scores else training).append(time.perf_counter() - start)
                whole = time.perf_counter() - begun
        finally:
            engine.close()
        kept = sum(1 for _ in store.private.rglob("*")) if store.private.exists() else 0
    found: dict[str, Any] = {
        "method": method,
        "rounds": rounds,
        "workers": workers,
        "others' share of the cores": meter.others(),
        "seconds a round": mean(training),
        "seconds a scored round": mean(scoring) if scoring else None,
        "hours for 500 rounds": _extrapolated(plan, mean(training), mean(scoring or training)) / 3600,
        "files of v_i": kept,
    }
    if workers:
        found["PSS in MB"] = {
            "most": max(memory),
            "first third": mean(memory[after_first:][: len(memory[after_first:]) // 3 or 1]),
            "last third": mean(memory[-(len(memory) // 3 or 1) :]),
        }
    else:
        busy = sum(WHERE.values())
        found["seconds"] = {**WHERE, "everything else": whole - busy}
        found["engine's share"] = 1 - busy / whole
    return found


def _extrapolated(plan: Any, training: float, scored: float) -> float:
    """The paper's 500 rounds, of which every 10th and each of the last 10 are scored."""
    marked = sum(1 for r in range(1, PAPERS_ROUNDS + 1) if r % plan.scoring.every == 0 or r > PAPERS_ROUNDS - 10)
    return (PAPERS_ROUNDS - marked) * training + marked * scored


@contextmanager
def timed() -> Iterator[None]:
    """Measure the time of steps and scoring in this process; the rest is the engine's."""
    from lindt.client import client

    fit, forward_all = client.fit, client.forward_all

    def timed_fit(step: Callable[[Any], None], *rest: Any) -> Iterator[int]:
        return fit(_adding(step, "forward, backward, update"), *rest)

    client.fit = timed_fit
    client.forward_all = _adding(forward_all, "scoring")
    try:
        yield
    finally:
        client.fit, client.forward_all = fit, forward_all


def _adding(function: Callable[..., Any], where: str) -> Callable[..., Any]:
    def adding(*arguments: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(*arguments)
        finally:
            WHERE[where] += time.perf_counter() - start

    return adding


@contextmanager
def sampled(into: list[float], every: float = 0.5) -> Iterator[None]:
    """PSS over this process and its descendants: shared pages count once."""
    ended = threading.Event()

    def sample() -> None:
        while not ended.is_set():
            into.append(_pss())
            ended.wait(every)

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _pss() -> float:
    pids, found = ["self"], 0.0
    with suppress(OSError):
        pids += Path("/proc/self/task").joinpath(Path("/proc/self").resolve().name, "children").read_text().split()
    for pid in pids:
        with suppress(OSError):  # it has ended meanwhile
            told = Path(f"/proc/{pid}/smaps_rollup").read_text()
            found += int(next(line for line in told.splitlines() if line.startswith("Pss:")).split()[1]) / 1024
    return found


if __name__ == "__main__":
    main()
