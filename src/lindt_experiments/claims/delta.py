"""Checks of Delta on one seed. Each function takes the outcomes of that seed and answers yes, no or not comparable.

A run is not compared with a control whose rounds, epsilon or noise differ.
"""

from __future__ import annotations

from statistics import fmean

from lindt_experiments.claims.judging import Seen
from lindt_experiments.results.outcomes import Outcome

MOST = 0.9  # the share of rounds that counts as all of them, as Delta is noisy
VISIBLE = 0.2  # a change of Delta below a fifth is not visible in a figure
LIFTED = 0.7  # the share of the rounds after which the attacks end
TWO_WORLDS = {"cifar": ("nfl-long", "normal-long"), "shake": ("nfl", "normal")}  # whose Delta is compared


def deltas(outcome: Outcome, after: float = 0.0, until: float = 1.0) -> dict[int, float]:
    """Delta by round, from one share of the rounds to another, without rounds that have no valid update."""
    first, last = round(after * outcome.rounds) + 1, round(until * outcome.rounds)
    found = {r: delta for r, delta in enumerate(outcome.delta, 1) if first <= r <= last}
    return {r: delta for r, delta in found.items() if delta is not None}


def above(outcome: Outcome, rounds: dict[int, float]) -> float:
    """The share of the rounds in which Delta is above epsilon."""
    return fmean(delta > outcome.epsilon for delta in rounds.values()) if rounds else 0.0


def noise_norm(outcome: Outcome) -> float:
    """The norm of the noise: w_div less Delta."""
    pairs = zip(outcome.w_div, outcome.delta, strict=True)
    return fmean(w_div - delta for w_div, delta in pairs if w_div is not None and delta is not None)


def unlike(one: Outcome, other: Outcome) -> str:
    """The reason why two runs cannot be compared by Delta; empty where they can."""
    for name in ("rounds", "epsilon", "patience"):
        a, b = getattr(one, name), getattr(other, name)
        if a != b:
            return f"not comparable: {name} {a} and {b}"
    a, b = noise_norm(one), noise_norm(other)
    if abs(a - b) > 0.05 * max(abs(a), abs(b), 1e-6):
        return f"not comparable: noise of norm {a:.2f} and {b:.2f}"
    return ""


def alarm(outcome: Outcome) -> int | None:
    """The round in which `count > r'` (Alg. 2, s10), computed from Delta, since FedAvg's runs have no detector."""
    count = 0
    for r, delta in deltas(outcome).items():
        count += delta > outcome.epsilon
        if count > outcome.patience:
            return r
    return None


def parts_from_control(nfl: Outcome, normal: Outcome) -> Seen:
    """NFL stays above epsilon in the second half; at the end normal FL is below it, and below NFL."""
    if why := unlike(nfl, normal):
        return Seen(None, why)
    late, end, control = deltas(nfl, after=0.5), deltas(nfl, after=0.9), deltas(normal, after=0.9)
    if not (late and end and control):
        return Seen(None, "too few rounds")
    stays, quiet = above(nfl, late), 1 - above(normal, control)
    text = (
        f"NFL above epsilon in {stays:.0%} of the second half, normal FL below in {quiet:.0%} of the last tenth; "
        f"mean there {fmean(end.values()):.3f} against {fmean(control.values()):.3f}"
    )
    return Seen(stays >= MOST and quiet >= MOST and fmean(control.values()) < fmean(end.values()), text)


def fires_and_control_is_silent(nfl: Outcome, normal: Outcome) -> Seen:
    if why := unlike(nfl, normal):
        return Seen(None, why)
    fired, false_alarm = alarm(nfl), alarm(normal)
    words = [f"fires in round {r}" if r else "stays silent" for r in (fired, false_alarm)]
    text = f"NFL {words[0]} of {nfl.rounds}, control {words[1]}"
    return Seen(fired is not None and false_alarm is None, text)


def cured_is_no_cause(recovering: Outcome, fedavg: Outcome) -> Seen:
    """From the detection on, Delta is not visibly lower than FedAvg's at the same rounds."""
    if why := unlike(recovering, fedavg):
        return Seen(None, why)
    if not recovering.detected_at:
        return Seen(None, "NFL was not detected")
    since = recovering.detected_at[0]
    ours, theirs = deltas(recovering), deltas(fedavg)
    common = [r for r in ours.keys() & theirs.keys() if r > since]
    if not common:
        return Seen(None, "no round after the detection")
    a, b = (fmean(found[r] for r in common) for found in (ours, theirs))
    return Seen(a > (1 - VISIBLE) * b, f"mean Delta after round {since}: {a:.3f}, FedAvg {b:.3f}")


def drops(lifted: Outcome) -> Seen:
    """Above epsilon in most of the tenth before the attacks end, below it in most of the last tenth."""
    before, after = deltas(lifted, LIFTED - 0.1, LIFTED), deltas(lifted, after=0.9)
    if not (before and after):
        return Seen(None, "too few rounds")
    was, still = above(lifted, before), above(lifted, after)
    text = f"above epsilon in {was:.0%} of the tenth before, in {still:.0%} of the last tenth"
    return Seen(was >= MOST and still <= 1 - MOST, text)


def stops(lifted: Outcome) -> Seen:
    """Detected before the attacks end, stopped after it."""
    end = round(LIFTED * lifted.rounds)
    detected = [r for r in lifted.detected_at or () if r <= end]
    if not detected:
        return Seen(None, f"NFL was not detected by round {end}, when the attacks end")
    stopped = [r for r in lifted.stopped_at if r > detected[0]]
    text = f"detected in round {detected[0]}, attacks end after {end}, "
    text += f"stopped in {stopped[0]}" if stopped else "never stopped"
    return Seen(bool(stopped) and stopped[0] > end, text)
