"""What passes between detector and mods beside the user's own messages: an Instruction out, a report back.

The reply of a training carries a GainReport, that of an evaluation a ClientReport.

An Instruction stands in the config of every message, as plain values: the flag (Alg. 2, s11), the experiment that v_i
belongs to, the round. It has no field for v_i, and neither has a ClientReport: v_i never leaves its client.
What comes over the network is checked here; a malformed instruction or report raises ValueError.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, Final, final

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from torch import Tensor

from lindt.client.training import NoPenalty, Proximal
from lindt.errors import UserError, in_short, one_line
from lindt.plan.problem import Accuracy, MeanOf
from lindt.protocols import ClientTally, GainReport, Penalty
from lindt.server.detection.gain import MOST_NOISE
from lindt.server.updates import MOST_SAMPLES, clipped_report, pack_tally, unpack_report, unpack_tally, whole_number

PREFIX = "lindt-"
REPORT = "lindt"  # the record of a report in a reply
LONGEST_REPORT: Final = 4096  # characters of a GainReport; ours have about 300
_LOG = logging.getLogger("flwr")  # where a Flower user looks


def log_message(text: str, *, warn: bool = False) -> None:
    _LOG.log(logging.WARNING if warn else logging.INFO, "lindt: %s", text)


MEAN: Final = MeanOf(torch.sub)  # stands for a client's own metric, whose function the server does not have


OPTIONAL: Final[dict[str, bool | float]] = {"reports": False, "panel": True, "noise": 0.0}  # of an Instruction


@final
@dataclass(frozen=True)
class Instruction:
    """What the server tells a client. `since` is the round this session of the run went on from: a client that
    meets a new `session` forgets what it learned after that round. Versions of v_i before `keep` may go. `reports`
    says that gains are tested: clients of the `panel` add a gain report to each training, with Laplace noise of scale
    `noise` on its numbers. These three are in the message only where they are not what they are by default."""

    experiment: str
    session: str
    since: int
    round: int
    keep: int
    recovering: bool
    reports: bool = False
    panel: bool = True
    noise: float = 0.0

    def put(self, message: Message) -> None:
        """Into the message's config; where it has none, into one of its own. One record more would upset DP mods."""
        configs = message.content.config_records
        config = next(iter(configs.values())) if configs else ConfigRecord()
        for name, value in asdict(self).items():
            if name not in OPTIONAL or value != OPTIONAL[name]:
                config[PREFIX + name] = value
        if not configs:
            message.content["config"] = config

    @classmethod
    def read(cls, message: Message) -> Instruction | None:
        """None where no detector stands behind the message."""
        configs = message.content.config_records
        config: dict[str, Any] = dict(next(iter(configs.values()))) if configs else {}
        if PREFIX + "experiment" not in config:
            return None
        names = cls.__dataclass_fields__
        found: dict[str, Any] = {name: config.get(PREFIX + name, OPTIONAL.get(name)) for name in names}
        for name in ("experiment", "session"):
            # They name files on the client: letters and digits only, no way out of a folder.
            if not isinstance(found[name], str) or not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", str(found[name])):
                raise ValueError(f"{PREFIX}{name} = {in_short(found[name])}: no name of an experiment or session")
        for name in ("recovering", "reports", "panel"):
            if not isinstance(found[name], bool):
                raise ValueError(f"{PREFIX}{name} = {in_short(found[name])}: no flag")
        for name in ("since", "round", "keep"):
            found[name] = whole_number(found[name], PREFIX + name, MOST_SAMPLES)
        if not isinstance(found["noise"], float) or not 0 <= found["noise"] <= MOST_NOISE:  # NaN is none of it
            raise ValueError(f"{PREFIX}noise = {in_short(found['noise'])}: no scale of noise")
        return cls(**found)


def with_own_config(message: Message) -> None:
    """Give the message a config of its own: strategies put the same content into the messages of all nodes.

    The weights stay the same object.
    """
    records = dict(message.content)
    for name, record in records.items():
        if isinstance(record, ConfigRecord):
            records[name] = ConfigRecord(dict(record))
    message.content = RecordDict(records)


@final
@dataclass(frozen=True)
class ClientReport:
    """How a client fares on its own test data: sums over samples, no sample. Each sum of the tally is a pair, the sum
    over the samples and their number; `percent` says that a sample's score lies between 0 and 1."""

    client: str
    tally: ClientTally
    percent: bool = True

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
        client, percent = found.get("client"), found.get("percent")
        if not isinstance(client, str) or not 0 < len(client) <= 200 or not client.isprintable():
            raise ValueError("a report without a client's name")
        if not isinstance(percent, bool):
            raise ValueError("a report that does not say how its scores are read")
        try:
            table = json.loads(str(found.get("tally")))
        except RecursionError:
            raise ValueError("no tally") from None
        tally = unpack_tally(table, Accuracy() if percent else MEAN, (2,), private=None)
        pairs = [sums for sums in (tally.central, tally.local, tally.private) if sums is not None]
        if tally.attack_chances or any(float(sums[1]) != tally.samples for sums in pairs):
            raise ValueError("a report of other samples than its own")
        return cls(client, tally, percent)


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


def detach_gain(content: RecordDict) -> GainReport | None:
    """Take it out again, clipped to its bounds; None where there is none, ValueError where it is no report."""
    if not isinstance(content.get(REPORT), ConfigRecord):
        return None
    written = content.config_records[REPORT].get("gain")
    del content[REPORT]
    if not isinstance(written, str) or len(written) > LONGEST_REPORT:
        raise ValueError("no gain report")
    try:
        report = clipped_report(unpack_report(json.loads(written)))
    except (RecursionError, OverflowError):
        raise ValueError("no gain report") from None
    if report is None:
        raise ValueError("a gain report with a number that is none")
    return report


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
        raise UserError("mods: LindtMod must be the last of them, or clipping and the like would be passed over")
