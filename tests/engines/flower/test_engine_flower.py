"""Our federation on Flower's messages: the real ServerApp and ClientApp, over a Grid in this process."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.common.serde import message_to_proto
from loopback import Loopback, over_the_wire
from worlds import tiny_runtime

from lindt.client.private_store import FolderStore
from lindt.engines.flower.apps import FAILURE, client_app, serve
from lindt.engines.flower.claims import Holder
from lindt.engines.flower.engine import Flower, Timeouts
from lindt.engines.flower.node import held_by
from lindt.engines.flower.nodes import NodeRecord
from lindt.engines.flower.wire import EngineSession, pack_tasks, unpack_replies
from lindt.engines.inprocess import InProcess
from lindt.environment.participation import Sampled
from lindt.errors import UserError
from lindt.plan.file import to_dict
from lindt.plan.models import Linear
from lindt.plan.plan import METHODS, Alone, Plan, Scoring
from lindt.plan.problem import problem_for
from lindt.protocols import Detection, Task
from lindt.registry import component
from lindt.runs.about import about_run
from lindt.runs.play import RoundFollowed, RunEnded, run_plan
from lindt.runs.store import Store, load_checkpoint
from lindt.server.federation import begin
from lindt.server.updates import ScoreFormat
from lindt.weights import first_model

Spoil = Callable[[Message, Message], Message | None]
NODES = {7001: "0,1,2", 2**60 + 1: "3", 42: "4,5"}  # ids as Flower draws them: in no order


P = 650  # weights of `quick`: 64 pixels, ten classes


def five(method: str = "lindt") -> Plan:
    """Six clients of digits, the small CNN, an attacker, noise; five rounds, the last one scored."""
    return replace(tiny_runtime(rounds=5), method=METHODS[method], alone=Alone(private=False))


def quick(rounds: int = 1) -> Plan:
    """FedAvg with softmax regression, where only the messages matter."""
    return replace(five("fedavg"), model=Linear(), rounds=rounds)


def grid_for(
    plan: Plan,
    tmp_path: Path,
    run: str,
    spoil: Spoil | None = None,
    connected: dict[int, str] | None = None,
    **own: object,
) -> Loopback:
    held_by_node = NODES if connected is None else connected
    nodes = {id: {"clients": held, "private": str(tmp_path / f"node-{id}")} | own for id, held in held_by_node.items()}
    config = {"plan": json.dumps(to_dict(plan)), "run": run, "task": ""}
    return Loopback(client_app, nodes, config, spoil or (lambda task, reply: reply))


def play(
    plan: Plan, tmp_path: Path, spoil: Spoil | None = None, connected: dict[int, str] | None = None, **config: Any
) -> tuple[Store, Loopback]:
    """The ServerApp on a run's folder, as the command line would have made it."""
    folder = tmp_path / "run"
    if not (folder / "plan.toml").exists():
        Store.create(folder, plan, about_run(plan, problem_for(plan), None, config.get("noise", "plan")))
    store = Store.open(folder)
    grid = grid_for(plan, tmp_path, store.run, spoil, connected)
    given = {
        "folder": str(folder),
        "task": "",
        "noise": "plan",
        "deadline": 0.5,
        "gather": 5.0,
        "comeback": 0.0,
        **config,
    }
    serve(grid, Context(1, 0, {}, RecordDict(), {**grid.run_config, **given}))
    return store, grid


@pytest.mark.parametrize("method", ["fedavg", "lindt", "lindt-tm"])
def test_five_rounds_have_the_bytes_of_in_process(method: str, tmp_path: Path) -> None:
    plan = five(method)
    store, _ = play(plan, tmp_path)
    list(run_plan(plan, tmp_path / "here", engine="inprocess"))
    assert (store.folder / "rounds.jsonl").read_bytes() == (tmp_path / "here/rounds.jsonl").read_bytes()
    there = Store.open(tmp_path / "here").state()
    assert torch.equal(store.state().w, there.w)


