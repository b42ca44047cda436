"""Metrics: accuracy and macro F1 by name, and a user's own function that gives one number a sample.

A metric travels as a tally: sums over samples that add up over clients. torch is imported where outputs are scored
only: a Flower server adds up tallies, which are arrays of numpy there, without it.

Legend: n samples, C classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, final

from lindt.errors import UserError
from lindt.gains import Paired
from lindt.protocols import Metric
from lindt.registry import Named, component, kinds, register

if TYPE_CHECKING:
    from torch import Tensor

OWN_METRIC: Final = "give metric=, a function of outputs and targets with one number per sample, higher is better"


def _hits(name: str, outputs_nC: Tensor, y_n: Tensor) -> Tensor:
    """1 where the largest output is the label's, 0 where an output is NaN.

    Other shapes than one label per prediction would broadcast.
    """
    if y_n.shape != outputs_nC.shape[:-1]:
        raise UserError(
            f"outputs of shape {tuple(outputs_nC.shape)} and targets of shape {tuple(y_n.shape)} are not one class per "
            f"prediction, which {name} compares; {OWN_METRIC}"
        )
    # NaN is no prediction; argmax would take it for the largest output, often that of the first class.
    return ((outputs_nC.argmax(-1) == y_n) & ~outputs_nC.isnan().any(-1)).double()


@register(Metric)
@final
@dataclass(frozen=True)
class Accuracy:
    percent = True
    bounded = True

    def per_sample(self, outputs_nC: Tensor, y_n: Tensor) -> Tensor:
        return _hits("Accuracy", outputs_nC, y_n)

    def tally(self, outputs_nC: Tensor, y_n: Tensor) -> Tensor:
        hits = self.per_sample(outputs_nC, y_n)
        import torch

        return torch.stack([hits.sum(), torch.tensor(float(hits.numel()), dtype=torch.float64)])

    def value(self, tally: Tensor) -> float:
        return float(tally[0] / tally[1])


@register(Metric)
@final
@dataclass(frozen=True)
class MacroF1:
    """The mean F1 over the classes that occur in truth or prediction; its tally is the confusion matrix."""

    percent = True
    bounded = True

    def per_sample(self, outputs_nC: Tensor, y_n: Tensor) -> Tensor:
        return _hits("MacroF1", outputs_nC, y_n)

    def tally(self, outputs_nC: Tensor, y_n: Tensor) -> Tensor:
        self.per_sample(outputs_nC, y_n)  # refuses other shapes
        classes = outputs_nC.shape[-1]
        cells = y_n * classes + outputs_nC.argmax(-1)
        import torch

        return torch.bincount(cells.flatten(), minlength=classes * classes).double()

    def value(self, tally: Tensor) -> float:
        confusion = tally.reshape(math.isqrt(len(tally)), -1)
        hits, total = confusion.diagonal(), confusion.sum(0) + confusion.sum(1)
        return float((2 * hits / total)[total > 0].mean())


@final
@dataclass(frozen=True)
class MeanOf:
    """A user's own metric: a function that returns one number per sample, higher is better."""

    function: Callable[[Tensor, Tensor], Tensor]
    percent = False
    bounded = False

    def per_sample(self, outputs_nC: Tensor, y_n: Tensor) -> Tensor:
        found = self.function(outputs_nC, y_n)
        if not hasattr(found, "double"):
            raise ValueError(
                f"the metric returned a {type(found).__name__}; return a tensor with one number per sample"
            )
        values = found.double()
        if values.shape != (len(y_n),):
            raise ValueError(
                f"the metric returned shape {tuple(values.shape)} for {len(y_n)} samples; return one number per sample"
            )
        return values

    def tally(self, outputs_nC: Tensor, y_n: Tensor) -> Tensor:
        values = self.per_sample(outputs_nC, y_n)
        import torch

        return torch.stack([values.sum(), torch.tensor(float(len(values)), dtype=torch.float64)])

    def value(self, tally: Tensor) -> float:
        return float(tally[0] / tally[1])


def as_metric(given: Metric | Callable[[Tensor, Tensor], Tensor]) -> Metric:
    """A user's `metric=` as a Metric: a function of outputs and targets is wrapped."""
    if isinstance(given, Metric):
        return given
    if not callable(given):
        raise UserError(f"metric: it is of type {type(given).__name__}; {OWN_METRIC}")
    return MeanOf(given)


def require_classes(metric: Metric, owner: str, outputs: Tensor, y: Tensor) -> None:
    """Check the targets of Accuracy and MacroF1. They compare the largest output with a class; others would score 0."""
    if not isinstance(metric, Accuracy | MacroF1):
        return
    name = type(metric).__name__
    one_hot = y.shape == outputs.shape and y.dim() == 2 and y.shape[1] > 1
    if one_hot and bool(((y == 0) | (y == 1)).all() and (y.sum(1) == 1).all()):
        raise UserError(f"{owner}: its targets are one-hot, and {name} compares classes; give y.argmax(1)")
    if y.is_floating_point():
        raise UserError(f"{owner}: its targets are floats, and {name} compares classes; {OWN_METRIC}")
    if y.dim() == outputs.dim() == 2 and y.shape[1] == 1 < outputs.shape[1]:
        raise UserError(
            f"{owner}: its targets have shape {tuple(y.shape)}, and {name} compares classes; give y.squeeze(1)"
        )
    if outputs.dim() < 2 or outputs.shape[-1] == 1:
        raise UserError(
            f"{owner}: the model has one output per sample, and {name} compares the outputs of classes; give the model "
            f"one output per class, or {OWN_METRIC}"
        )


def sample_values(metric: Metric, outputs_nC: Tensor, y_n: Tensor) -> Tensor:
    """The metric of each sample; the mean where a sample has several predictions. NaN counts as the lowest value."""
    values_n = metric.per_sample(outputs_nC, y_n).double().reshape(len(y_n), -1).mean(1)
    return values_n.nan_to_num(0.0 if getattr(metric, "bounded", False) else -math.inf, math.inf, -math.inf)


def paired(metric: Metric, first_n: Tensor, second_n: Tensor) -> Paired:
    """Two predictors compared on the same samples, by `sample_values` of each.

    A metric whose values per sample lie in [0, 1] has `bounded`. For other metrics only the sign of each difference
    counts: the mean is the share of samples won less the share lost.
    """
    bounded = getattr(metric, "bounded", False)  # else two values may be infinite, and their difference NaN
    d_n = first_n - second_n if bounded else (first_n > second_n).double() - (first_n < second_n).double()
    return Paired(float(d_n.mean()), float(d_n.square().mean()))


METRICS: Mapping[str, Metric] = Named(lambda: kinds(Metric), lambda kind: component(Metric, kind))
