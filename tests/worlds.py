"""Small worlds that many tests share: cheap plans on the embedded digits, and a scripted engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from lindt.client.training import NoPenalty
from lindt.data.partition import Classes
from lindt.environment import Environment
from lindt.environment.participation import Sampled
from lindt.environment.privacy import Gaussian
from lindt.environment.threats import Backdoor
from lindt.plan.models import Linear
from lindt.plan.plan import METHODS, Alone, Data, Method, Plan, Scoring
from lindt.protocols import Context, Examples, Loss, Penalty, Reply, Task
from lindt.server.recovery import OnDetection


def tiny(method: str | Method = "fedavg", /, **changes: object) -> Plan:
    """Six clients with two classes each, one of them an attacker, noise; three answer; softmax regression."""
    plan = Plan(
        name="tiny",
        rounds=4,
        data=Data(clients=6, allocation=Classes(per_client=2, spread=0.5)),
        model=Linear(),
        environment=Environment(Sampled(rate=0.5), Backdoor(share=0.17, epochs=2), Gaussian(S=15.0, sigma=0.001)),
        method=METHODS[method] if isinstance(method, str) else method,
        alone=Alone(epochs=1, patience=1),  # P_i takes most of a small run's time: tests of its epochs ask for more
        scoring=Scoring(every=2, last=1),
    )
    return replace(plan, **changes)  # type: ignore[arg-type]  # all at once: a recovery may need a detection


def tiny_runtime(patience: int = 1, **changes: object) -> Plan:
    """`tiny` with the dual model on the small CNN, switched on by detection after `patience` + 1 rounds."""
    from lindt.plan.models import SmallCnn

    method = replace(METHODS["runtime"], recovery=OnDetection(epsilon=1e-6, patience=patience))
    return tiny(model=SmallCnn(), method=method, **changes)


def context(
    train: Examples,
    *,
    loss: Loss = cross_entropy,
    rate: float = 0.1,
    max_norm: float = 1e9,
    seed: int = 0,
    penalty: Penalty | None = None,
    received: Tensor | None = None,
) -> Context:
    """What a client has at hand, for tests of an adaptation alone."""
    return Context(
        client=0,
        round=1,
        rate=rate,
        max_norm=max_norm,
        batch=10,
        train=train,
        loss=loss,
        penalty=penalty or NoPenalty(),
        received_P=torch.empty(0) if received is None else received,
        generator=torch.Generator().manual_seed(seed),
        device=torch.device("cpu"),
    )


class Scripted:
    """An engine whose clients answer what the test says; the server's side is the real one."""

    def __init__(self, answers: Sequence[Reply], clients: int = 3) -> None:
        self.answers, self.clients = answers, clients
        self.tasks: list[Task] = []

    def available(self) -> Sequence[int]:
        return range(self.clients)

    def dispatch(self, tasks: Sequence[Task]) -> Iterable[Reply]:
        self.tasks.extend(tasks)
        return iter(self.answers)

    def forget_after(self, round: int) -> None:
        raise AssertionError("nothing is resumed here")