def test_detection_recovery_and_gains_travel_too(tmp_path: Path) -> None:
    plan = tiny_runtime(rounds=4)  # with private models, and the flag raised after round 2
    store, _ = play(plan, tmp_path)
    list(run_plan(plan, tmp_path / "here", engine="inprocess"))
    assert (store.folder / "rounds.jsonl").read_bytes() == (tmp_path / "here/rounds.jsonl").read_bytes()
    assert store.summary()["detected_at"] == [2]


def test_guarded_prediction_has_the_bytes_of_in_process(tmp_path: Path) -> None:
    """Each node trains its clients' P_i and chooses their weights on V_i; every round is scored."""
    plan = tiny_runtime(rounds=3, detection=component(Detection, "gain"), scoring=Scoring(every=1, last=1))
    plan = replace(plan, method=METHODS["guarded"], environment=replace(plan.environment, participation=Sampled(1.0)))
    store, _ = play(plan, tmp_path)
    list(run_plan(plan, tmp_path / "here", engine="inprocess"))
    assert (store.folder / "rounds.jsonl").read_bytes() == (tmp_path / "here/rounds.jsonl").read_bytes()
    last = store.rounds()[-1]
    assert {"weight/global", "weight/adapted", "weight/private"} <= set(last["scores"]["notes"])
    assert last["reports"]
    assert store.summary()["prediction"]["models"] == 3


