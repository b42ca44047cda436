"""Which model a client should predict with: its models, single and combined, over federations of several tasks.

    python benchmarks/combinations.py --part design --runs 24    # small tasks, on which the default was chosen
    python benchmarks/combinations.py --part judged --runs 24    # small tasks, on which it is judged
    python benchmarks/combinations.py --part cifar --seeds 10,11,12 --world nfl    # CIFAR-10 at the scale cpu
    python benchmarks/combinations.py --part cifar --scale paper --seeds 0 --at 100,200,300,400,500

With `--at` the models of these rounds are judged, each round in a table of its own, and the run ends with the last.

Each federation of the small tasks is a configuration of `lindt reproduce detectors`, each of CIFAR-10 a cell of
`lindt reproduce recovery`; all are played with LINDT from the first round, and hold out V_i. At the end every honest
client has four models that have not trained on V_i: the global model, its dual model, w tuned for 5 epochs, and the
model that it trained alone. Each combination is chosen on V_i, and scored on the client's test data.

With "V_i given back" the weights are chosen as before, but the models that predict have trained on V_i as well: w is
tuned on all of D_i, and the private model is trained anew on all of D_i. The dual model stays as it is, but for the row
of the dual model alone, where it trains for one more round's epochs on all of D_i. Training alone, with which all are
compared, is the private model that trains on all of D_i. The mean gain is the mean over federations; clients worse off
are counted over all of them.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Final, final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lindt.client.adaptations.fine_tune import FineTune
from lindt.client.adaptations.guarded import mixed, mixture_weights
from lindt.client.client import Client
from lindt.client.private_models import PrivateTraining
from lindt.client.training import fit, forward_all
from lindt.data.examples import LocalWork
from lindt.engines.inprocess import InProcess
from lindt.plan.plan import METHODS, Plan, Scoring, attackers_of
from lindt.plan.problem import problem_for
from lindt.protocols import Examples, Task
from lindt.server.federation import federate
from lindt.server.scores import paired_p_value, worst_tenth
from lindt.weights import write
from lindt_experiments.detectors.configurations import TASKS, configurations
from lindt_experiments.recovery.cells import RecoveryCell, plan_for

SETS: Final = {
    "global": ("global",),
    "dual": ("dual",),
    "tuned": ("tuned",),
    "private": ("private",),
    "global, dual, private": ("global", "dual", "private"),
    "global, tuned, private": ("global", "tuned", "private"),
    "tuned, private": ("tuned", "private"),
    "dual, private": ("dual", "private"),
    "dual, tuned": ("dual", "tuned"),
    "dual, tuned, private": ("dual", "tuned", "private"),
    "global, dual, tuned, private": ("global", "dual", "tuned", "private"),
}
EPOCHS: Final = 5  # of tuning
Weigh = Callable[[Tensor, int | None], Tensor]


def _equal(hits_Mn: Tensor, _private: int | None) -> Tensor:
    return torch.full((len(hits_Mn),), 1 / len(hits_Mn), dtype=torch.float64)


def _best(hits_Mn: Tensor, _private: int | None) -> Tensor:
    return torch.eye(len(hits_Mn), dtype=torch.float64)[hits_Mn.sum(1).argmax()]


def _exponential(strength: float = 0.0) -> Weigh:
    return lambda hits_Mn, _private: mixture_weights(hits_Mn, strength)


def _alone_if_clear(hits_Mn: Tensor, private: int | None) -> Tensor:
    """The private model alone where each of the others is clearly worse on V_i by the paired test; else as `exp by n`.

    Without this rule a clearly worse model still has a small weight.
    """
    if private is not None and len(hits_Mn) > 1 and hits_Mn.shape[1]:
        others = [one for index, one in enumerate(hits_Mn) if index != private]
        pairs = [(int((one > hits_Mn[private]).sum()), int((one < hits_Mn[private]).sum())) for one in others]
        if all(losses > wins and paired_p_value(wins, losses) < 0.05 for wins, losses in pairs):
            return torch.eye(len(hits_Mn), dtype=torch.float64)[private]
    return mixture_weights(hits_Mn)


def _geometric(outputs_MnC: Sequence[Tensor], weights_M: Tensor) -> Tensor:
    """The logarithm of the weighted geometric mean of the probabilities, up to a constant for each sample."""
    stacked = torch.stack(list(outputs_MnC)).log_softmax(-1)
    return (weights_M.to(stacked).reshape(-1, 1, 1) * stacked).sum(0)


@final
@dataclass(frozen=True)
class Rule:
    """How the weights are chosen from the hits on V_i (M models, n samples; the place of P_i), and how models mix."""

    weigh: Weigh
    mix: Callable[[Sequence[Tensor], Tensor], Tensor] = mixed


RULES: Final[dict[str, Rule]] = {
    "equal": Rule(_equal),
    "exp by n": Rule(_exponential()),
    "exp by n, geometric mean": Rule(_exponential(), _geometric),
    "exp by n, alone if clear": Rule(_alone_if_clear),
    **{f"exp {strength}": Rule(_exponential(strength)) for strength in (0.25, 0.5, 1.0)},
    "best on V_i": Rule(_best),
}


@final
@dataclass(frozen=True)
class ClientOutputs:
    """The outputs of a client's models by name; `names/given back` are those of the models that trained on V_i."""

    validation: Mapping[str, Tensor]  # for V_i; empty where there is none
    test: Mapping[str, Tensor]
    y_validation: Tensor
    y_test: Tensor
    wanted: Tensor  # the label that attackers want for each test sample, -1 where they want none


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--part", choices=("design", "judged", "cifar"), default="judged")
    parser.add_argument("--runs", type=int, default=24, help="federations of the small tasks, drawn by a fixed seed")
    parser.add_argument("--seeds", default="10,11,12", help="cifar: the seeds, with commas")
    parser.add_argument("--world", default="nfl", help="cifar: nfl, normal, dirichlet or dirichlet-attacked")
    parser.add_argument("--scale", default="cpu", help="cifar: smoke, cpu or paper")
    parser.add_argument("--at", default="", help="rounds to judge, with commas; by default the plan's last")
    parser.add_argument("--cache", type=Path, default=None, help="a folder for private models")
    parser.add_argument("--keep", type=Path, default=None, help="a folder for outputs, to judge them again unplayed")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    federations: dict[int, list[list[ClientOutputs]]] = {}
    for name, plan in _plans(asked.part, asked.runs, asked.seeds, asked.world, asked.scale):
        began = time.monotonic()
        rounds = sorted(int(one) for one in asked.at.split(",")) if asked.at else [plan.rounds]
        for place, found in enumerate(_kept(asked.keep, name, plan, rounds, asked.cache)):
            federations.setdefault(rounds[place] if asked.at else 0, []).append(found)
            say(f"{name}, round {rounds[place]}: {time.monotonic() - began:.0f} s")
            if asked.at:  # as soon as the round is known: a run at the paper's size takes hours
                tell(asked.part, federations[rounds[place]], f", round {rounds[place]}")
    if not asked.at:
        tell(asked.part, federations.get(0, []))


