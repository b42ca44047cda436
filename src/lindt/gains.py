"""A client's gain report: what it says, its bounds, and the noise that a client may add to it.

torch is not imported: a Flower client that trains with another library reports in the same words.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, final

from lindt.errors import in_short

LONGEST: Final = 1e18  # of an update: the squared distance of two such is still a float32
MOST_SAMPLES: Final = 2**40
MOST_NOISE: Final = 1e6


@final
@dataclass(frozen=True)
class Paired:
    """Two predictors on the same samples: the mean and the mean square of the difference d of each sample.

    d lies in [-1, 1]: the difference of a metric that lies in [0, 1], else the sign of the difference.
    """

    mean: float
    square: float


@final
@dataclass(frozen=True)
class GainReport:
    """What a client adds to the answer of a visit: how the received w does on its validation part V_i.

    Neither w nor P_i nor v_i trains on V_i. Positive means that the first of the two predictors is better.
    """

    samples: int  # of V_i
    private: Paired  # w less the finished P_i
    equal_age: Paired  # w less P_i after as many epochs as w has had, r E at most
    adapted: Paired | None = None  # while recovery is on: what the client predicts with, less w
    adapted_private: Paired | None = None  # ... less P_i
    first_batch: float | None = None  # FL-GUARD: the score of w on the first training batch, less that of P_i on V_i


PAIRS: Final = ("private", "equal_age", "adapted", "adapted_private")  # of a GainReport, the comparisons


def with_noise(report: GainReport, b: float, uniform: Callable[[], float] | None = None) -> GainReport:
    """The report with Laplace noise of scale b on each of its numbers; as it is where b is 0.

    `uniform` draws from [0, 1). Without it the operating system's generator does: a seed that the server knows, or can
    find by trying all, would let it subtract the noise. The mean squares would tell as much as the means: 1 stands in
    their place, the most that they can be.
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
    # The bound first: a whole number may be too large for any float.
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LONGEST:
        raise ValueError(f"{name} = {in_short(value)}: no number up to {LONGEST:g}")
    return float(value)


def whole_number(value: object, name: str, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise ValueError(f"{name} = {in_short(value)}: no whole number from 0 to {most}")
    return value
