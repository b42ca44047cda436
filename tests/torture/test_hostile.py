"""Hostile clients, nodes and files, drawn at random: the promises of SECURITY.md hold in every draw.

The seed is printed; LINDT_HOSTILE_SEED plays the same draws again. LINDT_HOSTILE_SECONDS (180) is for all parts.

Legend: K clients answering, P parameters, F floats in buffers.
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from crashing import crash_plan, figure, left, same
from torch import Tensor, nn

from lindt.engines.inprocess import InProcess
from lindt.environment import Environment
from lindt.environment.participation import Sampled
from lindt.environment.threats import InnerProduct, LittleIsEnough, MinMax, NoThreat, SignFlip, Sybils, Threat
from lindt.errors import UserError
from lindt.plan.plan import METHODS, Alone, Plan, Scoring, attackers_of
from lindt.plan.problem import Problem
from lindt.protocols import PAIRS, Aggregator, Buffers, GainReport, Reply, Task
from lindt.runs.play import run_plan
from lindt.runs.schema import ROUND, fits
from lindt.runs.summary import round_line
from lindt.server.aggregation import (
    GeometricMedian,
    Krum,
    Mean,
    Median,
    MultiKrum,
    NormBound,
    TrimmedMean,
    WeightedMean,
)
from lindt.server.detection.gain import Gain
from lindt.server.federation import begin, federate
from lindt.server.recovery import OnEvidence
from lindt.server.state import RoundResult, RunState
from lindt.server.updates import LONGEST, MOST_SAMPLES, MOST_TIMES, ScoreFormat, pack_reply, unpack_reply

pytestmark = pytest.mark.torture
SEED = os.environ.get("LINDT_HOSTILE_SEED") or str(random.SystemRandom().randrange(10**9))
SECONDS = float(os.environ.get("LINDT_HOSTILE_SECONDS", "180")) / 3  # of each part
FEWEST = 5  # plays of a part, however slow the machine is
PLAY_SECONDS = 120  # seconds of one play: a pipe that is waited for would be waited for without end


def plays(part: str) -> Iterator[random.Random]:
    """A generator of random numbers for each play, until the time is up; the last one that is printed has failed."""
    end, done = time.monotonic() + SECONDS, 0
    while done < FEWEST or time.monotonic() < end:
        print(f"LINDT_HOSTILE_SEED={SEED}, {part}, play {done}")  # noqa: T201  # shown where the test fails
        with ending():
            yield random.Random(f"{SEED} {part} {done}")
        done += 1
    figure(part=part.replace(" ", "_"), plays=done, seed=SEED)


@contextmanager
def ending() -> Iterator[None]:
    def late(*_: object) -> None:
        raise TimeoutError(f"a play took more than {PLAY_SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(PLAY_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


# Clients that lie

CLIENTS, HOSTILE, ROUNDS = 9, 2, 6
AGGREGATORS: list[Aggregator] = [
    Mean(), WeightedMean(), TrimmedMean(0.25), Median(), Krum(0.25), MultiKrum(0.25), GeometricMedian(), NormBound(),
]  # fmt: skip
SHARE = HOSTILE / CLIENTS
THREATS: list[Threat] = [
    NoThreat(), InnerProduct(SHARE), InnerProduct(SHARE, 0.5), LittleIsEnough(SHARE), LittleIsEnough(SHARE, 1.5),
    MinMax("std", SHARE), MinMax("unit", SHARE), MinMax("sign", SHARE), Sybils(SignFlip(SHARE, 100.0)),
]  # fmt: skip
ODD: list[object] = [
    math.nan, math.inf, -math.inf, 1e308, -1e308, 1e18, 2**70, -(2**70), -1, 0, 1e-320, True, None, "1", [], {},
    5.0, -99.0, 1e9, 0.5, -1.0, 1.0,
]  # fmt: skip
NUMBERS = [math.nan, math.inf, -math.inf, 3e38, -3e38, 1e19, 1e17, 1e9, -1e9, -1.0, 0.0, 1e-40]


def net() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))


def world() -> Problem:
    """Four classes of points, two at each client; the clients' units differ by up to 3 to 1."""
    draw = torch.Generator().manual_seed(0)
    centres = 3 * torch.randn(4, 6, generator=draw)

    def points(client: int) -> tuple[Tensor, Tensor]:
        y = (client + torch.randint(2, (40,), generator=draw)) % 4
        return (centres[y] + torch.randn(40, 6, generator=draw)) * (1 + client % 3), y

    return Problem([(points(i), points(i)) for i in range(CLIENTS)], net)


