"""`lindt.run` plays a run into a folder, from Python.

Runs use the code of the command line (`runs/play.py`) and its progress display, and the folder has the same files:
`lindt show`, `report`, `table` and `watch` read it. `federate` is the generator underneath, for loops that handle each
round themselves.
"""

from __future__ import annotations

import io
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TextIO, final

import torch
from rich.console import Console
from torch import Tensor, nn

from lindt.cli.execution import ProgressDisplay
from lindt.client.adaptations.dual import default_points
from lindt.client.adaptations.fine_tune import FineTune
from lindt.client.adaptations.guarded import Guarded
from lindt.errors import PlanError, UserError, is_interrupt, plain, require_type
from lindt.opening import Run
from lindt.plan.file import OWN, resolve
from lindt.plan.plan import Plan
from lindt.plan.problem import Problem, fingerprint, load_task, problem_for, settled
from lindt.protocols import Loss, Metric
from lindt.runs.play import Event, RunStarted, cache_folder, check_device, run_plan
from lindt.runs.schema import FROM_PYTHON
from lindt.runs.store import Store, require_free
from lindt.server.preflight import PreflightWarning
from lindt.weights import first_model


def run(
    plan: Plan | str | Path | None = None,
    *,
    overrides: Mapping[str, object] | Sequence[str] = (),
    clients: Sequence[Sequence[object]] | None = None,
    model: Callable[[], nn.Module] | None = None,
    loss: Loss | None = None,
    metric: Metric | Callable[[Tensor, Tensor], Tensor] | None = None,
    problem: Problem | None = None,
    task: str | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    engine: str = "auto",
    device: str = "cpu",
    progress: bool = True,
    preflight: bool = True,
    **options: Any,
) -> Run:
    """Play a run into a folder and return it.

    The data and the model are `clients` and `model`, a `problem`, a `task`, or else the plan's own. Worker processes
    build a task's problem themselves; Python objects stay in this process. Ctrl-C stops the run; finished rounds are
    kept.

    Args:
        plan: A Plan, a preset's name or the path of a TOML file. By default own-task for data of your own, else
            digits-nfl.
        overrides: A dict of the plan's dotted fields, `{"rounds": 10, "training.rate": 0.05}`, or a list of texts as
            after `--set`.
        clients: For each client a pair (train, test), or (train, validation, test): tensors, arrays, map-style datasets
            or DataLoaders. `LazyClients` are made when they are visited.
        model: A function that builds an untrained model.
        loss: A function of outputs and targets.
        metric: A Metric, or a function of outputs and targets that returns one number per sample.
        problem: All of it as one `Problem`.
        task: "module:function", a function that returns a `Problem`.
        out: The run's folder; by default runs/NAME-seedN. A folder that holds a run is refused, unless `resume` is set.
        resume: Whether to continue a run in the folder where it stopped; a run that has ended is opened.
        engine: `inprocess`, `processes` (one worker per core, for a task or the plan's own data), or `auto`.
        device: Where models train, "cpu" or "cuda".
        progress: Whether to show the progress, in terminals and notebooks.
        preflight: Whether to check for mistakes that give a plausible but false result (server/preflight.py); a warning
            is a `PreflightWarning`.
        **options: Any other field of `Problem`, such as `optimizer` or `client_names`.

    Returns:
        The run, in its folder.

    Raises:
        UserError: An argument is wrong, or the folder holds another run.

    Examples:
        >>> import lindt, tempfile, torch
        >>> x_KnD = torch.randn(3, 40, 2, generator=torch.Generator().manual_seed(0))
        >>> pairs = [(x, (x[:, 0] > 0).long()) for x in x_KnD]
        >>> clients = [((x[:30], y[:30]), (x[30:], y[30:])) for x, y in pairs]
        >>> folder = tempfile.mkdtemp()
        >>> changes = {"rounds": 2, "method": "fedavg", "alone.epochs": 1}
        >>> run = lindt.run(
        ...     clients=clients, model=lambda: torch.nn.Linear(2, 2), overrides=changes, out=folder, progress=False
        ... )
        >>> run.state, run.verdict.state
        ('ended', 'too early')
    """
    given = given_fields({"clients": clients, "model": model, "loss": loss, "metric": metric, **options}, "run")
    if plan is None and (clients is not None or problem is not None):
        plan = OWN
    resolved = resolve(plan, overrides, task=task)
    own = own_problem(resolved, problem, given)
    named = [str(entry).partition("=")[0].strip() for entry in overrides]
    given_as = "task=" if task else "problem=" if problem is not None else "clients=" if "clients" in given else ""
    folder = Path(out) if out is not None else Path("runs") / f"{resolved.name}-seed{resolved.seed}"
    begun = (folder / "plan.toml").exists()
    for name in named if given_as and not begun else ():  # a run of an earlier version may have been begun with one
        if name.partition(".")[0] in ("data", "model"):
            raise UserError(
                f"overrides: {name} has no effect with {given_as}, which gives data and model; leave it out"
            )
    if own is not None and own.optimizer is not None:
        for name in named:
            if name == "training.rate" or name.startswith("training.optimizer"):
                raise UserError(f"overrides: {name} has no effect with optimizer=, which has its own; leave one out")
    if plan == OWN and own is not None:
        resolved = _fitting_recovery(resolved, own, named)
    if begun:
        _require_same(folder, resolved, own, task, resume)
    else:
        require_free(folder, "out =")
    made = Run(folder, own, task, engine=engine, device=device)
    play(made, resolved, resume=resume, progress=progress, preflight=preflight)
    return made


