"""The privacy budget of Eq. 4: the (epsilon, delta) that the server's Gaussian noise guarantees.

The paper adds N(0, sigma^2 I) to the aggregate of updates clipped to S and calls it differential privacy, but gives no
budget. This file computes it by Renyi accounting: without sampling by the formula, with sampling by the package
dp-accounting, whose import takes a second. epsilon and delta are those of
differential privacy, with names in `_dp`: the paper's epsilon is a threshold, and its Delta a divergence.

What is counted, and what is not:
- Two federations are neighbours when all data of one client are replaced by other data (N is public).
- Counted is the release of w after every round. Not counted: that the server itself sees every w_i, that the
  switch of recovery depends on Delta (a bit per round, computed from the updates before noise), and that float
  buffers are sent without noise. The true budget is never smaller than the budget computed here.
- In a simulation the noise is drawn from the plan's seed, and everybody who knows the seed knows the noise.
  `privacy_budget` in runs/summary.py says so.
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
"""The largest epsilon of "a strong guarantee" (Ponomareva et al. 2023, "How to DP-fy ML", tier 1)."""


MEANINGFUL: Final = 10.0
"""The largest epsilon of "a moderate guarantee" (tier 2). Above it, one client's data may change the probability of an
outcome by a factor of e^10 = 22,026: "no meaningful guarantee" (tier 3)."""


LARGEST_DELTA_DP: Final = 0.01
"""The largest delta with a meaningful guarantee: a mechanism that publishes everything with probability delta satisfies
it. N^-1.1 is above it for fewer than 66 clients."""


# Renyi orders. For the Gaussian mechanism any order above 1 is valid: a geometric series, so dense that the minimum is
# within 0.1% of the closed form. dp-accounting accepts no order up to 1.01 (its conversion is unstable there), and a
# huge epsilon needs the smallest order: at 1.0101 it is 1% above the limit.
_ORDERS: Final = tuple(1 + 0.0101 * 1.05**k for k in range(400))
# For sampling without replacement the bound is known at whole orders only, and interpolated between them; between 1 and
# 2 that is no better than 2. The cost grows with the square of an order up to 256; above, a looser bound is cheap.
_SAMPLED_ORDERS: Final = (*range(2, 33), *range(36, 65, 4), 80, 96, 128, 512, 1024)
# The budget stays valid where less noise is counted than is added. Above these limits z^2 overflows, or the sampled
# account subtracts numbers whose difference (1/z^2) is below the rounding error.
_MOST_NOISE: Final = 1e100
_MOST_SAMPLED_NOISE: Final = 1e3


@final
@dataclass(frozen=True)
class Budget:
    """The guarantee of the noise of Eq. 4 after a number of rounds; `epsilon_dp` is None where there is none.

    `amplified`: the guarantee holds only if nobody learns which clients were asked in a round.
    """

    epsilon_dp: float | None
    delta_dp: float
    noise_multiplier: float | None
    amplified: bool
    reason: str

    def in_words(self) -> str:
        """One plain sentence: `(privacy epsilon = 2.27e+09, privacy delta = 0.00631): no meaningful guarantee ...`."""
        if self.epsilon_dp is None:
            return f"no guarantee: {self.reason}"
        if self.epsilon_dp > MEANINGFUL or self.delta_dp > LARGEST_DELTA_DP:
            worth = "no meaningful guarantee"
        else:
            worth = "a strong guarantee" if self.epsilon_dp <= STRONG else "a moderate guarantee"
        return f"(privacy epsilon = {self.epsilon_dp:.3g}, privacy delta = {self.delta_dp:.3g}): {worth} {self.reason}"

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

    `asked` is the number of clients asked in a round, by default K. With over-selection it is more than K, and the
    first K answers are used.

    `reachable`, in place of `rounds`, gives for each round the number of connected clients. By default all N are.

    `sensitivity` is how far, in L2, the aggregate can move when one client's update is replaced: 2S/K for the
    plain mean of updates clipped to S, with the smallest K of any round; None where no bound is known.
    `delta_dp` is by default N^-1.1, as in McMahan et al. 2018, whose scheme the paper follows. It has to be below 1/N:
    at 1/N, publishing all data of a random client would be allowed.

    Two accounts are valid, and the smaller is returned. The plain account holds for any choice of clients. The
    amplified account needs a `uniform` and secret choice of the clients asked among the connected ones; a fixed share
    of attackers per round is not uniform. For the paper's small sigma the plain account is the smaller.

    The amplified account uses the sampling rate `asked` / `reachable` of each round, not K / N. The connected clients
    are assumed to be known: each of M connected clients is asked with probability `asked` / M. Only the clients asked
    are a uniform sample; which K of them are used depends on their speed, and a client that is always fast enough is
    used whenever it is asked. Given the clients asked, the rest of the round is the Gaussian mechanism with
    `sensitivity`: for given times of arrival, replacing one client changes at most one of the K updates. So
    amplification by sampling without replacement holds at that rate. Not counted is what the times of arrival reveal:
    they are assumed to be independent of the data.
    """
    require(math.isfinite(sigma) and sigma >= 0, "sigma", sigma, "take a finite number, 0 or larger")
    require(sensitivity is None or sensitivity > 0, "sensitivity", sensitivity, "take a number above 0, or None")
    require(clients >= 1, "clients", clients, "take at least one client")
    require(1 <= active <= clients, "active", active, f"take 1 to {clients}, the number of clients")
    asked = active if asked is None else asked
    require(active <= asked <= clients, "asked", asked, f"take {active} to {clients}: from `active` to `clients`")
    if reachable is None:
        require(rounds is not None and rounds >= 0, "rounds", rounds, "take 0 or more")
        times = Counter({clients: rounds} if rounds else {})  # not a list, as there may be a billion rounds
    else:
        times = Counter(reachable)
    fix = f"take 1 to {clients}, the number of clients, for each round"
    require(all(1 <= M <= clients for M in times), "reachable", reachable, fix)
    rounds = times.total()
    # N = 1 would give delta = 1, which guarantees nothing with any noise; the value of two clients is used.
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
        why = "the effect of one client on the aggregate has no known bound"
        return Budget(None, delta_dp, None, amplified=False, reason=why)

    plain = _plain_epsilon_dp(min(z, _MOST_NOISE), rounds, delta_dp)
    sampled = math.inf
    # Where all connected clients are asked there is no sampling.
    draws: Counter[tuple[int, int] | None] = Counter()
    for M, count in times.items():
        draws[(asked, M) if asked < M else None] += count
    if uniform and any(draws):
        sampled = _sampled_epsilon_dp(min(z, _MOST_SAMPLED_NOISE), draws, delta_dp)
    epsilon_dp, amplified = min(plain, sampled), sampled < plain
    reason = f"from noise of {z:.3g} times the sensitivity, {rounds} round{'s' if rounds > 1 else ''}"
    if math.isinf(epsilon_dp):
        return Budget(
            None, delta_dp, z, amplified=False, reason=f"the privacy epsilon is too large for a float, {reason}"
        )
    if amplified:
        worst, best = (f"{min(asked, M)}/{M}" for M in (min(times), max(times)))
        reason += (
            f", amplified by the sampling rate {worst if worst == best else f'{best} to {worst}'} of the clients that"
        )
        reason += f" could be reached, provided that nobody learns which {asked} of them were asked"
    return Budget(epsilon_dp, delta_dp, z, amplified, reason)


