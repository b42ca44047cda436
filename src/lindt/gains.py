"""A client's gain report: its fields, its bounds, and the noise that a client may add to it.

torch is not imported: a Flower client that trains with another library sends the same report.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, final

from lindt.errors import in_short

LONGEST: Final = 1e18  # the largest norm of an update: the squared distance of two such updates is still a float32
MOST_SAMPLES: Final = 2**40
MOST_NOISE: Final = 1e6


@final
@dataclass(frozen=True)
class Paired:
    """Two predictors on the same samples: the mean and the mean square of the difference d of each sample.

    d lies in [-1, 1]: the difference of a metric that lies in [0, 1], else the sign of the difference. So the mean
    square lies between the square of the mean and 1; it is not the variance. `Detector.observe` refuses other pairs. In
    a report from the network the mean is clipped to [-1, 1] and the mean square to its bounds.

    Examples:
        Five samples: on one of them only the first predictor is right, on the others both agree.

        >>> import lindt
        >>> import torch
        >>> d = torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0])
        >>> pair = lindt.Paired(float(d.mean()), float(d.square().mean()))
        >>> round(pair.mean, 2), round(pair.square, 2)
        (0.2, 0.2)
    """

    mean: float  # of d
    square: float  # the mean of d squared


@final
@dataclass(frozen=True)
class GainReport:
    """A client's report with its update: the gains of the received w on its validation part V_i.

    None of w, P_i and v_i trains on V_i. A positive gain means that the first of the two predictors is better.

    Examples:
        >>> import lindt
        >>> worse = lindt.Paired(mean=-0.2, square=0.3)
        >>> report = lindt.GainReport(samples=50, private=worse, equal_age=worse)
        >>> verdict = lindt.Detector(rounds=100, clients=20).observe(gains={"ward 3": report})
        >>> verdict.gain, verdict.samples
        (-0.2, 50)
    """

    samples: int  # the size of V_i
    private: Paired  # w less the finished P_i
    equal_age: Paired  # w less P_i after as many epochs as w has had, r E at most
    adapted: Paired | None = None  # while recovery is on: the model that the client predicts with, less w
    adapted_private: Paired | None = None  # while recovery is on: the model that the client predicts with, less P_i
    first_batch: float | None = None  # FL-GUARD: the score of w on the first training batch, less that of P_i on V_i


PAIRS: Final = ("private", "equal_age", "adapted", "adapted_private")  # the comparisons of a GainReport


def with_noise(report: GainReport, b: float, uniform: Callable[[], float] | None = None) -> GainReport:
    """The report with Laplace noise of scale b on each of its numbers; unchanged where b is 0.

    `uniform` draws from [0, 1); by default it is the operating system's generator. With a seed that the server knows,
    or can find by trying all, the server could subtract the noise. The mean squares are replaced by 1, their largest
    value, since they reveal as much as the means.
    """
    if not b:
        return report
    draw = uniform or secrets.SystemRandom().random

    def laplace() -> float:
        centred = draw() - 0.5
        return -b * math.copysign(math.log1p(-2 * abs(centred)), centred)

    pairs = {name: getattr(report, name) for name in PAIRS}
    noisy: dict[str, Any] = {
        name: Paired(pair.mean + laplace(), 1.0) for name, pair in pairs.items() if pair is not None
    }
    first = None if report.first_batch is None else report.first_batch + laplace()
    return replace(report, first_batch=first, **noisy)


def number(value: object, name: str) -> float:
    # The bound is checked first: a whole number may be too large for a float.
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LONGEST:
        raise ValueError(f"{name} = {in_short(value)}: it is not a number up to {LONGEST:g}")
    return float(value)


def whole_number(value: object, name: str, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise ValueError(f"{name} = {in_short(value)}: it is not a whole number from 0 to {most}")
    return value
