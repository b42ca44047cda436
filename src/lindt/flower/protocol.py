"""The reports of clients: a GainReport in the reply of a training, a ClientReport in the reply of an evaluation.

The server's messages to them are Instructions (messages.py). A ClientReport has no field for v_i: v_i never leaves its
client. Reports from the network are checked here; a malformed report raises ValueError.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final, NoReturn, final

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict

from lindt.errors import UserError, one_line
from lindt.flower.messages import LONGEST_REPORT, PREFIX, REPORT, Instruction, Visit
from lindt.plan.metrics import Accuracy, MeanOf
from lindt.protocols import ClientTally, GainReport, Penalty
from lindt.server.updates import clipped_report, pack_tally, unpack_report, unpack_tally

if TYPE_CHECKING:
    from torch import Tensor


def _not_here(*_: object) -> NoReturn:
    raise NotImplementedError("a client's own metric scores samples on the client only")


MEAN: Final = MeanOf(_not_here)  # stands for a client's own metric, whose function the server does not have


@final
@dataclass(frozen=True)
class ClientReport:
    """A client's scores on its own test data, as sums over samples: no sample leaves the client.

    Each entry of the tally is a pair, the sum of the scores and the number of samples. `percent`: the score of a sample
    is between 0 and 1. `paired`: wins and losses are counted sample by sample. `chosen`: the model of `local` was
    chosen by its score on these data.
    """

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
        """Add it to the reply of the user's evaluation: means to the user's metrics, sums in a record of its own."""
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
        """Take it out of a reply: strategies require the same metrics from every client. None if there is no report."""
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
            raise ValueError("report.client is not a name of 1 to 200 printable characters")
        if not isinstance(percent, bool) or not isinstance(paired, bool) or not isinstance(chosen, bool):
            raise ValueError("percent, paired or chosen of a report is not a boolean")
        try:
            table = json.loads(str(found.get("tally")))
        except RecursionError:
            raise ValueError("report.tally is nested too deeply") from None
        tally = unpack_tally(table, Accuracy() if percent else MEAN, (2,), private=None)
        pairs = [sums for sums in (tally.central, tally.local, tally.private) if sums is not None]
        if tally.attack_chances or any(float(sums[1]) != tally.samples for sums in pairs):
            raise ValueError("the sums of a report's tally are not over its number of samples")
        return cls(client, tally, percent, paired, chosen)


def sums_of(scores: Tensor) -> Tensor:
    """The scores of samples as a tally: their sum and their number."""
    import torch

    return torch.tensor([float(scores.sum()), len(scores)], dtype=torch.float64)


def reports_of(replies: Iterable[Message]) -> tuple[dict[int, ClientReport], dict[int, str]]:
    """The reports, taken out of the replies, by node; and the errors of malformed reports, by node."""
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


def evaluation_visits(replies: Iterable[Message]) -> list[Visit]:
    """The visits in the replies of an evaluation, without the malformed ones. `reports_of` takes them out."""
    found = []
    for reply in replies:
        record = None if reply.has_error() else reply.content.get(REPORT)
        if isinstance(record, ConfigRecord) and "visit" in record:
            with suppress(ValueError):  # `reports_of` names it
                found.append(Visit.unpack(record["visit"]))
    return found


def attach_gain(content: RecordDict, report: GainReport) -> None:
    """Add a gain report to the reply of a training: one record of a few hundred bytes."""
    content[REPORT] = ConfigRecord({"gain": json.dumps(asdict(report))})


def attach_visit(content: RecordDict, visit: Visit) -> None:
    """Add a visit to the reply of a training, in the record of its gain report."""
    found = content.config_records[REPORT] if REPORT in content else ConfigRecord()
    found["visit"] = visit.pack()
    content[REPORT] = found


def detach_gain(content: RecordDict) -> GainReport | None:
    """Take the gain report out of a reply, clipped to its bounds; None without a report, ValueError if malformed."""
    return detach_visit(content)[1]


def detach_visit(content: RecordDict) -> tuple[Visit | None, GainReport | None]:
    """Take the visit and the gain report, clipped to its bounds, out of a reply.

    Each is None if the reply does not have it. Raises ValueError if one is malformed.
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
        raise ValueError(f"gain is not a string of at most {LONGEST_REPORT} characters")
    try:
        report = clipped_report(unpack_report(json.loads(written)))
    except (RecursionError, OverflowError):
        raise ValueError("gain is nested too deeply, or has a number that is too large") from None
    if report is None:
        raise ValueError("gain has a number that is not finite, or a wrong number of samples")
    return visit, report


Next = Callable[[Message, Context], Message]


def instruction_of(message: Message) -> Instruction | None:
    try:
        return Instruction.read(message)
    except ValueError as error:
        raise UserError(f"the server's instruction is malformed: {error}") from None


def record_of(message: Message) -> ArrayRecord:
    records = message.content.array_records
    if len(records) != 1:
        raise UserError(f"the message has {len(records)} records of weights; lindt needs one that holds the model")
    return next(iter(records.values()))


def penalty_of(message: Message) -> Penalty:
    """FedProx sends mu to its clients in the config; the training of w uses it in recovery as well."""
    from lindt.client.training import NoPenalty, Proximal

    mu = next(iter(message.content.config_records.values())).get("proximal-mu", 0.0)
    return Proximal(mu) if isinstance(mu, int | float) and mu > 0 else NoPenalty()


def must_be_last(call_next: Next) -> None:
    if getattr(call_next, "__module__", "").startswith("flwr.") and "make_ffn" in call_next.__qualname__:
        raise UserError(
            "mods: Dual must be the last of them, else the mods after it (clipping, say) are skipped. With mods of a "
            "function, @app.train(mods=[...]), leave Dual out of the ClientApp's mods and end the file with "
            "app = lindt.flower.wrap(app, dual=Dual(...))"
        )