class Lying:
    """Clients of this process, of which the hostile ones send anything, as bytes would bring it."""

    def __init__(self, plan: Plan, problem: Problem, hostile: frozenset[int], draw: random.Random) -> None:
        self.inner, self.hostile, self.draw = InProcess(plan, problem), hostile, draw
        self.available, self.forget_after = self.inner.available, self.inner.forget_after
        self.expected = ScoreFormat.of(plan, problem)
        self.honest: dict[int, Reply] = {}  # of the training last dispatched
        self.sent: dict[int, list[Reply]] = {}  # ... by the hostile ones

    def dispatch(self, tasks: Sequence[Task]) -> Iterable[Reply]:
        asked = {task.client: task for task in tasks}
        if tasks and tasks[0].kind == "train":
            self.honest, self.sent = {}, {}
        for reply in self.inner.dispatch(tasks):
            task = asked[reply.client]
            if reply.client not in self.hostile:
                if task.kind == "train":
                    self.honest[reply.client] = reply
                yield reply
            else:
                for _ in range(self.draw.choice((0, 1, 1, 1, 2))):
                    lie = self.lie(task, reply)
                    if task.kind == "train":
                        self.sent.setdefault(reply.client, []).append(lie)
                    yield lie

    def lie(self, task: Task, reply: Reply) -> Reply:
        draw, found = self.draw, json.loads(json.dumps(pack_reply(reply)))
        for _ in range(draw.choice((0, 1, 2, 3))):
            spoil(found, draw)
        w, buffers = reply.w, reply.buffers
        if w is not None and draw.random() < 0.4:
            w = draw.choice(
                (w + draw.choice(NUMBERS), w[:-1], w.double(), w.reshape(1, -1), task.w - 1e6 * (w - task.w), w * 0)
            )
        if buffers is not None and draw.random() < 0.6:
            buffers = spoilt_buffers(buffers, draw)
        return unpack_reply(found, task, self.expected, lambda: (w, buffers))  # type: ignore[arg-type,return-value]


def spoil(found: dict[str, Any], draw: random.Random) -> None:
    """Something odd in a random place of an answer, mostly in the gain report."""
    place: dict[str, Any] = found
    if isinstance(found.get("report"), dict) and draw.random() < 0.8:
        place = found["report"]
    while True:
        name = draw.choice(list(place) + (["adapted", "secret"] if place is found.get("report") else []))
        if isinstance(place.get(name), dict) and place[name] and draw.random() < 0.8:
            place = place[name]
            continue
        if name == "adapted":
            place[name] = {"mean": -1.0, "square": 1.0}
        else:
            place[name] = draw.choice(ODD)
        return


def spoilt_buffers(buffers: Buffers, draw: random.Random) -> Buffers:
    floats_F, counts_I = buffers.floats_F.clone(), buffers.counts_I.clone()
    start = draw.randrange(len(floats_F))
    floats_F[start : start + draw.choice((1, 6, len(floats_F)))] = draw.choice(NUMBERS)
    if draw.random() < 0.2:
        counts_I[0] = draw.choice((2**62, -(2**62), 0))
    return draw.choice((Buffers(floats_F, counts_I), Buffers(floats_F[:-1], counts_I), Buffers(floats_F, counts_I)))


