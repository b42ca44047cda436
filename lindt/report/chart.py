"""A small chart for the terminal: one value over rounds, a line to hold it against, marked events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True)
class Marks:
    """What a chart is drawn with."""

    point: str = "•"
    rule: str = "┄"
    side: str = "│"
    floor: str = "─"
    corner: str = "└"


ASCII = Marks("*", "-", "|", "-", "+")


def chart(
    title: str,
    values: Sequence[tuple[int, float]],
    *,
    against: float,
    span: tuple[int, int],
    events: Mapping[int, str] | None = None,
    width: int = 64,
    height: int = 8,
    marks: Marks = Marks(),  # frozen
    decimals: int = 2,
) -> list[str]:
    """Lines of text. `values` are (round, value) within `span`; `against` is drawn across; an event is one letter.

    Each column is the mean of the rounds that fall into it.
    """
    if not values:
        return [f"{title}: nothing yet"]
    first, last = span
    columns = max(1, min(width, last - first + 1))

    def column(round: int) -> int:
        return (round - first) * columns // (last - first + 1)

    cells: dict[int, list[float]] = {}
    for round, value in values:
        cells.setdefault(column(round), []).append(value)
    means = {x: sum(found) / len(found) for x, found in cells.items()}
    low, high = min(against, *means.values(), 0.0), max(against, *means.values())
    high = high if high > low else low + 1

    def row(value: float) -> int:
        return round_half((high - value) / (high - low) * (height - 1))

    picture = [[" "] * columns for _ in range(height)]
    picture[row(against)] = [marks.rule] * columns
    for x, value in means.items():
        picture[row(value)][x] = marks.point
    numbers = {0: high, row(against): against, height - 1: low}
    labels = [f"{numbers[y]:.{decimals}f}" if y in numbers else "" for y in range(height)]
    room = max(len(label) for label in labels)
    text = [
        title,
        *(f"{label:>{room}} {marks.side}{''.join(cells)}" for label, cells in zip(labels, picture, strict=True)),
    ]
    text.append(" " * room + f" {marks.corner}" + marks.floor * columns)
    ends = f"{first}{str(last).rjust(max(0, columns - len(str(first))))}"
    text.append(" " * (room + 2) + ends + "  round")
    noted = [" "] * columns
    for round, letter in (events or {}).items():
        if first <= round <= last:
            noted[column(round)] = letter
    if "".join(noted).strip():
        text.insert(-1, " " * (room + 2) + "".join(noted).rstrip())
    return text


def round_half(value: float) -> int:
    """To the nearest row; Python's own rounding goes to even ones at a half, which bends straight lines."""
    return int(value + 0.5)
