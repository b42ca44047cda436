"""The score of a model from an app's own evaluation: one number, higher is better; and the difference of two scores.

The score is the metric whose name contains "acc", else minus the metric whose name contains "loss", else the metric
that the user names. An accuracy is a share in [0, 1]; the user can say that of another metric, too. An evaluation gives
means over samples, not the samples: the mean difference of two accuracies a and b is known, but the mean square of the
difference only has a bound, min(a + b, 2 - a - b). The bound is reported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import final

from flwr.app import RecordDict

from lindt.errors import UserError, in_short
from lindt.gains import MOST_SAMPLES, Paired

ScoreRule = str | Callable[[Mapping[str, float]], float] | None


@final
@dataclass(frozen=True)
class Score:
    """The score of one model on a client's evaluation data. `share`: it is an accuracy, or treated as one. `words`: the
    metric and its direction, for the logs."""

    value: float
    share: bool
    samples: int
    loss: float | None = None  # the metric with "loss" in its name, if there is exactly one
    words: str = field(default="", compare=False)

    def scaled(self, percent: bool) -> Score:
        return replace(self, value=self.value / 100) if percent and self.share else self


def require_rule(rule: ScoreRule, share: bool) -> None:
    """Refuse `share` where it cannot be meant."""
    if share and rule is None:
        raise UserError("share: name the score that is a share, wrap(app, score='name', share=True)")
    if share and isinstance(rule, str) and rule.startswith("-"):
        raise UserError(
            f"share: with score = {rule!r} lower is better; give a function of all metrics instead, "
            f"score=lambda metrics: 1 - metrics[{rule.removeprefix('-')!r}]"
        )


def score_of(content: RecordDict, rule: ScoreRule, weighted_by: str, share: bool = False) -> Score:
    """The score in the reply of an evaluation. Raises UserError if no metric can be the score.

    `share`: the user says that the score is a share in [0, 1].
    """
    metrics: dict[str, float] = {}
    for record in content.metric_records.values():
        metrics |= {name: float(value) for name, value in record.items() if isinstance(value, int | float)}
    if weighted_by not in metrics:
        raise UserError(
            f"the evaluation's metrics are {_names(metrics)}: {weighted_by!r}, the number of samples, is missing; "
            "return it too"
        )
    samples = metrics.pop(weighted_by)
    if not 1 <= samples <= MOST_SAMPLES:
        raise UserError(
            f"the evaluation's {weighted_by} is {in_short(samples)}; the number of samples must be 1 to {MOST_SAMPLES}"
        )
    losses = [name for name in metrics if "loss" in name.lower()]
    loss = metrics[losses[0]] if len(losses) == 1 else None
    value, accuracy, words = _value(metrics, rule)
    if not math.isfinite(value):
        raise UserError(f"the evaluation's score is {value}; it must be a finite number")
    if share and not 0 <= value <= 1:
        raise UserError(
            f"the evaluation's score is {value:g}, but share=True says that it is a share; it must be from 0 to 1"
        )
    if accuracy and not 0 <= value <= 100:
        raise UserError(f"the evaluation's accuracy is {value:g}; it must be from 0 to 1, or a percentage up to 100")
    known = loss if loss is not None and math.isfinite(loss) else None
    return Score(value, accuracy or share, int(samples), known, f"{words} (a share)" if share else words)


def _value(metrics: Mapping[str, float], rule: ScoreRule) -> tuple[float, bool, str]:
    """The score, whether it is an accuracy, and the metric and its direction in words."""
    if callable(rule):
        return float(rule(metrics)), False, "a function of all metrics, higher is better"
    if rule is not None:
        name = rule.removeprefix("-")
        if name not in metrics:
            raise UserError(f"score = {rule!r}: the evaluation's metrics are {_names(metrics)}; name one of them")
        if rule.startswith("-"):
            return -metrics[name], False, _lower(name)
        if any(word in name.lower() for word in ("loss", "error")):  # the verdict would be the opposite of the truth
            raise UserError(
                f"score = {rule!r}: of a loss or an error lower is better: write score='-{name}'. If higher is better "
                f"here, give a function, score=lambda metrics: metrics[{name!r}]"
            )
        return metrics[name], _is_accuracy(name), _higher(name)
    accuracies = [name for name in metrics if _is_accuracy(name)]
    if len(accuracies) == 1:
        return metrics[accuracies[0]], True, _higher(accuracies[0])
    losses = [name for name in metrics if "loss" in name.lower()]
    if not accuracies and len(losses) == 1:
        return -metrics[losses[0]], False, _lower(losses[0])
    raise UserError(
        f"the evaluation's metrics are {_names(metrics)}: which of them is the score? "
        "Give wrap(app, score='name'), or score='-name' if lower is better"
    )


def _higher(name: str) -> str:
    return f"{_printable(name)}, higher is better"


def _lower(name: str) -> str:
    return f"{_printable(name)}, lower is better"


def _printable(name: str) -> str:
    """The name as the server takes it: one that could break its log is written with escapes."""
    return name[:80] if name.isprintable() else ascii(name[:16])


def _is_accuracy(name: str) -> bool:
    return "acc" in name.lower() and "accum" not in name.lower()  # accumulated_steps is none


def _names(metrics: Mapping[str, float]) -> str:
    return ", ".join(sorted(metrics)[:12]) or "none"


def compared(first: Score, second: Score) -> Paired:
    """The gain of the first score over the second, in [-1, 1]: a - b for accuracies, else (a - b) / (|a| + |b|)."""
    if first.share and second.share:
        a, b = first.value, second.value
        return Paired(a - b, min(1.0, a + b, 2 - a - b))
    size = abs(first.value) + abs(second.value)
    return Paired((first.value - second.value) / size if size else 0.0, 1.0)
