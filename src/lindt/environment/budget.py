"""The honest privacy budget of Eq. 4: the (epsilon, delta) that the server's Gaussian noise really buys.

The paper adds N(0, sigma^2 I) to the aggregate of updates clipped to S and calls it differential privacy, but
never says how much. This file says it, by Renyi accounting (the package dp-accounting). The words are the
privacy literature's, marked `_dp`: the paper's epsilon is a threshold, and its Delta a divergence.

What is counted, and what is not:
- Two federations are neighbours when one client's whole data is replaced by another's (N is public).
- Counted is the release of w after every round. Not counted: that the server itself sees every w_i, that the
  switch of recovery depends on Delta (a bit per round, read off the updates before noise), and that float
  buffers travel without noise. The true budget is never smaller than the one given here.
- In simulation the noise comes from the plan's seed; who knows the seed knows the noise. `privacy_budget` in
  runs/summary.py says so.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, final

from lindt.errors import require

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


STRONG: Final = 1.0
"""Up to here "a strong guarantee" (Ponomareva et al. 2023, "How to DP-fy ML", tier 1)."""


MEANINGFUL: Final = 10.0
"""Up to here "a moderate guarantee" (tier 2). Above it, the chance of any outcome may change by a factor of
e^10 = 22,026 with one client's data: "no meaningful guarantee" (tier 3)."""


LARGEST_DELTA_DP: Final = 0.01
"""Above it no epsilon means much: to publish everything with a chance of delta would be allowed. N^-1.1 is
above it for fewer than 66 clients."""


# Renyi orders. For the Gaussian alone any order above 1 is good: geometric, dense enough that the minimum
# lies within 0.1% of the closed form's. dp-accounting takes no order up to 1.01 (its conversion is unstable
# there), and a huge epsilon wants the smallest one: at 1.0101 it is 1% above the limit.
_ORDERS: Final = tuple(1 + 0.0101 * 1.05**k for k in range(400))
# Sampling without replacement is known at whole orders only, and between two of them is interpolated; between
# 1 and 2 that is no better than 2. An order costs its square up to 256; above, the bound is looser and cheap.
_SAMPLED_ORDERS: Final = (*range(2, 33), *range(36, 65, 4), 80, 96, 128, 512, 1024)
# To count less noise than there is stays true. Beyond these, z^2 overflows, or the differences that the
# sampled account takes (of numbers 1/z^2 apart from 1) drown in rounding.
_MOST_NOISE: Final = 1e100
_MOST_SAMPLED_NOISE: Final = 1e3


@final
@dataclass(frozen=True)
class Budget:
    """What the noise of Eq. 4 buys after a number of rounds; `epsilon_dp` is None where it buys nothing.

    `amplified`: it relies on nobody learning which clients were asked in a round.
    """

    epsilon_dp: float | None
    delta_dp: float
    noise_multiplier: float | None
    amplified: bool
    reason: str

    def in_words(self) -> str:
        """One plain sentence: `(epsilon = 2.27e+09, delta = 0.00631): no meaningful guarantee from ...`."""
        if self.epsilon_dp is None:
            return f"no guarantee: {self.reason}"
        if self.epsilon_dp > MEANINGFUL or self.delta_dp > LARGEST_DELTA_DP:
            worth = "no meaningful guarantee"
        else:
            worth = "a strong guarantee" if self.epsilon_dp <= STRONG else "a moderate guarantee"
        return f"(epsilon = {self.epsilon_dp:.3g}, delta = {self.delta_dp:.3g}): {worth} {self.reason}"

    def __str__(self) -> str:
        return self.in_words()


