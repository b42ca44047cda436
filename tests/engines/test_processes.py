"""The engines as a person uses them from Python: own problems, errors, a second dispatch, close. None of it hangs."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch.nn.functional import cross_entropy, nll_loss
from worlds import tiny

from lindt.engines.inprocess import InProcess
from lindt.engines.processes import worker
from lindt.engines.processes.engine import Processes
from lindt.engines.processes.worker import problem_hashes
from lindt.environment import Environment
from lindt.errors import UserError
from lindt.plan.plan import Plan
from lindt.plan.problem import Problem, load_task, problem_for
from lindt.protocols import Reply, Task
from lindt.server.federation import begin

SECONDS = 180  # far more than any of these tests takes: after that it hangs


@pytest.fixture(autouse=True)
def _time_limit() -> Iterator[None]:
    """A test that hangs fails."""

    def give_up(_number: int, _frame: FrameType | None) -> None:
        raise TimeoutError(f"nothing came back within {SECONDS} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


INSIDE = Path(__file__).parents[1] / "torture" / "inside"  # fails a worker's disk at a step


@pytest.fixture(scope="module")
def plan() -> Plan:
    return tiny(environment=Environment())


@pytest.fixture(scope="module")
def problem(plan: Plan) -> Problem:
    return problem_for(plan)


@pytest.fixture
def engine(plan: Plan, problem: Problem) -> Iterator[Processes]:
    engine = Processes(plan, problem, workers=2)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def running(plan: Plan, problem: Problem) -> Iterator[Processes]:
    """One engine for the tests that leave it as they found it: a worker takes seconds to start."""
    with Processes(plan, problem, workers=2) as engine:
        yield engine


def tasks_for(plan: Plan, problem: Problem, clients: range | list[int]) -> list[Task]:
    state = begin(plan, problem)
    return [Task("train", "", i, 1, state.w, state.buffers, recovering=False) for i in clients]


def assert_same(here: list[Reply], there: list[Reply]) -> None:
    assert [reply.client for reply in here] == [reply.client for reply in there]
    for mine, theirs in zip(here, there, strict=True):
        assert mine.w is not None
        assert theirs.w is not None
        assert torch.equal(mine.w, theirs.w)


# A problem of one's own


def own_data(problem: Problem) -> Problem:
    x, y = torch.zeros(20, 1, 8, 8), torch.zeros(20, dtype=torch.int64)
    return Problem([((x, y), (x, y))] * 6, problem.model)


def own_model(problem: Problem) -> Problem:
    def build() -> torch.nn.Module:
        model = problem.model()
        with torch.no_grad():
            next(model.parameters()).add_(1.0)  # the same names and shapes, other first weights
        return model

    return replace(problem, model=build)


def own_loss(problem: Problem) -> Problem:
    return replace(problem, loss=lambda output, y: 2 * cross_entropy(output, y))


def own_metric(problem: Problem) -> Problem:
    return replace(problem, metric=lambda output, y: -nll_loss(output, y, reduction="none"))


def own_optimizer(problem: Problem) -> Problem:
    return replace(problem, optimizer=lambda params: torch.optim.Adam(params, lr=0.01))


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (own_data, "data"),
        (own_model, "model"),
        (own_loss, "loss"),
        (own_metric, "metric"),
        (own_optimizer, "optimizer"),
    ],
)
def test_a_worker_without_a_task_refuses_a_problem_that_is_not_the_plans_own(
    plan: Plan, problem: Problem, change: Callable[[Problem], Problem], part: str
) -> None:
    own = change(problem)
    with pytest.raises(UserError, match=rf"not the plan's own \(its {part} is different\).*task=.*InProcess") as caught:
        worker._problem(plan, None, problem_hashes(plan, own))
    assert "\n" not in str(caught.value)


def test_an_own_problem_without_a_task_is_not_replaced_by_the_plans_own(plan: Plan, problem: Problem) -> None:
    own = own_data(problem)
    engine = Processes(plan, own, workers=1)
    try:
        with pytest.raises(UserError, match="not the plan's own"):
            list(engine.dispatch(tasks_for(plan, own, range(2))))
    finally:
        engine.close()


def test_an_own_problem_is_refused_where_the_plans_own_cannot_be_built(plan: Plan, problem: Problem) -> None:
    impossible = replace(plan, data=replace(plan.data, clients=2000))  # more than the digits can be shared among
    with pytest.raises(UserError, match=r"data\.clients = 2000.*task=.*InProcess"):
        worker._problem(impossible, None, problem_hashes(impossible, problem))


def test_hashes_of_a_problem_change_nothing_and_are_the_same_for_any_number_of_threads(
    plan: Plan, problem: Problem
) -> None:
    before = torch.random.get_rng_state()
    expected = problem_hashes(plan, problem)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.set_num_threads(2)
    try:
        assert problem_hashes(plan, problem_for(plan)) == expected
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


TASK = """
import os
from pathlib import Path

