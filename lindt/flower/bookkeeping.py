"""The server's books: clients by number, a line a round, a checkpoint. Without a folder, the numbers only.

Flower's node ids have 64 bits and are no order; a client's number is its place in the order of first sight. A mod that
reports tells the client's own name beside it.
"""

from __future__ import annotations

import random
from dataclasses import asdict, replace
from typing import Any, final

from flwr.app import ArrayRecord
from flwr.serverapp.strategy import Strategy

from lindt.checkpoint import put_aside
from lindt.detection import Divergence
from lindt.flower.caution import say
from lindt.flower.checkpoint import Saved, check_fit, load_newest, remembered, remind, save
from lindt.flower.journal import Journal
from lindt.flower.orders import Report
from lindt.flower.replies import Sifted
from lindt.metrics import METRICS, Scores, summarise
from lindt.recovery import RecoveryState


@final
class Bookkeeping:
    def __init__(self, journal: Journal | None) -> None:
        self.journal = journal
        self.nodes: list[int] = []  # a node's number is its index here
        self._numbers: dict[int, int] = {}  # the inverse of `nodes`: a search in the list would be O(N) a node
        self.clients = 0  # N: nodes connected when last asked
        self._asked: list[int] = []
        self._known: dict[int, dict[str, Any]] = {}  # what run.json says of a client, by number
        self._saved: Saved | None = None

    def take_up(self, rounds: int, strategy: Strategy, arrays: ArrayRecord, *, own_loop: bool) -> Saved | None:
        """The last checkpoint, with the strategy and the sampler as they were then. `close` gives the folder free."""
        if self.journal is None:
            return None
        self.journal.lock(own_loop=own_loop)
        try:
            return self._load(self.journal, rounds, strategy, arrays)
        except BaseException:
            self.journal.close()
            raise

    def _load(self, journal: Journal, rounds: int, strategy: Strategy, arrays: ArrayRecord) -> Saved | None:
        saved, damaged = load_newest(journal.checkpoint, journal.run)
        if saved:  # before anything is written: a start that is refused changes nothing
            check_fit(saved.arrays, arrays)
            remind(strategy, saved.memory)
        done, count, pending = (saved.round, saved.lines, saved.line) if saved else (0, 0, None)
        journal.open(rounds, done, count, pending)
        for text in put_aside(damaged, saved.round) if saved else ():
            say(text, warn=True)
        self._known = {one["client"]: one for one in journal.about["clients"]}
        if saved:
            self.nodes, self._saved = list(saved.nodes), saved
            self._numbers = {node: number for number, node in enumerate(self.nodes)}
            random.setstate(saved.sampler)
        return saved

    def number(self, node: int) -> int:
        """The node's number; a node that was never seen gets the next one."""
        if node not in self._numbers:
            self._numbers[node] = len(self.nodes)
            self.nodes.append(node)
        return self._numbers[node]

    def ask(self, round: int, asked: list[int], connected: list[int]) -> None:
        for node in sorted(connected):
            self.number(node)
        if self.journal is not None:
            self.journal.flush()
        self.clients, self._asked = len(connected), sorted(self.number(node) for node in asked)

    def played(
        self,
        round: int,
        sifted: Sifted,
        seen: Divergence | None,
        recovering: bool,
        state: RecoveryState,
        arrays: ArrayRecord,
        strategy: Strategy,
    ) -> None:
        """After the aggregate: from here on the round is not lost."""
        refused = {self.number(node): reason for node, reason in sifted.refused.items()}
        line = {
            "round": round,
            "asked": self._asked,
            "answered": sorted(self.number(node) for node in sifted.nodes),
            "refused": [{"client": client, "reason": reason} for client, reason in sorted(refused.items())],
            **(asdict(seen) if seen else {}),
            "recovering": recovering,
            "flag": state.on,
            "count": state.count,
            "quiet": state.quiet,
            "detections": state.detections,
            "scores": None,
        }
        for node, size in zip(sifted.nodes, sifted.sizes_K, strict=True):
            self._know(self.number(node), train=int(size))
        if self.journal is None:
            return
        memory = remembered(strategy)
        self.journal.flush()
        count = self.journal.lines + 1
        self._saved = Saved(round, arrays, memory, state, list(self.nodes), line, random.getstate(), count)
        save(self.journal.checkpoint, self.journal.run, self._saved)
        self._tell_clients(self.journal)
        self.journal.played(line)

    def scored(self, round: int, reports: dict[int, Report]) -> Scores | None:
        """After the evaluation: the round's line is whole."""
        tallies = {self.number(node): report.tally() for node, report in reports.items()}
        scores = None
        if tallies:
            # Each report is a sum over samples and their number: any metric that is a mean reads like accuracy.
            counted = frozenset(tallies)
            scores = summarise(tallies, METRICS["accuracy"], counted=counted, alphas=dict.fromkeys(tallies, 1.0))
            for node, report in reports.items():
                self._know(self.number(node), test=report.samples, name=report.client)
            self._tell(round, scores)
        if self.journal is None or self._saved is None or self._saved.round != round:
            return scores
        line = self._saved.line | {"scores": asdict(scores) if scores else None}
        self._tell_clients(self.journal, all(report.percent for report in reports.values()) if reports else None)
        self.journal.scored(line)
        self._saved = replace(self._saved, line=line, sampler=random.getstate())
        save(self.journal.checkpoint, self.journal.run, self._saved)
        return scores

    def finish(self) -> None:
        if self.journal is not None:
            self.journal.finish()

    def close(self) -> None:
        if self.journal is not None:
            self.journal.close()

    def _tell_clients(self, journal: Journal, percent: bool | None = None) -> None:
        percent = bool(journal.about["metric_in_percent"]) if percent is None else percent
        journal.know([self._known[client] for client in sorted(self._known)], percent)

    def _know(self, client: int, **found: Any) -> None:
        nothing = {"client": client, "train": 0, "test": 0, "attacker": False, "labels": {}}
        self._known[client] = self._known.get(client, nothing | {"node": str(self.nodes[client])}) | found

    def _tell(self, round: int, scores: Scores) -> None:
        if scores.beta is None:
            return
        hurt = sorted((one.beta, one.client) for one in scores.clients if one.beta is not None and one.beta < 0)
        names = [f"{self._known[client]['name']} ({beta:+.3f})" for beta, client in hurt[:10]]
        more = f" and {len(hurt) - 10} more" if len(hurt) > 10 else ""
        who = f"worse off than alone: {', '.join(names)}{more}" if names else "nobody is worse off than alone"
        say(f"round {round}: mean gain beta {scores.beta:+.3f}; {who}", warn=scores.beta < 0)
