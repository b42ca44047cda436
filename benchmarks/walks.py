"""How many modules of lindt a walk enters: the files that a reader opens to follow one job from end to end.

    python benchmarks/walks.py            # a table: entered, to open, goal, before
    python benchmarks/walks.py --list     # and the names

A module is entered when one of its functions is called; importing it does not count, nor does code that runs during the
import. Calls are counted by `sys.setprofile` on tiny runs, in this process and in every thread that it starts. A
function that `dataclass` writes has no file, so building a plain dataclass does not count either.

Two numbers are printed. `entered` is the measured number. `to open` is that number without the modules that a reader of
that walk need not open. The two differ in one walk only, the round that a new reader follows: plain FedAvg in process,
without attackers, noise, recovery or scores. Left out there (`NOT_OPENED` gives the reason for each) are utilities with
self-explanatory names, and modules of which only an empty component is called. The same round with all components is a
walk of its own, of which no module is left out.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field, replace
from io import StringIO
from pathlib import Path
from types import FrameType
from typing import Any, final

import lindt

PACKAGE = Path(lindt.__file__).resolve().parent
NOT_OPENED = {
    "lindt.plan.plan": "seed_for, scored, rate_at, attackers_of: what the plan says of a round and of a client",
    "lindt.seeds": "seed_for, seeded, with_threads: a number from names, a generator's state, the plan's threads",
    "lindt.weights": "read_w, write, initial_weights: a module as one vector and back, and w^0",
    "lindt.client.private_store": "nothing is stored: flush finds no v_i",
    "lindt.environment.privacy": "NoPrivacy: updates as they are, noise of zero",
    "lindt.server.recovery": "Never: the flag stays off",
}


@final
@dataclass(frozen=True)
class Walk:
    """`goal` and `before` are those of the design: before is the count when the goals were set.

    Before was counted in another way, which is not known: compare it with care. By this script the package had 54, 24,
    36, 7, 33 and 16 when the script was written (commit 64dcf33); 33 was the round with everything on.
    """

    title: str
    count: Callable[[Path], set[str]]
    goal: int | None
    before: int | None
    not_opened: frozenset[str] = frozenset()

    def to_open(self, entered: set[str]) -> set[str]:
        return entered - self.not_opened


@final
@dataclass
class EnteredModules:
    """The modules of lindt whose functions were called inside `watching`, up to the call of `last`."""

    names: set[str] = field(default_factory=set)
    last: Callable[..., object] | None = None
    ended: bool = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        before, before_threads = sys.getprofile(), threading.getprofile()
        threading.setprofile(self._see)
        sys.setprofile(self._see)
        try:
            yield
        finally:
            sys.setprofile(before)
            threading.setprofile(before_threads)  # type: ignore[arg-type]  # None is what it gave us

    def _see(self, frame: FrameType, event: str, _argument: object) -> None:
        if event != "call" or self.ended:
            return
        if self.last is not None and frame.f_code is self.last.__code__:
            self.ended = True
            return
        name = _module_of(frame.f_code.co_filename)
        if name is not None and name not in self.names and not _is_importing(frame):
            self.names.add(name)


_NAMES: dict[str, str | None] = {}


def _module_of(filename: str) -> str | None:
    if filename not in _NAMES:
        path = Path(filename)
        inside = path.is_relative_to(PACKAGE)
        _NAMES[filename] = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) if inside else None
    return _NAMES[filename]


def _is_importing(frame: FrameType) -> bool:
    """Whether a module of lindt is being imported further up the stack."""
    up: FrameType | None = frame
    while up is not None:
        if up.f_code.co_name == "<module>" and _module_of(up.f_code.co_filename) is not None:
            return True
        up = up.f_back
    return False


TINY = (
    "data.clients=6", "environment.participation.rate=0.5", "alone.epochs=1", "scoring.every=2", "scoring.last=1",
    "detection=delta", "method=runtime", "method.recovery.epsilon=0.000001", "method.recovery.patience=1",
)  # fmt: skip


def tiny_plan(rounds: int = 4) -> Any:
    """digits-nfl with six clients and the paper's rule: three answer, and recovery is on from the third round."""
    from lindt.plan.file import resolve

    return resolve("digits-nfl", TINY, rounds=rounds)


