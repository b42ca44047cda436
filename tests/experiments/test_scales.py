"""Plans of the evaluation: the paper's setting to the letter, and what a smaller scale may change."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lindt.client.adaptations.apfl import Apfl
from lindt.client.adaptations.dual import Dual
from lindt.client.adaptations.fine_tune_head import FineTuneHead
from lindt.client.adaptations.separate import Separate
from lindt.data.partition import Balanced, Classes, Iid
from lindt.environment.participation import Sampled
from lindt.environment.privacy import Gaussian
from lindt.environment.threats import Backdoor, NoThreat, Until
from lindt.errors import UserError
from lindt.plan.file import from_dict, resolve, to_dict
from lindt.plan.plan import METHODS, Alone, Plan, Scoring
from lindt.server.aggregation import TrimmedMean
from lindt.server.recovery import EveryoneTreated, OnDetection, Persist, QuietRounds
from lindt_experiments.plans.catalog import EXHIBITS, cells_of, named
from lindt_experiments.plans.keys import ADDED, content_key, private_group
from lindt_experiments.plans.scales import SIZES, plan_for, reduced
from lindt_experiments.plans.worlds import WORLDS
from lindt_experiments.results.outcomes import SCALES


def paper(task: str, world: str = "nfl", method: str = "fedavg", seed: int = 0) -> Plan:
    return plan_for(task, world, method, "paper", seed)


@pytest.mark.parametrize(
    ("preset", "task", "world", "method"),
    [
        ("cifar-nfl", "cifar", "nfl", "runtime"),
        ("cifar-control", "cifar", "normal", "runtime"),
        ("shake-nfl", "shake", "nfl", "lindt"),
        ("shake-control", "shake", "normal", "lindt"),
    ],
)
def test_the_papers_scale_is_the_preset(preset: str, task: str, world: str, method: str) -> None:
    wanted = resolve(preset, seed=2)
    assert replace(paper(task, world, method, 2), name=preset) == wanted
    assert wanted.scoring == Scoring(every=10, last=10)


def test_every_plan_of_the_evaluation_can_be_read_from_its_file() -> None:
    cells = cells_of(named("all"))
    for scale in SCALES:
        plans = [plan_for(*cell, scale=scale, seed=0) for cell in cells if (scale, cell.task) in SIZES]
        assert all(from_dict(to_dict(plan)) == plan for plan in plans)
        # Each cell is a plan of its own, but that SHAKE's normal FL is that of 0% attackers (2 methods), that a
        # long world is its short one where the scale is long enough (3 cells are in a table as well), and that the
        # best of the ablation has a name as well.
        if scale == "paper":
            assert len({content_key(plan) for plan in plans}) == len(cells) - 2 - 3 - 1


def test_methods_that_the_paper_does_not_have() -> None:
    own = paper("cifar", method="apfl-own")
    assert own.method == replace(METHODS["apfl"], adaptation=Apfl(v_loss="own"))
    assert replace(own, name="x", method=METHODS["apfl"]) == replace(paper("cifar", method="apfl"), name="x")
    guarded, fl_guard = (paper("cifar", method=method) for method in ("guarded-all", "fl-guard"))
    assert guarded.detection.reports  # clients hold out V_i
    assert guarded.scoring == Scoring(every=500, last=10)
    assert (guarded.method, fl_guard.method) == (METHODS["guarded-all"], METHODS["fl-guard"])
    assert not fl_guard.detection.reports
    reporting = paper("cifar", method="fedavg-gain")
    assert replace(reporting, name="x", detection=paper("cifar").detection) == replace(paper("cifar"), name="x")
    assert reporting.detection.reports


def changed(world: str, task: str = "cifar") -> set[str]:
    """The fields in which a world differs from the default NFL."""
    there, here = to_dict(paper(task, world)), to_dict(paper(task))
    return {path for path in _leaves(there) if path not in _leaves(here) or _leaves(there)[path] != _leaves(here)[path]}


def _leaves(table: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(table, dict):
        return {path: table}
    return {k: v for key, value in table.items() for k, v in _leaves(value, f"{path}.{key}" if path else key).items()}


def test_a_world_changes_one_thing() -> None:
    assert changed("active-0.3") == {"name", "environment.participation.rate"}
    assert changed("sigma-0.005") == {"name", "environment.privacy.sigma"}
    assert changed("attack-0.1") == {"name", "environment.threat.share"}
    assert changed("attack-0.33", "shake") == {"name", "environment.threat.share"}
    assert changed("nfl") == set()


def test_worlds_by_hand() -> None:
    assert paper("cifar", "active-0.3").environment.participation == Sampled(rate=0.3)
    assert paper("cifar", "sigma-0.005").environment.privacy == Gaussian(S=15.0, sigma=0.005)
    assert paper("cifar", "attack-0").environment.threat == NoThreat()
    assert paper("cifar", "attack-0.1").environment.threat.share == 0.1
    assert paper("cifar", "classes-5").data.allocation == Classes(per_client=5, spread=2.0, floor=10)
    assert paper("cifar", "iid").data.allocation == Iid()
    assert paper("cifar", "iid").environment.threat.share == 0.2
    assert paper("cifar", "lifted").environment.threat == Until(350, Backdoor())
    assert paper("cifar", "lifted").data.allocation == Classes(per_client=10, spread=2.0, floor=10)
    balanced = paper("shake", "balanced").data
    assert (balanced.allocation, balanced.text.split) == (Balanced(least=10_000), "shuffled")
    assert plan_for("cifar", "lifted", "fedavg", "cpu", 0).environment.threat == Until(
        round(0.7 * 3 * SIZES["cpu", "cifar"].rounds), Backdoor()
    )


def test_methods_by_hand() -> None:
    assert paper("cifar", method="fb").method.adaptation == FineTuneHead(rate=0.001, epochs=200)
    assert paper("shake", method="fb").method.adaptation == FineTuneHead(rate=0.01, epochs=40)
    assert paper("cifar", method="fedprox").method == METHODS["fedprox"]
    assert paper("cifar", method="apfl").method == METHODS["apfl"]
    assert paper("cifar", "attack-0.1", "trimmed-mean").method.aggregator == TrimmedMean(share=0.1)
    assert paper("cifar", "normal", "trimmed-mean").method.aggregator == TrimmedMean(share=0.2)
    assert paper("shake", method="lindt-tm").method.aggregator == TrimmedMean(share=0.16)
    for name, stop in (("runtime", Persist()), ("runtime-once", EveryoneTreated()), ("runtime-quiet", QuietRounds(10))):
        method = paper("cifar", method=name).method
        assert (method.adaptation, method.recovery) == (Dual(), OnDetection(epsilon=0.1, patience=250, stop=stop))
    recovery = paper("shake", method="runtime").method.recovery
    assert isinstance(recovery, OnDetection)
    assert recovery.patience == 50


def test_the_ablation_is_two_by_three_by_two_and_two_more() -> None:
    adaptations = [paper("cifar", method=cell.method).method.adaptation for cell in EXHIBITS["ablation"].cells]
    duals = [a for a in adaptations if isinstance(a, Dual) and a.trains == "all"]
    assert len({(a.position, a.scale, a.first) for a in duals}) == len(duals) == 12
    assert Dual(trains="head") in adaptations
    assert Separate() in adaptations


@pytest.mark.parametrize(("scale", "task"), SIZES)
def test_every_scale_keeps_the_rule_of_rounds(scale: str, task: str) -> None:
    size, full = SIZES[scale, task], {"cifar": 500, "shake": 100}[task]
    plan = plan_for(task, "nfl", "runtime", scale, 0)
    assert isinstance(plan.method.recovery, OnDetection)
    assert plan.method.recovery.patience == size.rounds // 2
    # Over the whole run the rate falls as far as in the paper.
    assert plan.training.decay**plan.rounds == pytest.approx(0.992**full)
    control = plan_for(task, "normal", "runtime", scale, 0).method.recovery
    assert control == plan.method.recovery  # the same epsilon and r' for NFL and control


def test_what_is_reduced_is_said() -> None:
    assert reduced("cifar", "paper") == "scored in every 10th round (FB not) and in each of the last 10"
    size = SIZES["cpu", "cifar"]
    assert f"{size.rounds} rounds (500)" in reduced("cifar", "cpu")
    assert "parameters (940,362)" in reduced("cifar", "cpu")
    assert f"windows of {SIZES['cpu', 'shake'].text.window} characters (80)" in reduced("shake", "cpu")


def test_a_tenth_of_the_windows_is_all_that_is_less_on_shakespeare() -> None:
    tenth = plan_for("shake", "nfl", "lindt", "tenth", 0)
    whole, alone = paper("shake", method="lindt"), Alone(epochs=40, patience=10)
    allocation = replace(tenth.data.allocation, least=10_000)  # type: ignore[type-var]
    data = replace(tenth.data, text=whole.data.text, allocation=allocation)
    assert replace(tenth, name=whole.name, data=data, alone=whole.alone) == whole
    assert (tenth.data.text.stride, tenth.alone) == (10, alone)
    assert reduced("shake", "tenth").startswith("one window in 10 (all); private models of at most 40 epochs")


def test_the_key_is_the_content_and_not_the_name() -> None:
    plan = paper("cifar")
    assert content_key(replace(plan, name="another")) == content_key(plan)
    assert content_key(replace(plan, seed=1)) != content_key(plan)
    assert content_key(replace(plan, alone=Alone(stretch=2.0))) != content_key(plan)
    assert paper("shake", "attack-0") == paper("shake", "normal")


def test_a_field_that_was_added_later_does_not_change_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if `training.epochs` had not been there when results were kept, and 1 changed nothing."""
    plan = paper("cifar")
    monkeypatch.setitem(ADDED, "training.epochs", 1)
    plain, more = content_key.__wrapped__(plan), replace(plan, training=replace(plan.training, epochs=2))
    monkeypatch.delitem(ADDED, "training.epochs")
    assert plain != content_key(plan)
    monkeypatch.setitem(ADDED, "training.epochs", 1)
    assert content_key.__wrapped__(more) != plain


