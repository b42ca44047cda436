"""In-process and worker processes give the same bytes; workers come once, are replaced when they die, and go."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from stopping import alive
from worlds import tiny, tiny_runtime

from lindt.client.private_store import FolderStore, ShardStore
from lindt.client.training import Adam
from lindt.engines.inprocess import InProcess
from lindt.engines.processes import worker
from lindt.engines.processes.engine import Processes
from lindt.engines.processes.worker import problem_hashes
from lindt.environment import Environment
from lindt.environment.participation import Sampled
from lindt.errors import UserError
from lindt.plan.models import Mlp, SmallCnn
from lindt.plan.plan import METHODS, Alone, Data, Plan, Scoring, Training
from lindt.plan.problem import load_task, problem_for
from lindt.protocols import MANY, Detection, Task
from lindt.registry import component
from lindt.runs import files
from lindt.server.federation import begin, federate


@pytest.mark.slow  # of detection and recovery: test_a_worker_that_dies_is_replaced_and_its_task_repeated
@pytest.mark.parametrize("method", ["fedavg", "fb", "apfl", "lindt-tm", "guarded"])
def test_processes_give_the_bytes_of_in_process(method: str) -> None:
    plan = replace(tiny_runtime(), method=METHODS[method])
    if method == "guarded":  # its weights are chosen on V_i
        plan = replace(plan, detection=component(Detection, "gain"))
    problem = problem_for(plan)
    engine = Processes(plan, problem, workers=2)
    try:
        there = list(federate(plan, problem=problem, engine=engine))
    finally:
        engine.close()
    here = list(federate(plan, problem=problem))
    for (a, x), (b, y) in zip(here, there, strict=True):
        assert torch.equal(a.w, b.w)
        assert x == y


@pytest.mark.slow
def test_adam_stopped_in_workers_and_resumed_in_others_gives_the_bytes_of_an_uninterrupted_run(tmp_path: Path) -> None:
    """v_i's moments are kept with v_i: a worker that never met the client goes on with them."""
    plan = tiny("lindt", rounds=3, model=SmallCnn(), training=Training(optimizer=Adam(), rate=0.01, accumulate=2))
    plan = replace(plan, alone=Alone(private=False), environment=Environment(Sampled(rate=0.5)))
    problem = problem_for(plan)
    there = [(begin(plan, problem), None)]
    for rounds in (2, 1):
        with Processes(plan, problem, workers=1, folder=tmp_path) as engine:
            there += islice(federate(plan, problem=problem, engine=engine, state=there[-1][0]), rounds)
    for (a, x), (b, y) in zip(federate(plan, problem=problem), there[1:], strict=True):
        assert torch.equal(a.w, b.w)
        assert x == y


@pytest.mark.slow  # it starts two workers
def test_many_lazy_clients_in_workers_give_the_bytes_of_in_process(tmp_path: Path) -> None:
    """Two workers make the clients that they visit, and write into the same shards."""
    plan = Plan(
        rounds=2,
        data=Data("two-camps-crowd", clients=MANY + 1),
        model=Mlp(16, 4),
        environment=Environment(Sampled(active_clients=12)),
        method=METHODS["lindt-always"],
        alone=Alone(private=False),
        scoring=Scoring(every=9, last=1, panel=4),
    )
    problem = problem_for(plan)
    with Processes(plan, problem, workers=2, folder=tmp_path / "there") as engine:
        there = list(federate(plan, problem=problem, engine=engine))
    with InProcess(plan, problem, folder=tmp_path / "here") as engine:
        here = list(federate(plan, problem=problem, engine=engine))
    for (a, x), (b, y) in zip(here, there, strict=True):
        assert torch.equal(a.w, b.w)
        assert x == y
    written = [ShardStore(tmp_path / name, "").newest_rounds(9) for name in ("here", "there")]
    assert written[0] == written[1]
    assert len(written[0]) == len({client for _, result in here for client in result.answered}) > 12


@pytest.mark.slow
def test_workers_start_when_first_needed_stay_and_go() -> None:
    plan = tiny()
    problem = problem_for(plan)
    engine = Processes(plan, problem, workers=2)
    assert engine._workers == []
    rounds = federate(plan, problem=problem, engine=engine)
    next(rounds)
    first = [worker.process.pid for worker in engine._workers]
    list(rounds)
    assert [worker.process.pid for worker in engine._workers] == first
    engine.close()
    assert not any(alive(pid) for pid in first)


def test_a_worker_that_dies_is_replaced_and_its_task_repeated() -> None:
    """Every round has the bytes of in-process, before and after a worker is killed."""
    plan = tiny_runtime()
    problem = problem_for(plan)
    straight = list(federate(plan, problem=problem))
    engine = Processes(plan, problem, workers=2)
    try:
        found = []
        for state, result in federate(plan, problem=problem, engine=engine):
            found.append((state, result))
            if result.round == 2:
                os.kill(engine._workers[0].process.pid, signal.SIGKILL)
    finally:
        engine.close()
    assert [r for _, r in found] == [r for _, r in straight]
    assert all(torch.equal(a.w, b.w) for (a, _), (b, _) in zip(straight, found, strict=True))


