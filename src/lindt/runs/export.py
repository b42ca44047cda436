"""Export a client's model from a run: the weights as safetensors, and a plain module that works without lindt.

The module is written by torch.export: `torch.export.load(path).module()` takes a batch and returns the outputs that
the client predicts with.
"""

from __future__ import annotations

import io
import json
import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from safetensors.torch import save
from torch import Tensor, nn

from lindt.engines.inprocess import InProcess
from lindt.errors import UserError
from lindt.plan.file import to_dict
from lindt.plan.plan import Plan, attackers_of
from lindt.plan.problem import Problem, import_task, load_task, problem_for
from lindt.protocols import Inputs, Predictor, Task, has_global, has_several
from lindt.runs.files import write_whole
from lindt.runs.schema import FROM_PYTHON, ROUND, fits
from lindt.runs.store import Origin, Store, require_fitting
from lindt.runs.summary import software_versions
from lindt.seeds import isolated_random_state, with_threads
from lindt.server.checks import keeps_private, probe
from lindt.server.federation import begin
from lindt.server.state import RunState
from lindt.weights import first_model, write


class _Predicting(nn.Module):
    """A client's predictor as a module that holds its shared and its private weights."""

    def __init__(self, predict: Predictor, shared: nn.Module, private: nn.Module | None) -> None:
        super().__init__()
        self.shared = shared
        self.adapted = predict is not shared
        self.private = private if private is not None else nn.Module()
        # Register the predictor's own weights (FB's head). The shared module is registered above already.
        self.own = predict if isinstance(predict, nn.Module) and self.adapted else nn.Module()
        self._predict = [predict]

    def forward(self, x: Tensor) -> Tensor:
        return self._predict[0](x)


class _WithInputs(nn.Module):
    """A predictor for samples with several inputs. It takes the same arguments as the user's own model."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and has_several(args[0]):
            return self.module(args[0])
        values: dict[str | int, Tensor] = dict(enumerate(args))
        values.update(kwargs.items())
        return self.module(Inputs(values))


@final
@dataclass(frozen=True)
class PlayedRun:
    """A run's last state, with the plan and the problem that fit it: everything that is needed to build its models."""

    store: Store
    plan: Plan
    problem: Problem
    state: RunState


@final
@dataclass(frozen=True)
class ClientModel:
    """The model that a client predicts with after the last round, and its score on the client's test samples.

    `recorded` is the score in the last round's line, None where that line has no score to compare with.
    """

    module: nn.Module
    adapted: bool  # whether it has more than w
    outputs: Tensor  # of the test samples
    score: float
    recorded: float | None


def load_played(folder: Path, task: str | None = None, problem: Problem | None = None) -> PlayedRun:
    """The last state of a run. `problem` is given for a run that was played with Python objects.

    Refuses data, a model, a loss or a metric that differ from those of the run.
    """
    store = Store.open(folder)
    store.require_task(task if problem is None else FROM_PYTHON, "take models from")
    if task:
        import_task(task)  # the plan may name components that the user's module registers
    plan, own = store.plan(), bool(task) or problem is not None
    if problem is None:
        problem = load_task(task) if task else problem_for(plan)
    if own:
        store.require_data(problem)
    store.origin = Origin(to_dict(plan), probe(plan, problem, first_model(problem, plan)), software_versions())
    state = store.state()
    require_fitting(folder, state, begin(plan, problem))
    return PlayedRun(store, plan, problem, state)


def client_model(run: PlayedRun, client: int, cache: Path | None = None) -> ClientModel:
    """The client's model as a new module: two calls share no tensor. `cache` holds private models between runs.

    Where the last round was scored, the module's score on the client's test data is compared with the recorded score.
    """
    store, plan, problem, state = run.store, run.plan, run.problem, run.state
    if not 0 <= client < len(problem.data):
        raise UserError(f"client {client}: the run has clients 0 to {len(problem.data) - 1}")
    _require_private(store, plan, problem, state, client)
    engine = InProcess(plan, problem, run=store.run, folder=store.private, cache=cache)
    asked = Task("evaluate", state.run, client, state.model_round, state.w, state.buffers, state.recovery.on)
    with with_threads(plan.threads), torch.enable_grad():  # a method may train for its prediction
        found = _Predicting(*engine.clients[client].predictor(asked)).eval()
    module: nn.Module = found.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]  # plain for any reader
    test = problem.data[client][1]
    x, y = test.take(torch.arange(len(test)))
    if has_several(x):
        module = _WithInputs(module)
    with torch.no_grad():
        outputs = module(x)
    if not torch.isfinite(outputs).all():
        raise UserError(f"client {client}: the model gives NaN or infinity for its test samples; it is not exported")
    metric = problem.metric_for(plan)
    score, recorded = metric.value(metric.tally(outputs, y)), _recorded_score(store, state, client)
    if recorded is not None and not math.isclose(score, recorded, rel_tol=1e-3, abs_tol=1e-6):
        raise UserError(
            f"client {client}: on its test samples the model scores {score:.4g}, but the run recorded {recorded:.4g} "
            f"after round {state.model_round}; its v_i or rounds.jsonl was changed after the run, so restore both"
        )
    return ClientModel(module, found.adapted, outputs, score, recorded)


