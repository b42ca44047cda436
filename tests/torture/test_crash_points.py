"""Every durable step is a crash point: killed there, or with a disk that fails, the run goes on to the same bytes."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from crashing import Zygote, crash_plan, figure, left, same, zygote

from lindt.runs.files import STEPS

FAMILIES = {
    "run.json": STEPS[:5],
    "plan.toml": STEPS[:5],
    "private model": STEPS[:5],
    "v_i": (*STEPS[:5], *STEPS[8:]),
    "rounds.jsonl": STEPS[5:8],
    "timing.jsonl": STEPS[5:8],
    "checkpoint": (*STEPS[:5], *STEPS[8:]),
    "summary.json": STEPS[:5],
}
POINTS = [(family, step) for family, steps in FAMILIES.items() for step in steps]
QUICK = [("v_i", "synced"), ("rounds.jsonl", "appended"), ("checkpoint", "written"), ("checkpoint", "renamed")]


@pytest.fixture(scope="module")
def workshop() -> Iterator[Zygote]:
    with zygote() as found:
        yield found


@pytest.fixture(scope="module")
def straight(workshop: Zygote, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The undisturbed run; and that the list above names every step it takes, and no other."""
    folder = tmp_path_factory.mktemp("straight")
    done = workshop.play(crash_plan(), folder / "run", steps=str(folder / "steps.txt"))
    assert done["code"] == 0, done["said"]
    reached = {tuple(line.split("|")) for line in (folder / "steps.txt").read_text().splitlines()}
    assert reached == set(POINTS)
    return left(folder / "run")


def broken(
    workshop: Zygote, folder: Path, point: tuple[str, str], fault: str, engine: str = "inprocess"
) -> dict[str, Any]:
    """Broken at the second time the point is reached, or at the first where there is no second; then resumed."""
    once = point[0] in ("run.json", "plan.toml", "summary.json") or point[1] in ("before removal", "removed")
    mark = folder / "mark"
    nth = 1 if once or point[0] == "private model" else 2
    text = "|".join([*point, str(nth), fault, str(mark)])
    first = workshop.play(crash_plan(), folder / "run", engine, **{"break": text})
    assert mark.exists(), f"{point} was not reached: {first['said']}"
    return first


@pytest.mark.parametrize("point", QUICK, ids=" ".join)
def test_killed_there_the_run_goes_on_to_the_same_bytes(
    point: tuple[str, str], workshop: Zygote, straight: dict[str, Any], tmp_path: Path
) -> None:
    first = broken(workshop, tmp_path, point, "kill")
    assert first["code"] == -9
    again = workshop.play(crash_plan(), tmp_path / "run")
    assert again["code"] == 0, again["said"]
    assert same(left(tmp_path / "run"), straight)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    ["kill", *(pytest.param(str(e), marks=pytest.mark.torture) for e in (errno.ENOSPC, errno.EROFS))],
)
def test_at_every_point_in_process(fault: str, workshop: Zygote, straight: dict[str, Any], tmp_path: Path) -> None:
    """A full disk and one that became read-only are told in one line, and nothing saved before is lost."""
    for index, point in enumerate(POINTS):
        folder = tmp_path / str(index)
        first = broken(workshop, folder, point, fault)
        if fault == "kill":
            assert first["code"] == -9, (point, first)
        else:
            # A cache that cannot be written does not end a run.
            assert first["code"] == (0 if point[0] == "private model" else 2), (point, first)
            assert len(first["said"].splitlines()) == 1, (point, first)
        again = workshop.play(crash_plan(), folder / "run")
        assert again["code"] == 0, (point, again["said"])
        assert same(left(folder / "run"), straight), point
    figure(crash_points=len(POINTS), engine="inprocess", fault=fault, same_bytes=len(POINTS))


@pytest.mark.torture
def test_at_every_point_with_worker_processes(workshop: Zygote, straight: dict[str, Any], tmp_path: Path) -> None:
    """A worker that dies at a step of its own is replaced within the run; the server's death is resumed."""
    replaced = 0
    for index, point in enumerate(POINTS):
        folder = tmp_path / str(index)
        first = broken(workshop, folder, point, "kill", "processes")
        assert first["code"] in (-9, 0), (point, first)
        replaced += first["code"] == 0
        again = workshop.play(crash_plan(), folder / "run", "processes")
        assert again["code"] == 0, (point, again["said"])
        assert same(left(folder / "run"), straight), point
    assert replaced == len(FAMILIES["v_i"]) + len(FAMILIES["private model"])
    figure(crash_points=len(POINTS), engine="processes", workers_replaced=replaced, same_bytes=len(POINTS))