@pytest.mark.slow
def test_answers_that_nobody_waited_for_are_not_taken_for_others() -> None:
    plan = tiny()
    problem = problem_for(plan)
    state = begin(plan, problem)
    tasks = [Task("train", "", i, 1, state.w, state.buffers, recovering=False) for i in range(6)]
    engine = Processes(plan, problem, workers=2)
    try:
        abandoned = iter(engine.dispatch(tasks))
        next(abandoned)
        del abandoned  # workers are still at it
        there = list(engine.dispatch(tasks[::-1]))
    finally:
        engine.close()
    here = list(InProcess(plan, problem).dispatch(tasks[::-1]))
    assert [reply.client for reply in there] == [5, 4, 3, 2, 1, 0]
    for mine, theirs in zip(here, there, strict=True):
        assert mine.w is not None
        assert theirs.w is not None
        assert torch.equal(mine.w, theirs.w)


def test_when_a_dispatch_has_ended_every_v_i_is_on_a_disk_however_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = replace(tiny_runtime(), environment=Environment())
    problem = problem_for(plan)
    state = begin(plan, problem)
    monkeypatch.setattr(files, "watch", lambda step, _path: time.sleep(0.05) if step == "written" else None)
    engine = InProcess(plan, problem, run="run", folder=tmp_path)
    tasks = [Task("train", "run", i, 1, state.w, state.buffers, recovering=True) for i in range(3)]
    assert [reply.client for reply in engine.dispatch(tasks)] == [0, 1, 2]
    assert [FolderStore(tmp_path, "run").rounds(i) for i in range(4)] == [[1], [1], [1], []]


def test_a_mistake_in_a_worker_is_told_as_a_mistake() -> None:
    plan = tiny()
    engine = Processes(plan, problem_for(plan), task="no.such:thing", workers=1)
    try:
        with pytest.raises(UserError, match="No module named 'no'"):
            list(federate(plan, engine=engine))
    finally:
        engine.close()


TASK = """
import sys
import torch
from lindt import Problem
from torch.nn.functional import cross_entropy

def loss(output, y):
    if output.requires_grad and "pytest" not in sys.modules:  # the server's process tries a step before it trains
        raise ArithmeticError("not in a worker")
    return cross_entropy(output, y)

def problem():
    data = torch.zeros(20, 2), torch.zeros(20, dtype=torch.int64)
    return Problem([(data, data)] * 6, lambda: torch.nn.Linear(2, 2), loss)

def fickle():
    data = torch.rand(20, 2), torch.zeros(20, dtype=torch.int64)
    return Problem([(data, data)] * 6, lambda: torch.nn.Linear(2, 2))
"""


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "odd_task.py").write_text(TASK)
    monkeypatch.syspath_prepend(tmp_path)
    return "odd_task"


def test_a_failure_in_a_worker_is_told_with_its_traceback(task: str) -> None:
    plan = tiny(environment=Environment(Sampled(rate=1.0)), alone=Alone(private=False))
    engine = Processes(plan, load_task(f"{task}:problem"), task=f"{task}:problem", workers=1)
    try:
        with pytest.raises(RuntimeError, match="not in a worker"):
            list(federate(plan, problem=load_task(f"{task}:problem"), engine=engine, preflight=False))
    finally:
        engine.close()


def test_a_task_that_draws_other_data_in_every_process_is_refused(task: str) -> None:
    plan = tiny(environment=Environment(Sampled(rate=1.0)), alone=Alone(private=False))
    there = problem_hashes(plan, load_task(f"{task}:fickle"))  # the server's
    with pytest.raises(UserError, match="draw the data from a fixed seed"):
        worker._problem(plan, f"{task}:fickle", there)


def test_killed_outright_the_server_leaves_no_orphans(tmp_path: Path) -> None:
    script = tmp_path / "serve.py"
    script.write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
        "from worlds import tiny\n"
        "from lindt.engines.processes.engine import Processes\n"
        "from lindt.server.federation import federate\n"
        "from lindt.plan.problem import problem_for\n"
        "plan = tiny(rounds=100000)\n"
        "engine = Processes(plan, problem_for(plan), workers=2)\n"
        "for state, result in federate(plan, engine=engine):\n"
        "    if result.round == 1:\n"
        "        print(*[worker.process.pid for worker in engine._workers], flush=True)\n"
    )
    server = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    workers = [int(pid) for pid in server.stdout.readline().split()]
    assert len(workers) == 2
    server.kill()
    server.communicate()
    deadline = time.monotonic() + 120
    while any(alive(pid) for pid in workers):
        assert time.monotonic() < deadline, "a worker outlived its server"
        time.sleep(0.05)


def test_small_work_stays_in_one_process_and_the_papers_work_does_not() -> None:
    from lindt.data.partition import Iid
    from lindt.plan.file import resolve
    from lindt.plan.models import Cnn
    from lindt.plan.plan import Data
    from lindt.plan.problem import Problem
    from lindt.runs.play import workers_pay

    small = resolve("digits-nfl")
    assert not workers_pay(small, problem_for(small))
    if (os.cpu_count() or 1) > 1:
        plan = replace(Plan(rounds=500, data=Data(allocation=Iid())))
        data = (torch.zeros(500, 3, 32, 32), torch.zeros(500, dtype=torch.int64))
        assert workers_pay(plan, Problem([(data, data)] * 10, lambda: Cnn().build(10)))


@pytest.mark.slow
def test_a_resumed_run_may_change_its_engine(tmp_path: Path) -> None:
    from itertools import islice

    from lindt.runs.play import run_plan

    plan = tiny_runtime(rounds=5)
    list(run_plan(plan, tmp_path / "straight"))
    events = run_plan(plan, tmp_path / "run", engine="inprocess")
    for _ in islice(events, 1 + 6 + 3):
        pass
    events.close()
    list(run_plan(None, tmp_path / "run", engine="processes", resume=True))
    assert (tmp_path / "run/rounds.jsonl").read_bytes() == (tmp_path / "straight/rounds.jsonl").read_bytes()