def global_model(run: PlayedRun) -> nn.Module:
    """A new module with w and its buffers after the last round, in evaluation mode."""
    state, plan = run.state, run.plan
    if state.recovery.on and not has_global(plan.method.adaptation):
        raise UserError(
            f"{run.store.folder}: clients of this method share only a part of the model, so there is no global model; "
            "take the model of a client"
        )
    model = first_model(run.problem, plan)
    write(model, state.w, state.buffers)
    return model.eval()


def export_client(folder: Path, client: int, out: Path, task: str | None = None) -> dict[str, Any]:
    """Write the model that a client predicts with into the new folder `out`; returns the content of export.json."""
    _require_new(out)
    return export_model(load_played(folder, task), client, out)


def export_model(run: PlayedRun, client: int, out: Path, cache: Path | None = None) -> dict[str, Any]:
    """Write the model that a client of a loaded run predicts with into the new folder `out`."""
    _require_new(out)
    store, plan, problem, state = run.store, run.plan, run.problem, run.state
    found = client_model(run, client, cache)
    module, expected = found.module, found.outputs
    test = problem.data[client][1]
    x, _ = test.take(torch.arange(len(test)))
    if has_several(x):
        raise UserError(
            f"client {client}: its samples have several inputs, but an exported module takes one tensor; get the "
            "model in Python with lindt.open(...).model(client)"
        )
    batch = torch.export.Dim("batch", min=1)
    two = torch.cat([x, x])[:2]  # a batch of one sample would fix the size
    with isolated_random_state(0, torch.device("cpu")):  # torch.export draws from Python's generator
        program = torch.export.export(module, (two,), dynamic_shapes=({0: batch},))
    again = program.module()(x)
    if not torch.allclose(again, expected, atol=1e-5) or not torch.equal(again.argmax(-1), expected.argmax(-1)):
        raise UserError(f"client {client}: the exported module does not predict as the run does; please report this")
    own = "the client's own (shared and private weights)"
    untrained = ": this client has trained no v_i" if keeps_private(plan, problem) and state.recovery.on else ""
    about = {
        "client": client,
        "run": store.run,
        "round": state.model_round,
        "model": own if found.adapted else f"the global model{untrained}",
        "checked_samples": len(test),
        "score": found.score,
        "recorded_score": found.recorded,
        "input": list(x.shape[1:]),
        "folder": str(out),
        "warnings": store.said,
    }
    plain = io.BytesIO()
    torch.export.save(program, plain)
    weights = {name: tensor.detach().contiguous().clone() for name, tensor in module.state_dict().items()}
    files = {
        "model.safetensors": save(weights),
        "model.pt2": plain.getvalue(),
        "export.json": json.dumps(about, indent=2).encode(),
    }
    _write_folder(out, files)
    return about


def _require_new(out: Path) -> None:
    if out.exists():
        raise UserError(f"{out} exists already; name another folder")


def _require_private(store: Store, plan: Plan, problem: Problem, state: RunState, client: int) -> None:
    """Refuse to export w for a client that predicts with its v_i, where that v_i is not in the run's folder."""
    if not (state.recovery.on or plan.method.keeps_adapted) or not keeps_private(plan, problem):
        return
    lines = store.rounds() if client not in attackers_of(plan, len(problem.data)) else []
    trained = (line for line in lines if line.get("recovering") and client in line["answered"])
    # After an early stop the models are those of an earlier round: the v_i of later rounds are deleted.
    rounds = [line["round"] for line in trained if line["round"] <= state.model_round]
    last = store.private_rounds.get(client, max(rounds, default=None))
    if last is not None and not [round for round in store.versions.rounds(client) if round <= state.model_round]:
        raise UserError(
            f"client {client}: its v_i of round {last} is not in {store.private}; on Flower the client's node keeps "
            "it, in the node's private folder"
        )


def _recorded_score(store: Store, state: RunState, client: int) -> float | None:
    """The client's score in the last round's line; None where clients predict differently after that round."""
    lines = [line for line in store.rounds() if fits(line, ROUND) and line["round"] <= state.model_round]
    *before, last = [{"round": 0, "detections": 0}, *lines]
    if last["round"] != state.model_round or not last.get("scores"):
        return None
    if last["detections"] > before[-1]["detections"]:  # recovery began after the scores (server/federation.py)
        return None
    return next((float(one["local"]) for one in last["scores"]["clients"] if one["client"] == client), None)


def _write_folder(out: Path, files: Mapping[str, bytes]) -> None:
    """Write a new folder with these files: either all of them or no folder at all."""
    aside = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        aside.mkdir(parents=True)
        try:
            for name, content in files.items():
                write_whole(aside / name, content)
            aside.rename(out)
        finally:
            shutil.rmtree(aside, ignore_errors=True)  # after a successful rename there is nothing to remove
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({error.strerror}); name another folder with -o") from None