def _plain_epsilon_dp(z: float, rounds: int, delta_dp: float) -> float:
    """`rounds` Gaussians of multiplier z without sampling; infinite where z^2 is below the smallest float.

    The Renyi divergence of order a is a / (2 z^2) a round, under replace-one as under every other relation of
    neighbours: z must be sigma over the replace-one sensitivity. The conversion is that of dp-accounting: Canonne,
    Kamath and Steinke 2020, Prop. 12, and 0 where delta >= sqrt(1 - exp(-divergence)).
    """
    twice = 2 * z**2
    if not twice:
        return math.inf
    found = math.inf
    for a in _ORDERS:
        rdp = rounds * (a / twice)
        if delta_dp**2 + math.expm1(-rdp) > 0:
            return 0.0
        found = min(found, rdp + math.log1p(-1 / a) - math.log(delta_dp * a) / (a - 1))
    return max(0.0, found)


def _sampled_epsilon_dp(z: float, draws: Mapping[tuple[int, int] | None, int], delta_dp: float) -> float:
    """Renyi accounting under replace-one with sampling; infinite where dp-accounting's arithmetic fails.

    `draws` counts the rounds by their sample (the clients asked, the clients connected); None is a round without
    sampling.
    """
    # Imported here: scipy and dp-accounting take over a second to import, and most runs need no amplification.
    import dp_accounting
    import numpy as np
    from dp_accounting import rdp

    noise = dp_accounting.GaussianDpEvent(z)
    accountant = rdp.RdpAccountant(_SAMPLED_ORDERS, dp_accounting.NeighboringRelation.REPLACE_ONE)
    try:
        # A tiny z gives z^2 = 0 (math raises) and inf - inf (numpy would warn); the results are checked below.
        with np.errstate(all="ignore"):
            for sample, rounds in draws.items():
                drawn = sample and dp_accounting.SampledWithoutReplacementDpEvent(sample[1], sample[0], noise)
                accountant.compose(drawn or noise, rounds)
    except (ValueError, ZeroDivisionError, OverflowError):
        return math.inf
    # dp-accounting turns a NaN or a negative divergence into epsilon = 0, which would be a perfect guarantee.
    if not np.all(accountant.rdp >= 0):
        return math.inf
    return float(accountant.get_epsilon(delta_dp))
