"""Figure 1's traces: real rounds, a fair reference, and a plane that keeps what it can."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from matplotlib.colors import to_hex
from matplotlib.patches import FancyArrowPatch
from typer.testing import CliRunner

from lindt.cli.main import app
from lindt.environment import Environment
from lindt.environment.participation import Sampled
from lindt.errors import UserError
from lindt.plan.models import Linear
from lindt.plan.plan import Training
from lindt.plan.problem import Problem
from lindt.server.federation import federate
from lindt_experiments.figures import record_traces
from lindt_experiments.figures.figures import write
from lindt_experiments.figures.record_traces import axes_of, centralized, plan_for, played, reproduce, turns
from lindt_experiments.figures.style import BLUE, ORANGE, VERMILION
from lindt_experiments.figures.traces import draw_traces, traces_for
from lindt_experiments.results.traces import PANELS, Traces, keep, load

pytestmark = pytest.mark.slow  # five small federations are played


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    reproduce("smoke", 0, folder)
    return folder


@pytest.fixture(scope="module")
def panels(results: Path) -> dict[str, Traces]:
    return {one.panel: one for one in load(results, "smoke")}


def small(batch: int) -> tuple[record_traces.Plan, Problem]:
    """Four clients of eight samples each, a linear model, everyone answers."""
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(4, 16, 6, generator=draw), torch.randint(3, (4, 16), generator=draw)
    clients = [((x[i, :8], y[i, :8]), (x[i, 8:], y[i, 8:])) for i in range(4)]
    plan, _ = plan_for("normal", "smoke", 0)
    plan = replace(plan, rounds=3, training=Training(batch=batch, max_norm=1e6))
    return plan, Problem(clients, lambda: Linear(6).build(3))


def test_with_full_batches_normal_fl_is_centralized_training() -> None:
    # One step a client a round: the mean of the four gradients is the gradient of the pooled data.
    plan, problem = small(batch=8)
    federation, reference = played(plan, problem), centralized(plan, problem)
    for ours, theirs in zip(federation.w, reference.w, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_with_small_batches_it_is_not_but_makes_as_many_steps() -> None:
    plan, problem = small(batch=2)
    federation, reference = played(plan, problem), centralized(plan, problem)
    assert torch.equal(federation.w[0], reference.w[0])
    assert not torch.allclose(federation.w[-1], reference.w[-1])
    assert [len(reference.sent), len(federation.sent)] == [3, 12]


def test_listening_changes_nothing() -> None:
    plan, problem = small(batch=2)
    heard = played(plan, problem)
    for (state, _), w in zip(federate(plan, problem=problem), heard.w[1:], strict=True):
        assert torch.equal(state.w, w)
    for r in (1, 2, 3):
        mine = [w_i for round, _, w_i in heard.sent if round == r]
        torch.testing.assert_close(torch.stack(mine).mean(0), heard.w[r])


def test_a_reference_hears_nobody_else() -> None:
    plan, problem = small(batch=8)
    assert plan.environment == Environment(participation=Sampled(rate=1.0))
    noisy, _ = plan_for("noised", "smoke", 0)
    noisy = replace(noisy, rounds=3, training=plan.training)
    for ours, theirs in zip(centralized(plan, problem).w, centralized(noisy, problem).w, strict=True):
        assert torch.equal(ours, theirs)


def test_principal_axes_by_hand() -> None:
    # Variance only along the second and third coordinate: 4 + 4 there, 1 + 1 here.
    w_MP = torch.tensor([[0.0, -2, 0], [0, 2, 0], [0, 0, 1], [0, 0, -1]], dtype=torch.float64)
    axes_2P, shares = axes_of(w_MP)
    assert torch.allclose(axes_2P.abs(), torch.tensor([[0.0, 1, 0], [0, 0, 1]], dtype=torch.float64))
    assert shares == pytest.approx((0.8, 0.2))
    assert axes_2P[0, 1] > 0, "the mean lies to the right of the first"


def test_turns_are_angles() -> None:
    w = [torch.tensor(point) for point in ([0.0, 0], [1.0, 0], [2.0, 0], [2.0, 5], [2.0, 4])]
    assert turns(w) == pytest.approx([0, 90, 180])


def test_the_plane_keeps_the_mean(panels: dict[str, Traces]) -> None:
    """A projection is linear: where all answer and nothing is added, w is the middle of its clients."""
    for name in ("normal", "non-IID", "attacked"):
        for r in range(1, panels[name].rounds + 1):
            ends = [update.end for update in panels[name].updates if update.round == r]
            middle = tuple(sum(axis) / len(ends) for axis in zip(*ends, strict=True))
            assert middle == pytest.approx(panels[name].global_trace[r], abs=1e-4)


def test_each_panel_shows_its_effect(panels: dict[str, Traces]) -> None:
    assert tuple(panels) == PANELS
    for one in panels.values():
        assert one.global_trace[0] == one.central_trace[0] == (0, 0)
        assert len(one.global_trace) == len(one.central_trace) == one.rounds + 1
        assert {update.start for update in one.updates} <= set(one.global_trace)
    answers = {name: len(one.updates) / one.rounds for name, one in panels.items()}
    assert answers == {"normal": 4, "non-IID": 4, "inactive": 2, "attacked": 4, "noised": 4}
    assert {name for name, one in panels.items() if any(u.attacker for u in one.updates)} == {"attacked"}
    divergence = {name: sum(one.w_div) / one.rounds for name, one in panels.items()}
    assert min(divergence, key=lambda name: divergence[name]) == "normal"  # the paper's point
    straying = {name: sum(one.turns) / len(one.turns) for name, one in panels.items()}
    assert straying["inactive"] > 1.5 * straying["normal"]


def test_what_was_played_is_not_played_again(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> Traces:
        raise AssertionError("played again")

    monkeypatch.setattr(record_traces, "traced", never)
    assert reproduce("smoke", 0, results) == results / "traces-smoke.jsonl"
    said: list[str] = []
    with pytest.raises(AssertionError, match="played again"):
        reproduce("smoke", 1, results, said.append)
    assert said == ["figure1, seed 1: normal"]


def test_kept_and_read_again(panels: dict[str, Traces], tmp_path: Path) -> None:
    everything = list(panels.values())
    path = keep(tmp_path, "smoke", everything)
    assert load(tmp_path, "smoke") == everything
    keep(tmp_path, "smoke", [replace(panels["noised"], commit="later"), replace(panels["normal"], seed=1)])
    assert [(one.panel, one.seed) for one in load(tmp_path, "smoke")] == [*((p, 0) for p in PANELS), ("normal", 1)]
    assert load(tmp_path, "smoke")[4].commit == "later"
    assert load(tmp_path, "cpu") == []
    for damage in ('{"panel": "normal"}', "no JSON", '{"panel": "other"}', "[]"):
        path.write_text(damage + "\n")
        with pytest.raises(UserError, match=r"line 1: not traces .* `lindt reproduce figure1`"):
            load(tmp_path, "smoke")


def test_an_unknown_scale_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="scale 'huge': choose among smoke, cpu, paper"):
        reproduce("huge", 0, tmp_path)


def test_arrows_are_the_traces(results: Path, panels: dict[str, Traces]) -> None:
    figure = draw_traces(traces_for(results, "smoke"))
    for one, axes in zip(panels.values(), figure.axes, strict=False):
        arrows = [patch for patch in axes.patches if isinstance(patch, FancyArrowPatch)]
        colours = [to_hex(patch.get_edgecolor()).upper() for patch in arrows]
        hostile = sum(update.attacker for update in one.updates)
        assert colours.count(ORANGE) == len(one.updates) - hostile
        assert colours.count(VERMILION) == hostile
        assert colours.count("#000000") == colours.count(BLUE) == one.rounds
        assert axes.get_title(loc="left").startswith(f"({'abcde'[PANELS.index(one.panel)]}) {one.panel}: ")
        assert f"({one.shares[0]:.0%} of the variance)" in axes.get_xlabel()
        assert axes.get_aspect() == 1  # an angle in the plane is an angle on paper


def test_the_figure_s_files(results: Path, tmp_path: Path) -> None:
    caption = write("figure1", results, "smoke", tmp_path)[-1].read_text()
    assert "4 real rounds of 4 clients, 13,706 weights" in caption
    assert "(d) attacked: IID data, one of four attacks; lindt reproduce figure1 --scale smoke --seeds 1" in caption
    assert (tmp_path / "figure1-smoke.svg").stat().st_size > 10_000


def test_the_command_plays_each_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int, Path]] = []
    monkeypatch.setattr(
        record_traces, "reproduce", lambda scale, seed, folder, say: asked.append((scale, seed, folder))
    )
    common = ["--scale", "smoke", "--results", str(tmp_path), "--runs", str(tmp_path / "runs")]
    said = CliRunner().invoke(app, ["reproduce", "figure1", "--seeds", "2", *common], catch_exceptions=False)
    assert asked == [("smoke", 0, tmp_path), ("smoke", 1, tmp_path)]
    assert "`lindt figure figure1 --scale smoke`" in said.output
