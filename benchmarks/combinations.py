"""What a client should predict with: its models one by one and combined, over small federations of several tasks.

    python benchmarks/combinations.py --part design --runs 24    # on which the default was chosen
    python benchmarks/combinations.py --part judged --runs 24    # on which it is judged

Each federation is a configuration of `lindt reproduce detectors`, played with LINDT from the first round. Then every
honest client has four models: the global one, its dual model, w tuned for 5 epochs at the round's first rate, and the
one that it trained alone. Each way to combine them chooses on the client's validation part, and is scored on its test
data. The mean gain over training alone is the mean over federations; the clients worse off are counted over all.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Final, final

import torch
from torch import Tensor

from lindt.client.adaptations.fine_tune import FineTune
from lindt.client.adaptations.guarded import mixed, mixture_weights
from lindt.client.training import forward_all
from lindt.engines.inprocess import InProcess
from lindt.plan.plan import METHODS, Plan, Scoring, attackers_of
from lindt.plan.problem import problem_for
from lindt.protocols import Task
from lindt.server.federation import federate
from lindt.server.scores import paired_p_value, worst_tenth
from lindt_experiments.detectors.configurations import TASKS, configurations

SETS: Final = {
    "global": ("global",),
    "dual": ("dual",),
    "tuned": ("tuned",),
    "global, dual, private": ("global", "dual", "private"),
    "global, tuned, private": ("global", "tuned", "private"),
    "tuned, private": ("tuned", "private"),
    "dual, private": ("dual", "private"),
    "global, dual, tuned, private": ("global", "dual", "tuned", "private"),
}


def _equal(hits_Mn: Tensor) -> Tensor:
    return torch.full((len(hits_Mn),), 1 / len(hits_Mn), dtype=torch.float64)


def _best(hits_Mn: Tensor) -> Tensor:
    return torch.eye(len(hits_Mn), dtype=torch.float64)[hits_Mn.sum(1).argmax()]


RULES: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "equal": _equal,
    **{f"exp {strength}": lambda hits, s=strength: mixture_weights(hits, s) for strength in (0.25, 0.5, 1.0)},
    "best on V_i": _best,
}


@final
@dataclass(frozen=True)
class Member:
    """One model's outputs for the validation part (None where there is none) and the test data."""

    validation: Tensor | None
    test: Tensor


@final
@dataclass(frozen=True)
class ClientOutputs:
    members: Mapping[str, Member]
    y_validation: Tensor | None
    y_test: Tensor


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--part", choices=("design", "judged"), default="judged")
    parser.add_argument("--runs", type=int, default=24, help="federations, drawn by a fixed seed")
    parser.add_argument("--cache", type=Path, default=None, help="a folder for private models")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    chosen = [one for one in configurations("cpu") if one.part == asked.part and one.task in TASKS]
    random.Random(0).shuffle(chosen)
    federations = []
    for one in chosen[: asked.runs]:
        began = time.monotonic()
        federations.append(list(outputs(one.plan(0), asked.cache)))
        say(f"{one.name}: {time.monotonic() - began:.0f} s")
    say(f"\n{len(federations)} federations of the {asked.part} part, {sum(map(len, federations))} honest clients\n")
    say("| predicts with | weights | mean gain | worse off | clearly | clearly better | worst tenth |")
    say("|---|---|--:|--:|--:|--:|--:|")
    for words, names in SETS.items():
        for rule, weigh in RULES.items():
            if len(names) > 1 or rule == "equal":
                say(f"| {words} | {rule if len(names) > 1 else ''} | {row(federations, names, weigh)} |")


def outputs(plan: Plan, cache: Path | None) -> Iterator[ClientOutputs]:
    """What each honest client's models say, once the federation has ended."""
    plan = replace(plan, method=METHODS["lindt"], scoring=Scoring(every=plan.rounds, last=1))
    problem, device = problem_for(plan), torch.device("cpu")
    engine = InProcess(plan, problem, cache=cache)
    *_, (state, _) = federate(plan, problem=problem, engine=engine, preflight=False)
    for i in sorted(set(range(len(problem.data))) - attackers_of(plan, len(problem.data))):
        client = engine.clients[i]
        task = Task("evaluate", state.run, i, state.round, state.w, state.buffers, state.recovery.on)
        dual, shared, _ = client.predictor(task)
        ctx = client._open(task)
        tuned = FineTune(rate=plan.training.rate, epochs=5).predictor(ctx, shared, None)
        models = {"global": shared, "dual": dual, "tuned": tuned}
        held = client.validation
        found = {
            name: Member(
                None if held is None else forward_all(model, held, device), forward_all(model, client.test, device)
            )
            for name, model in models.items()
        }
        if held is not None:
            alone = client._private_module()
            assert alone is not None
            found["private"] = Member(forward_all(alone, held, device), forward_all(alone, client.test, device))
        else:
            found["private"] = Member(None, client._private_model().outputs)
        yield ClientOutputs(found, None if held is None else held.labels, client.test.labels)


def row(federations: Sequence[Sequence[ClientOutputs]], names: Sequence[str], weigh: Callable[[Tensor], Tensor]) -> str:
    means, worst, worse, clearly, better, clients = [], [], 0, 0, 0, 0
    for federation in federations:
        gains = []
        for client in federation:
            y, members = client.y_test, [client.members[name] for name in names]
            hits_Mn = torch.zeros(len(members), 0)
            if client.y_validation is not None:
                said = [member.validation for member in members]
                hits_Mn = torch.stack(
                    [(one.argmax(-1) == client.y_validation).double() for one in said if one is not None]
                )
            right = mixed([member.test for member in members], weigh(hits_Mn)).argmax(-1) == y
            alone = client.members["private"].test.argmax(-1) == y
            wins, losses = int((right & ~alone).sum()), int((alone & ~right).sum())
            gains.append((wins - losses) / len(y))
            clear = paired_p_value(wins, losses) < 0.05
            worse, clients = worse + (losses > wins), clients + 1
            clearly, better = clearly + (clear and losses > wins), better + (clear and wins > losses)
        means.append(fmean(gains))
        worst.append(worst_tenth(gains))
    return f"{100 * fmean(means):+.1f} | {worse} of {clients} | {clearly} | {better} | {100 * fmean(worst):+.1f}"


if __name__ == "__main__":
    main()
