"""Table 8: the number of samples of the clients, at the paper's size. Only allocations are drawn, without training."""

from __future__ import annotations

from lindt.data.sizes import SCHEMES, sizes_over
from lindt_experiments.tables.sheets import Sheet
from lindt_experiments.tables.titles import TASK_TITLES

SEEDS = 20


def sizes_sheet(task: str, seeds: int = SEEDS) -> Sheet:
    schemes = tuple(scheme for scheme in SCHEMES if scheme.task == TASK_TITLES[task])
    rows = tuple(
        (
            found.scheme.name,
            _spread(found.mean, found.mean_spread),
            f"{found.scheme.paper_mean:,}",
            _spread(found.std, found.std_spread),
            f"{found.scheme.paper_std:,}",
        )
        for found in sizes_over(seeds, schemes)
    )
    remark = f"Mean and standard deviation over the clients, each as mean ± spread over {seeds} seeds."
    title = f"Table 8, samples a client, {TASK_TITLES[task]}"
    return Sheet(title, ("", "mean", "paper", "std", "paper"), rows, (remark,))


def _spread(value: float, spread: float) -> str:
    return f"{value:,.0f} ±{spread:,.0f}"