import torch
from lindt import Problem
from torch.nn.functional import cross_entropy

def _clients():
    torch.manual_seed(1)
    return [((torch.rand(20, 2) + i, torch.arange(20) % 2), (torch.rand(20, 2) + i, torch.arange(20) % 2))
            for i in range(6)]

def problem():
    return Problem(_clients(), lambda: torch.nn.Linear(2, 2))

def other_loss():
    return Problem(_clients(), lambda: torch.nn.Linear(2, 2), lambda output, y: 2 * cross_entropy(output, y))

def loss_that_fails_once(output, y):
    mark = Path(os.environ["LINDT_TEST_MARK"])
    if output.requires_grad and mark.exists():
        mark.unlink()
        raise ArithmeticError("this happens once")
    return cross_entropy(output, y)

def fails_once():
    return Problem(_clients(), lambda: torch.nn.Linear(2, 2), loss_that_fails_once)

def fails_in_workers():
    if Path(os.environ["LINDT_TEST_MARK"]).exists():
        raise ArithmeticError("the data cannot be read")
    return problem()

def dies_in_training():
    def loss(output, y):
        if output.requires_grad and Path(os.environ["LINDT_TEST_MARK"]).exists():
            os._exit(7)
        return cross_entropy(output, y)
    return Problem(_clients(), lambda: torch.nn.Linear(2, 2), loss)
"""


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file by which a test tells its workers to fail."""
    (tmp_path / "task_of_processes.py").write_text(TASK)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("LINDT_TEST_MARK", str(tmp_path / "mark"))
    return tmp_path / "mark"


@pytest.mark.usefixtures("mark")
def test_an_own_problem_with_its_task_trains_as_in_process(plan: Plan) -> None:
    own = load_task("task_of_processes:problem")
    engine = Processes(plan, own, task="task_of_processes:problem", workers=2)
    tasks = tasks_for(plan, own, range(6))
    try:
        assert_same(list(InProcess(plan, own).dispatch(tasks)), list(engine.dispatch(tasks)))
    finally:
        engine.close()


@pytest.mark.usefixtures("mark")
def test_a_task_that_builds_another_loss_than_the_problem_has_is_refused(plan: Plan) -> None:
    expected = problem_hashes(plan, load_task("task_of_processes:problem"))
    assert worker._problem(plan, "task_of_processes:problem", expected)
    with pytest.raises(UserError, match=r"task task_of_processes:other_loss.*its loss is different"):
        worker._problem(plan, "task_of_processes:other_loss", expected)


# After an error


def test_after_a_workers_failure_the_engine_can_be_used_again(plan: Plan, mark: Path) -> None:
    own = load_task("task_of_processes:fails_once")
    engine = Processes(plan, own, task="task_of_processes:fails_once", workers=2)
    tasks = tasks_for(plan, own, range(6))
    try:
        mark.touch()
        with pytest.raises(RuntimeError, match="this happens once"):
            list(engine.dispatch(tasks))
        there = list(engine.dispatch(tasks))
    finally:
        engine.close()
    assert_same(list(InProcess(plan, own).dispatch(tasks)), there)


