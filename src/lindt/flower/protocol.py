"""The reports of clients: a GainReport in the reply of a training, a ClientReport in that of an evaluation.

What goes out to them is an Instruction (messages.py). A ClientReport has no field for v_i: v_i never leaves its client.
What comes over the network is checked here; a malformed report raises ValueError.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, Final, final

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from torch import Tensor

from lindt.client.training import NoPenalty, Proximal
from lindt.errors import UserError, one_line
from lindt.flower.messages import LONGEST_REPORT, PREFIX, REPORT, Instruction, Visit
from lindt.plan.problem import Accuracy, MeanOf
from lindt.protocols import ClientTally, GainReport, Penalty
from lindt.server.updates import clipped_report, pack_tally, unpack_report, unpack_tally

MEAN: Final = MeanOf(torch.sub)  # stands for a client's own metric, whose function the server does not have


@final
@dataclass(frozen=True)
class ClientReport:
    """How a client fares on its own test data: sums over samples, no sample. Each sum of the tally is a pair, the sum
    over the samples and their number; `percent` says that a sample's score lies between 0 and 1. `paired`: wins and
    losses are known, sample by sample. `chosen`: the model behind `local` was chosen by its score on these data."""

    client: str
    tally: ClientTally
    percent: bool = True
    paired: bool = True
    chosen: bool = False

    @property
    def beta(self) -> float | None:
        """beta_i (Eq. 2)."""
        alone = self.tally.private
        return None if alone is None else float(self.tally.local[0] - alone[0]) / self.tally.samples

    def attach(self, content: RecordDict) -> None:
        """To the reply of the user's own evaluation: values beside the user's metrics, and the sums by themselves."""
        metrics, tally = content.metric_records, self.tally
        values = {"central": tally.central, "local": tally.local, "private": tally.private}
        shown = {PREFIX + name: float(sums[0]) / tally.samples for name, sums in values.items() if sums is not None}
        if self.beta is not None:
            shown[PREFIX + "beta"] = self.beta
        record = next(iter(metrics.values())) if metrics else MetricRecord()
        record.update(shown)
        if not metrics:
            content["metrics"] = record
        sums = json.dumps(pack_tally(tally))
        content[REPORT] = ConfigRecord({"client": self.client, "percent": self.percent, "tally": sums})

    @classmethod
    def detach(cls, content: RecordDict) -> ClientReport | None:
        """Take it out again, so that strategies see the user's metrics alone: they demand the same of every client."""
        for record in content.metric_records.values():
            for name in [name for name in record if name.startswith(PREFIX)]:
                del record[name]
        if not isinstance(content.get(REPORT), ConfigRecord):
            return None
        found: dict[str, Any] = dict(content.config_records[REPORT])
        del content[REPORT]
        if "visit" in found:
            Visit.unpack(found["visit"])
            if "tally" not in found:
                return None
        client, percent = found.get("client"), found.get("percent")
        paired, chosen = found.get("paired", True), found.get("chosen", False)
        if not isinstance(client, str) or not 0 < len(client) <= 200 or not client.isprintable():
            raise ValueError("a report without a client's name")
        if not isinstance(percent, bool) or not isinstance(paired, bool) or not isinstance(chosen, bool):
            raise ValueError("a report that does not say how its scores are read")
        try:
            table = json.loads(str(found.get("tally")))
        except RecursionError:
            raise ValueError("no tally") from None
        tally = unpack_tally(table, Accuracy() if percent else MEAN, (2,), private=None)
        pairs = [sums for sums in (tally.central, tally.local, tally.private) if sums is not None]
        if tally.attack_chances or any(float(sums[1]) != tally.samples for sums in pairs):
            raise ValueError("a report of other samples than its own")
        return cls(client, tally, percent, paired, chosen)


def sums_of(scores: Tensor) -> Tensor:
    """The scores of samples as a tally: their sum and their number."""
    return torch.tensor([float(scores.sum()), len(scores)], dtype=torch.float64)


def reports_of(replies: Iterable[Message]) -> tuple[dict[int, ClientReport], dict[int, str]]:
    """The reports by node, taken out of the replies; and what is wrong with those that are none."""
    reports: dict[int, ClientReport] = {}
    faults: dict[int, str] = {}
    for reply in replies:
        if not reply.has_error():
            try:
                report = ClientReport.detach(reply.content)
            except ValueError as error:
                faults[reply.metadata.src_node_id] = one_line(str(error))
            else:
                if report is not None:
                    reports[reply.metadata.src_node_id] = report
    return reports, faults


def attach_gain(content: RecordDict, report: GainReport) -> None:
    """To the reply of a training: one record of a few hundred bytes."""
    content[REPORT] = ConfigRecord({"gain": json.dumps(asdict(report))})


def attach_visit(content: RecordDict, visit: Visit) -> None:
    """To the reply of a training, beside its gain report."""
    found = content.config_records[REPORT] if REPORT in content else ConfigRecord()
    found["visit"] = visit.pack()
    content[REPORT] = found


def detach_gain(content: RecordDict) -> GainReport | None:
    """Take it out again, clipped to its bounds; None where there is none, ValueError where it is no report."""
    return detach_visit(content)[1]


def detach_visit(content: RecordDict) -> tuple[Visit | None, GainReport | None]:
    """Take out what a client says of its visit, and its gain report, clipped to its bounds.

    None where there is none; ValueError where it is no such thing.
    """
    if not isinstance(content.get(REPORT), ConfigRecord):
        return None, None
    found: dict[str, Any] = dict(content.config_records[REPORT])
    del content[REPORT]
    visit = Visit.unpack(found["visit"]) if "visit" in found else None
    if visit is not None and "gain" not in found:
        return visit, None
    written = found.get("gain")
    if not isinstance(written, str) or len(written) > LONGEST_REPORT:
        raise ValueError("no gain report")
    try:
        report = clipped_report(unpack_report(json.loads(written)))
    except (RecursionError, OverflowError):
        raise ValueError("no gain report") from None
    if report is None:
        raise ValueError("a gain report with a number that is none")
    return visit, report


Next = Callable[[Message, Context], Message]


def instruction_of(message: Message) -> Instruction | None:
    try:
        return Instruction.read(message)
    except ValueError as error:
        raise UserError(f"the server's order cannot be understood: {error}") from None


def record_of(message: Message) -> ArrayRecord:
    records = message.content.array_records
    if len(records) != 1:
        raise UserError(f"the message has {len(records)} records of weights; lindt needs one that holds the model")
    return next(iter(records.values()))


def penalty_of(message: Message) -> Penalty:
    """FedProx tells its clients mu in the config; w keeps to it in recovery as well."""
    mu = next(iter(message.content.config_records.values())).get("proximal-mu", 0.0)
    return Proximal(mu) if isinstance(mu, int | float) and mu > 0 else NoPenalty()


def must_be_last(call_next: Next) -> None:
    if getattr(call_next, "__module__", "").startswith("flwr.") and "make_ffn" in call_next.__qualname__:
        raise UserError(
            "mods: Dual must be the last of them, or clipping and the like would be passed over. With mods of a "
            "function, @app.train(mods=[...]), leave Dual out of the ClientApp's mods and end the file with "
            "app = lindt.flower.wrap(app, dual=Dual(...))"
        )