def test_hostile_clients_end_no_run_and_silence_no_honest_one() -> None:
    problem = world()
    for draw in plays("clients"):
        aggregator, threat = draw.choice(AGGREGATORS), draw.choice(THREATS)
        combine: Any = draw.choice(("mean", "median", "sum"))
        print(f"{aggregator}, {threat}, combine {combine}")  # noqa: T201
        plan = Plan(
            seed=draw.randrange(1000),
            rounds=ROUNDS,
            environment=Environment(Sampled(rate=1.0), threat),
            method=replace(METHODS["lindt"], aggregator=aggregator, recovery=OnEvidence()),
            alone=Alone(epochs=1, patience=1),
            scoring=Scoring(every=3, last=1),
            detection=Gain(combine=combine, start=2),
        )
        hostile = attackers_of(plan, CLIENTS) or frozenset(draw.sample(range(CLIENTS), HOSTILE))
        assert len(hostile) == HOSTILE
        engine = Lying(plan, problem, hostile, draw)
        before = begin(plan, problem)
        for state, result in federate(plan, problem=problem, engine=engine, preflight=False):
            ruinable = isinstance(aggregator, Mean | WeightedMean)
            check_round(result, hostile, engine, ruinable=ruinable)
            if not ruinable or all(map(within_limits, engine.honest.values())):
                check_reports(result, engine, combine)
                check_step(before, state, aggregator, engine)
                check_buffers(before, state, aggregator, engine)
            before = state
        assert before.round == ROUNDS


def check_round(result: RoundResult, hostile: frozenset[int], engine: Lying, *, ruinable: bool) -> None:
    """`ruinable`: under a plain mean one client can ruin w, so that honest training from it leaves the limits, too."""
    honest = {i for i, reply in engine.honest.items() if not ruinable or within_limits(reply)}
    line = json.loads(json.dumps(round_line(result), allow_nan=False))  # no NaN in what is kept
    assert fits(line, ROUND)
    assert set(result.answered) >= honest
    assert {refusal.client for refusal in result.refused} <= hostile | (engine.honest.keys() - honest)
    some = next(iter(engine.honest.values()))
    for client in hostile & set(result.answered):
        assert any(can_be(reply, some) for reply in engine.sent[client])
    assert all(refusal.reason and "\n" not in refusal.reason for refusal in result.refused)
    if result.scores is not None:
        assert {one.client for one in result.scores.clients} >= honest


def within_limits(reply: Reply) -> bool:
    assert reply.w is not None
    assert reply.buffers is not None
    return bool((reply.w.abs() <= LONGEST).all() and (reply.buffers.floats_F.abs() <= LONGEST).all())


def can_be(reply: Reply, honest: Reply) -> bool:
    """Whether an update of these weights and statistics can come from training this model."""
    if reply.fault is not None or reply.w is None or reply.buffers is None or honest.w is None or not honest.buffers:
        return False
    fitting = reply.w.shape == honest.w.shape and reply.w.dtype == honest.w.dtype
    if not fitting or reply.buffers.floats_F.shape != honest.buffers.floats_F.shape:
        return False
    variances = torch.cat([reply.buffers.floats_F[6:12], reply.buffers.floats_F[20:28]])
    return bool(
        torch.isfinite(reply.w).all() and torch.isfinite(reply.buffers.floats_F).all() and (variances >= 0).all()
    )


def check_reports(result: RoundResult, engine: Lying, combine: str) -> None:
    assert result.reports is not None
    for report in result.reports.values():
        assert 1 <= report.samples <= MOST_SAMPLES
        assert report.first_batch is None or -1 <= report.first_batch <= 1
        for name in PAIRS:
            pair = getattr(report, name)
            assert pair is None or (-1 <= pair.mean <= 1 and pair.mean**2 <= pair.square <= 1)
        assert result.recovering or (report.adapted is None and report.adapted_private is None)
    honest = {i: reply.report for i, reply in engine.honest.items()}
    assert {i: result.reports[i] for i in honest} == (
        honest if result.recovering else {i: told_without_recovery(r) for i, r in honest.items() if r}
    )
    assert result.detection is not None
    gain = result.detection.verdict.gain
    assert gain is not None
    assert -1 <= gain <= 1
    means = [report.private.mean for report in honest.values() if report]
    if combine == "median":  # a quarter of liars at most
        assert min(means) - 1e-9 <= gain <= max(means) + 1e-9
    if combine == "mean":
        most = 2 * HOSTILE / CLIENTS
        assert abs(gain - math.fsum(means) / len(means)) <= most + 1e-9