def given_fields(arguments: Mapping[str, Any], caller: str) -> dict[str, Any]:
    """The fields of a Problem that were given. UserError for another argument, with the place where it belongs."""
    known = [field.name for field in fields(Problem) if field.init]
    for name in arguments:
        if name not in known:
            raise TypeError(
                f"lindt.{caller} has no argument {name!r}; give fields of a plan in overrides={{...}}; the fields of a "
                f"problem are {', '.join(known)}"
            )
    return {name: value for name, value in arguments.items() if value is not None}


def own_problem(plan: Plan, problem: Problem | None, given: Mapping[str, Any]) -> Problem | None:
    """The problem of Python objects; None where it is the plan's or a task's.

    The user's loss, metric and optimizer also work with the plan's data.
    """
    if problem is not None:
        if given:
            raise UserError(f"problem: it was given with {', '.join(given)}, which a problem contains; leave one out")
        require_type("problem", problem, Problem, "give a lindt.Problem, or clients= and model=")
        return problem
    if ("clients" in given) != ("model" in given):
        missing, other = ("model", "clients") if "clients" in given else ("clients", "model")
        raise UserError(f"{missing}: it is missing beside {other}; give both, or neither to use the plan's own")
    if "clients" in given:
        return Problem(**given)
    return replace(problem_for(plan), **given) if given else None


def _fitting_recovery(plan: Plan, problem: Problem, overridden: Sequence[str]) -> Plan:
    """own-task with a recovery that works with the model, where the caller chooses none.

    The preset adapts a dual model, which needs attach points: a plain nn.Sequential of two or more layers has them,
    other modules name their own. For other models it is replaced by fine-tuning, which works with any model.
    """
    if any(name == "method" or name.startswith("method.") for name in overridden):
        return plan
    try:
        model = first_model(problem, plan)
    except Exception:  # noqa: BLE001  # the checks before training report the error
        return plan
    try:
        points = default_points(model)
    except PlanError:
        points = []
    if points:
        return plan
    return replace(plan, method=replace(plan.method, adaptation=Guarded(adaptation=FineTune())))


