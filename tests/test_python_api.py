"""The Python API as a person uses it from a notebook: resuming, own problems, own loops, second calls."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from worlds import tiny, tiny_runtime

from lindt import RoundResult, RunState, UserError, federate
from lindt.environment import Environment
from lindt.environment.participation import Sampled
from lindt.methods import METHODS
from lindt.plan import Alone, Plan
from lindt.recovery import EveryoneTreated, OnDetection

ALONE = Alone(private=False)  # P_i takes most of the time, and has nothing to do with these tests
Rounds = list[tuple[RunState, RoundResult]]


def same(resumed: Rounds, straight: Rounds) -> None:
    assert [result for _, result in resumed] == [result for _, result in straight]
    for (mine, _), (theirs, _) in zip(resumed, straight, strict=True):
        assert torch.equal(mine.w, theirs.w)
        assert mine.recovery == theirs.recovery


def lindt_plan(rounds: int = 6) -> Plan:
    return replace(tiny_runtime(alone=ALONE), method=METHODS["lindt"], rounds=rounds)


RESUMED = {"all the time": lindt_plan(), "on detection": tiny_runtime(alone=ALONE, rounds=6)}


class TestResume:
    @pytest.mark.parametrize("name", RESUMED)
    def test_a_run_resumed_from_its_folder_equals_the_uninterrupted_run(self, name: str, tmp_path: Path) -> None:
        plan = RESUMED[name]
        straight = list(federate(plan))
        first = list(islice(federate(plan, folder=tmp_path), 4))
        resumed = list(federate(plan, state=first[-1][0], folder=tmp_path))
        same([*first, *resumed], straight)

    def test_v_i_written_after_the_state_are_not_used(self, tmp_path: Path) -> None:
        plan = lindt_plan()
        straight = list(federate(plan))
        first = list(islice(federate(plan, folder=str(tmp_path)), 4))
        same(list(federate(plan, state=first[2][0], folder=str(tmp_path))), straight[3:])

    def test_two_runs_in_one_folder_do_not_mix(self, tmp_path: Path) -> None:
        plan = lindt_plan()
        first = list(islice(federate(plan, folder=tmp_path), 3))
        other = list(federate(replace(plan, seed=1), folder=tmp_path))
        assert first[0][0].run != other[0][0].run
        same(list(federate(plan, state=first[-1][0], folder=tmp_path)), list(federate(plan))[3:])

    def test_a_state_without_the_clients_v_i_is_refused(self) -> None:
        for plan in RESUMED.values():
            *_, (state, _) = islice(federate(plan), 4)
            with pytest.raises(UserError, match=r"keep a v_i.*folder="):
                next(federate(plan, state=state))

    def test_a_folder_without_the_v_i_is_refused(self, tmp_path: Path) -> None:
        plan = lindt_plan()
        *_, (state, _) = islice(federate(plan, folder=tmp_path / "mine"), 4)
        list(islice(federate(plan, folder=tmp_path / "other"), 4))
        with pytest.raises(UserError, match="other: it holds no v_i of this run"):
            next(federate(plan, state=state, folder=tmp_path / "other"))

    def test_a_folder_without_the_v_i_is_refused_after_recovery_has_stopped(self, tmp_path: Path) -> None:
        recovery = OnDetection(epsilon=1e-6, patience=0, stop=EveryoneTreated(), again="once")
        plan = tiny_runtime(alone=ALONE, rounds=20, environment=Environment(Sampled(rate=0.5)))
        plan = replace(plan, method=replace(plan.method, recovery=recovery))
        state = next(
            state
            for state, _ in federate(plan, folder=tmp_path / "mine")
            if state.recovery.detections and not state.recovery.on
        )
        with pytest.raises(UserError, match="it holds no v_i of this run"):
            next(federate(plan, state=state, folder=tmp_path / "other"))
        assert next(federate(plan, state=state, folder=tmp_path / "mine"))[1].round == state.round + 1

    def test_a_state_older_than_the_last_two_is_refused(self, tmp_path: Path) -> None:
        plan = lindt_plan()
        rounds = list(federate(plan, folder=tmp_path))
        with pytest.raises(UserError, match=r"round 1.*the last two"):
            next(federate(plan, state=rounds[0][0], folder=tmp_path))

    def test_a_method_that_keeps_nothing_resumes_without_a_folder(self) -> None:
        for method in ("fedavg", "watch"):
            plan = tiny(method, rounds=6)
            straight = list(federate(plan))
            same(list(federate(plan, state=straight[2][0])), straight[3:])

    def test_a_run_whose_recovery_was_never_on_resumes_without_a_folder(self) -> None:
        plan = tiny_runtime(patience=100, alone=ALONE, rounds=4)
        straight = list(federate(plan))
        same(list(federate(plan, state=straight[1][0])), straight[2:])

    def test_a_folder_and_an_engine_are_refused_together(self, tmp_path: Path) -> None:
        from lindt.engines.inprocess import InProcess
        from lindt.problem import problem_for

        plan = tiny()
        problem = problem_for(plan)
        with pytest.raises(UserError, match="folder"):
            next(federate(plan, problem=problem, engine=InProcess(plan, problem), folder=tmp_path))

    def test_a_state_of_another_model_is_refused(self) -> None:
        *_, (state, _) = federate(tiny(rounds=1))
        with pytest.raises(UserError, match="weights"):
            next(federate(replace(tiny_runtime(), method=METHODS["fedavg"]), state=state))
