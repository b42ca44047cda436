"""The paper's main table, one method a line. Methods are compositions: there is no class per combination."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, final

from lindt.client.adaptations.apfl import Apfl
from lindt.client.adaptations.base import GlobalOnly
from lindt.client.adaptations.dual import Dual
from lindt.client.adaptations.fine_tune_head import FineTuneHead
from lindt.client.penalties import NoPenalty, Proximal
from lindt.protocols import Adaptation, Aggregator, Penalty, Recovery
from lindt.server.aggregation import Mean, TrimmedMean
from lindt.server.recovery import Always, Never, OnDetection


@final
@dataclass(frozen=True)
class Method:
    """What the clients learn for themselves, how the server joins it, and when recovery runs.

    `after_stop` is how clients predict once recovery has stopped: with what they learned, frozen ("adapted"),
    or with the global model alone.
    """

    adaptation: Adaptation = field(default_factory=GlobalOnly)
    aggregator: Aggregator = field(default_factory=Mean)
    penalty: Penalty = field(default_factory=NoPenalty)
    recovery: Recovery = field(default_factory=Always)
    after_stop: Literal["adapted", "global"] = "adapted"


FEDAVG = Method(recovery=Never())


FEDPROX = replace(FEDAVG, penalty=Proximal(mu=0.001))


TRIMMED_MEAN = replace(FEDAVG, aggregator=TrimmedMean(share=0.2))


FB = Method(adaptation=FineTuneHead(rate=0.001, epochs=200))


APFL = Method(adaptation=Apfl(alpha=0.01))


LINDT = Method(adaptation=Dual())


LINDT_BEFORE = Method(adaptation=Dual(position="before"))


LINDT_TM = replace(LINDT, aggregator=TrimmedMean(share=0.2))


RUNTIME = replace(LINDT, recovery=OnDetection(epsilon=0.1, patience=250))


WATCH = replace(FEDAVG, recovery=OnDetection(epsilon=0.1, patience=250))


METHODS: dict[str, Method] = {
    "fedavg": FEDAVG,
    "fedprox": FEDPROX,
    "trimmed-mean": TRIMMED_MEAN,
    "fb": FB,
    "apfl": APFL,
    "lindt": LINDT,
    "lindt-tm": LINDT_TM,
    "lindt-before": LINDT_BEFORE,  # attached before the activations: the best of the ablation, by little
    "runtime": RUNTIME,  # detection and recovery: FedAvg until NFL is detected, LINDT from then on
    "watch": WATCH,  # detection only: FedAvg that says when it goes wrong
}
