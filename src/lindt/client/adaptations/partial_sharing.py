"""Partial sharing: some layers of the model are shared, the others are private and stay with each client.

FedPer, FedRep and FedBABU are settings of it (fedper.py, fedrep.py, fedbabu.py). The server clips, aggregates and
measures the shared layers only, and adds noise to them only. In w the private layers keep the values that they had when
recovery began; a client's private layers start from these values.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, final

import torch
from torch import Tensor, nn

from lindt.client.training import fit, gradient_step
from lindt.data.examples import LocalWork
from lindt.errors import PlanError, require, require_choice
from lindt.protocols import Adaptation, Batch, Context, Predictor, Step
from lindt.registry import register
from lindt.weights import trainable

Training = Literal["together", "in turn", "shared only"]


@register(Adaptation)
@final
@dataclass(frozen=True)
class PartialSharing:
    """`private` names the layers that stay with the client, or `shared` the layers that do not; by default the last
    layer is private. A name is that of a layer, with all layers inside it ("fc2", "encoder", "encoder.0"), or that of a
    parameter.

    `training`: "together": shared and private layers train on the same batches. "in turn": in each round first only the
    private layers train, for `epochs`, then only the shared layers, on the round's batches. "shared only": the private
    layers are not trained in the federation; for each prediction the client tunes a copy of them for `epochs`.
    Except with "shared only" the federation has no whole global model.

    A penalty covers the shared layers. `rate` is the rate of SGD in the epochs that train only private layers; with 0
    they use the round's rate and optimizer.
    """

    private: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    training: Training = "together"
    epochs: int = 10
    rate: float = 0.0

    takes_optimizer = True

    def __post_init__(self) -> None:
        require_choice("training", self.training, Training)
        require(not (self.private and self.shared), "shared", self.shared, "name private or shared layers, not both")
        require(self.epochs >= 1, "epochs", self.epochs, "train private layers for at least 1 epoch")
        require(self.rate >= 0, "rate", self.rate, "the rate must be 0 or more; 0 takes the round's")

    @property
    def has_global(self) -> bool:
        return self.training == "shared only"

    def fits(self, model: nn.Module, x: Tensor) -> None:
        kept = self.private_names([name for name, p in model.named_parameters() if p.requires_grad])
        first: dict[int, str] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            one = first.setdefault(id(parameter), name)
            # A tied parameter has its first name in w. Its other names must be private or shared like the first.
            if one != name and parameter.requires_grad and (one in kept) != self._is_private(name, kept, model):
                raise PlanError(self._field, name, f"it is tied to {one}; make both shared or both private")

    def private_names(self, names: Sequence[str]) -> frozenset[str]:
        """The trainable parameters that stay with the client. PlanError where a name is not that of a layer."""
        given = self.private or self.shared
        has = f"the model has {', '.join(_layers(names))}"
        for name in given:
            if not any(_within(parameter, name) for parameter in names):
                raise PlanError(self._field, name, f"there is no trainable layer of that name; {has}")
        last = _owner(names[-1])
        named = frozenset(p for p in names if (any(_within(p, name) for name in given) if given else _owner(p) == last))
        found = frozenset(names) - named if self.shared else named
        said = list(given) or "the last layer"
        require(len(found) < len(names), self._field, said, f"no layer is left to share; {has}")
        require(bool(found), self._field, said, f"no layer is left private; {has}")
        return found

    @property
    def part_in_words(self) -> str:
        """The layers that clients send, as text."""
        if self.shared:
            return f"the layers {', '.join(self.shared)}"
        return f"all layers but {', '.join(self.private) or 'the last'}"

    def begin(self, ctx: Context, shared: nn.Module) -> nn.Module | None:
        return None if self.has_global else _PrivateLayers(self._tensors(shared))

    def step(self, ctx: Context, shared: nn.Module, private: nn.Module | None) -> Step:
        if private is None:
            kept = self.private_names(_names(shared))
            rest = [p for name, p in shared.named_parameters() if p.requires_grad and name not in kept]
            return self._stepping(ctx, shared, shared, rest)
        assert isinstance(private, _PrivateLayers)
        model = _joined(shared, private)
        if self.training == "together":
            return self._stepping(ctx, shared, model, trainable(model))
        own = {id(p) for p in private.parameters()}
        _train_alone(self._own_rate(ctx), model, private, self.epochs)
        return self._stepping(ctx, shared, model, [p for p in trainable(model) if id(p) not in own])

    def predictor(self, ctx: Context, shared: nn.Module, private: nn.Module | None) -> Predictor:
        if self.has_global:
            tuned = _PrivateLayers(self._tensors(shared))
            model = _joined(shared, tuned).train()
            with torch.enable_grad():
                _train_alone(self._own_rate(ctx), model, tuned, self.epochs, whole=False)
            return model.eval()
        if private is None:
            return shared
        assert isinstance(private, _PrivateLayers)
        return _joined(shared, private)

    def _stepping(self, ctx: Context, shared: nn.Module, model: nn.Module, group: list[nn.Parameter]) -> Step:
        """The training step of `model`. The penalty is that of `shared`, whose private layers do not change."""
        inside = {id(tensor) for tensor in model.parameters()}
        down = gradient_step(
            ctx,
            self,
            lambda x, y: ctx.shared_loss(shared, model(x), y),
            (model, group),
            also=[p for p in shared.parameters() if id(p) not in inside],
        )

        def step(batch: Batch) -> None:
            down(batch)

        return step

    def _own_rate(self, ctx: Context) -> Context:
        # With a rate of its own it is plain SGD, without the round's optimizer.
        return replace(ctx, rate=self.rate, optimizer=None, accumulate=1) if self.rate else ctx

    @property
    def _field(self) -> str:
        return "shared" if self.shared else "private"

    def _is_private(self, name: str, kept: frozenset[str], model: nn.Module) -> bool:
        given = self.private or self.shared
        if not given:
            return name in kept
        return any(_within(name, one) for one in given) != bool(self.shared)

    def _tensors(self, model: nn.Module) -> dict[str, Tensor]:
        """The private parameters by name, and the buffers of layers all of whose parameters are private."""
        kept = self.private_names(_names(model))
        owners = {_owner(name) for name in kept} - {_owner(name) for name in _names(model) if name not in kept}
        parameters: dict[str, Tensor] = {name: p for name, p in model.named_parameters() if name in kept}
        return parameters | {name: b for name, b in model.named_buffers() if _owner(name) in owners}


@final
class _PrivateLayers(nn.Module):
    """v_i: a copy of the parameters and buffers of the private layers, by their names in the model."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.places: dict[str, str] = {}  # the name in the model -> the name here, which may contain no dot
        for name, tensor in tensors.items():
            place = self.places[name] = name.replace(".", "/")
            copied = tensor.detach().clone()
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(place, nn.Parameter(copied))
            else:
                self.register_buffer(place, copied)

    def of(self, name: str) -> Tensor:
        found: Tensor = getattr(self, self.places[name])
        return found