def told_without_recovery(report: GainReport) -> GainReport:
    return replace(report, adapted=None, adapted_private=None)


def check_step(before: RunState, after: RunState, aggregator: Aggregator, engine: Lying) -> None:
    """Two of nine move w no farther than the honest updates reach, where the aggregator promises it."""
    assert torch.isfinite(after.w).all()
    updates_KP = torch.stack([reply.w - before.w for reply in engine.honest.values() if reply.w is not None])
    step_P, slack_P = after.w - before.w, 1e-4 * (1 + before.w.abs())
    if isinstance(aggregator, Median | TrimmedMean):
        assert (step_P >= updates_KP.amin(0) - slack_P).all()
        assert (step_P <= updates_KP.amax(0) + slack_P).all()
    if isinstance(aggregator, NormBound):
        assert float(step_P.norm()) <= float(updates_KP.norm(dim=1).max()) + float(slack_P.norm())


def check_buffers(before: RunState, after: RunState, aggregator: Aggregator, engine: Lying) -> None:
    floats_F = after.buffers.floats_F
    assert torch.isfinite(floats_F).all()
    for start, width in ((0, 6), (12, 8)):
        assert (floats_F[start + width : start + 2 * width] >= 0).all()  # variances
    honest_KF = torch.stack([reply.buffers.floats_F for reply in engine.honest.values() if reply.buffers])
    if isinstance(aggregator, Mean | WeightedMean):
        scale = max(1.0, float(honest_KF.abs().max()), float(before.buffers.floats_F.abs().max()))
        assert float(floats_F.abs().max()) <= MOST_TIMES * scale
    else:
        slack_F = 1e-4 * (1 + honest_KF.abs().amax(0))
        assert (floats_F >= honest_KF.amin(0) - slack_F).all()
        assert (floats_F <= honest_KF.amax(0) + slack_F).all()


# Folders of strangers


def sentence(work: Callable[[], object]) -> str | None:
    """What the user is told where it is refused, in one line; None where it is done."""
    try:
        work()
    except (UserError, OSError) as error:  # the command line makes a sentence of either
        said = str(error)
    else:
        return None
    assert said
    assert "\n" not in said
    return said