def run_walk(folder: Path) -> set[str]:
    """`lindt run digits-nfl`, from the command to the last line of rounds.jsonl, in one process.

    Detection, recovery and the private models are part of it. The summary and the verdict come afterwards.
    """
    from lindt.cli.main import app
    from lindt.runs.about import summarise_run

    sets = [word for assignment in TINY for word in ("--set", assignment)]
    words = ["run", "digits-nfl", "--rounds", "4", *sets, "--engine", "inprocess", "--out", str(folder / "run")]
    found, cache = EnteredModules(last=summarise_run), os.environ.get("LINDT_CACHE")
    os.environ["LINDT_CACHE"] = str(folder / "cache")
    try:
        with redirect_stdout(StringIO()), found.watching():
            app(words, standalone_mode=False)
            assert found.ended
    finally:
        del os.environ["LINDT_CACHE"]
        if cache is not None:
            os.environ["LINDT_CACHE"] = cache
    return found.names


def worker_walk(folder: Path) -> set[str]:
    """One update in a worker process, from the task's line to the reply's: recovery is on.

    The worker's own loop runs here in a thread, over a socketpair, as it would in its process. Two updates are made:
    a second one enters what the first has recorded.
    """
    from lindt.engines.processes.engine import Processes
    from lindt.engines.processes.worker import Line, serve, task_line
    from lindt.plan.problem import problem_for
    from lindt.protocols import Task
    from lindt.server.federation import begin

    plan = tiny_plan()
    problem = problem_for(plan)
    ours, theirs = socket.socketpair()
    found, line = EnteredModules(), Line(ours)
    with Processes(plan, problem, run="walk", folder=folder / "private", workers=1) as engine:
        state = begin(plan, problem, "walk")
        engine.weights.put(0, state.w, state.buffers)
        shared = os.dup(engine._file.fileno())
        asked = threading.Event()
        worker = threading.Thread(target=_profiled_after_ready, args=(serve, theirs.detach(), shared, asked, found))
        worker.start()
        line.send(engine._setup | {"slot": 1})
        assert line.receive() == {"ready": True}
        client = sorted(set(range(len(problem.data))) - _attackers(plan, problem))[0]
        asked.set()
        for round in (1, 2):
            task = Task("train", "walk", client, round, state.w, state.buffers, recovering=True, keep=0)
            line.send(task_line(task) | {"weights": 0})
            assert line.receive()["fault"] is None
        line.close()
        worker.join()
        os.close(shared)
    return found.names


def _profiled_after_ready(
    serve: Callable[[int, int], None], socket: int, shared: int, asked: threading.Event, found: EnteredModules
) -> None:
    """Serve; calls before the task was sent are the start of the worker, and do not count."""

    def see(frame: FrameType, event: str, argument: object) -> None:
        if asked.is_set():
            found._see(frame, event, argument)

    sys.setprofile(see)
    threading.setprofile(see)  # the thread that writes v_i
    try:
        serve(socket, shared)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


def _attackers(plan: Any, problem: Any) -> frozenset[int]:
    from lindt.plan.plan import attackers_of

    return attackers_of(plan, len(problem.data))


def flower_walk(folder: Path) -> set[str]:
    """Rounds of a user's own Flower app with NFLDetector and wrap, before recovery and in it."""
    sys.path.insert(0, str(PACKAGE.parents[1] / "tests" / "flower"))
    try:
        from fake_grid import FakeGrid
    finally:
        sys.path.pop(0)
    import torch
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp.strategy import FedAvg
    from torch import Tensor, nn
    from torch.nn.functional import cross_entropy

    from lindt.flower import NFLDetector, wrap

    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2))

    def samples(context: Context, split: str) -> tuple[Tensor, Tensor]:
        client = int(context.node_config["partition-id"])
        x = torch.randn(40, 2, generator=torch.Generator().manual_seed(client))
        y = (x[:, 1] * (1 if client % 2 else -1) > 0).long()
        return (x[:20], y[:20]) if split == "train" else (x[20:], y[20:])

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.2)

    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        model, (x, y) = net(), samples(context, "train")
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimizer = sgd(model.parameters())
        cross_entropy(model(x), y).backward()
        optimizer.step()
        metrics = MetricRecord({"num-examples": 20})
        return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return Message(RecordDict({"metrics": MetricRecord({"num-examples": 20, "acc": 0.5})}), reply_to=message)

    detector = NFLDetector(FedAvg(), epsilon=1e-6, patience=1, folder=folder / "run")
    app = wrap(app, folder=folder / "v")
    grid, arrays, found = FakeGrid(app, 4), ArrayRecord(net().state_dict()), EnteredModules()
    log, level = logging.getLogger("flwr"), logging.getLogger("flwr").level
    log.setLevel(logging.CRITICAL)  # Flower prints every round
    try:
        with found.watching():
            detector.start(grid, arrays, num_rounds=4)
    finally:
        log.setLevel(level)
    return found.names