@pytest.mark.slow
def test_a_failure_while_a_worker_starts_is_told_and_the_next_dispatch_starts_another(plan: Plan, mark: Path) -> None:
    own = load_task("task_of_processes:problem")
    engine = Processes(plan, own, task="task_of_processes:fails_in_workers", workers=1)
    tasks = tasks_for(plan, own, range(6))
    try:
        mark.touch()
        for _ in range(2):
            with pytest.raises(UserError, match=r"it failed \(ArithmeticError: the data cannot be read; .*line 32"):
                list(engine.dispatch(tasks))
        mark.unlink()
        there = list(engine.dispatch(tasks))
    finally:
        engine.close()
    assert_same(list(InProcess(plan, own).dispatch(tasks)), there)


@pytest.mark.slow
def test_after_workers_that_died_the_engine_can_be_used_again(plan: Plan, mark: Path) -> None:
    own = load_task("task_of_processes:dies_in_training")
    engine = Processes(plan, own, task="task_of_processes:dies_in_training", workers=1)
    tasks = tasks_for(plan, own, range(2))
    try:
        mark.touch()
        with pytest.raises(RuntimeError, match="workers died one after the other"):
            list(engine.dispatch(tasks))
        mark.unlink()
        there = list(engine.dispatch(tasks))
    finally:
        engine.close()
    assert_same(list(InProcess(plan, own).dispatch(tasks)), there)


# Tasks


def test_each_task_is_done_with_its_own_weights(plan: Plan, problem: Problem, running: Processes) -> None:
    tasks = [replace(task, w=task.w + task.client % 3) for task in tasks_for(plan, problem, range(6))]
    assert_same(list(InProcess(plan, problem).dispatch(tasks)), list(running.dispatch(tasks)))
    assert running.weights.get(0)[0].shape == tasks[0].w.shape


def test_weights_of_another_length_are_refused(plan: Plan, problem: Problem, running: Processes) -> None:
    (task,) = tasks_for(plan, problem, range(1))
    for either in (InProcess(plan, problem), running):
        with pytest.raises(ValueError, match="1 values for"):
            list(either.dispatch([replace(task, w=torch.zeros(1))]))


@pytest.mark.parametrize("client", [-1, 6])
def test_an_unknown_client_is_refused_by_both_engines(
    plan: Plan, problem: Problem, engine: Processes, client: int
) -> None:
    tasks = tasks_for(plan, problem, [0, client])
    for either in (InProcess(plan, problem), engine):
        with pytest.raises(ValueError, match=f"client {client} does not exist: the problem has clients 0 to 5"):
            either.dispatch(tasks)
    assert engine._workers == []  # no worker was started for it


def test_a_task_of_another_run_is_refused_by_both_engines(plan: Plan, problem: Problem, engine: Processes) -> None:
    """Its v_i would be read and written in the folder of the engine's own run."""
    tasks = [replace(task, run="other") for task in tasks_for(plan, problem, [0])]
    for either in (InProcess(plan, problem), engine):
        with pytest.raises(ValueError, match="a task of run 'other': this engine keeps the v_i of run ''"):
            either.dispatch(tasks)
    named = InProcess(plan, problem, run="other")
    assert [reply.client for reply in named.dispatch(tasks)] == [0]


def test_a_task_of_an_unknown_kind_is_refused(plan: Plan, problem: Problem) -> None:
    tasks = [replace(task, kind="privat") for task in tasks_for(plan, problem, [0])]  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"task\.kind is 'privat'"):
        list(InProcess(plan, problem).dispatch(tasks))


def test_no_tasks_no_replies(plan: Plan, problem: Problem, engine: Processes) -> None:
    assert list(InProcess(plan, problem).dispatch([])) == []
    assert list(engine.dispatch([])) == []


# Number of workers