def budget(
    *,
    sigma: float,
    sensitivity: float | None,
    clients: int,
    active: int,
    rounds: int | None = None,
    asked: int | None = None,
    reachable: Sequence[int] | None = None,
    uniform: bool = True,
    delta_dp: float | None = None,
) -> Budget:
    """The budget of `rounds` rounds of Eq. 4 with `active` (K) of `clients` (N) in each.

    `asked` is how many clients are asked in a round, by default K. With over-selection it is more than K, and the
    first K answers are taken.

    `reachable` gives, in place of `rounds`, how many clients could be asked in each of them: those that were connected.
    By default all N.

    `sensitivity` is how far, in L2, the aggregate can move when one client's update is replaced: 2S/K for the
    plain mean of updates clipped to S, with the smallest K of any round; None where no bound is known.
    `delta_dp` is by default N^-1.1, as in McMahan et al. 2018, whose scheme the paper follows; always below
    1/N, since at 1/N one could publish a random client's data in full.

    Two accounts are valid, and the smaller is returned. The plain one holds whoever takes part. The amplified
    one needs a `uniform` and secret choice of the clients asked among those reachable, which a fixed share of attackers
    per round is not. For the paper's small sigma the plain one is the smaller.

    The amplified account uses the sampling rate `asked` / `reachable` of each round, not K / N. Who is connected is
    taken to be known: among M connected clients one of them is asked with probability `asked` / M, however many others
    there are. Only the clients asked are a uniform sample; which K of them are taken depends on their speed, and a
    client that is always fast enough is in the sum whenever it is asked. Given the clients asked, the rest of the round
    is the Gaussian mechanism with `sensitivity`: for given times of arrival, replacing one client exchanges at most one
    of the K updates. So amplification by sampling without replacement holds at that rate. Not counted is what the times
    themselves reveal: they are taken to be independent of the data.
    """
    require(math.isfinite(sigma) and sigma >= 0, "sigma", sigma, "take a finite number, 0 or larger")
    require(sensitivity is None or sensitivity > 0, "sensitivity", sensitivity, "take a number above 0, or None")
    require(clients >= 1, "clients", clients, "take at least one client")
    require(1 <= active <= clients, "active", active, f"take 1 to {clients}, the number of clients")
    asked = active if asked is None else asked
    require(active <= asked <= clients, "asked", asked, f"take {active} to {clients}: the answers taken to all clients")
    if reachable is None:
        require(rounds is not None and rounds >= 0, "rounds", rounds, "take 0 or more")
        times = Counter({clients: rounds} if rounds else {})  # not a list: rounds may be a billion
    else:
        times = Counter(reachable)
    fix = f"take 1 to {clients}, the number of clients, for each round"
    require(all(1 <= M <= clients for M in times), "reachable", reachable, fix)
    rounds = times.total()
    # N = 1 would give 1, which promises nothing whatever the noise; it takes the value of two clients.
    delta_dp = max(clients, 2) ** -1.1 if delta_dp is None else delta_dp
    require(
        0 < delta_dp < 1 / clients,
        "delta_dp",
        delta_dp,
        f"take a number between 0 and 1/N = {1 / clients:.3g}",
    )

    z = sigma / sensitivity if sensitivity is not None and math.isfinite(sensitivity) else None
    if rounds == 0:
        return Budget(0.0, delta_dp, z, amplified=False, reason="before the first round")
    if sigma == 0:
        return Budget(None, delta_dp, z, amplified=False, reason="no noise is added (sigma = 0)")
    if z is None:
        why = "one client's part in the aggregate has no known bound"
        return Budget(None, delta_dp, None, amplified=False, reason=why)

    plain = _epsilon_dp(min(z, _MOST_NOISE), {None: rounds}, delta_dp, _ORDERS)
    sampled = math.inf
    # Where all that can be reached are asked there is no sample.
    draws: Counter[tuple[int, int] | None] = Counter()
    for M, count in times.items():
        draws[(asked, M) if asked < M else None] += count
    if uniform and any(draws):
        sampled = _epsilon_dp(min(z, _MOST_SAMPLED_NOISE), draws, delta_dp, _SAMPLED_ORDERS)
    epsilon_dp, amplified = min(plain, sampled), sampled < plain
    reason = f"from noise of {z:.3g} times the sensitivity, {rounds} round{'s' if rounds > 1 else ''}"
    if math.isinf(epsilon_dp):
        return Budget(None, delta_dp, z, amplified=False, reason=f"epsilon is beyond every number, {reason}")
    if amplified:
        worst, best = (f"{min(asked, M)}/{M}" for M in (min(times), max(times)))
        reason += (
            f", amplified by the sampling rate {worst if worst == best else f'{best} to {worst}'} of the clients that"
        )
        reason += f" could be reached, provided that nobody learns which {asked} of them were asked"
    return Budget(epsilon_dp, delta_dp, z, amplified, reason)


def _epsilon_dp(
    z: float, draws: Mapping[tuple[int, int] | None, int], delta_dp: float, orders: Sequence[float]
) -> float:
    """Renyi accounting under replace-one; infinite where dp-accounting's arithmetic gives out.

    `draws` counts the rounds by their sample, so many of so many clients; None is a round without one.

    Its Gaussian event has Renyi divergence order / (2 z^2) under every neighbouring relation: it does not
    double the sensitivity for replace-one by itself, so z must be sigma over the replace-one sensitivity.
    """
    # Here, not above: scipy and dp-accounting take over a second to import, and most runs ask for no budget.
    import dp_accounting
    import numpy as np
    from dp_accounting import rdp

    noise = dp_accounting.GaussianDpEvent(z)
    accountant = rdp.RdpAccountant(orders, dp_accounting.NeighboringRelation.REPLACE_ONE)
    try:
        # A vanishing z gives z^2 = 0 (math raises) and inf - inf (numpy would warn). It is judged below.
        with np.errstate(all="ignore"):
            for sample, rounds in draws.items():
                drawn = sample and dp_accounting.SampledWithoutReplacementDpEvent(sample[1], sample[0], noise)
                accountant.compose(drawn or noise, rounds)
    except (ValueError, ZeroDivisionError, OverflowError):
        return math.inf
    # dp-accounting turns a NaN or a negative divergence into epsilon = 0, the best guarantee there is.
    if not np.all(accountant.rdp >= 0):
        return math.inf
    return float(accountant.get_epsilon(delta_dp))