@pytest.mark.parametrize("asked", [(0, 1, 2), (0, 1, 3)])
def test_clients_that_work_at_the_same_time_reply_as_one_after_another(
    asked: tuple[int, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The same replies and v_i. Where a client cannot be asked (3 is not on the node), the others still reply."""
    logging.getLogger("flwr").addHandler(caplog.handler)
    plan = five("lindt-always")
    problem = problem_for(plan)
    state, expected = begin(plan, problem), ScoreFormat.of(plan, problem, first_model(problem, plan))
    tasks = [Task("train", "ab", i, 1, state.w, state.buffers, True) for i in asked]
    found = {}
    for workers in (1, 2):
        home = tmp_path / str(workers)
        grid = grid_for(plan, home, "ab", connected={7: "0,1,2"}, workers=workers)
        (id,) = grid.push_messages([Message(pack_tasks(tasks, EngineSession("session")), 7, "train")])
        replies = unpack_replies(next(iter(grid.pull_messages([id]))), tasks, expected)
        kept = {str(path.relative_to(home)): path.read_bytes() for path in home.rglob("round-*")}
        found[workers] = [(one.client, one.fault, one.w if one.w is None else one.w.tolist()) for one in replies], kept
    assert found[1] == found[2]
    answered = [i for i in asked if i != 3]
    assert [client for client, fault, _ in found[2][0] if fault is None] == answered
    assert len(found[2][1]) == len(answered)
    logging.getLogger("flwr").removeHandler(caplog.handler)
    assert ("they are asked one after another" in caplog.text) == (3 in asked)


def test_v_i_lie_on_the_nodes_that_hold_the_clients_and_nowhere_else(tmp_path: Path) -> None:
    store, grid = play(replace(five("lindt"), rounds=2), tmp_path)
    for id, held in NODES.items():
        homes = (tmp_path / f"node-{id}" / store.run).glob("client-*/")
        assert {int(home.name.removeprefix("client-")) for home in homes} <= set(held_by({"clients": held}))
    assert not store.private.exists()
    for message in grid.sent + grid.pulled:
        assert all(set(record) == {"w", "floats", "counts"} for record in message.content.array_records.values())


def test_the_messages_of_fedavg_and_lindt_weigh_the_same(tmp_path: Path) -> None:
    def sizes(method: str) -> list[tuple[str, int]]:
        _, grid = play(replace(five(method), rounds=2), tmp_path / method)
        both = grid.sent + grid.pulled
        return [(m.metadata.message_type, weight(m)) for m in both if m.metadata.message_type == "train"]

    def weight(message: Message) -> int:
        proto = message_to_proto(message)
        proto.ClearField("metadata")  # names of nodes and messages, and the time of day
        return int(proto.ByteSize())

    fedavg, lindt = sizes("fedavg"), sizes("lindt")
    assert len(fedavg) >= 8
    assert fedavg == lindt


def test_a_killed_server_goes_on_with_the_same_count_and_flag(tmp_path: Path) -> None:
    plan = replace(tiny_runtime(patience=1, rounds=4), alone=Alone(private=False))
    list(run_plan(plan, tmp_path / "straight", engine="inprocess"))

    class KilledError(Exception):
        pass

    def kill_in_round_4(task: Message, reply: Message) -> Message:
        if task.metadata.message_type == "train" and task.content.config_records["task"]["round"] == 4:
            raise KilledError  # its node has trained, and keeps a v_i of a round that will be played again
        return reply

    with pytest.raises(KilledError):
        play(plan, tmp_path, kill_in_round_4)
    folder = tmp_path / "run"
    loaded = load_checkpoint(folder / "checkpoint", Store.open(folder).run)
    assert loaded is not None
    state = loaded.state
    assert (state.round, state.recovery.count, state.recovery.on) == (3, 3, True)
    assert "KilledError" in (folder / FAILURE).read_text()
    store, _ = play(plan, tmp_path)
    assert (folder / "rounds.jsonl").read_bytes() == (tmp_path / "straight/rounds.jsonl").read_bytes()
    assert torch.equal(store.state().w, Store.open(tmp_path / "straight").state().w)


def test_a_resumed_run_forgets_what_v_i_learned_after_the_checkpoint_once(tmp_path: Path) -> None:
    plan = replace(five("lindt"), rounds=2)
    store, grid = play(plan, tmp_path)
    engine = Flower(grid, plan, problem_for(plan), Timeouts(5, 5))
    engine.forget_after(0)
    engine.available()
    state = store.state()
    versions = FolderStore(tmp_path / f"node-{2**60 + 1}", store.run)
    versions.write(3, 2, ({}, {}))  # of a round that the resumed server has not played
    for round in (1, 3):
        list(engine.dispatch([Task("train", store.run, 3, round, state.w, state.buffers, recovering=True)]))
    assert sorted(versions.rounds(3)) == [1, 3]


def rewritten(reply: Message, change: Callable[[RecordDict], None]) -> Message:
    change(reply.content)
    return reply


def only(round: int, change: Callable[[RecordDict], None], kind: str = "train") -> Spoil:
    """Spoils what node 2**60 + 1, the home of client 3, answers in a round."""

    def spoil(task: Message, reply: Message) -> Message:
        mine = task.metadata.dst_node_id == 2**60 + 1 and task.metadata.message_type == kind
        return rewritten(reply, change) if mine and task.content.config_records["task"]["round"] == round else reply

    return spoil


def put(**arrays: Array) -> Callable[[RecordDict], None]:
    def change(content: RecordDict) -> None:
        record = content.array_records["weights-3"]
        content["weights-3"] = ArrayRecord({**record, **arrays})

    return change


def raw(values: torch.Tensor, dtype: str = "<f4", stype: str = "lindt.raw", shape: tuple[int, ...] = ()) -> Array:
    return Array(dtype=dtype, shape=shape or tuple(values.shape), stype=stype, data=values.numpy().tobytes())


def nothing(content: RecordDict) -> None:
    content.clear()


def told(**changes: object) -> Callable[[RecordDict], None]:
    """Client 3's reply with other fields."""

    def change(content: RecordDict) -> None:
        about = json.loads(str(content["reply-3"]["about"]))
        content["reply-3"]["about"] = json.dumps(about | changes)

    return change


def scores(**changes: object) -> Callable[[RecordDict], None]:
    def change(content: RecordDict) -> None:
        about = json.loads(str(content["reply-3"]["about"]))
        about["notes"] = changes.get("notes", about["notes"])
        about["tally"] |= {name: value for name, value in changes.items() if name != "notes"}
        content["reply-3"]["about"] = json.dumps(about)

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (put(w=raw(torch.full((P,), float("nan")))), "NaN or infinity"),
        (put(w=raw(torch.zeros(P - 1))), "weights, the model"),
        (put(w=raw(torch.zeros(P), shape=(P, 1))), "one vector"),
        (put(w=raw(torch.zeros(3), shape=(2**31 - 1,))), "12 bytes for 2147483647 values"),
        (put(w=raw(torch.zeros(P, dtype=torch.float64), dtype="<f8")), "one vector of <f4"),
        (put(w=raw(torch.zeros(P), stype="pickle")), "one vector of <f4"),
        (nothing, "there is no record 'reply-3'"),
        (lambda content: content.pop("weights-3"), "there are no weights"),
        (told(round=1), "round 1"),
        (told(size=2**60), "not a whole number"),
        (told(size=0), "0 samples"),
    ],
)  # fmt: skip
def test_a_bad_answer_is_refused_by_name_and_the_run_goes_on(
    change: Callable[[RecordDict], None], reason: str, tmp_path: Path
) -> None:
    plan = quick(5)
    asked = next(r for r in range(2, 6) if 3 in asked_in(plan)[r - 1])
    store, _ = play(replace(plan, rounds=asked), tmp_path, only(asked, change))
    line = store.rounds()[asked - 1]
    assert [refusal["client"] for refusal in line["refused"]] == [3]
    assert reason in line["refused"][0]["reason"]
    assert set(line["answered"]) == set(line["asked"]) - {3}


