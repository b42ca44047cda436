"""The one training loop of the package: clients, FB's fine-tuning, private and centralized training call it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from lindt.data.examples import LocalWork
from lindt.errors import require
from lindt.protocols import Batch, Examples, Penalty
from lindt.registry import register, register_method
from lindt.weights import trainable


def prepare_model(model: nn.Module, device: torch.device, sample: Tensor) -> nn.Module:
    """A model where it trains. One with convolutions has its weights' channels last, which a CPU runs faster on.

    Not every model bears that: `.view()` on a convolution's output fails then. It is tried on a sample first.
    """
    model = model.to(device)
    if not any(isinstance(module, nn.Conv2d) for module in model.modules()):
        return model
    training = model.training
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    try:
        with torch.no_grad():
            model.eval()(sample.to(device))
    except RuntimeError:  # if it fails for another reason, it will fail again where that can be told
        model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    return model.train(training)


def fit(
    step: Callable[[Batch], None],
    work: LocalWork,
    batch: int,
    generator: torch.Generator,
    device: torch.device,
) -> Iterator[int]:
    """Alg. 1, c4-c7. Yields after each epoch, so that the caller may stop."""
    for epoch in range(1, work.epochs + 1):
        for x, y in work.batches(batch, generator):
            step((x.to(device), y.to(device)))
        yield epoch


@torch.no_grad()
def forward_all(predict: Callable[[Tensor], Tensor], data: Examples, device: torch.device, batch: int = 128) -> Tensor:
    """The outputs for all samples of a client, in order."""
    rows = torch.arange(len(data))
    return torch.cat([predict(data.take(chunk)[0].to(device)) for chunk in rows.split(batch)])


@final
class OutputCapture:
    """The global model's outputs, caught while a predictor that asks it on the way runs: one pass for two scores."""

    def __init__(self, shared: nn.Module) -> None:
        self._shared = shared
        self._caught: list[Tensor] = []

    def watched(self, predict: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def watched(x: Tensor) -> Tensor:
            handle = self._shared.register_forward_hook(lambda _module, _inputs, output: self._caught.append(output))
            try:
                return predict(x)
            finally:
                handle.remove()

        return watched

    def outputs(self, samples: int) -> Tensor | None:
        """None where the global model was not asked exactly once for each sample."""
        if sum(len(output) for output in self._caught) != samples:
            return None
        return torch.cat(self._caught)


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Dropout draws from torch's global generator: give it a seed of its own, then put it back."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        if device.type == "cpu":
            torch.default_generator.manual_seed(seed)  # the same, without asking after every accelerator
        else:
            torch.manual_seed(seed)
        yield


@register(Penalty)
@final
@dataclass(frozen=True)
class NoPenalty:
    def __call__(self, shared: nn.Module, received_P: Tensor) -> Tensor | None:
        return None


@register(Penalty)
@final
@dataclass(frozen=True)
class Proximal:
    """FedProx (Sahu et al. 2018, Eq. 2): mu / 2 * ||w_i - w^{r-1}||^2."""

    mu: float = 0.001

    def __post_init__(self) -> None:
        require(self.mu >= 0, "mu", self.mu, "the proximal coefficient must be 0 or more")

    def __call__(self, shared: nn.Module, received_P: Tensor) -> Tensor | None:
        w_P = torch.cat([p.reshape(-1) for p in trainable(shared)])
        return self.mu / 2 * (w_P - received_P).square().sum()


register_method("fedprox", penalty={"kind": "proximal", "mu": 0.001}, recovery="never")
