"""lindt by its public API: a plan, a problem and an engine; a round has no scores and no private models."""

from __future__ import annotations

from time import perf_counter

import lindt_work
import torch
from plain_torch import WORKS
from work import BATCH, MAX_NORM, RATE, WINDOW_BATCH, Report, rounds_wanted

from lindt import METHODS, Plan, Problem, federate
from lindt.engines.inprocess import InProcess
from lindt.engines.processes.engine import Processes
from lindt.environment import Environment
from lindt.environment.participation import Sampled
from lindt.plan.models import Cnn, Lstm, parameters_of
from lindt.plan.plan import Alone, Scoring, Training
from lindt.resources import keep_memory
from lindt.server.federation import begin, evaluate
from lindt.server.state import RunState
from lindt.weights import first_model, write

NEVER = 1_000_000


def plan_for(work: str, method: str) -> Plan:
    lstm = work == "lstm"
    return Plan(
        name="bench",
        rounds=NEVER,
        model=Lstm() if lstm else Cnn(),  # not read where the task gives the model
        training=Training(rate=RATE, decay=1.0, batch=WINDOW_BATCH if lstm else BATCH, max_norm=MAX_NORM),
        environment=Environment(participation=Sampled(rate=1.0)),
        method=METHODS[method],
        alone=Alone(private=False),
        scoring=Scoring(every=NEVER, last=1),
    )


def loss_of(problem: Problem, plan: Plan, state: RunState) -> float:
    model = first_model(problem, plan).eval()
    write(model, state.w, state.buffers)
    train, _ = problem.data[0]
    with torch.no_grad():
        x, y = train.take(torch.arange(len(train)))
        return float(problem.loss(model(x), y))


def main() -> None:
    parser, parse = rounds_wanted()
    parser.add_argument("--work", choices=(*WORKS, "evaluation"), default="cnn")
    parser.add_argument("--method", choices=sorted(METHODS), default="fedavg")
    parser.add_argument("--workers", type=int, default=0, help="processes; 0: in this one")
    options = parse()
    plan = plan_for(options.work, options.method)
    problem = getattr(lindt_work, options.work)()
    torch.set_num_threads(1)
    if options.workers:
        engine = Processes(plan, problem, task=f"lindt_work:{options.work}", workers=options.workers)
        where = f"{options.workers} workers"
    else:
        keep_memory()  # as `lindt run` does; `federate` in a user's process does not
        engine, where = InProcess(plan, problem), "in process"
    name = f"lindt, {options.method}, {where}"
    report = Report(name, ("lindt", "torch"), options.rounds, parameters_of(first_model(problem, plan)))
    state = begin(plan, problem)
    try:
        if options.work == "evaluation":
            report.play(lambda: evaluate(state, plan, problem, engine))
        else:
            rounds = federate(plan, problem=problem, engine=engine, state=state)
            while report.wanted():
                start = perf_counter()
                state, result = next(rounds)
                report.took(perf_counter() - start)
                assert len(result.answered) == len(problem.data)
    finally:
        engine.close()
    report.end(loss_of(problem, plan, state))


if __name__ == "__main__":
    main()
