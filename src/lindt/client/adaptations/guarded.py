"""Guarded prediction: a client weights its models by their scores on its validation data, to be no worse than alone.

A client has up to four models: the global model (w), the model that its method adapts, a copy of w that it tunes when
it predicts, and the model that it trained alone (P_i). Guarded prediction mixes their predictions. The weight of a
model grows exponentially with its score on the client's validation part V_i, on which none of them has trained
(exponential weights; Dalalyan and Tsybakov, 2008). With few samples the weights are nearly equal; with many the best
model has nearly all the weight. So no threshold on the size of V_i is needed, and a model that is far worse than P_i
has almost no weight. Test data are not used. Clients send nothing more. The cost is the memory of the models and a
forward pass of each.

Once the weights are chosen, V_i is given back (`alone.with_validation`): the models that predict have trained on it as
well, as far as they train alone or at prediction, with the weights of the models that have not.

What is tested on V_i is not chosen on the same samples: for the reports, each half of V_i is predicted with weights
from the other half, by models that have not trained on V_i (`held_out_outputs`).

Legend: M models, n samples, C classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal, final, get_args

import torch
from torch import Tensor, nn

from lindt.client.adaptations.fine_tune import FineTune
from lindt.client.training import forward_all
from lindt.data.examples import as_examples, stratified, subset
from lindt.errors import PlanError, UserError, one_line, require, require_choice, require_type
from lindt.plan.problem import Accuracy, as_metric, require_classes, sample_values, validation_samples
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
from lindt.user_code import describe_error

Combine = Literal["probabilities", "outputs", "pick"]
Member = Literal["global", "adapted", "tuned", "private"]
STRENGTHS: Final = "give a number up to 100; 0: by the number of validation samples"
BY_NAME: Final = Mapping | nn.ModuleDict
NAMED: Final = 'give a dict of models by name, such as {"global": w, "private": own}'
SMALLEST: Final = 1e-30  # the least probability whose logarithm is taken


def mixture_weights(values_Mn: Tensor, strength: float = 0.0) -> Tensor:
    """Weights of M models from their scores on n validation samples: proportional to exp(strength * sum of scores).

    A sample's scores lie in [0, 1], higher is better. Without samples the weights are equal. A strength of 0 stands for
    sqrt(2 ln M / n): the fewer samples, the more each says, so that three samples keep out a model that fails on all.
    It is half of the rate with the least regret for n known in advance (Cesa-Bianchi and Lugosi, 2006, theorem 2.2).
    """
    models, samples = values_Mn.shape
    used = strength or math.sqrt(2 * math.log(models) / max(1, samples))
    return (used * values_Mn.to(torch.float64).sum(1)).softmax(0)


def mixed(outputs_MnC: Sequence[Tensor], weights_M: Tensor, combine: Combine = "probabilities") -> Tensor:
    """The mixed prediction of M models.

    `probabilities`: the logarithm of the mean of their softmax, which can be used as logits. `outputs`: the mean of the
    outputs. `pick`: the outputs of the model with the largest weight, the first among equal weights.

    A model whose output for a sample is NaN or infinite is left out for this sample: a w that an attacker has made
    huge may be finite on V_i and overflow elsewhere, and a small weight times NaN is NaN.
    """
    if combine == "pick":
        best, *others = sorted(range(len(outputs_MnC)), key=lambda m: -float(weights_M[m]))  # a tie keeps the order
        found_nC = outputs_MnC[best]
        for place in others:
            if not usable(found_nC).all():
                found_nC = torch.where(usable(found_nC), found_nC, outputs_MnC[place])
        return found_nC
    shape = (-1, *[1] * outputs_MnC[0].dim())
    stacked = torch.stack(list(outputs_MnC))
    weights = weights_M.to(stacked).reshape(shape)
    values = stacked if combine == "outputs" else stacked.softmax(-1)
    finite = torch.isfinite(values) if combine == "outputs" else torch.isfinite(values).all(-1, keepdim=True)
    kept = weights * finite
    # Where all are finite, the weights are used as they are: a division would change the last bits.
    weights = torch.where(finite.all(0), weights, kept / kept.sum(0))
    mixture = (weights * torch.where(finite, values, torch.zeros_like(values))).sum(0)
    return mixture if combine == "outputs" else mixture.clamp_min(SMALLEST).log()


def usable(outputs_nC: Tensor) -> Tensor:
    """For each sample whether its outputs are numbers that a prediction can be read from; a logit of -inf is one."""
    finite = torch.isfinite(outputs_nC)
    if outputs_nC.dim() == 1:
        return finite
    return (finite | torch.isneginf(outputs_nC)).all(-1, keepdim=True) & finite.any(-1, keepdim=True)


def fitting_rule(combine: Combine, outputs_nC: Tensor, y_n: Tensor) -> Combine:
    """The rule for these outputs: `probabilities` needs classes with one output each in the last dimension; otherwise
    it is `outputs`."""
    one_each = outputs_nC.shape[:-1] == y_n.shape and outputs_nC.shape[-1] > 1
    classes = not y_n.is_floating_point() and outputs_nC.dim() > 1 and one_each
    return "outputs" if combine == "probabilities" and not classes else combine


def bounded_values(metric: Metric, outputs_MnC: Sequence[Tensor], y_n: Tensor) -> Tensor:
    """A score in [0, 1] for each model and sample.

    For a metric without known bounds it is the share of the other models that have a lower score on the sample; a tie
    counts half. Where a model's outputs are NaN or infinite, its score is the lowest.
    """
    values_Mn = torch.stack([sample_values(metric, outputs_nC, y_n) for outputs_nC in outputs_MnC])
    usable_Mn = torch.stack([usable(outputs_nC).reshape(len(y_n), -1).all(1) for outputs_nC in outputs_MnC])
    if getattr(metric, "bounded", False) or len(values_Mn) == 1:
        return torch.where(usable_Mn, values_Mn, torch.zeros_like(values_Mn))
    values_Mn = torch.where(usable_Mn, values_Mn, torch.full_like(values_Mn, -math.inf))
    one, other = values_Mn[:, None], values_Mn[None]
    beaten_MMn = (one > other).to(values_Mn) - (one < other).to(values_Mn)
    return (beaten_MMn.sum(1) / (len(values_Mn) - 1) + 1) / 2


@register(Adaptation)
@final
@dataclass(frozen=True)
class Guarded:
    """Guarded prediction around another adaptation, which decides how the client trains.

    `members` are the models to mix, as far as the client has them: `private` needs private models (`alone.private`);
    `tuned` is w after `tuning_epochs`, which it costs whenever a client is scored or its model is built. P_i and a
    model that is tuned at prediction train twice: without V_i for the weights, and with V_i to predict.

    The weights are equal in a plan whose `detection` asks for no reports, since no client has a V_i there. A client
    with fewer than 5 samples has no V_i in any plan, and predicts with P_i alone. `combine = "probabilities"` needs
    labels that are classes and a model with one output per class; with other labels, as in regression, the outputs are
    mixed.
    """

    adaptation: Adaptation = field(default_factory=lambda: component(Adaptation, "dual"))
    members: tuple[Member, ...] = ("global", "adapted", "private")
    combine: Combine = "probabilities"
    strength: float = 0.0
    tuning_rate: float = FineTune.rate
    tuning_epochs: int = FineTune.epochs

    uses_private_model = True

    def __post_init__(self) -> None:
        require_choice("combine", self.combine, Combine)
        known = get_args(Member)
        for name in self.members:
            require_choice("members", name, Member)
        once = "adapted" in self.members and len(set(self.members)) == len(self.members)
        require(once, "members", self.members, f"name each of {', '.join(known)} at most once, and adapted among them")
        require(0 <= self.strength <= 100, "strength", self.strength, STRENGTHS)
        require(self.tuning_rate > 0, "tuning_rate", self.tuning_rate, "give a rate above 0")
        require(self.tuning_epochs >= 1, "tuning_epochs", self.tuning_epochs, "tune for at least 1 epoch")
        nested = isinstance(self.adaptation, Guarded)
        require(not nested, "adaptation", "guarded", "guarded cannot contain guarded; name another adaptation")

    def fits(self, model: nn.Module, x: Tensor) -> None:
        if isinstance(self.adaptation, ChecksModel):
            try:
                self.adaptation.fits(model, x)
            except PlanError as error:
                raise error.within("adaptation") from None

    @property
    def takes_optimizer(self) -> bool:
        return getattr(self.adaptation, "takes_optimizer", False)

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
        weights_M, several = torch.ones(1), len(models.by_name) > 1
        if several:
            weights_M = self._weights(ctx, models, self._on_validation(ctx, models), ctx.validation)
            for name, weight in zip(models.by_name, weights_M.tolist(), strict=True):
                ctx.notes[f"weight/{name}"] = weight
        if ctx.whole is not None:
            trained_on_all = replace(ctx, train=ctx.whole, private_model=ctx.private_on_whole)
            models = self._models(trained_on_all, shared, private)
        if not several:
            return next(iter(models.by_name.values()))
        return _Mixture(models, weights_M, self._rule(ctx, shared)).eval()

    def held_out_outputs(self, ctx: Context, shared: nn.Module, private: nn.Module | None) -> Tensor:
        """The outputs for V_i: each half is predicted with weights from the other half."""
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
        """How outputs are mixed. In a regression a softmax would be wrong, without raising an error."""
        x, y = ctx.train.take(torch.arange(1))
        with torch.no_grad():
            return fitting_rule(self.combine, shared(x.to(ctx.device)), y)

    def _models(self, ctx: Context, shared: nn.Module, private: nn.Module | None) -> _Models:
        """The client's models by name. Without a v_i the adapted model may be w itself: then it counts once.

        A client with too few samples for a V_i has P_i alone: it could not tell that the other models are worse.
        """
        alone = ctx.private_model() if "private" in self.members and ctx.private_model is not None else None
        if alone is not None and ctx.validation is None and not validation_samples(len(ctx.train)):
            return _Models({"private": alone}, shared, runs_w=False)
        adapted = self.adaptation.predictor(ctx, shared, private)
        tuning = FineTune(self.tuning_rate, self.tuning_epochs)
        has: dict[str, Predictor | None] = {
            "global": shared if adapted is not shared and self.has_global else None,
            "adapted": adapted,
            "tuned": tuning.predictor(ctx, shared, None) if "tuned" in self.members and self.has_global else None,
            "private": alone,
        }
        by_name: dict[str, Predictor] = {name: model for name in self.members if (model := has[name]) is not None}
        return _Models(by_name, shared, getattr(self.adaptation, "predictor_runs_w", False))

    def _on_validation(self, ctx: Context, models: _Models) -> list[Tensor]:
        if ctx.validation is None:
            return []
        outputs_nMC = forward_all(lambda x: torch.stack(models.outputs(x), 1), ctx.validation, ctx.device)
        return [one.contiguous() for one in outputs_nMC.cpu().unbind(1)]

    def _weights(self, ctx: Context, models: _Models, outputs_MnC: Sequence[Tensor], on: Examples | None) -> Tensor:
        if on is None or ctx.metric is None:
            return mixture_weights(torch.zeros(len(models.by_name), 0))
        return mixture_weights(bounded_values(ctx.metric, outputs_MnC, on.labels), self.strength)


@final
@dataclass(frozen=True, eq=False)
class _Models:
    """A client's models by name. Where the adapted model runs w (`runs_w`), a pass of it gives the outputs of w too."""

    by_name: Mapping[str, Predictor]
    shared: nn.Module
    runs_w: bool

    def outputs(self, x: Tensor) -> list[Tensor]:
        if not self.runs_w or "global" not in self.by_name:
            return [model(x) for model in self.by_name.values()]
        caught: list[Tensor] = []
        handle = self.shared.register_forward_hook(lambda _module, _inputs, output: caught.append(output))
        try:
            adapted = self.by_name["adapted"](x)
        finally:
            handle.remove()
        (of_w,) = caught
        known = {"adapted": adapted, "global": of_w}
        return [known[name] if name in known else model(x) for name, model in self.by_name.items()]


