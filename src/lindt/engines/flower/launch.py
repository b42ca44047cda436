"""Starts a run on Flower and follows it: `lindt run --engine flower`.

The run itself is played by the ServerApp (flower/apps.py), in a process of the SuperLink. This module makes the app
folder that Flower needs, submits it, reads the store as it grows, and tells how the run ended. Without `superlink` it
first starts its own SuperLink with Flower's simulation, and stops it at the end. It only uses Flower's commands and
does not import Flower; telemetry and update checks are off.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, final

import tomli_w

from lindt.engines.flower.claims import Claims, operator_list
from lindt.engines.flower.superlink import SuperLink, connected, simulating
from lindt.errors import UserError
from lindt.plan.file import to_dict
from lindt.plan.plan import Plan
from lindt.runs.play import NOTHING_TO_WITHHOLD, Event, RoundFollowed, RunEnded, RunStarted, open_run
from lindt.runs.store import Store
from lindt.server.scores import require_updates

FAILURE: Final = "failure.txt"  # written by the ServerApp into the run's folder
LOOK: Final = 0.3  # seconds between two reads of the store
CHECK: Final = 5.0  # seconds between two checks that the SuperLink can be reached
ASK: Final = 60.0  # seconds without a new round before the SuperLink is asked for the run's status by a new process


@final
@dataclass(frozen=True)
class FlowerOptions:
    """The options of a run on Flower. `superlink` is a connection's name or HOST:PORT; None simulates here."""

    superlink: str | None = None
    root_certificates: Path | None = None
    noise: str | None = None  # plan or system; None: from the plan in a simulation, else from the system
    deadline: float = 600.0
    gather: float = 120.0
    comeback: float = 0.0
    nodes: Path | None = None  # the operator's list: the clients of each node
    withhold: bool = False  # do not write into the run's folder which clients took part

    def __post_init__(self) -> None:
        if self.noise not in (None, "plan", "system"):
            raise UserError(f"--noise {self.noise}: choose among plan, system")
        if self.deadline <= 0 or self.gather < 0 or self.comeback < 0:
            raise UserError("--deadline must be above 0 seconds, --gather and --comeback 0 seconds or more")
        if self.nodes is not None and self.superlink is None:
            raise UserError("--nodes goes with --superlink; a simulation makes its own nodes")
        if self.withhold and (self.superlink is None or self.drawn_from != "system"):
            raise UserError(NOTHING_TO_WITHHOLD)
        if self.superlink is None and find_spec("flwr") and find_spec("ray") is None:
            raise UserError(
                "--engine flower: its simulation needs Ray; pip install 'lindt[flower-simulation]', "
                "or name a --superlink"
            )

    @property
    def drawn_from(self) -> str:
        return self.noise or ("plan" if self.superlink is None else "system")


def run_on_flower(
    plan: Plan | None,
    folder: Path,
    flower: FlowerOptions,
    *,
    task: str | None = None,
    resume: bool = False,
    device: str = "cpu",
    cache: Path | None = None,
    preflight: bool = True,
) -> Iterator[Event]:
    """`run_plan` on Flower: the same folder and events, except for those of training alone, which it does not see."""
    opened = open_run(
        plan,
        folder,
        task=task,
        resume=resume,
        engine="flower",
        device=device,
        noise=flower.drawn_from,
        withhold=flower.withhold,
        preflight=preflight,
        deployment=flower.superlink is not None,
    )
    if isinstance(opened, RunEnded):
        yield opened
        return
    store, plan, problem = opened.store, opened.plan, opened.problem
    (store.folder / FAILURE).unlink(missing_ok=True)
    with store.locked():
        if flower.nodes is not None:
            Claims.open(store.folder, store.run).name(operator_list(flower.nodes, len(problem.data)))
        state = store.resume()  # as the ServerApp will find it, with later lines cut off
    played, N = state.round if state else 0, len(problem.data)
    yield RunStarted(store, plan, N, played)
    with TemporaryDirectory(prefix="lindt-flower-") as aside:
        app = Path(aside) / "app"
        write_app(app, app_config(store, plan, flower, task, cache))
        home, log = Path(aside) / "home", store.folder / "flower.log"
        where = (
            simulating(home, log, N)
            if flower.superlink is None
            else connected(flower.superlink, flower.root_certificates, home)
        )
        with where as superlink:
            run = superlink.submit(app)
            try:
                yield from _follow(store, superlink, run, played)
            finally:
                if not store.ended:
                    superlink.stop(run)


def app_config(store: Store, plan: Plan, flower: FlowerOptions, task: str | None, cache: Path | None) -> dict[str, Any]:
    """The run config of ServerApp and ClientApp. Nodes get it too: it names folders, but has no secret."""
    config: dict[str, Any] = {
        "plan": json.dumps(to_dict(plan)),
        "run": store.run,
        "folder": str(store.folder.resolve()),
        "task": task or "",
        "noise": flower.drawn_from,
        "deadline": flower.deadline,
        "gather": flower.gather,
        "comeback": flower.comeback,
    }
    if flower.superlink is None:
        config["simulated-private"] = str(store.private.resolve())
        config["simulated-cache"] = str(cache.resolve()) if cache else ""
    return config


def write_app(folder: Path, config: dict[str, Any]) -> None:
    """A Flower app is a folder with a pyproject.toml; ours names code that is installed with lindt."""
    import lindt

    home = "lindt.engines.flower.apps"
    about = {
        "project": {"name": "lindt-run", "version": lindt.__version__, "license": "MIT", "dependencies": []},
        "tool": {
            "flwr": {
                "app": {
                    "publisher": "lindt",
                    "components": {"serverapp": f"{home}:server_app", "clientapp": f"{home}:client_app"},
                    "config": config,
                }
            }
        },
    }
    folder.mkdir(parents=True)
    (folder / "pyproject.toml").write_text(tomli_w.dumps(about))


def _follow(store: Store, superlink: SuperLink, run: str, played: int) -> Iterator[Event]:
    path, heard, looked = store.folder / "rounds.jsonl", time.monotonic(), time.monotonic()
    position = path.stat().st_size if path.exists() else 0
    while True:
        ended = store.ended  # read before the last lines, so that no line is missed
        lines, position = _new_lines(path, position)
        for line in lines:
            heard = time.monotonic()
            yield RoundFollowed(line)
        if ended:
            require_updates(store.rounds())
            yield RunEnded(store, store.summary())
            return
        failure = store.folder / FAILURE
        if failure.exists():
            raise UserError(f"the run failed on Flower: {failure.read_text().strip()}")
        if time.monotonic() - looked > CHECK:
            looked = time.monotonic()
            superlink.check()
        if time.monotonic() - heard > ASK:
            heard = time.monotonic()
            status = superlink.status(run)
            if status.startswith("finished") and not store.ended and not failure.exists():
                raise UserError(f"the run on Flower is {status}; its rounds so far are kept: resume with --resume")
        time.sleep(LOOK)


def _new_lines(path: Path, position: int) -> tuple[list[dict[str, Any]], int]:
    """The complete lines of a file after `position`, and the position after them."""
    if not path.exists():
        return [], position
    with path.open("rb") as file:
        file.seek(position)
        new = file.read()
    whole = new[: new.rfind(b"\n") + 1]
    return [json.loads(line) for line in whole.splitlines()], position + len(whole)
