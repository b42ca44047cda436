"""The messages between NFLDetector and a Flower client, without torch: an Instruction out, a Visit back.

An Instruction is part of the config of every message, as plain values: the flag (Alg. 2, s11), the experiment that v_i
belongs to, the round. It has no field for v_i: v_i never leaves its client. A Visit is one record in the reply: what
`wrap` did besides the app's own work. Records from the network are checked here; a malformed record raises ValueError.
`protocol.py` has the server's side of reports, and the reports of the dual model.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, final

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from lindt.errors import in_short
from lindt.gains import MOST_NOISE, MOST_SAMPLES, number, whole_number

PREFIX: Final = "lindt-"
REPORT: Final = "lindt"  # the record of a report in a reply
LONGEST_REPORT: Final = 4096  # characters of a GainReport or a Visit; ours have about 300
OWN_CONFIG: Final = PREFIX + "own-config"  # set if lindt added the config record to the message
START: Final = PREFIX + "start"  # w^0, for a client that does not have it
_LOG = logging.getLogger("flwr")  # the log that a Flower user reads


def log_message(text: str, *, warn: bool = False) -> None:
    _LOG.log(logging.WARNING if warn else logging.INFO, "lindt: %s", text)


def no_report(client: str, why: str) -> str:
    """The sentence of a client whose updates have noise and whose reports would have none."""
    return (
        f"client {client}: no report: {why}, and a report would have none; to get reports with noise, give the server "
        "NFLDetector(..., detection=Gain(noise=0.1))"
    )


# `num-server-rounds`, `numRounds`, and not `background`. More rounds change neither the data nor the training.
_ROUNDS: Final = re.compile(r"(?<![gG])round|Round|ROUND")


def settings_of(config: Mapping[str, Any]) -> dict[str, str]:
    """A hash of each setting, without the numbers of rounds. The values are not kept: one may be a password."""
    hashed = {key: hashlib.sha256(json.dumps(value, default=str).encode()).hexdigest() for key, value in config.items()}
    return {key: hashed[key] for key in sorted(hashed) if not _ROUNDS.search(key)}


def changed_settings(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """The names of the settings that differ, are new or are gone."""
    return sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))


OPTIONAL: Final[dict[str, bool | float | str]] = {  # fields of an Instruction, with their defaults
    "reports": False,
    "panel": True,
    "noise": 0.0,
    "weighted_by": "num-examples",
    "replies": "weights",
}


@final
@dataclass(frozen=True)
class Instruction:
    """The server's instruction to a client.

    `since` is the round after which this session of the run started or resumed: a client that sees a new `session`
    drops its models of later rounds. Versions of v_i before round `keep` may be deleted. `reports`: the server tests
    gains, and clients of the `panel` add a gain report to each training, with Laplace noise of scale `noise` on its
    numbers. `weighted_by` is the metric with the number of samples. `replies`: the app sends weights or updates. The
    last five fields are in the message only if they differ from their defaults.
    """

    experiment: str
    session: str
    since: int
    round: int
    keep: int
    recovering: bool
    reports: bool = False
    panel: bool = True
    noise: float = 0.0
    weighted_by: str = "num-examples"
    replies: str = "weights"

    def put(self, message: Message) -> None:
        """Write it into the message's config, or into a new config if the message has none. Flower's mods for
        differential privacy accept one config record only."""
        configs = message.content.config_records
        config = next(iter(configs.values())) if configs else ConfigRecord({OWN_CONFIG: True})
        for name, value in asdict(self).items():
            if name not in OPTIONAL or value != OPTIONAL[name]:
                config[PREFIX + name] = value
        if not configs:
            message.content["config"] = config

    @classmethod
    def read(cls, message: Message) -> Instruction | None:
        """Read it from a message; None if the message is not from NFLDetector."""
        configs = message.content.config_records
        config: dict[str, Any] = dict(next(iter(configs.values()))) if configs else {}
        if PREFIX + "experiment" not in config:
            return None
        names = cls.__dataclass_fields__
        found: dict[str, Any] = {name: config.get(PREFIX + name, OPTIONAL.get(name)) for name in names}
        for name in ("experiment", "session"):
            # They name files on the client, so a path separator must not get in.
            if not isinstance(found[name], str) or not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", str(found[name])):
                raise ValueError(f"{PREFIX}{name} = {in_short(found[name])}: not 1 to 64 letters, digits, _ or -")
        for name in ("recovering", "reports", "panel"):
            if not isinstance(found[name], bool):
                raise ValueError(f"{PREFIX}{name} = {in_short(found[name])}: not a boolean")
        for name in ("since", "round", "keep"):
            found[name] = whole_number(found[name], PREFIX + name, MOST_SAMPLES)
        if not isinstance(found["noise"], float) or not 0 <= found["noise"] <= MOST_NOISE:  # false for NaN
            raise ValueError(f"{PREFIX}noise = {in_short(found['noise'])}: not a number from 0 to {MOST_NOISE:g}")
        if not isinstance(found["weighted_by"], str) or not 0 < len(found["weighted_by"]) <= 200:
            raise ValueError(f"{PREFIX}weighted_by = {in_short(found['weighted_by'])}: not a name of a metric")
        if found["replies"] not in ("weights", "updates"):
            raise ValueError(f"{PREFIX}replies = {in_short(found['replies'])}: neither weights nor updates")
        return cls(**found)


def with_own_config(message: Message) -> None:
    """Copy the message's config: strategies put the same content object into the messages of all nodes.

    The weights are not copied.
    """
    records = dict(message.content)
    for name, record in records.items():
        if isinstance(record, ConfigRecord):
            records[name] = ConfigRecord(dict(record))
    message.content = RecordDict(records)


def without_instruction(content: RecordDict) -> RecordDict:
    """The content without NFLDetector's entries, as the app's own functions get it."""
    records: dict[str, Any] = {}
    for name, record in content.items():
        if isinstance(record, ConfigRecord) and any(key.startswith(PREFIX) for key in record):
            kept = ConfigRecord({key: value for key, value in record.items() if not key.startswith(PREFIX)})
            if not kept and OWN_CONFIG in record:
                continue
            records[name] = kept
        else:
            records[name] = record
    return RecordDict(records)


def start_of(message: Message) -> bytes | None:
    """w^0, if the server put it into the message."""
    for config in message.content.config_records.values():
        found = config.get(START)
        if isinstance(found, bytes):
            return found
    return None


def nameless(node: int) -> str:
    """A stand-in for the name of a client whose name is not known."""
    return f"node-{node}"


@final
@dataclass(frozen=True)
class Visit:
    """What a wrapped client did for one message besides its app's own work.

    `problem` is a sentence: why there is no report. `ours`: the problem is in the use of lindt, not an error of the
    app's own functions. `note` is a sentence for the server's log, when models were set aside. `silent`: the client
    adds noise to its updates, and does not report without noise. `finished`: its private model takes no call now, since
    it no longer improves or has had the most calls. `flat`: it is finished and never improved on its first score.
    `recovers`: it trained a v_i. `wants_start`: it needs w^0 from the server. `score` names the metric that is the
    score, and its direction.
    """

    client: str
    calls: int = 0  # extra calls of the train function
    seconds: float = 0.0  # time of all extra calls
    recovers: bool = False
    finished: bool = False
    flat: bool = False
    wants_start: bool = False
    silent: bool = False
    problem: str = ""
    ours: bool = False
    note: str = ""
    score: str = ""

    def pack(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def unpack(cls, written: object) -> Visit:
        if not isinstance(written, str) or len(written) > LONGEST_REPORT:
            raise ValueError(f"visit is not a string of at most {LONGEST_REPORT} characters")
        try:
            found = json.loads(written)
        except RecursionError:
            raise ValueError("visit is nested too deeply") from None
        if not isinstance(found, dict) or found.keys() != cls.__dataclass_fields__.keys():
            raise ValueError("visit has missing or unknown fields")
        flags = ("recovers", "finished", "flat", "wants_start", "silent", "ours")
        words = (found["client"], found["problem"], found["note"], found["score"])
        if not all(isinstance(found[name], bool) for name in flags) or not all(isinstance(word, str) for word in words):
            raise ValueError("visit has a field of the wrong type")
        if not 0 < len(found["client"]) <= 200 or not found["client"].isprintable():
            raise ValueError("visit.client is not a name of 1 to 200 printable characters")
        if len(found["score"]) > 200 or not found["score"].isprintable():
            raise ValueError("visit.score has more than 200 characters, or some that cannot be printed")
        whole_number(found["calls"], "calls", MOST_SAMPLES)
        found["seconds"] = number(found["seconds"], "seconds")
        return cls(**found)


def pack_records(content: RecordDict) -> bytes:
    """Records as bytes: a JSON header with their names and types, then the bytes of the arrays. Nothing is pickled."""
    head: list[list[Any]] = []
    pieces: list[bytes] = []
    for name, record in content.items():
        if isinstance(record, ArrayRecord):
            arrays = [[key, a.dtype, list(a.shape), a.stype, len(a.data)] for key, a in record.items()]
            head.append([name, "arrays", arrays])
            pieces += [a.data for a in record.values()]
        else:
            kind = "metrics" if isinstance(record, MetricRecord) else "config"
            head.append([name, kind, [[key, *_packed(value)] for key, value in record.items()]])
    about = json.dumps(head).encode()
    return b"".join([len(about).to_bytes(8, "little"), about, *pieces])


def unpack_records(content: bytes) -> RecordDict:
    """The inverse of `pack_records`. Raises ValueError for other bytes."""
    end = 8 + int.from_bytes(content[:8], "little")
    try:
        if len(content) < end:
            raise ValueError("it is truncated")
        records = RecordDict()
        for name, kind, entries in json.loads(content[8:end]):
            if kind == "arrays":
                record = ArrayRecord()
                for key, dtype, shape, stype, size in entries:
                    if not 0 <= size <= len(content) - end:
                        raise ValueError("it is truncated")
                    record[key] = Array(dtype, tuple(shape), stype, content[end : end + size])
                    end += size
                records[name] = record
            else:
                values = {key: _unpacked(type, value) for key, type, value in entries}
                records[name] = MetricRecord(values) if kind == "metrics" else ConfigRecord(values)
    except (TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"the header does not describe records ({error})") from None
    return records


def _packed(value: Any) -> tuple[str, Any]:
    if isinstance(value, bytes):
        return "bytes", b64encode(value).decode()
    if isinstance(value, list) and any(isinstance(one, bytes) for one in value):
        return "bytes list", [b64encode(one).decode() for one in value]
    return "", value


def _unpacked(type: str, value: Any) -> Any:
    if type == "bytes":
        return b64decode(value)
    return [b64decode(one) for one in value] if type == "bytes list" else value


def copied(content: RecordDict) -> RecordDict:
    """A copy that an app can change without changing the original. The bytes of Arrays are immutable and shared."""
    records: dict[str, Any] = {}
    for name, record in content.items():
        kind: Any = type(record)
        values = {key: list(value) if isinstance(value, list) else value for key, value in record.items()}
        records[name] = kind(values)
    return RecordDict(records)