def test_runs_that_share_private_models_are_a_group() -> None:
    same = [("nfl", "fedavg"), ("nfl", "lindt"), ("sigma-0.01", "fedavg"), ("attack-0", "lindt"), ("nfl", "alone-x2")]
    groups = {private_group(paper("cifar", world, method)) for world, method in same}
    assert len(groups) == 1
    for other in (paper("cifar", "iid"), paper("cifar", seed=1), plan_for("cifar", "nfl", "fedavg", "cpu", 0)):
        assert private_group(other) not in groups


def test_private_models_alone_are_one_round_of_fedavg() -> None:
    plan = paper("cifar", "classes-2", "alone-x0.5")
    assert (plan.rounds, plan.alone, plan.method) == (1, Alone(stretch=0.5), METHODS["fedavg"])
    assert plan.training == paper("cifar", "classes-2").training  # the decay is that of the whole run


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        (("mnist", "nfl", "fedavg", "cpu"), "task 'mnist': choose among cifar, shake"),
        (("shake", "iid", "fedavg", "cpu"), "world 'iid' of shake"),
        (("cifar", "nfl", "fedsgd", "cpu"), "method 'fedsgd'"),
        (("cifar", "nfl", "fedavg", "tenth"), "--scale tenth: it has no runs of cifar; give --task shake"),
        (("cifar", "nfl", "fedavg", "gpu"), "--scale gpu: choose among smoke, cpu, tenth, paper"),
    ],
)
def test_what_does_not_exist_is_named(cell: tuple[str, str, str, str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        plan_for(*cell, seed=0)


def test_the_catalog_names_worlds_that_exist() -> None:
    for cell in cells_of(named("all")):
        assert cell.world in WORLDS[cell.task]
    shown = {(cell.task, cell.world) for cell in cells_of(named("all"))}
    assert shown == {(task, world) for task, worlds in WORLDS.items() for world in worlds}
    assert {cell.method for cell in cells_of(named("table3"), "shake", ["fb", "apfl"])} == {"fb", "apfl"}
    with pytest.raises(UserError, match="--only fbb"):
        cells_of(named("table3"), only=["fbb"])


def test_one_cell_can_be_asked_for() -> None:
    assert cells_of(named("table5"), only=["lindt"], worlds=["active-0.3"]) == (("cifar", "active-0.3", "lindt"),)
    assert len(cells_of(named("table3"), "shake", worlds=["nfl"])) == 7
    with pytest.raises(UserError, match=r"--world active-0\.4: choose among .*active-0\.3"):
        cells_of(named("table5"), worlds=["active-0.4"])
    with pytest.raises(UserError, match="--task shake: it has runs of cifar only"):
        cells_of(named("table5"), "shake")
    assert cells_of(named("table8"), "shake") == ()  # nothing is trained for it
    with pytest.raises(UserError, match="--only lindt: it has no runs to choose from"):
        cells_of(named("figure1"), only=["lindt"])
    with pytest.raises(UserError, match="--only lindt-tm --world normal: no run has both"):
        cells_of(named("table3"), only=["lindt-tm"], worlds=["normal"])


@pytest.mark.parametrize(("task", "key"), [("cifar", "170b0200d495"), ("shake", "0b61f9af6256")])
def test_the_key_of_a_plan_is_what_it_was(task: str, key: str) -> None:
    """Results are kept by it. A new field of a plan goes into keys.ADDED with the value at which it changes nothing."""
    assert content_key(paper(task, method="lindt"))[:12] == key


def test_fb_is_scored_at_the_end_only() -> None:
    fb, fedavg = (plan_for("cifar", "nfl", method, "cpu", 0) for method in ("fb", "fedavg"))
    assert [r for r in range(1, 101) if fb.scored(r)] == [96, 97, 98, 99, 100]
    assert [r for r in range(1, 101) if fedavg.scored(r)] == [10, 20, 30, 40, 50, 60, 70, 80, 90, 96, 97, 98, 99, 100]


def test_long_worlds_differ_from_the_short_ones_in_length_alone() -> None:
    for long, short in (("nfl-long", "nfl"), ("normal-long", "normal")):
        assert content_key(paper("cifar", long)) == content_key(paper("cifar", short))  # played once
        one, other = (plan_for("cifar", world, "runtime", "cpu", 0) for world in (long, short))
        assert (one.rounds, other.rounds) == (300, 100)
        assert isinstance(one.method.recovery, OnDetection)
        assert one.method.recovery.patience == 150
        assert one.training.decay**300 == pytest.approx(other.training.decay**100)
        assert (one.data, one.model, one.environment) == (other.data, other.model, other.environment)
    assert "300 rounds (500)" in reduced("cifar", "cpu", "nfl-long")


def test_an_open_choice_changes_one_thing() -> None:
    one_field = {
        "pool-1": {"environment.threat.per_batch"},
        "attacker-epochs-10": {"environment.threat.epochs"},
        "dropout-0": {"model.dropout"},
        "spread-1": {"data.allocation.spread"},
        "clipping-100": {"training.max_norm"},
        "alone-longer": {"alone.epochs", "alone.patience"},
        "alone-no-refit": {"alone.refit"},
    }
    assert {world: changed(world) - {"name"} for world in one_field} == one_field
    assert paper("cifar", "alone-longer").alone == Alone(epochs=200, patience=40)
