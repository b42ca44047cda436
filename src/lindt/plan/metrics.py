"""The metrics by name: accuracy, macro F1, or the mean of a function that gives one number a sample.

A metric travels as a tally: sums over samples that add up over clients.

Legend: n samples, C classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor

from lindt.protocols import Metric
from lindt.registry import Named, component, kinds, register

Weighting = Literal["equal", "size", "given"]


@register(Metric)
@final
@dataclass(frozen=True)
class Accuracy:
    percent = True

    def per_sample(self, outputs_nC: Tensor, y_n: Tensor) -> Tensor:
        return (outputs_nC.argmax(-1) == y_n).to(torch.float64)

    def tally(self, outputs_nC: Tensor, y_n: Tensor) -> Tensor:
        hits = self.per_sample(outputs_nC, y_n)
        return torch.stack([hits.sum(), torch.tensor(float(hits.numel()), dtype=torch.float64)])

    def value(self, tally: Tensor) -> float:
        return float(tally[0] / tally[1])


@register(Metric)
@final
@dataclass(frozen=True)
class MacroF1:
    """The mean F1 over the classes that occur in truth or prediction; its tally is the confusion matrix."""

    percent = True

    def per_sample(self, outputs_nC: Tensor, y_n: Tensor) -> Tensor:
        return (outputs_nC.argmax(-1) == y_n).to(torch.float64)

    def tally(self, outputs_nC: Tensor, y_n: Tensor) -> Tensor:
        classes = outputs_nC.shape[-1]
        cells = y_n * classes + outputs_nC.argmax(-1)
        return torch.bincount(cells.flatten(), minlength=classes * classes).to(torch.float64)

    def value(self, tally: Tensor) -> float:
        confusion = tally.view(math.isqrt(tally.numel()), -1)
        hits, total = confusion.diagonal(), confusion.sum(0) + confusion.sum(1)
        return float((2 * hits / total)[total > 0].mean())


@final
@dataclass(frozen=True)
class MeanOf:
    """A user's own metric: a function that gives one number a sample, higher is better."""

    function: Callable[[Tensor, Tensor], Tensor]
    percent = False

    def per_sample(self, outputs_nC: Tensor, y_n: Tensor) -> Tensor:
        values = self.function(outputs_nC, y_n).to(torch.float64)
        if values.shape != (len(y_n),):
            raise ValueError(
                f"the metric gave shape {tuple(values.shape)} for {len(y_n)} samples; give one number each"
            )
        return values

    def tally(self, outputs_nC: Tensor, y_n: Tensor) -> Tensor:
        values = self.per_sample(outputs_nC, y_n)
        return torch.stack([values.sum(), torch.tensor(float(len(values)), dtype=torch.float64)])

    def value(self, tally: Tensor) -> float:
        return float(tally[0] / tally[1])


METRICS: Mapping[str, Metric] = Named(lambda: kinds(Metric), lambda kind: component(Metric, kind))
