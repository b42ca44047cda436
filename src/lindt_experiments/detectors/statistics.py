"""Statistics of a detector over many runs, with their intervals. Never imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from scipy.stats import beta as beta_distribution
from scipy.stats import rankdata


@final
@dataclass(frozen=True)
class Share:
    """`hits` of `total`, with the exact interval of Clopper and Pearson at 95%."""

    hits: int
    total: int

    @property
    def value(self) -> float | None:
        return self.hits / self.total if self.total else None

    @property
    def interval(self) -> tuple[float, float]:
        k, n = self.hits, self.total
        low = float(beta_distribution.ppf(0.025, k, n - k + 1)) if k else 0.0
        high = float(beta_distribution.ppf(0.975, k + 1, n - k)) if k < n else 1.0
        return low, high

    def __str__(self) -> str:
        if not self.total:
            return "-"
        low, high = self.interval
        return f"{self.hits / self.total:.3f} ({low:.3f}-{high:.3f})"


def share(of: Sequence[bool]) -> Share:
    return Share(sum(of), len(of))


def area(negative: Sequence[float | None], healthy: Sequence[float | None]) -> float | None:
    """AUC: how often a negative run has more evidence than a healthy run; a tie counts half.

    A run without evidence yet has the evidence 0.
    """
    if not negative or not healthy:
        return None
    values = np.array([0.0 if value is None else value for value in (*negative, *healthy)])
    ranks = rankdata(np.nan_to_num(values, nan=0.0))
    n, m = len(negative), len(healthy)
    return float((ranks[:n].sum() - n * (n + 1) / 2) / (n * m))
