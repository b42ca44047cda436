"""The numbers that the paper prints, transcribed: tables 3 to 8 and 10 to 13. Percent, and points for beta."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

Row = tuple[float | None, float, float]  # central accuracy, local accuracy, beta


@final
@dataclass(frozen=True)
class Printed:
    """One method in one environment, from a table of the paper."""

    table: int
    task: str
    world: str
    method: str
    central: float | None  # None for FB, which has FedAvg's
    local: float
    beta: float

    @property
    def private(self) -> float:
        """The accuracy of clients alone that this row implies."""
        return self.local - self.beta


def _pair(central: tuple[float, float], local: tuple[float, float], beta: tuple[float, float]) -> dict[str, Row]:
    """A row of tables 4 to 7 and 10 to 13: each metric of FedAvg and of LINDT."""
    return {"fedavg": (central[0], local[0], beta[0]), "lindt": (central[1], local[1], beta[1])}


_CIFAR = _pair((55.63, 55.73), (56.19, 81.61), (-17.83, +7.59))  # the starred row, which four tables share
_SHAKE = _pair((43.60, 49.17), (44.26, 52.84), (-2.93, +5.65))
TABLES: dict[tuple[int, str, str], dict[str, Row]] = {
    (3, "cifar", "nfl"): {
        "fedavg": (55.63, 56.19, -17.83),
        "fedprox": (55.20, 55.92, -18.10),
        "trimmed-mean": (55.67, 56.70, -17.32),
        "fb": (None, 81.17, +7.15),
        "apfl": (54.90, 80.61, +6.59),
        "lindt": (55.73, 81.61, +7.59),
        "lindt-tm": (56.23, 82.82, +8.80),
    },
    (3, "shake", "nfl"): {
        "fedavg": (43.60, 44.26, -2.93),
        "fedprox": (40.20, 40.64, -6.55),
        "trimmed-mean": (43.93, 45.53, -1.66),
        "fb": (None, 51.85, +4.66),
        "apfl": (43.87, 51.96, +4.77),
        "lindt": (49.17, 52.84, +5.65),
        "lindt-tm": (49.86, 53.02, +5.83),
    },
    (3, "cifar", "normal"): {
        "fedavg": (73.00, 73.04, +29.99),
        "fedprox": (72.33, 72.91, +29.86),
        "trimmed-mean": (71.47, 72.09, +29.04),
        "fb": (None, 61.19, +18.14),
        "apfl": (70.73, 70.85, +27.80),
        "lindt": (73.07, 73.30, +30.05),
    },
    (3, "shake", "normal"): {
        "fedavg": (52.93, 53.42, +6.16),
        "fedprox": (52.07, 52.62, +5.36),
        "trimmed-mean": (52.67, 53.19, +5.93),
        "fb": (None, 53.89, +6.63),
        "apfl": (52.97, 53.23, +5.97),
        "lindt": (53.67, 54.07, +6.81),
    },
    (4, "cifar", "iid"): _pair((60.30, 60.43), (60.75, 69.87), (+16.99, +26.10)),
    (4, "cifar", "classes-10"): _pair((55.30, 55.40), (56.44, 76.77), (-8.79, +11.54)),
    (4, "cifar", "classes-5"): _pair((48.97, 49.40), (50.64, 84.06), (-25.85, +7.58)),
    (4, "cifar", "classes-2"): _pair((32.50, 33.23), (32.19, 93.73), (-58.12, +3.32)),
    (4, "cifar", "nfl"): _CIFAR,
    (5, "cifar", "active-0.9"): _pair((57.37, 57.87), (58.14, 82.89), (-15.88, +8.87)),
    (5, "cifar", "active-0.7"): _pair((57.35, 57.85), (57.67, 82.82), (-16.35, +8.80)),
    (5, "cifar", "active-0.5"): _pair((57.19, 57.47), (57.76, 81.89), (-16.26, +7.87)),
    (5, "cifar", "active-0.3"): _pair((56.43, 56.94), (57.28, 82.67), (-16.74, +8.65)),
    (5, "cifar", "nfl"): _CIFAR,
    (6, "cifar", "attack-0"): _pair((64.33, 65.20), (64.95, 83.06), (-7.69, +10.42)),
    (6, "cifar", "attack-0.1"): _pair((56.87, 57.90), (57.80, 81.76), (-15.30, +8.66)),
    (6, "cifar", "nfl"): _CIFAR,
    (7, "cifar", "nfl"): _CIFAR,
    (7, "cifar", "sigma-0.003"): _pair((52.35, 52.69), (52.61, 80.63), (-21.41, +6.61)),
    (7, "cifar", "sigma-0.005"): _pair((47.88, 48.32), (48.56, 78.73), (-25.46, +4.71)),
    (7, "cifar", "sigma-0.007"): _pair((40.84, 42.12), (41.09, 76.17), (-32.93, +2.15)),
    (7, "cifar", "sigma-0.01"): _pair((30.14, 31.19), (30.60, 75.37), (-43.42, +1.35)),
    (10, "shake", "balanced"): _pair((44.77, 52.57), (45.32, 52.50), (+2.03, +9.21)),
    (10, "shake", "nfl"): _SHAKE,
    (11, "shake", "active-0.9"): _pair((45.69, 49.89), (45.72, 52.93), (-1.47, +5.74)),
    (11, "shake", "active-0.3"): _pair((40.30, 44.27), (40.72, 51.67), (-6.47, +4.48)),
    (11, "shake", "nfl"): _SHAKE,
    (12, "shake", "attack-0"): _pair((52.93, 53.67), (53.42, 54.07), (+6.16, +6.81)),
    (12, "shake", "nfl"): _SHAKE,
    (12, "shake", "attack-0.33"): _pair((25.20, 30.97), (25.75, 51.21), (-21.37, +4.09)),
    (13, "shake", "nfl"): _SHAKE,
    (13, "shake", "sigma-0.003"): _pair((43.90, 52.77), (44.43, 53.21), (-2.76, +6.02)),
    (13, "shake", "sigma-0.005"): _pair((43.70, 49.07), (44.21, 52.66), (-2.98, +5.47)),
    (13, "shake", "sigma-0.007"): _pair((43.80, 51.10), (44.49, 52.89), (-2.70, +5.70)),
    (13, "shake", "sigma-0.01"): _pair((43.10, 47.69), (43.52, 52.43), (-3.67, +5.24)),
}
# Table 8: data per client, mean and standard deviation of the paper's single draw.
CLIENT_SIZES: dict[tuple[str, str], tuple[int, int]] = {
    ("cifar", "iid"): (600, 0),
    ("cifar", "classes-10"): (600, 572),
    ("cifar", "classes-5"): (600, 811),
    ("cifar", "classes-2"): (600, 855),
    ("cifar", "nfl"): (600, 732),
    ("shake", "nfl"): (17742, 8997),
    ("shake", "balanced"): (17741, 0),
}


def printed(table: int | None = None, task: str | None = None) -> Iterator[Printed]:
    """The rows in the paper's order, of one table or task or of all."""
    for (number, whose, world), methods in TABLES.items():
        if table in (None, number) and task in (None, whose):
            yield from (Printed(number, whose, world, method, *row) for method, row in methods.items())


def one(task: str, world: str, method: str) -> Printed | None:
    """The paper's numbers for a cell; None where it has none."""
    found = [row for row in printed(task=task) if (row.world, row.method) == (world, method)]
    return found[0] if found else None