def asked_in(plan: Plan) -> list[list[int]]:
    from lindt.plan.plan import attackers_of

    sampled = plan.environment.participation
    return [
        sampled.active(plan.seed_for("active", r), range(6), attackers_of(plan, 6)) for r in range(1, plan.rounds + 1)
    ]


def test_the_model_has_the_weights_that_the_cases_above_think() -> None:
    plan = quick()
    assert begin(plan, problem_for(plan)).w.numel() == P


@pytest.mark.parametrize(
    "change",
    [
        scores(local=[1.0]),
        scores(local=[float("nan"), 5.0]),
        scores(local=[0.0, 0.0]),
        scores(central="many"),
        scores(wins=10**18),
        scores(samples=0),
        scores(samples=True),
        scores(private=[1.0, 2.0]),
        scores(extra=1),
        scores(attack_local=5, attack_chances=4),
        scores(notes={"alpha": 1e30}),
        scores(notes={"x" * 101: 1.0}),
        lambda content: content["reply-3"].update({"about": "[" * 10**5}),
        told(tally=None),
    ],
)
def test_a_tally_that_would_spoil_everyones_scores_is_left_out(
    change: Callable[[RecordDict], None], tmp_path: Path
) -> None:
    store, _ = play(quick(), tmp_path, only(1, change, "evaluate"))
    found = store.rounds()[-1]["scores"]
    assert 3 not in [one["client"] for one in found["clients"]]
    assert len(found["clients"]) == 4  # of six, one attacks


def test_a_client_that_never_answers_does_not_hold_the_round_beyond_its_deadline(tmp_path: Path) -> None:
    def silent(task: Message, reply: Message) -> Message | None:
        training = task.metadata.message_type == "train"
        return None if training and task.metadata.dst_node_id == 7001 else reply

    store, _ = play(quick(5), tmp_path, silent, deadline=0.3)
    for line in store.rounds():
        assert set(line["answered"]) == set(line["asked"]) - {0, 1, 2}
    assert max(json.loads(t)["seconds"] for t in (store.folder / "timing.jsonl").read_text().splitlines()) < 5


