"""A client's model, out of the run: weights as safetensors, and a plain module that needs no lindt.

The module is what torch.export writes: `torch.export.load(path).module()` takes a batch and gives the
outputs the client predicts with.
"""

from __future__ import annotations

import io
import json
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from lindt.client.private_store import FolderStore
from lindt.engines.inprocess import InProcess
from lindt.errors import UserError
from lindt.plan.file import to_dict
from lindt.plan.plan import Plan, attackers_of
from lindt.plan.problem import Problem, import_task, load_task, problem_for
from lindt.protocols import Predictor, Task
from lindt.runs.files import write_whole
from lindt.runs.schema import ROUND, fits
from lindt.runs.store import Origin, Store, require_fitting
from lindt.runs.summary import software_versions
from lindt.server.checks import keeps_private, probe
from lindt.server.federation import RunState, begin
from lindt.weights import first_model


class _Predicting(nn.Module):
    """A client's predictor as a module: shared and private weights inside."""

    def __init__(self, predict: Predictor, shared: nn.Module, private: nn.Module | None) -> None:
        super().__init__()
        self.shared = shared
        self.adapted = predict is not shared
        self.private = private if private is not None else nn.Module()
        # What a predictor holds of its own (FB's head) is registered; a shared module would be so twice.
        self.own = predict if isinstance(predict, nn.Module) and self.adapted else nn.Module()
        self._predict = [predict]

    def forward(self, x: Tensor) -> Tensor:
        return self._predict[0](x)


def export_client(folder: Path, client: int, out: Path, task: str | None = None) -> dict[str, Any]:
    """Write the model that a client predicts with into the new folder `out`; returns what export.json says.

    Where the last round was scored, the module's score on the client's test data is compared with the recorded one:
    `recorded_score` in the answer, None where there is none to compare with.
    """
    store = Store.open(folder)
    if store.about.get("task") != task:
        raise UserError(f"{folder} was run with --task {store.about.get('task')}; give the same to export from it")
    if task:
        import_task(task)  # the plan may name components that the user's module registers
    plan = store.plan()
    if out.exists():
        raise UserError(f"{out} exists already; name another folder with -o")
    problem = load_task(task) if task else problem_for(plan)
    if task:
        store.require_data(task, problem)
    if not 0 <= client < len(problem.data):
        raise UserError(f"--client {client}: the run has clients 0 to {len(problem.data) - 1}")
    store.origin = Origin(to_dict(plan), probe(plan, problem, first_model(problem, plan)), software_versions())
    state = store.state()
    require_fitting(folder, state, begin(plan, problem))
    _require_private(store, plan, problem, state, client)
    engine = InProcess(plan, problem, run=store.run, folder=store.private)
    asked = Task("evaluate", state.run, client, state.round, state.w, state.buffers, state.recovery.on)
    module = _Predicting(*engine.clients[client].predictor(asked)).eval()
    module = module.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]  # plain for any reader
    test = problem.data[client][1]
    x, y = test.take(torch.arange(len(test)))
    with torch.no_grad():
        expected = module(x)
    if not torch.isfinite(expected).all():
        raise UserError(f"client {client}: the model gives NaN or infinity for its test samples; it is not exported")
    metric = problem.metric_for(plan)
    score, recorded = metric.value(metric.tally(expected, y)), _recorded_score(store, state, client)
    if recorded is not None and not math.isclose(score, recorded, rel_tol=1e-3, abs_tol=1e-6):
        raise UserError(
            f"client {client}: on its test samples the model scores {score:.4g}, and the run recorded {recorded:.4g} "
            f"after round {state.round}; its v_i or rounds.jsonl are not the run's own"
        )
    batch = torch.export.Dim("batch", min=1)
    two = torch.cat([x, x])[:2]  # a batch of one sample would fix the size
    program = torch.export.export(module, (two,), dynamic_shapes=({0: batch},))
    found = program.module()(x)
    if not torch.allclose(found, expected, atol=1e-5) or not torch.equal(found.argmax(-1), expected.argmax(-1)):
        raise UserError(f"client {client}: the exported module does not predict as the run does; please report this")
    own = "the client's own (shared and private weights)"
    untrained = ": this client has trained no v_i" if keeps_private(plan, problem) and state.recovery.on else ""
    about = {
        "client": client,
        "run": store.run,
        "round": state.round,
        "model": own if module.adapted else f"the global model{untrained}",
        "checked_samples": len(test),
        "score": score,
        "recorded_score": recorded,
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


def _require_private(store: Store, plan: Plan, problem: Problem, state: RunState, client: int) -> None:
    """Refuse to export w as the model of a client that predicts with a v_i which is not here."""
    if not (state.recovery.on or plan.method.keeps_adapted) or not keeps_private(plan, problem):
        return
    lines = store.rounds() if client not in attackers_of(plan, len(problem.data)) else []
    rounds = [line["round"] for line in lines if line.get("recovering") and client in line["answered"]]
    last = store.private_rounds.get(client, max(rounds, default=None))
    versions = FolderStore(store.private, store.run)
    if last is not None and not [round for round in versions.rounds(client) if round <= state.round]:
        raise UserError(
            f"client {client}: its v_i of round {last} is not in {store.private}; on Flower it lies with the client's "
            "node, in its private folder"
        )


def _recorded_score(store: Store, state: RunState, client: int) -> float | None:
    """The client's score of the last round, where the round was scored as clients predict after it."""
    *before, last = [{"round": 0, "detections": 0}, *(line for line in store.rounds() if fits(line, ROUND))]
    if last["round"] != state.round or not last.get("scores"):
        return None
    if last["detections"] > before[-1]["detections"]:  # the flag goes on after the scores (server/federation.py)
        return None
    return next((float(one["local"]) for one in last["scores"]["clients"] if one["client"] == client), None)


def _write_folder(out: Path, files: Mapping[str, bytes]) -> None:
    """A new folder with these files: whole, or not there."""
    aside = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        aside.mkdir(parents=True)
        try:
            for name, content in files.items():
                write_whole(aside / name, content)
            aside.rename(out)
        finally:
            shutil.rmtree(aside, ignore_errors=True)  # it is gone where all went well
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({error.strerror}); name another folder with -o") from None