@pytest.mark.parametrize("workers", [0, -1, 1.5])
def test_a_number_of_workers_that_cannot_be_is_refused(plan: Plan, problem: Problem, workers: int) -> None:
    with pytest.raises(UserError, match=f"workers = {workers}: give a whole number from 1 on, or None"):
        Processes(plan, problem, workers=workers)


# A dispatch that is left, and the end


def test_an_abandoned_dispatch_that_is_taken_up_again_says_so(plan: Plan, problem: Problem, running: Processes) -> None:
    tasks = tasks_for(plan, problem, range(6))
    first = iter(running.dispatch(tasks))
    assert next(first).client == 0
    assert len(list(running.dispatch(tasks))) == 6
    with pytest.raises(RuntimeError, match="this dispatch is over: another one"):
        next(first)


def test_a_full_disk_in_a_worker_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from worlds import tiny_runtime

    monkeypatch.syspath_prepend(str(INSIDE))
    monkeypatch.setenv("LINDT_BREAK", f"v_i|written|1|{errno.ENOSPC}|{tmp_path / 'mark'}")
    plan = tiny_runtime()
    problem = problem_for(plan)
    task = replace(tasks_for(plan, problem, range(1))[0], recovering=True)
    with (
        Processes(plan, problem, workers=1, folder=tmp_path) as engine,
        pytest.raises(UserError, match=r"client-00000/round-000001\.safetensors: No space left on device$"),
    ):
        list(engine.dispatch([task]))
    assert list(tmp_path.rglob("*.safetensors")) == []


@pytest.mark.slow
def test_v_i_of_an_abandoned_dispatch_are_forgotten_too(tmp_path: Path) -> None:
    from worlds import tiny_runtime

    plan = tiny_runtime()
    problem = problem_for(plan)
    tasks = [replace(task, recovering=True) for task in tasks_for(plan, problem, range(6))]
    engine = Processes(plan, problem, workers=2, folder=tmp_path)
    try:
        replies = iter(engine.dispatch(tasks))
        next(replies)
        engine.forget_after(0)
        del replies
        list(engine.dispatch([replace(tasks[0], kind="evaluate", round=0)]))
        assert list(tmp_path.rglob("*.safetensors")) == []
    finally:
        engine.close()


def test_dispatch_after_close_is_refused_by_both_engines(plan: Plan, problem: Problem, engine: Processes) -> None:
    tasks = tasks_for(plan, problem, range(2))
    for either in (InProcess(plan, problem), engine):
        either.close()
        either.close()
        with pytest.raises(RuntimeError, match="the engine is closed; build another"):
            either.dispatch(tasks)


def test_close_while_a_dispatch_is_open_ends_it(plan: Plan, problem: Problem) -> None:
    engine = Processes(plan, problem, workers=1)
    replies = iter(engine.dispatch(tasks_for(plan, problem, range(6))))
    next(replies)
    engine.close()
    with pytest.raises(RuntimeError, match="the engine is closed"):
        list(replies)


def test_engines_close_at_the_end_of_with(plan: Plan, problem: Problem) -> None:
    tasks = tasks_for(plan, problem, range(2))
    with Processes(plan, problem, workers=1) as engine:
        there = list(engine.dispatch(tasks))
        pid = engine._workers[0].process.pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with InProcess(plan, problem) as here:
        assert_same(list(here.dispatch(tasks)), there)
    with pytest.raises(RuntimeError, match="closed"):
        here.dispatch(tasks)


@pytest.mark.slow
def test_two_engines_share_a_folder(plan: Plan, problem: Problem, tmp_path: Path) -> None:
    tasks = tasks_for(plan, problem, range(2))
    with Processes(plan, problem, workers=1, folder=tmp_path) as one:
        first = list(one.dispatch(tasks))
        with Processes(plan, problem, workers=1, folder=tmp_path) as other:
            assert_same(first, list(other.dispatch(tasks)))
        assert_same(first, list(one.dispatch(tasks)))