def _require_same(folder: Path, plan: Plan, problem: Problem | None, task: str | None, resume: bool) -> None:
    """Refuse a folder that holds a run, unless it is the same run and is to be resumed."""
    store, anew = Store.open(folder), "give another out= for a new run"
    begun, given = store.about.get("task"), FROM_PYTHON if problem is not None else task
    if begun != given or (problem is not None and store.about.get("data") != fingerprint(problem)):
        raise UserError(f"{folder} holds a run with other data; {anew}")
    if problem is not None:
        plan = settled(plan, problem)
    elif task is not None:
        plan = settled(plan, load_task(task))
    if store.plan() != plan:
        raise UserError(f"{folder} holds a run with another plan; {anew}")
    if not resume and store.ended:
        raise UserError(
            f"{folder} holds this run, and it has ended; open it with resume=True in the same lindt.run(...), or {anew}"
        )
    if not resume:
        raise UserError(
            f"{folder} holds this run, and it has not ended; continue with resume=True in the same lindt.run(...), or "
            f"{anew}"
        )


def play(run: Run, plan: Plan | None, *, resume: bool, progress: bool, preflight: bool) -> None:
    """Play the run of `plan`, or with `resume` the rest of the one in its folder, and draw its progress."""
    if torch.is_inference_mode_enabled():
        raise UserError("torch.inference_mode is on, and no model can train in it; call lindt.run outside of it")
    check_device(run._device, "device =")
    events = run_plan(
        plan,
        run.folder,
        task=run._task,
        problem=run._problem,
        resume=resume,
        engine=run._engine,
        device=run._device,
        cache=cache_folder(),
        preflight=preflight,
    )
    try:
        with closing(events), _drawn(run.folder.name, progress) as see:
            for event in events:
                if isinstance(event, RunStarted):
                    for said in (event.store.about.get("checks") or {}).get("warnings", ()):
                        warnings.warn(plain(said), PreflightWarning, stacklevel=3)
                    for said in event.store.said:
                        warnings.warn(plain(said), stacklevel=3)
                see(event)
    except BaseException as error:
        if is_interrupt(error):
            sys.stderr.write(f"{_how_to_go_on(run)}\n")
        raise


def _how_to_go_on(run: Run) -> str:
    try:
        found = run._read()
    except UserError:
        return "stopped before the run began; nothing is kept"
    at = found.rounds[-1]["round"] if found.rounds else 0
    again = f"lindt.run(..., out={str(run.folder)!r}, resume=True) with the same arguments continues"
    return f"stopped after round {at}; finished rounds are kept: {again}"


@contextmanager
def _drawn(label: str, wanted: bool) -> Iterator[Callable[[Event], None]]:
    """The function that receives the events of a run and shows its progress."""
    if not wanted:
        yield lambda _event: None
    elif in_notebook():
        line = NotebookLine(label, sys.stdout)
        try:
            yield line.see
        finally:
            line.close()
    else:
        with ProgressDisplay(Console(stderr=True), label).watching() as display:
            yield display.see


def in_notebook() -> bool:
    """Whether a notebook's kernel runs this process. A terminal's IPython is a terminal."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


@final
class NotebookLine:
    """The progress of the command line as one line that is overwritten; messages stay above it."""

    def __init__(self, label: str, file: TextIO) -> None:
        self._file, self._told = file, io.StringIO()
        # The display treats it as a terminal, so that it writes its bar, but without control codes.
        console = Console(file=self._told, width=200, color_system=None, force_terminal=True, force_jupyter=False)
        self._display = ProgressDisplay(console, label)
        self._length = 0

    def see(self, event: Event) -> None:
        self._display.see(event)
        for text in self._told.getvalue().splitlines():
            self._write_over(text)
            self._file.write("\n")
            self._length = 0
        self._told.seek(0)
        self._told.truncate()
        self._write_over(self._display.line)

    def close(self) -> None:
        """Remove the line."""
        self._write_over("")
        self._file.write("\r")

    def _write_over(self, text: str) -> None:
        self._file.write(f"\r{text}{' ' * (self._length - len(text))}")
        self._file.flush()
        self._length = len(text)