def _joined(shared: nn.Module, private: _PrivateLayers) -> nn.Module:
    """A module like `shared`, with the tensors of `shared`, and in the private layers those of `private`.

    No tensor is copied: training it trains both.
    """
    own: dict[int, object] = {}
    for name, tensor in (*shared.named_parameters(), *shared.named_buffers()):
        own[id(tensor)] = private.of(name) if name in private.places else tensor
    return copy.deepcopy(shared, own)


def _train_alone(ctx: Context, model: nn.Module, private: _PrivateLayers, epochs: int, *, whole: bool = True) -> None:
    """Train the private layers of a joined model on all of the client's data. With `whole` the shared layers are in
    training mode too, as in FedRep; otherwise they are in evaluation mode, and their buffers do not change."""
    if not whole:
        inside = {id(tensor) for tensor in private.parameters()}
        for module in model.modules():
            own = list(module.parameters(recurse=False))
            module.train(bool(own) and all(id(p) in inside for p in own))
    group = list(private.parameters())
    named = ("private layers alone", tuple(private.places))
    down = gradient_step(ctx, named, lambda x, y: ctx.loss(model(x), y), (model, group))
    work = LocalWork(ctx.train, epochs)
    for _ in fit(lambda batch: _ignored(down(batch)), work, ctx.samples_a_step, ctx.generator, ctx.device):
        pass


def _ignored(_gradients: object) -> None:
    """Drop the gradients: a Step returns None."""


def _names(model: nn.Module) -> list[str]:
    return [name for name, p in model.named_parameters() if p.requires_grad]


def _owner(parameter: str) -> str:
    """The layer of a parameter; empty for a parameter of the model itself."""
    return parameter.rpartition(".")[0]


def _layers(names: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(_owner(name) or name for name in names))


def _within(parameter: str, name: str) -> bool:
    return parameter == name or parameter.startswith(f"{name}.")
