"""What `lindt compare` plays: every combination once, with the plan's own share of attackers."""

from __future__ import annotations

import pytest
from worlds import tiny

from lindt.cli.comparison import ComparisonGrid
from lindt.environment.threats import Backdoor, ModelReplacement, NoThreat, SignFlip
from lindt.errors import UserError
from lindt.plan.file import resolve
from lindt.plan.plan import METHODS
from lindt.server.aggregation import Krum
from lindt.server.recovery import OnDetection

BASE = tiny()  # a backdoor by 17% of six clients


def test_methods_alone_keep_their_aggregators_and_the_plans_attack() -> None:
    found = dict(ComparisonGrid.named("fedavg, trimmed-mean").plans(BASE))
    assert list(found) == ["fedavg", "trimmed-mean"]
    assert found["trimmed-mean"].method == METHODS["trimmed-mean"]
    assert found["fedavg"].environment == BASE.environment


def test_a_rule_by_delta_can_be_reached_in_the_plans_rounds() -> None:
    """The paper's r' of 250 could not flag anything in 80 rounds."""
    short, long = resolve("digits-nfl"), resolve("digits-nfl", ["rounds=500"])
    assert dict(ComparisonGrid.named("runtime").plans(short))["runtime"].method.recovery == OnDetection(patience=25)
    assert dict(ComparisonGrid.named("runtime").plans(long))["runtime"].method.recovery == OnDetection(patience=250)


def test_a_grid_is_every_combination() -> None:
    grid = ComparisonGrid.named("fedavg,apfl", "mean,krum", "no_threat,backdoor,sign_flip")
    found = dict(grid.plans(BASE))
    assert len(found) == 12
    assert list(found)[:3] == ["no_threat/mean/fedavg", "no_threat/mean/apfl", "no_threat/krum/fedavg"]
    cell = found["sign_flip/krum/apfl"]
    assert cell.method.aggregator == Krum()
    assert cell.method.adaptation == METHODS["apfl"].adaptation
    assert cell.environment.threat == SignFlip(share=0.17)
    assert cell.environment.privacy == BASE.environment.privacy
    assert found["backdoor/mean/fedavg"].environment.threat == Backdoor(share=0.17, epochs=2)  # the plan's own
    assert found["no_threat/mean/fedavg"].environment.threat == NoThreat()


def test_replacement_takes_the_share_too() -> None:
    ((_, plan),) = ComparisonGrid.named("fedavg", "", "model_replacement").plans(BASE)
    assert plan.environment.threat == ModelReplacement(threat=Backdoor(share=0.17))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("", "", ""), "--methods is empty"),
        (("fedavg,fedavg", "", ""), "--methods names fedavg twice"),
        (("lindt,lindt-always", "", ""), "--methods names lindt twice"),
        (("fedavg", "maen", ""), "--aggregators maen: choose among mean"),
        (("fedavg", "", "flip"), "--attacks flip: choose among no_threat"),
    ],
)
def test_unknown_words_are_named(words: tuple[str, str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ComparisonGrid.named(*words)


def test_an_attack_that_needs_more_than_its_name_says_so() -> None:
    with pytest.raises(UserError, match=r"until: environment\.threat\.last_round"):
        list(ComparisonGrid.named("fedavg", "", "until").plans(BASE))