def test_an_answer_that_arrives_by_half_does_not_hold_the_round_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node dies while it sends its weights: Flower's Grid then waits for them, whatever the deadline."""
    plan, stuck = quick(), threading.Event()
    monkeypatch.setattr("lindt.engines.flower.nodes.PULL_WAIT", 0.1)
    grid = grid_for(plan, tmp_path, "ab")
    engine = Flower(grid, plan, problem_for(plan), Timeouts(1.0, 5))
    state, clients = begin(plan, problem_for(plan)), engine.available()
    pull = grid.pull_messages

    def half(ids: list[str]) -> list[Message]:
        if any(grid.replies[id].metadata.src_node_id == 42 for id in ids if id in grid.replies):
            stuck.wait()
        return pull(ids)

    monkeypatch.setattr(grid, "pull_messages", half)
    began = time.monotonic()
    tasks = [Task("train", "ab", i, 1, state.w, state.buffers, recovering=False) for i in clients]
    assert sorted(reply.client for reply in engine.dispatch(tasks)) == [0, 1, 2, 3]
    assert time.monotonic() - began < 8
    stuck.set()


def test_a_node_that_leaves_is_not_asked_and_one_that_comes_back_is(tmp_path: Path) -> None:
    plan = quick()
    grid = grid_for(plan, tmp_path, "ab")
    engine = Flower(grid, plan, problem_for(plan), Timeouts(0.5, 5))
    assert engine.available() == [0, 1, 2, 3, 4, 5]
    gone = grid.nodes.pop(7001)
    assert engine.available() == [3, 4, 5]
    grid.nodes[9] = gone  # restarted without a key of its own: another name
    assert engine.available() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize(("comeback", "back"), [(0.0, False), (0.3, False), (200.0, True)])
