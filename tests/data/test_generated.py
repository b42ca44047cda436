"""Generated data: the same in every run, learnable, unlike between roles; and text through both engines."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from lindt.data import generated
from lindt.data.shakespeare import ALPHABET
from lindt.data.sources import Text
from lindt.engines.processes.engine import Processes
from lindt.errors import UserError
from lindt.plan.file import from_dict
from lindt.plan.models import Cnn
from lindt.plan.plan import Plan
from lindt.plan.problem import problem_for
from lindt.server.federation import federate

TEXT = {
    "name": "shake-smoke",
    "rounds": 2,
    "method": "lindt",
    "model": {"kind": "lstm", "hidden": 8},
    "data": {
        "source": "generated-text",
        "clients": 6,
        "test_share": 0.1,
        "allocation": {"kind": "roles", "least": 100},
        "text": {"window": 6, "stride": 20},
    },
    "training": {"rate": 1.47, "batch": 50},
    "environment": {
        "participation": {"kind": "sampled", "rate": 0.5},
        "threat": {"kind": "next_character", "share": 0.17, "epochs": 2},
        "privacy": {"kind": "gaussian", "S": 15.0, "sigma": 0.001},
    },
    "alone": {"epochs": 2, "patience": 1},
    "scoring": {"every": 2, "last": 1},
}


def test_pictures_fit_the_cnn_and_a_mean_picture_tells_the_classes() -> None:
    pools = generated.pictures(0.25, 0)
    assert pools.x.shape == (4000, 8, 8, 3)
    assert pools.x.dtype == torch.uint8
    assert pools.y[pools.test].bincount().tolist() == [100] * 10
    x = generated.prepare(pools.x)
    assert Cnn(side=8, kernel=2, channels=(4, 8), units=(16, 8)).build(10)(x[:2]).shape == (2, 10)
    flat = x.flatten(1)
    means = torch.stack([flat[pools.train][pools.y[pools.train] == label].mean(0) for label in range(10)])
    nearest = torch.cdist(flat[pools.test], means).argmin(1)
    assert (nearest == pools.y[pools.test]).float().mean() > 0.95


def test_roles_have_habits_of_their_own() -> None:
    pools = generated.speech(0.1, 0, Text(window=1))
    assert pools.roles is not None
    assert len(pools.role_names) == 30
    counts = np.zeros((30, 80, 80))
    rows = pools.train
    np.add.at(counts, (pools.roles[rows].numpy(), pools.x[rows, 0].numpy(), pools.y[rows].numpy()), 1)

    def hits(role: int, of: np.ndarray) -> float:
        """How often the most frequent follower is right on a role's test text."""
        mine = pools.test[pools.roles[pools.test] == role]
        return float((of.argmax(1)[pools.x[mine, 0].numpy()] == pools.y[mine].numpy()).mean())

    own = np.mean([hits(role, counts[role]) for role in range(30)])
    shared = np.mean([hits(role, counts.sum(0)) for role in range(30)])
    others = np.mean([hits(role, counts[(role + 1) % 30]) for role in range(30)])
    assert own > shared + 0.05 > others + 0.05
    assert shared > 0.15  # and yet something in common
    assert ALPHABET[0] not in {ALPHABET[code] for code in pools.y.unique().tolist()}  # nobody says a line end


def test_the_plans_seed_moves_the_split_not_the_data() -> None:
    one, other = (generated.pictures(0.25, seed) for seed in (0, 1))
    assert torch.equal(one.x, other.x)
    assert not torch.equal(one.test, other.test)
    one, other = (generated.speech(0.25, seed, Text(window=20, split="shuffled")) for seed in (0, 1))
    assert torch.equal(one.y, other.y)
    assert not torch.equal(one.test, other.test)


@pytest.mark.slow
def test_text_gives_the_same_bytes_in_process_and_in_processes() -> None:
    plan: Plan = from_dict(TEXT)
    problem = problem_for(plan)
    assert problem.client_names[0].startswith("role ")
    with pytest.raises(UserError, match="client_names: it has 1; give one for each of 6 clients"):
        replace(problem, client_names=("Hamlet",))
    engine = Processes(plan, problem, workers=2)
    try:
        there = list(federate(plan, problem=problem, engine=engine))
    finally:
        engine.close()
    here = list(federate(plan, problem=problem))
    for (a, x), (b, y) in zip(here, there, strict=True):
        assert torch.equal(a.w, b.w)
        assert x == y
    assert here[-1][1].scores is not None


def test_clients_of_a_text_share_one_buffer() -> None:
    plan: Plan = from_dict(TEXT)
    problem = problem_for(replace(plan, data=replace(plan.data, text=Text(window=20))))
    buffers = {part.x.untyped_storage().data_ptr() for pair in problem.data for part in pair}  # type: ignore[attr-defined]
    assert len(buffers) == 1


def test_two_camps_contradict_each_other() -> None:
    """The same class is called by other names in the second camp: all six, or the first two only."""
    whole, part = generated.two_camps(0.5, 0), generated.two_camps_in_part(0.5, 0)
    assert whole.roles is not None
    assert torch.equal(whole.x, part.x)
    second = whole.roles % 2 == 1
    differs = whole.y != part.y
    assert differs[second].float().mean() == pytest.approx(4 / 6, abs=0.05)
    assert not differs[~second].any()
    assert set(part.y[differs].tolist()) == {2, 3, 4, 5}
    train = whole.roles[whole.train]
    assert train.bincount().tolist() == [50] * 40  # half of every role


def test_clusters_are_the_same_each_time_and_have_all_classes() -> None:
    once, again = generated.clusters(0.5, 3), generated.clusters(0.5, 3)
    assert torch.equal(once.x, again.x)
    assert torch.equal(once.train, again.train)
    assert once.y[once.train].bincount().tolist() == [150] * 10
