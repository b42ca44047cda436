"""A run in its folder, as a Python object: `lindt.open` opens one, `lindt.run` plays one and returns it.

Reading a run needs no torch; its models, and playing it on, import torch when they are used.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, SupportsIndex, final

from lindt.errors import UserError, in_short, naming_extras, plain
from lindt.report.page import write_report
from lindt.report.reading import Reader, State
from lindt.report.reading import Run as FolderContents
from lindt.report.results import RunVerdict, Table, results_html, round_table, run_verdict, score_table
from lindt.runs.schema import FROM_FLOWER
from lindt.runs.store import Store, rounds_in

if TYPE_CHECKING:
    from torch import Tensor, nn

    from lindt.plan.plan import Plan
    from lindt.plan.problem import Problem
    from lindt.protocols import Loss, Metric
    from lindt.runs.export import PlayedRun

ENGINES = ("auto", "inprocess", "processes")


def open_(
    folder: str | Path,
    *,
    clients: Sequence[Sequence[object]] | None = None,
    model: Callable[[], nn.Module] | None = None,
    loss: Loss | None = None,
    metric: Metric | Callable[[Tensor, Tensor], Tensor] | None = None,
    problem: Problem | None = None,
    task: str | None = None,
    engine: str = "auto",
    device: str = "cpu",
    **options: Any,
) -> Run:
    """Open the folder of a run: of `lindt.run`, of the command line, or of a Flower app.

    Reading results needs only the folder. Loading models and resuming need the data and the model of the run:
    `clients` and `model`, a `problem`, or the `task`. Other data than the run's are refused.

    Args:
        folder: The run's folder.
        clients: For each client a pair (train, test), or (train, validation, test): tensors, arrays, map-style datasets
            or DataLoaders.
        model: A function that builds an untrained model.
        loss: A function of outputs and targets.
        metric: A Metric, or a function of outputs and targets that returns one number per sample.
        problem: All of it as one `Problem`.
        task: "module:function", a function that returns a `Problem`.
        engine: `inprocess`, `processes` (one worker a core, for a task or the plan's own data), or `auto`.
        device: Where models train, "cpu" or "cuda".
        **options: Any other field of `Problem`, such as `optimizer` or `client_names`.

    Returns:
        The run.

    Raises:
        UserError: The folder holds no run, or a run with other data.

    Examples:
        >>> import lindt, tempfile
        >>> try:
        ...     lindt.open(tempfile.mkdtemp())
        ... except lindt.UserError as error:
        ...     print("is not a run" in str(error))
        True
    """
    found = Run(Path(folder), None, task, engine=engine, device=device)
    found._read()  # raises where the folder holds no run
    objects = {"clients": clients, "model": model, "loss": loss, "metric": metric, **options}
    if problem is not None or any(value is not None for value in objects.values()):
        with naming_extras():
            from lindt.session import given_fields, own_problem

        found._problem = own_problem(found.plan, problem, given_fields(objects, "open"))
    return found


@final
class Run:
    """A run in a folder. `lindt.run` and `lindt.open` return it.

    `verdict`, `scores`, `rounds` and `summary` read the folder at each access: a run that another process plays can be
    followed. A client is given by its number, or by its name where clients have names.

    Args:
        folder: The run's folder.
        problem: Its data and model, where they are Python objects.
        task: The function that returns them, as "module:function".
        engine: Where clients train when the run is resumed.
        device: Where models train.

    Examples:
        >>> import lindt, tempfile, torch
        >>> x_KnD = torch.randn(3, 40, 2, generator=torch.Generator().manual_seed(0))
        >>> pairs = [(x, (x[:, 0] > 0).long()) for x in x_KnD]
        >>> clients = [((x[:30], y[:30]), (x[30:], y[30:])) for x, y in pairs]
        >>> run = lindt.run(
        ...     clients=clients, client_names=("a", "b", "c"), model=lambda: torch.nn.Linear(2, 2), progress=False,
        ...     overrides={"rounds": 2, "method": "fedavg", "alone.epochs": 1}, out=tempfile.mkdtemp(),
        ... )
        >>> run.predict("b", clients[1][1][0]).shape
        torch.Size([10, 2])
        >>> [row["round"] for row in run.rounds.to_dict("records")]
        [1, 2]
    """

    def __init__(
        self,
        folder: Path,
        problem: Problem | None = None,
        task: str | None = None,
        *,
        engine: str = "auto",
        device: str = "cpu",
    ) -> None:
        if engine not in ENGINES:
            flower = "; for Flower use `lindt run --engine flower` and open its folder" if engine == "flower" else ""
            raise UserError(f"engine = {engine!r}: choose among {', '.join(ENGINES)}{flower}")
        self.folder = folder
        self._task, self._problem, self._engine, self._device = task, problem, engine, str(device)
        self._reader = Reader(folder)
        self._played: PlayedRun | None = None
        self._predictors: dict[int, nn.Module] = {}

    @property
    def state(self) -> State:
        """running, ended, stopped (by the user) or crashed."""
        return self._read().state

    @property
    def verdict(self) -> RunVerdict:
        """Whether federation helps or hurts; `str()` gives the sentence that `lindt show` prints."""
        return run_verdict(self._read())

    @property
    def scores(self) -> Table:
        """One row per client of the last scored round, with the columns of `lindt table --per client`.

        A pandas.DataFrame where pandas is installed, else a small table with some of its methods.
        """
        return score_table(self._read())

    @property
    def rounds(self) -> Table:
        """One row per round, with the columns of `lindt table`; of the same type as `scores`."""
        return round_table(self._read())

    @property
    def summary(self) -> dict[str, Any] | None:
        """summary.json; None before the run has ended."""
        return self._read().summary

    @property
    def plan(self) -> Plan:
        """The plan of the run."""
        if self._task:
            with naming_extras():
                from lindt.plan.problem import import_task

            import_task(self._task)  # the plan may name components that the user's module registers
        store = Store.open(self.folder)
        if store.about.get("task") == FROM_FLOWER:
            raise UserError(f"{self.folder} is the run of a Flower app, which has no plan")
        return store.plan()

    def global_model(self) -> nn.Module:
        """A new module with the final w and its buffers, in evaluation mode."""
        found = self._load()
        from lindt.runs.export import global_model

        return global_model(found)

    def model(self, client: SupportsIndex | str) -> nn.Module:
        """A new module that predicts as the client does, with its shared and private weights, in evaluation mode.

        Its score on the client's test data is compared with the recorded score, if the last round was scored.
        """
        found = self._load()
        from lindt.runs.export import client_model
        from lindt.runs.play import cache_folder

        return client_model(found, self._number(client), cache_folder()).module

    def predict(self, client: SupportsIndex | str, x: object) -> Tensor:
        """The outputs of the client's model for a batch of samples, without gradients.

        `x` is a tensor or an array; where samples have several inputs, a tuple or a dict of them. `x` may also be a
        DataLoader or a dataset, as a client's data: then all of its inputs are used, in their order.
        """
        number, run = self._number(client), self._load()
        from lindt.runs.prediction import predict

        if number not in self._predictors:
            self._predictors[number] = self.model(number)
        return predict(self._predictors[number], run.problem.data[number][1], x)

    def export(self, client: SupportsIndex | str, path: str | Path | None = None) -> dict[str, Any]:
        """Write the client's model into a new folder, as `lindt export` does; returns the content of its export.json.

        By default the folder is RUN/export/client-N. `torch.export.load(folder / "model.pt2").module()` needs no lindt.
        """
        number = self._number(client)
        out = self.folder / "export" / f"client-{number}" if path is None else Path(path)
        found = self._load()
        from lindt.runs.export import export_model
        from lindt.runs.play import cache_folder

        return export_model(found, number, out, cache_folder())

    def report(self, path: str | Path = "report.html") -> Path:
        """Write the page of `lindt report` about this run: one file that opens offline."""
        write_report([self.folder], Path(path), "path =")
        return Path(path)

    def resume(self, *, progress: bool = True, preflight: bool = True) -> Self:
        """Continue the run where it stopped, and return it. A run that has ended is not changed."""
        if self._read().state == "ended":
            return self
        with naming_extras():
            from lindt.session import play

        play(self, None, resume=True, progress=progress, preflight=preflight)
        return self

    def __repr__(self) -> str:
        try:
            found = self._read()
        except UserError:
            return f"Run({str(self.folder)!r}, unreadable)"
        at = found.rounds[-1]["round"] if found.rounds else 0
        of = f" of {found.planned}" if found.planned else ""
        return f"Run({str(self.folder)!r}, {found.state}, round {at}{of}, {run_verdict(found).headline})"

    def _repr_html_(self) -> str:
        return results_html(self._read())

    def _read(self) -> FolderContents:
        return self._reader.read()

    def _number(self, client: SupportsIndex | str) -> int:
        if not isinstance(client, str):
            try:
                return operator.index(client)
            except TypeError:
                raise UserError(
                    f"client {in_short(client)}: it is of type {type(client).__name__}; give a client's number, or its "
                    "name as text"
                ) from None
        clients = self._read().about["clients"]
        found = [int(one["client"]) for one in clients if one.get("name") == client]
        if len(found) != 1:
            raise UserError(
                f"client {client!r}: {len(found) or 'no'} clients of {self.folder} have this name; give a number from "
                f"0 to {(self._read().about.get('population') or len(clients)) - 1}"
            )
        return found[0]

    def _load(self) -> PlayedRun:
        """The last state with the problem, which is built and compared with the run only once."""
        store = Store.open(self.folder)
        newest = rounds_in(self.folder / "checkpoint")[-1:]
        known = self._played
        if known is None or known.store.run != store.run or newest != [known.state.round]:
            self._predictors.clear()
            with naming_extras():
                from lindt.runs.export import load_played

            self._played = known = load_played(self.folder, self._task, self._problem)
            for said in known.store.said:
                warnings.warn(plain(said), stacklevel=3)
        return known