def test_a_node_lost_in_a_round_is_waited_for_as_long_as_it_may_take_to_come_back(
    comeback: float, back: bool, told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took its tasks and died. Back in time it is asked again and answers as if nothing had been.

    Whether we miss it or the SuperLink does (`told`), which then answers for it with an error, is the same.
    """
    monkeypatch.setattr("lindt.engines.flower.engine.NODE_CHECK_INTERVAL", 0.05)
    plan = quick()
    tasks_lost: list[Message] = []

    def dies(task: Message, reply: Message) -> Message | None:
        if task.metadata.message_type != "train" or task.metadata.dst_node_id != 7001 or tasks_lost:
            return reply
        tasks_lost.append(task)
        gone = grid.nodes.pop(7001)
        grid.states.pop(7001)
        if back:  # once it has been missed, as Flower lets a node in again only when its lease has run out
            threading.Thread(target=return_when_missed, args=(gone,), daemon=True).start()
        return Message(Error(ErrorCode.NODE_UNAVAILABLE, "no heartbeat"), reply_to=task) if told else None

    def return_when_missed(gone: dict[str, Any]) -> None:
        while 7001 in engine.registry.known:
            time.sleep(0.01)
        grid.nodes[7001] = gone

    grid = grid_for(plan, tmp_path, "ab", dies)
    engine = Flower(grid, plan, problem_for(plan), Timeouts(300.0, 60, comeback, 0.02))
    state, clients = begin(plan, problem_for(plan)), engine.available()
    tasks = [Task("train", "ab", i, 1, state.w, state.buffers, recovering=False) for i in clients]
    began = time.monotonic()
    replies = {reply.client: reply for reply in engine.dispatch(tasks)}
    assert time.monotonic() - began < 200  # not the deadline
    assert sorted(replies) == [0, 1, 2, 3, 4, 5]
    assert len(tasks_lost) == 1
    if not back:
        assert [replies[i].fault for i in (0, 1, 2)] == ["its node is gone"] * 3
    else:
        straight = {r.client: r.w for r in InProcess(plan, problem_for(plan), run="ab").dispatch(tasks)}
        for i, reply in replies.items():
            assert reply.fault is None
            assert reply.w is not None
            assert torch.equal(reply.w, straight[i])  # type: ignore[arg-type]


@pytest.mark.parametrize("comeback", [0.0, 200.0])
def test_a_node_that_was_restarted_before_anybody_missed_it_is_asked_again(
    comeback: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took its tasks, was killed, and is back under its name: only its memory of them is gone."""
    monkeypatch.setattr("lindt.engines.flower.engine.NODE_CHECK_INTERVAL", 0.05)
    monkeypatch.setattr("lindt.engines.flower.engine.SILENCE_BEFORE_CHECK", 0.1)
    plan, lost, slow = quick(), list[Message](), list[Message]()

    def restarts(task: Message, reply: Message) -> Message | None:
        if task.metadata.message_type == "train" and task.metadata.dst_node_id == 7001 and not lost:
            lost.append(task)
            del grid.states[7001]
            return None
        if task.metadata.message_type == "train" and task.metadata.dst_node_id == 42 and not slow:
            slow.append(reply)  # its node lives, and answers in time
            number = f"message-{len(grid.sent) - 1}"
            threading.Timer(1.0, lambda: grid.replies.update({number: over_the_wire(reply)})).start()
            return None
        return reply

    grid = grid_for(plan, tmp_path, "ab", restarts)
    engine = Flower(grid, plan, problem_for(plan), Timeouts(300.0 if comeback else 2.0, 60, comeback, 0.02))
    state, clients = begin(plan, problem_for(plan)), engine.available()
    tasks = [Task("train", "ab", i, 1, state.w, state.buffers, recovering=False) for i in clients]
    replies = {reply.client: reply for reply in engine.dispatch(tasks)}
    given = [m.metadata.dst_node_id for m in grid.sent if m.metadata.message_type == "train"]
    if not comeback:  # nobody asks; the deadline ends it
        assert sorted(replies) == [3, 4, 5]
        assert sorted(given) == sorted(NODES)
        return
    assert sorted(given) == sorted([*NODES, 7001])  # the slow one was asked about, but not asked again
    straight = {r.client: r.w for r in InProcess(plan, problem_for(plan), run="ab").dispatch(tasks)}
    assert sorted(replies) == sorted(straight)
    for i, reply in replies.items():
        assert reply.w is not None
        assert torch.equal(reply.w, straight[i])  # type: ignore[arg-type]


def test_a_greeting_that_was_lost_with_a_killed_process_is_sent_again(tmp_path: Path) -> None:
    """The SuperLink answers for the process, and the answer comes when the node is back."""
    lost: list[Message] = []

    def killed(task: Message, reply: Message) -> Message:
        if task.metadata.dst_node_id != 7001 or lost:
            return reply
        lost.append(task)
        return Message(Error(ErrorCode.NODE_UNAVAILABLE, "no heartbeat"), reply_to=task)

    plan = quick()
    engine = Flower(grid_for(plan, tmp_path, "ab", killed), plan, problem_for(plan), Timeouts(0.5, 5))
    assert engine.available() == [0, 1, 2, 3, 4, 5]
    assert not engine.registry.said


def test_a_node_lost_between_two_rounds_is_waited_for_as_well(tmp_path: Path) -> None:
    plan = quick()
    grid = grid_for(plan, tmp_path, "ab")
    engine = Flower(grid, plan, problem_for(plan), Timeouts(300.0, 60, 200.0, 0.02))
    assert engine.available() == [0, 1, 2, 3, 4, 5]
    gone = grid.nodes.pop(7001)
    threading.Timer(0.5, lambda: grid.nodes.update({7001: gone})).start()
    assert engine.available() == [0, 1, 2, 3, 4, 5]
    brief = Flower(grid, plan, problem_for(plan), Timeouts(300.0, 60, 0.3, 0.02))
    assert brief.available() == [0, 1, 2, 3, 4, 5]
    grid.nodes.pop(7001)
    assert brief.available() == [3, 4, 5]  # after 0.3 s it is given up


def test_a_node_whose_federation_is_another_says_so_and_is_left_out(tmp_path: Path) -> None:
    plan = quick()
    grid = grid_for(plan, tmp_path, "ab")
    grid.nodes[7001]["clients"] = "0,77"
    grid.nodes[42]["clients"] = "all"
    engine = Flower(grid, plan, problem_for(plan), Timeouts(0.5, 0.5))
    assert engine.available() == [3]
    assert "clients [77] do not exist: this federation has the clients 0 to 5" in engine.registry.said[7001]
    assert "give client numbers" in engine.registry.said[42]


def test_nobody_there_is_an_error_that_says_what_the_nodes_said(tmp_path: Path) -> None:
    def no_folder(task: Message, reply: Message) -> Message:
        return reply

    plan = quick()
    grid = grid_for(plan, tmp_path, "ab", no_folder)
    for config in grid.nodes.values():
        del config["private"]
    engine = Flower(grid, plan, problem_for(plan), Timeouts(0.5, 0.2))
    with pytest.raises(UserError, match=r"no client came within 0.2 s.*this node keeps no v_i"):
        engine.available()


def test_a_node_refuses_clients_it_does_not_hold_and_runs_it_is_not_in(tmp_path: Path) -> None:
    plan = quick()
    state = begin(plan, problem_for(plan))
    grid = grid_for(plan, tmp_path, "ab")
    engine = Flower(grid, plan, problem_for(plan), Timeouts(0.5, 5))
    engine.available()
    engine.registry.known = {42: NodeRecord(frozenset({0, 4}), "")}
    engine.registry.claims.holders[0] = Holder(42, "")
    tasks = [Task("train", run, i, 1, state.w, state.buffers, False) for run, i in (("ab", 0), ("ab", 4), ("ab", 5))]
    found = {reply.client: reply.fault for reply in engine.dispatch(tasks)}
    assert found[4] is None
    assert "is not on this node" in str(found[0])
    assert found[5] == "is not connected"
    (other,) = engine.dispatch([Task("train", "../../etc", 4, 1, state.w, state.buffers, False)])
    assert "a task of run" in str(other.fault)


def test_noise_from_the_system_differs_between_runs_and_is_kept_in_the_checkpoint_only(tmp_path: Path) -> None:
    plan = quick(2)
    first, grid = play(plan, tmp_path / "a", noise="system")
    second, _ = play(plan, tmp_path / "b", noise="system")
    assert not torch.equal(first.state().w, second.state().w)
    secret = first.state().secret
    assert secret is not None
    assert str(secret) not in repr(first.state())
    for message in grid.sent:
        for record in message.content.config_records.values():
            assert str(secret) not in str(dict(record))
    for file in first.folder.iterdir():
        assert file.is_dir() or str(secret) not in file.read_text()


def test_a_run_with_a_secret_is_resumed_with_the_same_clients_and_other_noise(tmp_path: Path) -> None:
    """The noise of a round that is played again must not be that of its first attempt: others may have answered."""
    plan = quick(4)
    store, _ = play(plan, tmp_path, noise="system")
    whole, w, first = store.rounds(), store.state().w, store.summary()["privacy"]
    (store.folder / "summary.json").unlink()
    (store.folder / "checkpoint/round-000004.safetensors").unlink()
    again, _ = play(plan, tmp_path, noise="system")
    assert [line["asked"] for line in again.rounds()] == [line["asked"] for line in whole]
    assert again.rounds()[:3] == whole[:3]
    assert not torch.equal(again.state().w, w)
    found = again.summary()["privacy"]
    assert found["epsilon"] > first["epsilon"]  # the round may have been released twice
    assert "for each of 1 restart" in found["words"]
    assert "the operating system's cryptographic generator" in found["words"]


def test_a_run_goes_on_with_the_noise_that_it_was_begun_with(tmp_path: Path) -> None:
    plan = quick(2)
    store, _ = play(plan, tmp_path)
    (store.folder / "summary.json").unlink()
    with pytest.raises(UserError, match="was begun with --noise plan"):
        play(plan, tmp_path, noise="system")
    play(plan, tmp_path)


def test_a_round_says_how_many_of_the_clients_were_connected(tmp_path: Path) -> None:
    store, _ = play(quick(2), tmp_path / "few", connected={42: "4,5"}, gather=0.3)
    assert [line["reachable"] for line in store.rounds()] == [2, 2]
    store, _ = play(quick(1), tmp_path / "all")
    assert "reachable" not in store.rounds()[0]


def test_the_command_follows_the_store(tmp_path: Path) -> None:
    from lindt.engines.flower import launch

    store, _ = play(quick(2), tmp_path)

    class Idle:
        def status(self, run: str) -> str:
            raise AssertionError("an ended run needs no asking")

    path = store.folder / "rounds.jsonl"
    size = len(path.read_bytes().splitlines(keepends=True)[0])
    events: Iterator[Any] = launch._follow(store, Idle(), "1", 1)  # type: ignore[arg-type]
    lines, position = launch._new_lines(path, size)
    assert [line["round"] for line in lines] == [2]
    assert position == len(path.read_bytes())
    found = list(events)
    assert isinstance(found[-1], RunEnded)
    assert not [event for event in found if isinstance(event, RoundFollowed)]  # all were there before


def test_a_failed_run_is_told_with_the_servers_own_words(tmp_path: Path) -> None:
    from lindt.engines.flower import launch

    plan = quick(2)
    store = Store.create(tmp_path / "run", plan, about_run(plan, problem_for(plan), None))
    (store.folder / FAILURE).write_text("no client came within 3 s")
    with pytest.raises(UserError, match="the run failed on Flower: no client came"):
        list(launch._follow(store, None, "1", 0))  # type: ignore[arg-type]


def test_a_greeting_that_is_none_is_heard_out(tmp_path: Path) -> None:
    def odd(task: Message, reply: Message) -> Message:
        if task.metadata.message_type == "query.clients" and task.metadata.dst_node_id == 42:
            reply.content["clients"] = ConfigRecord({"about": '{"held": [[1]], "clients": 6, "parameters": 1}'})
        return reply

    plan = quick()
    grid = grid_for(plan, tmp_path, "ab", odd)
    engine = Flower(grid, plan, problem_for(plan), Timeouts(0.5, 0.3))
    assert engine.available() == [0, 1, 2, 3]
    assert 42 in engine.registry.said


@pytest.mark.parametrize("poll", [0.0, 0.4])  # seconds of one poll: it is long with many nodes
def test_an_answer_is_noticed_at_most_a_tenth_of_its_time_or_a_second_late(
    poll: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, pauses = 0.0, list[tuple[float, float]]()

    def sleep(seconds: float) -> None:
        nonlocal now
        pauses.append((now, seconds))
        now += seconds

    monkeypatch.setattr("lindt.engines.flower.engine.time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    plan = quick()
    engine = Flower(grid_for(plan, tmp_path, "run"), plan, problem_for(plan))
    for _ in engine._poll(30.0):
        now += poll
    assert now == pytest.approx(30.0, abs=poll + 1e-6)
    *before, (_, last) = pauses  # the last pause is what is left of the time
    assert before[0] == (poll, pytest.approx(max(0.02, poll)))
    rounding = 1 + 1e-9
    assert all(pause <= max(0.02, min(1.0, waited / 10), poll) * rounding for waited, pause in before)
    assert all(pause * rounding >= max(0.02, poll) for _, pause in before)  # polls take at most half of the time
    assert before[-1][1] == pytest.approx(1.0)
    assert last <= 1.0