@final
class _Mixture(nn.Module):
    """The mixed prediction of several models, as one module; w and v_i belong to the client and are not registered."""

    weights_M: Tensor

    def __init__(self, models: _Models, weights_M: Tensor, combine: Combine) -> None:
        super().__init__()
        own = {
            name: one for name, one in models.by_name.items() if isinstance(one, nn.Module) and one is not models.shared
        }
        self.own = nn.ModuleDict(own)
        self.register_buffer("weights_M", weights_M)
        self._models = models
        self._combine: Combine = combine

    def forward(self, x: Tensor) -> Tensor:
        return mixed(self._models.outputs(x), self.weights_M, self._combine)


@final
class GuardedPredictor(nn.Module):
    """Guarded prediction for a loop of your own: a mixture of models, weighted by their scores on validation data.

    Called with inputs, it returns logarithms of probabilities, or the mean of the outputs of a regression. A model
    whose outputs for `validation` are not finite is left out (`left_out` names it). The models are not copied, and are
    put into evaluation mode; after training them further, build a new GuardedPredictor.

    Args:
        models: The models by name.
        validation: Samples that none of the models has trained on: tensors (x, y), or a data set; None for equal
            weights.
        metric: A function of outputs and targets with one number per sample, higher is better, or a lindt Metric; by
            default accuracy. A regression needs one. A sample's score is then the share of the other models that the
            model beats on it, so that one large error does not decide.
        combine: `probabilities` mixes the softmax of the outputs, `outputs` the outputs as they are, `pick` takes the
            best model alone. Where labels are not classes, `probabilities` mixes outputs.
        strength: How fast a model's weight grows with its score; 0: sqrt(2 ln M / n) for M models and n samples.

    Once the weights are chosen, `refitted` takes models that have trained on the validation samples too: they are
    usually better, and the weights stay honest.

    Examples:
        The second model is right on all validation samples, the first on none.

        >>> import lindt, torch
        >>> from torch import nn
        >>> wrong, right = nn.Linear(1, 2, bias=False), nn.Linear(1, 2, bias=False)
        >>> with torch.no_grad():
        ...     _ = right.weight.copy_(torch.tensor([[-1.0], [1.0]]))
        ...     _ = wrong.weight.copy_(torch.tensor([[1.0], [-1.0]]))
        >>> x, y = torch.ones(20, 1), torch.ones(20, dtype=torch.long)
        >>> predictor = lindt.GuardedPredictor({"global": wrong, "private": right}, (x, y))
        >>> {name: round(weight, 3) for name, weight in predictor.weights.items()}
        {'global': 0.005, 'private': 0.995}
        >>> predictor(x).argmax(1).eq(y).all().item()
        True

        A regression: the first model is 3 too low on all samples, the second 1 too high.

        >>> low, high = nn.Linear(1, 1), nn.Linear(1, 1)
        >>> with torch.no_grad():
        ...     _ = low.weight.fill_(2.0), low.bias.fill_(-3.0), high.weight.fill_(2.0), high.bias.fill_(1.0)
        >>> x = torch.randn(20, 1)
        >>> def closeness(outputs, targets):
        ...     return -(outputs - targets).abs().squeeze(1)  # one number per sample, higher is better
        >>> predictor = lindt.GuardedPredictor({"global": low, "private": high}, (x, 2 * x), metric=closeness)
        >>> {name: round(weight, 3) for name, weight in predictor.weights.items()}
        {'global': 0.005, 'private': 0.995}
        >>> [round(value, 2) for value in (predictor(x) - 2 * x).flatten().tolist()[:2]]  # 1 less 4 * 0.005
        [0.98, 0.98]
    """

    weights_M: Tensor

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        validation: object | None,
        *,
        metric: Metric | Callable[[Tensor, Tensor], Tensor] | None = None,
        combine: Combine = "probabilities",
        strength: float = 0.0,
    ) -> None:
        super().__init__()
        require_type("models", models, BY_NAME, NAMED)
        require(bool(models), "models", models, "give at least one model, by name")
        require_choice("combine", combine, Combine)
        require(0 <= strength <= 100, "strength", strength, STRENGTHS)
        judge = Accuracy() if metric is None else as_metric(metric)
        data = None if validation is None else as_examples(validation)
        if data is not None and not len(data):
            raise UserError("validation: it has no samples; give held-out samples, or None for equal weights")
        for name, model in models.items():
            require_type(f"models[{name!r}]", model, nn.Module, "give an nn.Module")
            model.eval()
        outputs = {} if data is None else {name: _outputs(model, data) for name, model in models.items()}
        _require_one_shape(outputs)
        used = {name: one for name, one in models.items() if name not in outputs or torch.isfinite(outputs[name]).all()}
        if not used:
            raise UserError(
                "models: the outputs of all models on the validation data hold NaN or infinity; give others"
            )
        self.left_out = tuple(name for name in models if name not in used)
        try:
            self.models = nn.ModuleDict(used)
        except (KeyError, TypeError) as error:  # a name with a dot, or that a module has a method of
            raise UserError(f"models: {one_line(str(error.args[0]))}; give another name") from None
        values_Mn, self._combine = torch.zeros(len(used), 0), combine
        if data is not None:
            found_MnC, y_n = [outputs[name] for name in used], data.labels
            require_classes(judge, "validation", found_MnC[0], y_n)
            self._combine = fitting_rule(combine, found_MnC[0], y_n)
            try:
                values_Mn = bounded_values(judge, found_MnC, y_n)
            except UserError:
                raise
            except Exception as error:
                shapes = f"outputs of shape {tuple(found_MnC[0].shape)} and targets of shape {tuple(y_n.shape)}"
                raise UserError(f"metric: it does not take {shapes} ({describe_error(error)})") from error
        self.register_buffer("weights_M", mixture_weights(values_Mn, strength))
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        outputs = {name: model(x) for name, model in self.models.items()}
        _require_one_shape(outputs)  # without validation data, or after `refitted`, this is the first call
        return mixed(list(outputs.values()), self.weights_M, self._combine)

    def refitted(self, models: Mapping[str, nn.Module]) -> GuardedPredictor:
        """The same weights with other models: with those that have trained on the validation data as well.

        Give a model for each name in `weights`; one that cannot be trained again can be given as it was.
        """
        names = sorted(self.models)
        require_type("models", models, BY_NAME, NAMED)
        require(sorted(models) == names, "models", sorted(models), f"give one model for each of {', '.join(names)}")
        again = GuardedPredictor({name: models[name] for name in self.models}, None, combine=self._combine)
        again.left_out, again.weights_M = self.left_out, self.weights_M.clone()
        return again

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each model, by name; they sum to 1."""
        return dict(zip(self.models, self.weights_M.tolist(), strict=True))

    @property
    def cost(self) -> str:
        """The cost of a prediction, as text."""
        return cost_in_words(len(self.models), sum(p.numel() for p in self.models.parameters()))


def cost_in_words(models: int, weights: int) -> str:
    size = f"{weights:,} weights, {4 * weights / 1e6:.1f} MB"
    return f"{models} models ({size}) and a forward pass of each; clients send nothing more"


def _require_one_shape(outputs: Mapping[str, Tensor]) -> None:
    shapes = [(name, tuple(found.shape)) for name, found in outputs.items()]
    for name, shape in shapes[1:]:
        first, expected = shapes[0]
        if shape != expected:
            raise UserError(
                f"models: the outputs of {first!r} have shape {expected}, those of {name!r} {shape}; give models with "
                "outputs of the same shape"
            )


def _outputs(model: nn.Module, data: Examples) -> Tensor:
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    return forward_all(model, data, device).cpu()


# The default of recovery: the paper's dual model, guarded.
register_method("guarded", adaptation={"kind": "guarded", "adaptation": "dual"})
register_method("guarded-fine-tune", adaptation={"kind": "guarded", "adaptation": "fine_tune"})
register_method(
    "guarded-all",
    adaptation={"kind": "guarded", "adaptation": "dual", "members": ["global", "adapted", "tuned", "private"]},
)