def tell(part: str, federations: Sequence[Sequence[ClientOutputs]], when: str = "") -> None:
    """The table of all combinations."""
    say(f"\n{len(federations)} federations of the {part} part{when}, {sum(map(len, federations))} honest clients\n")
    say("| predicts with | weights | V_i | score | mean gain | worse off | clearly | better | worst tenth | attack |")
    say("|---|---|---|--:|--:|--:|--:|--:|--:|--:|")
    for (words, names), (rule, how), back in product(SETS.items(), RULES.items(), (False, True)):
        single = len(names) == 1
        if (not single or rule == "equal") and not (back and words == "global"):
            told = f"{words} | {'' if single else rule} | {'given back' if back else 'held out'}"
            say(f"| {told} | {row(federations, names, how, back)} |")


def _plans(part: str, runs: int, seeds: str, world: str, scale: str) -> Iterator[tuple[str, Plan]]:
    if part == "cifar":
        for seed in map(int, seeds.split(",")):
            name = f"cifar-{world}-{seed}" if scale == "cpu" else f"cifar-{world}-{scale}-{seed}"
            yield name, plan_for(RecoveryCell(world, "guarded"), scale, seed)
        return
    chosen = [one for one in configurations("cpu") if one.part == part and one.task in TASKS]
    random.Random(0).shuffle(chosen)
    for one in chosen[:runs]:
        yield one.name, one.plan(0)


