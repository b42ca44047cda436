"""The record of a finished run, to replay detectors: reports, divergence and true gains, in one file.

Records are stored with the runs, not in the repository: about 30 kB per run. With them a detector whose code has
changed is judged again without training.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

from lindt.errors import UserError
from lindt.protocols import ClientId, Divergence, Evidence, GainReport, Paired
from lindt.runs.files import write_whole
from lindt.runs.schema import DIVERGENCE
from lindt.runs.store import Store, read_lines
from lindt_experiments.plans.keys import content_key

Reports = Mapping[ClientId, GainReport]
VERSION: Final = 2  # version 1 had no cosine


@final
@dataclass(frozen=True)
class RecordedRound:
    """One round: the clients that answered, the server's measurements, the clients' reports."""

    round: int
    answered: frozenset[ClientId]
    seen: Divergence | None
    reports: Reports


@final
@dataclass(frozen=True)
class Record:
    """A finished run of FedAvg. `betas` are the true gains over the honest clients, by scored round."""

    plan: str  # content key
    clients: int  # N
    attackers: frozenset[ClientId]
    rounds: tuple[RecordedRound, ...]
    betas: tuple[tuple[int, float], ...]
    seconds: float
    version: int = VERSION

    @property
    def cosines(self) -> tuple[float | None, ...] | None:
        """The cosine of every round; None in runs of versions that did not measure it."""
        if self.version == 1:
            return None
        return tuple(None if played.seen is None else played.seen.cosine for played in self.rounds)

    def evidence(self) -> Iterator[Evidence]:
        """The evidence of each round, as a detector receives it during the run."""
        for played in self.rounds:
            yield Evidence(
                round=played.round,
                seen=played.seen,
                answered=played.answered,
                clients=self.clients,
                rounds=len(self.rounds),
                reports=played.reports,
            )

    @property
    def last_reports(self) -> dict[ClientId, GainReport]:
        """The last report of each client."""
        found: dict[ClientId, GainReport] = {}
        for played in self.rounds:
            found |= played.reports
        return found


def path_of(runs: Path, key: str) -> Path:
    return runs / "recorded" / f"{key}.json.gz"


def record_of(folder: Path) -> Record:
    """The record of the finished run in a folder."""
    store = Store.open(folder)
    lines = store.rounds()
    if not any(line.get("reports") for line in lines):
        raise UserError(f"{folder}: no client reported a gain; the plan needs detection = 'gain'")
    return Record(
        plan=content_key(store.plan()),
        clients=len(store.about["clients"]),
        attackers=frozenset(one["client"] for one in store.about["clients"] if one["attacker"]),
        rounds=tuple(round_of(line) for line in lines),
        betas=tuple(betas_of(lines)),
        seconds=round(sum(line["seconds"] for line in read_lines(folder / "timing.jsonl")), 2),
        version=VERSION if all("cosine" in line for line in lines if line.get("delta") is not None) else 1,
    )


def betas_of(lines: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, float]]:
    for line in lines:
        scores = line.get("scores")
        if scores and scores["beta"] is not None:
            yield line["round"], scores["beta"]


def write(path: Path, record: Record) -> None:
    """Write a record in a compact form: a report is a list of numbers."""
    table = {
        "version": record.version,
        "plan": record.plan,
        "clients": record.clients,
        "attackers": sorted(record.attackers),
        "betas": record.betas,
        "seconds": record.seconds,
        "rounds": [
            [
                played.round,
                sorted(played.answered),
                None if played.seen is None else _values(played.seen, record.version),
                [_numbers(client, report) for client, report in sorted(played.reports.items())],
            ]
            for played in record.rounds
        ],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, gzip.compress(json.dumps(table, separators=(",", ":")).encode(), mtime=0))


def read(path: Path) -> Record:
    try:
        table = json.loads(gzip.decompress(path.read_bytes()))
        if table["version"] not in (1, VERSION):
            raise ValueError(f"version {table['version']}")
        return Record(
            plan=table["plan"],
            clients=table["clients"],
            attackers=frozenset(table["attackers"]),
            rounds=tuple(_recorded(table["version"], *one) for one in table["rounds"]),
            betas=tuple((int(round), float(beta)) for round, beta in table["betas"]),
            seconds=table["seconds"],
            version=table["version"],
        )
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: it is not a record of a run ({error}); delete it, to record the run again") from None


def round_of(line: Mapping[str, Any]) -> RecordedRound:
    seen = None
    if line.get("delta") is not None:
        measured = {name: float(line[name]) for name in _measured(1)}
        seen = Divergence(**measured, cosine=line.get("cosine"))
    reports = {one["client"]: _report(one) for one in line.get("reports") or ()}
    return RecordedRound(line["round"], frozenset(line["answered"]), seen, reports)


def _report(table: Mapping[str, Any]) -> GainReport:
    return GainReport(
        samples=table["samples"],
        private=Paired(**{name: table["private"][name] for name in ("mean", "square")}),
        equal_age=Paired(**{name: table["equal_age"][name] for name in ("mean", "square")}),
        first_batch=table.get("first_batch"),
    )


def _numbers(client: ClientId, report: GainReport) -> list[float | None]:
    pairs = (report.private, report.equal_age)
    first = None if report.first_batch is None else _short(report.first_batch)
    return [client, report.samples, *(_short(value) for pair in pairs for value in (pair.mean, pair.square)), first]


def _measured(version: int) -> tuple[str, ...]:
    """The fields of a round's Divergence in a record of this version, in order."""
    return tuple(name for name in DIVERGENCE if version > 1 or name != "cosine")


def _values(seen: Divergence, version: int) -> list[float | None]:
    found = [getattr(seen, name) for name in _measured(version)]
    return [None if value is None else _short(value) for value in found]


def _short(value: float) -> float:
    """Round to nine digits, which is exact enough for a share of validation samples."""
    return float(f"{value:.9g}")


def _recorded(
    version: int, round: int, answered: list[int], seen: list[Any] | None, reports: list[list[float | None]]
) -> RecordedRound:
    divergence = None if seen is None else Divergence(**dict(zip(_measured(version), seen, strict=True)))
    return RecordedRound(round, frozenset(answered), divergence, dict(_read_report(*one) for one in reports))


def _read_report(
    client: Any, samples: Any, mean: Any, square: Any, young_mean: Any, young_square: Any, first: Any
) -> tuple[ClientId, GainReport]:
    report = GainReport(int(samples), Paired(mean, square), Paired(young_mean, young_square), first_batch=first)
    return int(client), report
