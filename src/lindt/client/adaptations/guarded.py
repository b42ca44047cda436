"""Guarded prediction: a client predicts with what its own validation data support, so that it is not left worse off.

A client holds up to three models: the global one (w), the one that its method adapts, and the one that it trained alone
(P_i). Guarded prediction mixes what they predict, each with a weight that grows exponentially with its score on the
client's validation part V_i, on which none of them has trained (exponential weights; Dalalyan and Tsybakov, 2008). With
few samples the weights are nearly equal; with many the best model has nearly all of it. So no threshold says from when
on V_i is large enough, and a model that is far worse than P_i has no say. No test data are looked at. Nothing more is
sent. It costs the memory of the models and a forward pass of each.

Nothing that is tested on V_i is chosen on V_i: for the reports, each half of V_i is predicted with the weights that the
other half chooses (`held_out_outputs`).

Legend: M models, n samples, C classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, final, get_args

import torch
from torch import Tensor, nn

from lindt.client.training import forward_all
from lindt.data.examples import as_examples, stratified, subset
from lindt.errors import PlanError, UserError, require, require_choice
from lindt.plan.problem import Accuracy, sample_values
from lindt.protocols import (
    Adaptation,
    ChecksModel,
    Context,
    Examples,
    Metric,
    Predictor,
    SharesPart,
    Step,
    has_global,
    private_names,
)
from lindt.registry import component, register, register_method

Combine = Literal["probabilities", "outputs", "pick"]
Member = Literal["global", "adapted", "private"]
STRENGTH: Final = 0.5  # of the weights: 0.3 to 1 were equally good (docs/recovery.md)
SMALLEST: Final = 1e-30  # a probability whose logarithm is taken


def mixture_weights(values_Mn: Tensor, strength: float = STRENGTH) -> Tensor:
    """Weights of M models from their scores on n validation samples: proportional to exp(strength * sum of scores).

    A sample's scores lie in [0, 1], higher is better. Without samples the weights are equal.
    """
    return (strength * values_Mn.to(torch.float64).sum(1)).softmax(0)


def mixed(outputs_MnC: Sequence[Tensor], weights_M: Tensor, combine: Combine = "probabilities") -> Tensor:
    """What M models predict together.

    `probabilities`: the logarithm of the mean of their softmax, so that it reads as logits. `outputs`: the mean of the
    outputs as they are. `pick`: the outputs of the model with the largest weight, the first of equals.
    """
    if combine == "pick":
        return outputs_MnC[int(weights_M.argmax())]
    shape = (-1, *[1] * outputs_MnC[0].dim())
    stacked = torch.stack(list(outputs_MnC))
    weights = weights_M.to(stacked).reshape(shape)
    if combine == "outputs":
        return (weights * stacked).sum(0)
    return (weights * stacked.softmax(-1)).sum(0).clamp_min(SMALLEST).log()


def fitting_rule(combine: Combine, outputs_nC: Tensor, y_n: Tensor) -> Combine:
    """Probabilities are mixed where labels are classes and there is an output for each; else the outputs are."""
    classes = not y_n.is_floating_point() and outputs_nC.dim() > 1 and outputs_nC.shape[-1] > 1
    return "outputs" if combine == "probabilities" and not classes else combine


def bounded_values(metric: Metric, outputs_MnC: Sequence[Tensor], y_n: Tensor) -> Tensor:
    """A score in [0, 1] for each model and sample.

    Of a metric without known bounds it is the share of the other models that the model beats on the sample; a tie
    counts half.
    """
    values_Mn = torch.stack([sample_values(metric, outputs_nC, y_n) for outputs_nC in outputs_MnC])
    if getattr(metric, "bounded", False) or len(values_Mn) == 1:
        return values_Mn
    beaten_MMn = (values_Mn[:, None] - values_Mn[None]).sign()
    return (beaten_MMn.sum(1) / (len(values_Mn) - 1) + 1) / 2


@register(Adaptation)
@final
@dataclass(frozen=True)
class Guarded:
    """Another adaptation, with guarded prediction around it: it trains as that one does.

    `members` are the models that are mixed, those of them that the client has: `private` needs private models
    (`alone.private`), and the weights are equal where a client holds no V_i (a plan whose `detection` asks for no
    reports, or fewer than 5 samples). `combine = "probabilities"` is for labels that are classes, whole numbers, and a
    model with an output for each; with other labels, as in regression, the outputs are mixed.
    """

    adaptation: Adaptation = field(default_factory=lambda: component(Adaptation, "dual"))
    members: tuple[Member, ...] = ("global", "adapted", "private")
    combine: Combine = "probabilities"
    strength: float = STRENGTH

    uses_private_model = True

    def __post_init__(self) -> None:
        require_choice("combine", self.combine, Combine)
        known = get_args(Member)
        for name in self.members:
            require_choice("members", name, Member)
        once = "adapted" in self.members and len(set(self.members)) == len(self.members)
        require(once, "members", self.members, f"name each of {', '.join(known)} at most once, and adapted among them")
        require(0 < self.strength <= 100, "strength", self.strength, "the strength of the weights is above 0, to 100")
        nested = isinstance(self.adaptation, Guarded)
        require(not nested, "adaptation", "guarded", "it is guarded already; name the adaptation inside")

    def fits(self, model: nn.Module, x: Tensor) -> None:
        if isinstance(self.adaptation, ChecksModel):
            try:
                self.adaptation.fits(model, x)
            except PlanError as error:
                raise error.within("adaptation") from None

    @property
    def has_global(self) -> bool:
        return has_global(self.adaptation)

    @property
    def part_in_words(self) -> str:
        return self.adaptation.part_in_words if isinstance(self.adaptation, SharesPart) else ""

    def private_names(self, names: Sequence[str]) -> frozenset[str]:
        try:
            return private_names(self.adaptation, names)
        except PlanError as error:
            raise error.within("adaptation") from None

    def begin(self, ctx: Context, shared: nn.Module) -> nn.Module | None:
        return self.adaptation.begin(ctx, shared)

    def step(self, ctx: Context, shared: nn.Module, private: nn.Module | None) -> Step:
        return self.adaptation.step(ctx, shared, private)

    def predictor(self, ctx: Context, shared: nn.Module, private: nn.Module | None) -> Predictor:
        models = self._models(ctx, shared, private)
        if len(models) == 1:
            return next(iter(models.values()))
        outputs_MnC = self._on_validation(ctx, models)
        weights_M = self._weights(ctx, models, outputs_MnC, ctx.validation)
        for name, weight in zip(models, weights_M.tolist(), strict=True):
            ctx.notes[f"weight/{name}"] = weight
        return _Mixture(models, weights_M, self._rule(ctx, shared), shared).eval()

    def held_out_outputs(self, ctx: Context, shared: nn.Module, private: nn.Module | None) -> Tensor:
        """The outputs for V_i: each half predicted with the weights that the other half chooses."""
        validation = ctx.validation
        assert validation is not None
        models = self._models(ctx, shared, private)
        outputs_MnC = self._on_validation(ctx, models)
        found_nC, rule = torch.empty_like(outputs_MnC[0]), self._rule(ctx, shared)
        half_n = stratified(validation.labels, len(validation) // 2, ctx.client)
        for chosen_n in (half_n, ~half_n):
            rows = chosen_n.nonzero().flatten()
            weights_M = self._weights(ctx, models, [one[rows] for one in outputs_MnC], subset(validation, rows))
            found_nC[~chosen_n] = mixed([one[~chosen_n] for one in outputs_MnC], weights_M, rule)
        return found_nC

    def _rule(self, ctx: Context, shared: nn.Module) -> Combine:
        """How outputs are mixed. A softmax over the targets of a regression would be wrong without an error."""
        x, y = ctx.train.take(torch.arange(1))
        with torch.no_grad():
            return fitting_rule(self.combine, shared(x.to(ctx.device)), y)

    def _models(self, ctx: Context, shared: nn.Module, private: nn.Module | None) -> dict[str, Predictor]:
        """By name, those that the client has. Without a v_i the adapted one may be w itself: it counts once."""
        adapted = self.adaptation.predictor(ctx, shared, private)
        alone = ctx.private_model() if "private" in self.members and ctx.private_model is not None else None
        has: dict[str, Predictor | None] = {
            "global": shared if adapted is not shared and self.has_global else None,
            "adapted": adapted,
            "private": alone,
        }
        return {name: model for name in self.members if (model := has[name]) is not None}

    def _on_validation(self, ctx: Context, models: Mapping[str, Predictor]) -> list[Tensor]:
        if ctx.validation is None:
            return []
        return [forward_all(model, ctx.validation, ctx.device).cpu() for model in models.values()]

    def _weights(
        self, ctx: Context, models: Mapping[str, Predictor], outputs_MnC: Sequence[Tensor], on: Examples | None
    ) -> Tensor:
        if on is None or ctx.metric is None:
            return mixture_weights(torch.zeros(len(models), 0))
        return mixture_weights(bounded_values(ctx.metric, outputs_MnC, on.labels), self.strength)


@final
class _Mixture(nn.Module):
    """What several models predict together, as one module; w and v_i belong to the client and are not registered."""

    weights_M: Tensor

    def __init__(self, models: Mapping[str, Predictor], weights_M: Tensor, combine: Combine, shared: nn.Module) -> None:
        super().__init__()
        self.own = nn.ModuleDict(
            {name: model for name, model in models.items() if isinstance(model, nn.Module) and model is not shared}
        )
        self.register_buffer("weights_M", weights_M)
        self._models: list[Callable[[Tensor], Tensor]] = list(models.values())
        self._combine: Combine = combine

    def forward(self, x: Tensor) -> Tensor:
        return mixed([model(x) for model in self._models], self.weights_M, self._combine)


@final
class GuardedPredictor(nn.Module):
    """Guarded prediction for a loop of one's own: models that predict together, weighted by validation data.

    >>> predictor = GuardedPredictor({"global": w, "tuned": v, "private": alone}, (x, y))
    >>> predictor(test_x)  # logarithms of probabilities, or the mean of the outputs of a regression

    None of the models may have trained on `validation`: tensors (x, y), or a data set; None for equal weights. `metric`
    is a lindt Metric, by default accuracy. A model with outputs for `validation` that are not finite is left out. The
    models are held as they are, and are in evaluation mode from then on; after training them build another one.
    """

    weights_M: Tensor

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        validation: object | None,
        *,
        metric: Metric | None = None,
        combine: Combine = "probabilities",
        strength: float = STRENGTH,
    ) -> None:
        super().__init__()
        require(bool(models), "models", models, "give at least one, by name")
        require_choice("combine", combine, Combine)
        require(0 < strength <= 100, "strength", strength, "the strength of the weights is above 0, to 100")
        data = None if validation is None else as_examples(validation)
        for model in models.values():
            model.eval()
        outputs = {} if data is None else {name: _outputs(model, data) for name, model in models.items()}
        used = {name: one for name, one in models.items() if name not in outputs or torch.isfinite(outputs[name]).all()}
        if not used:
            raise UserError("models: all give NaN or infinity on the validation data; there is none to predict with")
        self.left_out = tuple(name for name in models if name not in used)
        self.models = nn.ModuleDict(used)
        values_Mn, self._combine = torch.zeros(len(used), 0), combine
        if data is not None:
            found_MnC = [outputs[name] for name in used]
            self._combine = fitting_rule(combine, found_MnC[0], data.labels)
            values_Mn = bounded_values(metric or Accuracy(), found_MnC, data.labels)
        self.register_buffer("weights_M", mixture_weights(values_Mn, strength))
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return mixed([model(x) for model in self.models.values()], self.weights_M, self._combine)

    @property
    def weights(self) -> dict[str, float]:
        """By model; they sum to 1."""
        return dict(zip(self.models, self.weights_M.tolist(), strict=True))

    @property
    def cost(self) -> str:
        """What it takes to predict, in words."""
        return cost_in_words(len(self.models), sum(p.numel() for p in self.models.parameters()))


def cost_in_words(models: int, weights: int) -> str:
    size = f"{weights:,} weights, {4 * weights / 1e6:.1f} MB"
    return f"{models} models ({size}) and a forward pass of each, no byte more is sent"


def _outputs(model: nn.Module, data: Examples) -> Tensor:
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    return forward_all(model, data, device).cpu()


# The default of recovery: the paper's dual model, guarded.
register_method("guarded", adaptation={"kind": "guarded", "adaptation": "dual"})
register_method("guarded-fine-tune", adaptation={"kind": "guarded", "adaptation": "fine_tune"})
