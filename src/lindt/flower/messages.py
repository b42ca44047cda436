"""What a Flower client and NFLDetector tell each other, without torch: an Instruction out, a Visit back.

An Instruction stands in the config of every message, as plain values: the flag (Alg. 2, s11), the experiment that v_i
belongs to, the round. It has no field for v_i: v_i never leaves its client. A Visit is one record in the reply: what
`wrap` did besides the app's own work. What comes over the network is checked here; a malformed one raises ValueError.
`protocol.py` has what the server does with reports, and the reports of the dual model.
"""

from __future__ import annotations

import json
import logging
import re
from base64 import b64decode, b64encode
from dataclasses import asdict, dataclass
from typing import Any, Final, final

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from lindt.errors import in_short
from lindt.gains import MOST_NOISE, MOST_SAMPLES, number, whole_number

PREFIX: Final = "lindt-"
REPORT: Final = "lindt"  # the record of a report in a reply
LONGEST_REPORT: Final = 4096  # characters of a GainReport or a Visit; ours have about 300
OWN_CONFIG: Final = PREFIX + "own-config"  # the message had no config before ours
START: Final = PREFIX + "start"  # w^0, for a client that has none
_LOG = logging.getLogger("flwr")  # where a Flower user looks


def log_message(text: str, *, warn: bool = False) -> None:
    _LOG.log(logging.WARNING if warn else logging.INFO, "lindt: %s", text)


OPTIONAL: Final[dict[str, bool | float | str]] = {  # of an Instruction
    "reports": False,
    "panel": True,
    "noise": 0.0,
    "weighted_by": "num-examples",
    "replies": "weights",
}


@final
@dataclass(frozen=True)
class Instruction:
    """What the server tells a client. `since` is the round this session of the run went on from: a client that
    meets a new `session` forgets what it learned after that round. Versions of v_i before `keep` may go. `reports`
    says that gains are tested: clients of the `panel` add a gain report to each training, with Laplace noise of scale
    `noise` on its numbers. `weighted_by` is the metric with the number of samples, `replies` says whether the app
    sends weights or updates. These five are in the message only where they are not what they are by default."""

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
        """Into the message's config; where it has none, into one of its own. One record more would upset DP mods."""
        configs = message.content.config_records
        config = next(iter(configs.values())) if configs else ConfigRecord({OWN_CONFIG: True})
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
        if not isinstance(found["weighted_by"], str) or not 0 < len(found["weighted_by"]) <= 200:
            raise ValueError(f"{PREFIX}weighted_by = {in_short(found['weighted_by'])}: no name of a metric")
        if found["replies"] not in ("weights", "updates"):
            raise ValueError(f"{PREFIX}replies = {in_short(found['replies'])}: neither weights nor updates")
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


def without_instruction(content: RecordDict) -> RecordDict:
    """What the message would be without NFLDetector: the app's own functions see nothing of ours."""
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
    """w^0, where the server sent it along."""
    for config in message.content.config_records.values():
        found = config.get(START)
        if isinstance(found, bytes):
            return found
    return None


@final
@dataclass(frozen=True)
class Visit:
    """What a wrapped client did besides its app's own work, in numbers and words.

    `problem` says in a sentence why there is no report; `ours` that it is for the user of lindt to mend, and not an
    error of the app's own functions. `silent`: the client adds noise to what it sends, and reports nothing without
    noise. `finished`: its private model does not improve any more. `recovers`: it trained a v_i.
    """

    client: str
    calls: int = 0  # extra calls of the train function
    seconds: float = 0.0  # that all extra calls took
    recovers: bool = False
    finished: bool = False
    wants_start: bool = False
    silent: bool = False
    problem: str = ""
    ours: bool = False

    def pack(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def unpack(cls, written: object) -> Visit:
        if not isinstance(written, str) or len(written) > LONGEST_REPORT:
            raise ValueError("no record of a visit")
        try:
            found = json.loads(written)
        except RecursionError:
            raise ValueError("no record of a visit") from None
        if not isinstance(found, dict) or found.keys() != cls.__dataclass_fields__.keys():
            raise ValueError("no record of a visit")
        flags = ("recovers", "finished", "wants_start", "silent", "ours")
        words = (found["client"], found["problem"])
        if not all(isinstance(found[name], bool) for name in flags) or not all(isinstance(word, str) for word in words):
            raise ValueError("a visit's flag or word of another type")
        if not 0 < len(found["client"]) <= 200 or not found["client"].isprintable():
            raise ValueError("a visit without a client's name")
        whole_number(found["calls"], "calls", MOST_SAMPLES)
        found["seconds"] = number(found["seconds"], "seconds")
        return cls(**found)


def pack_records(content: RecordDict) -> bytes:
    """Records as bytes: a JSON head with their names and types, then the arrays' own bytes. Nothing is pickled."""
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
    """What `pack_records` packed, or ValueError."""
    end = 8 + int.from_bytes(content[:8], "little")
    try:
        if len(content) < end:
            raise ValueError("it is cut off")
        records = RecordDict()
        for name, kind, entries in json.loads(content[8:end]):
            if kind == "arrays":
                record = ArrayRecord()
                for key, dtype, shape, stype, size in entries:
                    if not 0 <= size <= len(content) - end:
                        raise ValueError("it is cut off")
                    record[key] = Array(dtype, tuple(shape), stype, content[end : end + size])
                    end += size
                records[name] = record
            else:
                values = {key: _unpacked(type, value) for key, type, value in entries}
                records[name] = MetricRecord(values) if kind == "metrics" else ConfigRecord(values)
    except (TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"no records ({error})") from None
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
    """Records that an app can change without changing the original. An Array's bytes do not change, and are shared."""
    records: dict[str, Any] = {}
    for name, record in content.items():
        kind: Any = type(record)
        values = {key: list(value) if isinstance(value, list) else value for key, value in record.items()}
        records[name] = kind(values)
    return RecordDict(records)