def page_walk(folder: Path) -> set[str]:
    """The folder of an ended run into report.html."""
    from lindt.report.page import write_report
    from lindt.runs.play import run_plan

    if not (folder / "run" / "summary.json").exists():
        for _ in run_plan(tiny_plan(), folder / "run", engine="inprocess"):
            pass
    found = EnteredModules()
    with found.watching():
        write_report([folder / "run"], folder / "report.html")
    return found.names


def round_walk(_folder: Path) -> set[str]:
    """`play_round` of plain FedAvg in one process: clients are drawn, train, and their updates become the new w.

    No attackers, no noise, no recovery; of two rounds neither is scored. Delta is part of it: every round has one.
    """
    from lindt.plan.file import resolve

    plain = ("method=fedavg", "environment.threat=no_threat", "environment.privacy=no_privacy", "scoring.every=4")
    sets = [assignment for assignment in TINY if not assignment.startswith(("method.", "scoring.every"))]
    return _rounds_entered(resolve("digits-nfl", [*sets, *plain], rounds=4), recovering=False)


def whole_round_walk(_folder: Path) -> set[str]:
    """The same with recovery, attackers and noise: two rounds, the second one scored."""
    return _rounds_entered(tiny_plan(), recovering=True)


def _rounds_entered(plan: Any, *, recovering: bool) -> set[str]:
    from lindt.engines.inprocess import InProcess
    from lindt.plan.problem import problem_for
    from lindt.server.federation import begin, play_round, train_privately

    problem, found = problem_for(plan), EnteredModules()
    with InProcess(plan, problem) as engine:
        state = begin(plan, problem)
        list(train_privately(plan, problem, engine, state))  # before round 1, so not part of the walk
        if recovering:
            state = replace(state, recovery=replace(state.recovery, on=True, detections=1))
        with found.watching():
            for _ in range(2):
                state, _ = play_round(state, plan, problem, engine)
    return found.names


def field_walk(_folder: Path) -> set[str]:
    """The source files, written by hand, that list all fields of a round's scores: a new field is added to each.

    `schema.ts` is generated. A file that uses single fields does not list them.
    """
    from lindt.runs.schema import SCORES

    words = [re.compile(rf"\b{name}\b") for name in SCORES]
    files = [path for ending in ("*.py", "*.ts") for path in PACKAGE.rglob(ending) if path.name != "schema.ts"]
    texts = {str(path.relative_to(PACKAGE.parent)): path.read_text(encoding="utf-8") for path in files}
    return {name for name, text in texts.items() if all(word.search(text) for word in words)}


WALKS = {
    "run": Walk("`lindt run digits-nfl`, command to rounds.jsonl", run_walk, 36, 49),
    "update": Walk("one update in a worker process", worker_walk, 14, 19),
    "flower": Walk("a Flower round with NFLDetector and wrap", flower_walk, 24, 36),
    "page": Walk("run folder to page", page_walk, 8, 11),
    "round": Walk("files a reader opens to follow one round", round_walk, 10, 21, frozenset(NOT_OPENED)),
    "whole_round": Walk("a scored round with recovery, attackers and noise", whole_round_walk, None, None),
    "fields": Walk("places that spell a round's fields", field_walk, 2, 10),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the names too")
    parser.add_argument("walks", nargs="*", metavar="WALK", help=f"some of {', '.join(WALKS)}; by default all")
    asked = parser.parse_args()
    if unknown := [name for name in asked.walks if name not in WALKS]:
        parser.error(f"no such walk: {', '.join(unknown)}")
    write = sys.stdout.write
    write("| a walk | entered | to open | goal | before |\n|---|--:|--:|--:|--:|\n")
    named: list[str] = []
    for name in asked.walks or WALKS:
        walk = WALKS[name]
        with tempfile.TemporaryDirectory(prefix="lindt-walk-") as folder:
            found = walk.count(Path(folder))
        goal, opened = "-" if walk.goal is None else f"<= {walk.goal}", walk.to_open(found)
        write(f"| {walk.title} | {len(found)} | {len(opened)} | {goal} | {walk.before or '-'} |\n")
        rest = [f"  ({each}: {NOT_OPENED[each]})" for each in sorted(found - opened)]
        named += [f"\n{name}: {walk.title}", *(f"  {each}" for each in sorted(opened)), *rest]
    if asked.list:
        write("\n".join(named) + "\n")


if __name__ == "__main__":
    main()
