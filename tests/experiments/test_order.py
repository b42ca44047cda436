"""The order in which runs are played when hours are given, by hand."""

from __future__ import annotations

from lindt_experiments.plans.catalog import Cell
from lindt_experiments.plans.order import SEVERAL, Cost, OpenClaim, ordered
from lindt_experiments.plans.scales import plan_for
from lindt_experiments.queue.shared_rounds import shared_rounds

FB, NORMAL, SLOW = Cell("shake", "nfl", "fb"), Cell("cifar", "normal", "fedprox"), Cell("cifar", "active-0.9", "lindt")
LINDT, APFL = Cell("shake", "nfl", "lindt"), Cell("shake", "nfl", "apfl")


def test_undecided_claims_come_first_and_many_active_clients_last() -> None:
    runs = ordered("cpu", [OpenClaim((FB, NORMAL), None), OpenClaim((LINDT, SLOW), 3)])
    assert runs[:10] == [(cell, seed) for seed in range(5) for cell in (FB, NORMAL)]  # unknown: all five seeds
    assert runs[10] == (Cell("cifar", "nfl", "fedavg"), 0)
    several = [cell for cell, seed in runs if seed == 4]
    assert len(runs) == len(set(runs)) == 5 * len(several) + sum(cell not in several for cell, _ in runs)
    slow = [n for n, (cell, _) in enumerate(runs) if cell.world in ("active-0.9", "active-0.7", "active-0.5")]
    assert slow == list(range(5 * len(several) - len(slow), 5 * len(several)))  # undecided, and yet among the last
    assert len(SEVERAL) == 14


def test_the_claim_that_takes_the_least_time_to_decide_comes_first() -> None:
    seconds = {FB: 100.0, NORMAL: 10.0, LINDT: 30.0, APFL: 12.0}

    def cost(run: tuple[Cell, int]) -> Cost:
        cell, seed = run
        stored = cell == LINDT and seed == 0
        return Cost(0.0) if stored else Cost(seconds[cell], (cell.task, seed), 20.0 if cell.task == "shake" else 0.0)

    dear, cheap = OpenClaim((FB,), 2), OpenClaim((NORMAL,), 4)  # 240 and 40 seconds
    middle, joint = (
        OpenClaim((LINDT,), 2),
        OpenClaim((LINDT, APFL), 2),
    )  # 50; then 44: LINDT and P_i of seed 1 are there
    beyond = OpenClaim((NORMAL,), 9)  # five seeds do not decide it
    runs = ordered("cpu", [dear, beyond, joint, middle, cheap], cost)
    wanted = [*((NORMAL, seed) for seed in range(4)), (LINDT, 0), (LINDT, 1), (APFL, 0), (APFL, 1), (FB, 0), (FB, 1)]
    assert runs[:11] == [*wanted, (NORMAL, 4)]


def test_the_papers_size_is_played_in_the_steps_of_the_plan() -> None:
    runs = ordered("paper")
    assert runs[0] == (Cell("cifar", "nfl", "fedavg"), 0)
    assert [cell.method for cell, _ in runs[2:7]] == ["fb", "apfl", "trimmed-mean", "fedprox", "lindt-tm"]
    assert {cell.world for cell, _ in runs[7:13]} == {"normal"}
    recovery = [("nfl", "guarded-all"), ("nfl", "fl-guard"), ("normal", "guarded-all"), ("normal", "fl-guard")]
    rules = [("nfl-long", "fedavg"), ("nfl-long", "runtime"), ("nfl-long", "runtime-once")]
    assert [(cell.world, cell.method) for cell, _ in runs[13:20]] == [*recovery, *rules]
    three = [Cell("cifar", "nfl", method) for method in ("fedavg", "lindt", "guarded-all")]
    assert runs[22:24] == [(Cell("cifar", world, "fedavg-gain"), 0) for world in ("nfl", "normal")]
    assert runs[24:30] == [(cell, seed) for seed in (1, 2) for cell in three]


def test_the_rules_of_figure_3_share_250_rounds_at_the_papers_size() -> None:
    found = {
        method: shared_rounds("cifar", "paper", plan_for("cifar", world, method, "paper", 0))
        for world, method in (("nfl", "fedavg"), ("nfl-long", "runtime"), ("nfl-long", "runtime-once"))
    }
    assert [shared.round for shared in found.values() if shared] == [250, 250, 250]
    assert [len(shared.sources) for shared in found.values() if shared] == [0, 1, 2]
    assert shared_rounds("cifar", "paper", plan_for("cifar", "nfl", "lindt", "paper", 0)) is None
    assert (
        shared_rounds("cifar", "cpu", plan_for("cifar", "nfl", "fedavg", "cpu", 0)) is None
    )  # figure 3 has more rounds