def _kept(
    keep: Path | None, name: str, plan: Plan, rounds: Sequence[int], cache: Path | None
) -> Iterator[list[ClientOutputs]]:
    """The outputs of all honest clients after each of the rounds, from the folders where they are kept.

    If a round is missing, the federation is played from its start.
    """
    folders = [] if keep is None else [keep / (name if one == plan.rounds else f"{name}-{one}") for one in rounds]
    if folders and all(folder.is_dir() for folder in folders):
        yield from ([_read(load_file(path)) for path in sorted(folder.iterdir())] for folder in folders)
        return
    for place, found in enumerate(outputs(plan, rounds, cache)):
        if folders and not folders[place].is_dir():
            _write(found, folders[place])
        yield found


def _write(found: Sequence[ClientOutputs], folder: Path) -> None:
    folder.mkdir(parents=True)
    for index, one in enumerate(found):
        tensors = {"y_validation": one.y_validation, "y_test": one.y_test, "wanted": one.wanted}
        tensors |= {f"validation/{name}": value for name, value in one.validation.items()}
        tensors |= {f"test/{name}": value for name, value in one.test.items()}
        save_file({name: value.contiguous() for name, value in tensors.items()}, folder / f"{index:03}.safetensors")


def _read(tensors: Mapping[str, Tensor]) -> ClientOutputs:
    parts: dict[str, dict[str, Tensor]] = {"validation": {}, "test": {}}
    for name, value in tensors.items():
        part, slash, model = name.partition("/")
        if slash:
            parts[part][model] = value
    labels = (tensors[name] for name in ("y_validation", "y_test", "wanted"))
    return ClientOutputs(parts["validation"], parts["test"], *labels)


def outputs(plan: Plan, rounds: Sequence[int], cache: Path | None) -> Iterator[list[ClientOutputs]]:
    """The outputs of each honest client's models after each of the rounds."""
    plan = replace(plan, method=METHODS["lindt"], scoring=Scoring(every=plan.rounds, last=1))
    problem = problem_for(plan)
    engine = InProcess(plan, problem, cache=cache)
    honest = sorted(set(range(len(problem.data))) - attackers_of(plan, len(problem.data)))
    for state, _ in federate(plan, problem=problem, engine=engine, preflight=False):
        if state.round in rounds:
            arguments = (state.round, state.w, state.buffers, state.recovery.on)
            yield [_outputs_of(engine.clients[i], Task("evaluate", state.run, i, *arguments)) for i in honest]
        if state.round >= max(rounds):
            return