def content(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that stopped after three of six rounds and its cache of private models, side by side."""
    home = tmp_path_factory.mktemp("stopped")
    events = run_plan(crash_plan(6), home / "run", engine="inprocess", cache=home / "cache")
    for _ in islice(events, 1 + 6 + 3):
        pass
    events.close()
    return home


def place_in(home: Path, draw: random.Random, *, sealed: bool) -> Path:
    """A file of the run or the cache; with `sealed` one with a checksum, of each kind as often, the newest half."""
    paths = sorted(p for p in home.rglob("*") if p.is_file() and not p.is_symlink())
    if not sealed:
        return draw.choice(paths)
    kind = home / draw.choice(("run/checkpoint", "run/private", "cache"))
    held = sorted((p for p in paths if p.is_relative_to(kind) and p.suffix == ".safetensors"), key=lambda p: p.name)
    return draw.choice(held[len(held) // 2 :] or paths)


def flip(home: Path, outside: Path, draw: random.Random) -> str:
    path = place_in(home, draw, sealed=True)
    whole = bytearray(path.read_bytes())
    at = draw.randrange(len(whole))
    whole[at] ^= 1 << draw.randrange(8)
    path.write_bytes(whole)
    return f"a bit of byte {at} of {path}"


def cut(home: Path, outside: Path, draw: random.Random) -> str:
    path = place_in(home, draw, sealed=True)
    path.write_bytes(path.read_bytes()[: draw.randrange(path.stat().st_size)])
    return f"cut {path}"


def link(home: Path, outside: Path, draw: random.Random) -> str:
    """To a file or folder outside with the very same content, or to nothing."""
    path = place_in(home, draw, sealed=False)
    path = draw.choice([path, path, path.parent]) if path.parent not in (home, home / "run", home / "cache") else path
    target = outside / f"linked-{path.name}"
    if not target.exists():
        path.rename(target)
    path.symlink_to(draw.choice([target, target, outside / "nothing"]))
    return f"link {path}"


def second_name(home: Path, outside: Path, draw: random.Random) -> str:
    path = place_in(home, draw, sealed=False)
    target = outside / f"named-{path.name}"
    if not target.exists():
        shutil.copyfile(path, target)
    path.unlink()
    path.hardlink_to(target)
    return f"hard link {path}"


def pipe(home: Path, outside: Path, draw: random.Random) -> str:
    path = place_in(home, draw, sealed=False)
    path.unlink()
    os.mkfifo(path)
    return f"pipe {path}"


def other_id(home: Path, outside: Path, draw: random.Random) -> str:
    path = home / "run" / "run.json"
    if not path.is_file():
        return "nothing"
    about = json.loads(path.read_text())
    id = draw.choice(["../../outside", str(outside), "..", "", "0" * 32, str(about["run"]).upper(), 7, None, "/", [1]])
    path.write_text(json.dumps(about | {"run": id}))
    return f"run = {id!r}"


def littered(home: Path, outside: Path, draw: random.Random) -> str:
    """A file that no run has written, under a name that one could have."""
    name = draw.choice(
        ("checkpoint/round-000099.safetensors", "nodes.json", "checkpoint/round-x.safetensors", ".aside")
    )
    path = home / "run" / name
    if path.parent.is_dir() and not path.exists():
        path.write_bytes(draw.randbytes(200))
    return f"litter {path}"


def prepare(new: Path, outside: Path, draw: random.Random) -> bool:
    """A folder that waits for a new run, with a file outside in the place of one that the run would write."""
    victim = outside / "waiting"
    victim.write_bytes(b"{}\n")
    new.mkdir()
    path = new / draw.choice(("rounds.jsonl", "timing.jsonl", "lock", "flower.log"))
    kind = draw.choice(("nothing", "link", "second name", "pipe"))
    if kind == "link":
        path.symlink_to(victim)
    elif kind == "second name":
        path.hardlink_to(victim)
    elif kind == "pipe":
        os.mkfifo(path)
    return kind != "nothing"


ATTACKS: list[Callable[[Path, Path, random.Random], str]] = [
    flip, flip, cut, link, second_name, pipe, other_id, littered,
]  # fmt: skip


def test_a_strangers_folder_is_refused_in_one_sentence_or_gives_the_same_bytes(stopped: Path, tmp_path: Path) -> None:
    straight = tmp_path / "straight"
    shutil.copytree(stopped, straight)
    list(run_plan(None, straight / "run", resume=True, cache=straight / "cache"))
    wanted, refused, equal = left(straight / "run"), 0, 0
    for draw in plays("folders"):
        home, outside = tmp_path / "home", tmp_path / "outside"
        for one in (home, outside):
            shutil.rmtree(one, ignore_errors=True)
        outside.mkdir()
        (outside / "kept").write_bytes(b"not the run's")
        shutil.copytree(stopped, home)
        print([draw.choice(ATTACKS)(home, outside, draw) for _ in range(draw.choice((1, 1, 2, 3)))])  # noqa: T201
        before = content(outside)
        prepared = home / "prepared"
        spoilt = prepare(prepared, outside, draw)
        before = content(outside)
        assert (sentence(lambda new=prepared: list(run_plan(crash_plan(1), new))) is not None) is spoilt
        assert content(outside) == before
        said = sentence(lambda home=home: list(run_plan(None, home / "run", resume=True, cache=home / "cache")))
        refused, equal = refused + (said is not None), equal + (said is None)
        assert said is not None or same(left(home / "run"), wanted)
        assert content(outside) == before
    figure(folders_refused=refused, folders_with_the_same_bytes=equal)
    assert refused
    assert equal


# Nodes that claim clients of others


def test_no_node_gets_the_clients_of_another(tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    from flwr.app import ConfigRecord, Message
    from test_claims_flower import engine_on, given_to, intrude
    from test_engine_flower import NODES, grid_for, quick

    from lindt.engines.flower.claims import Claims
    from lindt.plan.problem import problem_for

    plan = quick()
    state = begin(plan, problem_for(plan))
    for number, draw in enumerate(plays("nodes")):
        home, run = tmp_path / str(number), f"{number:032x}"
        home.mkdir()
        heard: list[dict[str, Any]] = []  # what honest nodes said of themselves: strangers repeat it
        strangers: set[int] = set()

        def forge(
            task: Message,
            reply: Message,
            heard: list[dict[str, Any]] = heard,
            strangers: set[int] = strangers,
            draw: random.Random = draw,
        ) -> Message:
            if task.metadata.message_type != "query.clients" or reply.has_error():
                return reply
            about = json.loads(str(reply.content.config_records["clients"]["about"]))
            if task.metadata.dst_node_id not in strangers:
                heard.append(about)
                return reply
            stolen = draw.choice(heard)
            about |= draw.choice(
                (
                    {},
                    {"key": stolen.get("key"), "signature": stolen.get("signature")},
                    {"key": stolen.get("key")},
                    {"held": list(range(6))},
                    {"held": draw.choice(([0, 0], [-1], [6], ["0"], [True], None, [2**70], []))},
                    {"life": stolen.get("life")},
                    {draw.choice(("key", "signature", "clients", "parameters")): draw.choice(ODD)},
                )
            )
            reply.content["clients"] = ConfigRecord({"about": json.dumps(about)})
            return reply

        grid = grid_for(plan, home, run, forge)
        engine = engine_on(grid, Claims.open(home, run))
        assert list(engine.available()) == [0, 1, 2, 3, 4, 5]
        owner = {client: id for id, held in NODES.items() for client in map(int, held.split(","))}
        away: dict[int, dict[str, Any]] = {}
        for _ in range(draw.randrange(2, 7)):
            move = draw.choice(("intrude", "intrude", "leave", "return", "restart", "vanish"))
            honest = sorted(set(owner.values()) & grid.nodes.keys())
            if move == "intrude":
                strangers.add(id := draw.randrange(1, 2**63))
                intrude(grid, home, ",".join(map(str, draw.sample(range(6), draw.randrange(1, 7)))), id)
            elif move == "vanish" and strangers & grid.nodes.keys():
                grid.nodes.pop(draw.choice(sorted(strangers & grid.nodes.keys())))
            elif move == "leave" and len(honest) > 1:
                away[id] = grid.nodes.pop(id := draw.choice(honest))
            elif move == "return" and away:
                id = draw.choice(sorted(away))
                grid.nodes[id] = away.pop(id)
            elif move == "restart":  # under a new id, with the key of its folder
                old, new = draw.choice(honest), draw.randrange(1, 2**63)
                grid.nodes[new] = grid.nodes.pop(old)
                owner = {client: new if node == old else node for client, node in owner.items()}
            there = [client for client, node in sorted(owner.items()) if node in grid.nodes]
            assert sorted(engine.available()) == there
            assert engine.registry.nodes() == {client: owner[client] for client in there}
            tasks = [Task("train", run, i, 1, state.w, state.buffers, recovering=False) for i in there]
            replies = list(engine.dispatch(tasks))
            assert sorted(reply.client for reply in replies if reply.fault is None) == there
            assert not given_to(grid) & strangers
        check_kept_claims(home, run, draw)


def check_kept_claims(home: Path, run: str, draw: random.Random) -> None:
    """A flipped bit of nodes.json is refused, or says the same."""
    from lindt.engines.flower.claims import Claims

    path = home / "nodes.json"
    whole, holders = path.read_bytes(), Claims.open(home, run).holders
    for _ in range(20):
        spoilt = bytearray(whole)
        spoilt[draw.randrange(len(spoilt))] ^= 1 << draw.randrange(8)
        path.write_bytes(spoilt)
        found: list[Any] = []
        said = sentence(lambda found=found: found.append(Claims.open(home, run).holders))
        assert said is not None or found == [holders]
        assert path.read_bytes() == spoilt
    path.write_bytes(whole)
