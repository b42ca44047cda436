"""The figures: that their lines are the numbers that were kept, and that they say what made them."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from made import FALLING, HIGH, LOW, RECOVERING, as_in_the_figures, made
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.lines import Line2D
from typer.testing import CliRunner

from lindt.cli.main import app
from lindt.errors import UserError
from lindt_experiments.claims.delta import LIFTED
from lindt_experiments.figures.figures import draw, names, write
from lindt_experiments.plans.worlds import LIFTED as WORLDS_LIFTED
from lindt_experiments.results.outcomes import Outcome, keep


def line(axes: Axes, label: str) -> Line2D:
    (found,) = [one for one in axes.lines if str(one.get_label()).startswith(label)]
    return found


def points(axes: Axes, label: str) -> dict[float, float]:
    drawn = line(axes, label)
    xs, ys = (np.asarray(data, dtype=float).tolist() for data in drawn.get_data())
    return dict(zip(xs, ys, strict=True))


def upright(axes: Axes, label: str) -> float:
    (x,) = set(np.asarray(line(axes, label).get_xdata()).tolist())
    return float(x)


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    for outcome in as_in_the_figures():
        keep(tmp_path / "results", outcome)
    return tmp_path / "results"


def test_delta_in_both_worlds_with_epsilon() -> None:
    (axes,) = draw("3a", as_in_the_figures(), "cpu").axes
    assert points(axes, "NFL") == dict(enumerate(HIGH, 1))
    assert points(axes, "normal FL") == dict(enumerate(LOW, 1))
    assert set(points(axes, "ε = 0.1").values()) == {0.1}
    assert axes.get_xlabel() == "round"
    assert axes.get_ylabel() == "Δ (Euclidean distance of weights)"
    assert axes.get_ylim()[0] == 0
    assert not axes.collections, "no band over one seed"


def test_several_seeds_are_a_mean_and_a_band() -> None:
    outcomes = [
        made(world=world, seed=seed, delta=[0.1 * (seed + 1)] * 100)
        for world in ("nfl-long", "normal-long")
        for seed in range(3)
    ]
    (axes,) = draw("3a", outcomes, "cpu").axes
    assert list(points(axes, "NFL").values()) == pytest.approx([0.2] * 100)
    band = axes.collections[0]
    assert isinstance(band, PolyCollection)
    heights = band.get_paths()[0].vertices[:, 1]
    assert (heights.min(), heights.max()) == pytest.approx((0.1, 0.3))


def test_a_round_that_only_one_seed_has_is_not_drawn() -> None:
    extra = [made(seed=0, method=method, curve={10: 50.0, 17: 0.0, 20: 60.0}) for method in ("fedavg", "apfl", "lindt")]
    plain = [made(seed=1, method=method, curve={10: 52.0, 20: 62.0}) for method in ("fedavg", "apfl", "lindt")]
    (axes,) = draw("5a", [*extra, *plain], "cpu").axes
    assert points(axes, "FedAvg") == {10: 51.0, 20: 61.0}


def test_recovery_with_its_events_and_the_private_line() -> None:
    (axes,) = draw("3b", as_in_the_figures(), "cpu").axes
    assert points(axes, "LINDT, persisting") == pytest.approx(RECOVERING)
    assert points(axes, "LINDT, everyone once") == pytest.approx(FALLING)
    assert list(points(axes, "private models").values()) == pytest.approx([74.0, 74.0])  # 82 - 8, 80 - 6, 60 + 14
    assert upright(axes, "NFL detected (51)") == 51
    assert upright(axes, "recovery stops (70)") == 70
    assert axes.get_ylabel() == "local accuracy (%)"
    legend = axes.get_legend()
    assert legend is not None
    assert len(legend.get_texts()) == 6


def test_seeds_that_are_detected_in_different_rounds_are_told_apart() -> None:
    late = [replace(o, detected_at=(55,)) if o.detected_at else o for o in as_in_the_figures(seed=1)]
    (axes,) = draw("3b", [*as_in_the_figures(), *late], "cpu").axes
    assert line(axes, "NFL detected").get_label() == "NFL detected (51 to 55)"
    assert {51.0, 55.0} <= {float(np.asarray(one.get_xdata())[0]) for one in axes.lines}


def test_the_attacks_end_where_the_world_ends_them() -> None:
    assert LIFTED == WORLDS_LIFTED
    for name in ("8", "9"):
        (axes,) = draw(name, as_in_the_figures(), "cpu").axes
        assert upright(axes, "attacks end") == 70
        assert upright(axes, "recovery stops") == 80


def test_the_paper_s_arrangement() -> None:
    outcomes = as_in_the_figures()
    left, right = draw("6", outcomes, "cpu").axes
    assert left.get_xlim() == (0, 100)
    assert right.get_xlim() == (60, 100)
    assert min(points(right, "NFL")) == 61
    figure = draw("7", outcomes, "cpu")
    figure.draw_without_rendering()  # type: ignore[no-untyped-call]
    a, b, c = (axes.get_position() for axes in figure.axes)
    assert a.y0 > b.y1  # (a) above
    assert b.y0 == pytest.approx(c.y0)  # (b) and (c) side by side
    assert b.x1 < c.x0
    assert b.x0 < a.x0 < a.x1 < c.x1  # in the middle
    assert len({axes.get_ylim() for axes in figure.axes}) == 1, "to be compared by eye"


def test_every_curve_can_be_told_without_its_colour() -> None:
    for name in ("3a", "3b", "5a", "9"):
        (axes,) = draw(name, as_in_the_figures(), "cpu").axes
        curves = [one for one in axes.lines if not str(one.get_label()).startswith("_") and len(one.get_xdata()) > 2]
        assert len({one.get_color() for one in curves}) == len(curves)
        assert len({one.get_linestyle() for one in curves}) >= min(len(curves), 2)


def test_what_is_missing_is_said_with_the_command(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match="these runs are missing: cifar normal-long fedavg; make it with `lindt reproduce figure3 "
    ):
        draw("3a", [made(world="nfl-long")], "cpu")
    with pytest.raises(
        UserError, match=r"figure 1 at scale cpu: these panels are missing: normal, .* `lindt reproduce figure1 "
    ):
        write("1", tmp_path, "cpu", tmp_path)
    with pytest.raises(UserError, match="figure '4': choose among 1, 3, 3a"):
        write("4", tmp_path, "cpu", tmp_path)


def test_what_there_is_can_be_drawn_and_says_what_is_not(tmp_path: Path) -> None:
    kept = [made(method=method, curve={10: 50.0, 20: 60.0}) for method in ("fedavg", "lindt")]
    with pytest.raises(
        UserError, match=r"these runs are missing: cifar nfl apfl.*or draw the stored part with --partial"
    ):
        draw("5a", kept, "cpu")
    (axes,) = draw("5a", kept, "cpu", partial=True).axes
    assert points(axes, "LINDT") == {10: 50.0, 20: 60.0}
    assert not [one for one in axes.lines if str(one.get_label()).startswith("APFL")]
    with pytest.raises(UserError, match=r"these runs are missing: .*shake nfl lindt") as nothing:
        draw("5", kept, "cpu", partial=True)  # its second panel would be empty
    assert "--partial" not in str(nothing.value)
    for outcome in kept:
        keep(tmp_path, outcome)
    done = CliRunner().invoke(app, ["figure", "5a", "--results", str(tmp_path), "--partial"])
    assert done.exit_code == 0
    caption = (tmp_path / "figures" / "figure5a-cpu.txt").read_text()
    assert "Not run: cifar nfl apfl." in caption
    assert "Drawn by: lindt figure 5a --scale cpu --partial" in caption


def test_runs_of_different_sizes_are_not_drawn_together() -> None:
    with pytest.raises(UserError, match="its runs of cifar are of different sizes"):
        draw("3a", [made(world="nfl-long"), made(world="normal-long", reduced="something else")], "cpu")


def test_scales_are_not_mixed() -> None:
    with pytest.raises(UserError, match="these runs are missing"):
        draw("3a", [made(world="nfl-long"), made(world="normal-long", scale="paper")], "cpu")


def test_files_say_what_made_them_and_come_out_the_same(kept: Path, tmp_path: Path) -> None:
    first = write("figure3", kept, "cpu", tmp_path / "a", png=True)
    again = write("3", kept, "cpu", tmp_path / "b", png=True)
    assert [path.name for path in first] == [f"figure3-cpu.{kind}" for kind in ("svg", "pdf", "png", "txt")]
    for one, other in zip(first, again, strict=True):
        assert one.read_bytes() == other.read_bytes(), one.name
    caption = first[-1].read_text()
    for words in (
        "Figure 3: detection of NFL and recovery.",
        "scale: cpu, seed 0.",
        "Reduced: everything.",
        "cifar nfl-long fedavg, seed 0: lindt reproduce made, commit 0123456789ab, 2021-05-06",
        "Drawn by: lindt figure 3 --scale cpu",
    ):
        assert words in caption
    assert "commit 0123456789ab" in first[0].read_text()  # inside the picture, too
    assert first[1].read_bytes().startswith(b"%PDF")


def test_halves_with_different_seeds_say_so(tmp_path: Path) -> None:
    for outcome in (run for seed in range(3) for run in as_in_the_figures(seed)):
        if outcome.task == "cifar" or outcome.seed == 0:
            keep(tmp_path, outcome)
    caption = write("5", tmp_path, "cpu", tmp_path)[-1].read_text()
    assert "scale: cpu, seeds 0, 1, 2 (CIFAR), seed 0 (SHAKE); lines are means over seeds" in caption


def test_the_command(kept: Path, tmp_path: Path) -> None:
    listed = CliRunner().invoke(app, ["figure", "--list"])
    assert [row.split()[0] for row in listed.output.splitlines()] == list(names())
    out = tmp_path / "pictures"
    drawn = CliRunner().invoke(app, ["figure", "all", "--results", str(kept), "-o", str(out)])
    assert "figure 1 at scale cpu: these panels are missing" in drawn.output
    assert sorted(path.name for path in out.glob("*.pdf")) == [f"figure{n}-cpu.pdf" for n in (3, 5, 6, 7, 8, 9)]
    refused = CliRunner().invoke(app, ["figure", "3", "--scale", "paper", "--results", str(kept)])
    assert isinstance(refused.exception, UserError)


def test_neither_torch_nor_pyplot_is_imported(kept: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from lindt_experiments.figures.figures import write; "
        f"write('3', Path({str(kept)!r}), 'cpu', Path({str(tmp_path)!r})); "
        "assert not {'torch', 'matplotlib.pyplot'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_delta_below_zero_is_seen() -> None:
    outcomes: list[Outcome] = [made(world=world, delta=[-0.2, *HIGH[1:]]) for world in ("nfl-long", "normal-long")]
    (axes,) = draw("3a", outcomes, "cpu").axes
    assert axes.get_ylim()[0] == pytest.approx(-0.2)