def _outputs_of(client: Client, task: Task) -> ClientOutputs:
    plan, device, held = client.worker.plan, client.worker.device, client.validation
    on_validation: dict[str, Tensor] = {}
    on_test: dict[str, Tensor] = {}

    def note(name: str, predict: Callable[[Tensor], Tensor], data: Examples | None = held) -> None:
        if data is not None:
            on_validation[name] = forward_all(predict, data, device)
        on_test[name] = forward_all(predict, client.test, device)

    predict, shared, _ = client.predictor(task)
    note("global", shared)
    note("dual", predict)
    tuning = FineTune(rate=plan.training.rate, epochs=EPOCHS) if plan.data.source != "cifar10-half" else FineTune()
    with client._seeded(task):
        note("tuned", tuning.predictor(client._open(task), shared, None))
    alone = None if held is None else client._private_module()
    if alone is None:  # without a V_i the private model's weights are not kept
        on_test["private"] = client._private_model().outputs
    else:
        note("private", alone)
    # The models that train on V_i as well: their outputs for V_i are not used.
    everything = client.worker.problem.data[client.id][0]
    with client._seeded(task):
        ctx = replace(client._open(task), train=everything)
        note("tuned/given back", tuning.predictor(ctx, shared, None), None)
    with_all = PrivateTraining(
        f"client {client.id}", everything, client.test, plan, client.worker.problem, device, None
    )
    on_test["private/given back"] = client.worker.cache.outputs(with_all)
    on_test["dual/given back"] = _last_fit(client, task, everything)
    y = torch.zeros(0, dtype=client.test.labels.dtype) if held is None else held.labels
    goal = plan.environment.threat.goal(client.test.labels)
    return ClientOutputs(on_validation, on_test, y, client.test.labels, goal)


def _last_fit(client: Client, task: Task, everything: Examples) -> Tensor:
    """The test outputs of the dual model after one more round's training on all of D_i; the w that was received stays.

    As in a round, w_i and v_i train together, and the client predicts with v_i and the received w.
    """
    worker, dual = client.worker, client.worker.plan.method.adaptation
    with client._seeded(task):
        ctx = replace(client._open(task), train=everything, rate=worker.plan.training.rate_at(task.round))
        worker.shared.train()
        private = client._private(ctx, task.round, create=True)
        step = dual.step(ctx, worker.shared, private)
        for _ in fit(step, LocalWork(everything, worker.plan.training.epochs), ctx.batch, ctx.generator, ctx.device):
            pass
        write(worker.shared, task.w, task.buffers)
        worker.shared.eval()
        assert private is not None
        return forward_all(dual.predictor(ctx, worker.shared, private.eval()), client.test, worker.device)


def row(
    federations: Sequence[Sequence[ClientOutputs]],
    names: Sequence[str],
    how: Rule,
    back: bool,
) -> str:
    """One line of the table. Training alone is the private model that trains on all of D_i."""
    scores, means, worst, worse, clearly, better, clients, hits, chances = [], [], [], 0, 0, 0, 0, 0, 0
    for federation in federations:
        gains, values = [], []
        for client in federation:
            y = client.y_test
            said = [client.validation[name] for name in names if name in client.validation]
            hits_Mn = torch.zeros(len(names), 0)
            if len(said) == len(names):
                hits_Mn = torch.stack([(one.argmax(-1) == client.y_validation).double() for one in said])
            kept = ("global",) if len(names) == 1 else ("global", "dual")  # as guarded prediction does
            used = [f"{name}/given back" if back and name not in kept else name for name in names]
            weights_M = how.weigh(hits_Mn, names.index("private") if "private" in names else None)
            predicted = how.mix([client.test[name] for name in used], weights_M).argmax(-1)
            right, alone = predicted == y, client.test["private/given back"].argmax(-1) == y
            wins, losses = int((right & ~alone).sum()), int((alone & ~right).sum())
            gains.append((wins - losses) / len(y))
            values.append(float(right.double().mean()))
            clear = paired_p_value(wins, losses) < 0.05
            worse, clients = worse + (losses > wins), clients + 1
            clearly, better = clearly + (clear and losses > wins), better + (clear and wins > losses)
            hits += int((predicted == client.wanted)[client.wanted >= 0].sum())
            chances += int((client.wanted >= 0).sum())
        scores.append(fmean(values))
        means.append(fmean(gains))
        worst.append(worst_tenth(gains))
    attack = f"{100 * hits / chances:.1f}" if chances else "-"
    return (
        f"{100 * fmean(scores):.1f} | {100 * fmean(means):+.1f} | {worse} of {clients} | {clearly} | {better} | "
        f"{100 * fmean(worst):+.1f} | {attack}"
    )


if __name__ == "__main__":
    main()
