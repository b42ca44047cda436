"""A client's model, out of the run: weights as safetensors, and a plain module that needs no lindt.

The module is what torch.export writes: `torch.export.load(path).module()` takes a batch and gives the
outputs the client predicts with.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from lindt.engines.inprocess import InProcess
from lindt.errors import UserError
from lindt.plan.problem import import_task, load_task, problem_for
from lindt.protocols import Predictor, Task
from lindt.runs.files import write_whole
from lindt.runs.store import Store


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
    store = Store.open(folder)
    if store.about.get("task") != task:
        raise UserError(f"{folder} was run with --task {store.about.get('task')}; give the same to export from it")
    if task:
        import_task(task)  # the plan may name components that the user's module registers
    plan = store.plan()
    if out.exists():
        raise UserError(f"{out} exists already; name another folder with -o")
    problem = load_task(task) if task else problem_for(plan)
    if not 0 <= client < len(problem.data):
        raise UserError(f"--client {client}: the run has clients 0 to {len(problem.data) - 1}")
    state = store.state()
    engine = InProcess(plan, problem, run=store.run, folder=store.private)
    asked = Task("evaluate", state.run, client, state.round, state.w, state.buffers, state.recovery.on)
    module = _Predicting(*engine.clients[client].predictor(asked)).eval()
    module = module.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]  # plain for any reader
    test = problem.data[client][1]
    x, _ = test.take(torch.arange(len(test)))
    with torch.no_grad():
        expected = module(x)
    batch = torch.export.Dim("batch", min=1)
    if not torch.isfinite(expected).all():
        raise UserError(f"client {client}: the model gives NaN or infinity for its test samples; it is not exported")
    two = torch.cat([x, x])[:2]  # a batch of one sample would fix the size
    program = torch.export.export(module, (two,), dynamic_shapes=({0: batch},))
    found = program.module()(x)
    if not torch.allclose(found, expected, atol=1e-5) or not torch.equal(found.argmax(-1), expected.argmax(-1)):
        raise UserError(f"client {client}: the exported module does not predict as the run does; please report this")
    try:
        out.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({error.strerror}); name another folder with -o") from None
    weights = {name: tensor.detach().contiguous().clone() for name, tensor in module.state_dict().items()}
    write_whole(out / "model.safetensors", save(weights))
    torch.export.save(program, out / "model.pt2")
    about = {
        "client": client,
        "run": store.run,
        "round": state.round,
        "model": "the client's own (shared and private weights)" if module.adapted else "the global model",
        "checked_samples": len(test),
        "input": list(x.shape[1:]),
        "folder": str(out),
    }
    write_whole(out / "export.json", json.dumps(about, indent=2).encode())
    return about
