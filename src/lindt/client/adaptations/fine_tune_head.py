"""FB (Wang et al. 2019): freeze the federated model's base, fine-tune its top layer on the client's own data."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from lindt.client.training import GradientStep, fit, forward_all, global_step, recording_key
from lindt.data.examples import LocalWork, Rows
from lindt.errors import PlanError, require
from lindt.protocols import Adaptation, Batch, Context, Predictor, Step
from lindt.registry import register, register_method
from lindt.weights import trainable


@register(Adaptation)
@final
@dataclass(frozen=True)
class FineTuneHead:
    """The client trains w as FedAvg does; when it predicts, it tunes a copy of the head first.

    The base is frozen and in evaluation mode, so its features are computed once and cached: 200 epochs take
    seconds. The tuned head is not stored between rounds. An empty `head` means the last layer with parameters.
    """

    rate: float = 0.001
    epochs: int = 200
    batch: int = 32
    head: str = ""

    takes_optimizer = True  # for w; the head is tuned by SGD at `rate`
    predictor_runs_w = True  # once for each batch, unchanged: guarded prediction takes the outputs of w from there

    def __post_init__(self) -> None:
        require(self.rate > 0, "rate", self.rate, "the fine-tuning rate must be above 0")
        require(self.epochs >= 1, "epochs", self.epochs, "fine-tune for at least 1 epoch")
        require(self.batch >= 1, "batch", self.batch, "a batch has at least 1 sample")

    def fits(self, model: nn.Module, x: Tensor) -> None:
        _input_of(model, self.layer(model), x)

    def layer(self, model: nn.Module) -> nn.Module:
        """The head, by name."""
        modules: dict[str, nn.Module] = dict(model.named_modules())
        name = self.head or last_layer(model)
        if name not in modules:
            raise PlanError("head", name, f"the model has no such submodule; choose among {[n for n in modules if n]}")
        return modules[name]

    def begin(self, ctx: Context, shared: nn.Module) -> nn.Module | None:
        return None

    def step(self, ctx: Context, shared: nn.Module, private: nn.Module | None) -> Step:
        return global_step(ctx, shared)

    def predictor(self, ctx: Context, shared: nn.Module, private: nn.Module | None) -> Predictor:
        head = self.layer(shared)
        tuned = copy.deepcopy(head).train()
        features = forward_all(lambda x: _input_of(shared, head, x), ctx.train, ctx.device)
        cached = Rows(features, ctx.train.labels.to(features.device), torch.arange(len(features)))

        def loss(x: Tensor, y: Tensor) -> Tensor:
            return ctx.loss(tuned(x), y)

        down = GradientStep(loss, [trainable(tuned)], [tuned], recording_key(loss, ctx.loss, "head"))

        def step(batch: Batch) -> None:
            down(batch, self.rate, ctx.max_norm)

        for _ in fit(step, LocalWork(cached, self.epochs), self.batch, ctx.generator, ctx.device):
            pass
        return _Tuned(shared, head, tuned).eval()


@final
class _Tuned(nn.Module):
    """The frozen base with the client's own head."""

    def __init__(self, base: nn.Module, head: nn.Module, tuned: nn.Module) -> None:
        super().__init__()
        self.tuned = tuned
        self._base = (base, head)  # not registered as submodules: they belong to the shared model

    def forward(self, x: Tensor) -> Tensor:
        base, head = self._base
        output: Tensor = self.tuned(_input_of(base, head, x))
        return output


def last_layer(model: nn.Module) -> str:
    """The last submodule that has parameters of its own."""
    names = [n for n, module in model.named_modules() if n and list(module.parameters(recurse=False))]
    if not names:
        raise PlanError("head", "", "the model has no layer with parameters to fine-tune; choose another adaptation")
    return str(names[-1])


def _input_of(model: nn.Module, head: nn.Module, x: Tensor) -> Tensor:
    """The head's input in a forward pass of the model. The head's output has to be the model's output."""
    kept: list[tuple[Tensor, Tensor]] = []

    def keep(_module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        kept.append((inputs[0], output))

    handle = head.register_forward_hook(keep)
    try:
        output = model(x)
    finally:
        handle.remove()
    if not kept or kept[-1][1] is not output:
        raise PlanError("head", str(head), "its output is not the model's output; name the layer that gives the output")
    return kept[-1][0]


register_method("fb", adaptation={"kind": "fine_tune_head", "rate": 0.001, "epochs": 200})
