"""A client belongs to the node that held it first, or to the one that the operator names; other claims are refused."""

from __future__ import annotations

import json
import stat
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from loopback import Loopback, over_the_wire
from test_engine_flower import NODES, grid_for, play, quick

from lindt.cli.show import show
from lindt.engines.flower.apps import serve
from lindt.engines.flower.claims import Claims, Holder, operator_list
from lindt.engines.flower.engine import Flower, Timeouts
from lindt.engines.flower.identity import new_challenge, proof, proven_key
from lindt.engines.flower.launch import FlowerOptions
from lindt.errors import UserError
from lindt.plan.problem import problem_for
from lindt.protocols import Task
from lindt.report.payload import privacy_spent, whole_run
from lindt.report.reading import read_run
from lindt.runs.about import about_run
from lindt.runs.play import run_plan
from lindt.runs.schema import NODES as SHAPE
from lindt.runs.schema import fits
from lindt.runs.store import Store
from lindt.server.federation import begin

STRANGER, EVERYBODY = 666, "0,1,2,3,4,5"
OWNED = {0: 7001, 1: 7001, 2: 7001, 3: 2**60 + 1, 4: 42, 5: 42}


def engine_on(grid: Loopback, claims: Claims | None = None) -> Flower:
    plan = quick()
    return Flower(grid, plan, problem_for(plan), Timeouts(0.5, 0.3, 0.0, 0.02), claims)


def intrude(grid: Loopback, tmp_path: Path, clients: str = EVERYBODY, id: int = STRANGER) -> None:
    grid.nodes[id] = {"clients": clients, "private": str(tmp_path / f"stranger-{id}")}


def given_to(grid: Loopback, kind: str = "train") -> set[int]:
    return {m.metadata.dst_node_id for m in grid.sent if m.metadata.message_type == kind}


def test_a_node_that_comes_later_and_claims_every_client_gets_no_task(tmp_path: Path) -> None:
    plan = quick()
    grid = grid_for(plan, tmp_path, "ab")
    engine = engine_on(grid)
    assert engine.available() == [0, 1, 2, 3, 4, 5]
    intrude(grid, tmp_path)
    assert engine.available() == [0, 1, 2, 3, 4, 5]
    state = begin(plan, problem_for(plan))
    tasks = [Task("train", "ab", i, 1, state.w, state.buffers, recovering=False) for i in range(6)]
    assert all(reply.fault is None for reply in engine.dispatch(tasks))
    assert given_to(grid) == set(NODES)
    assert engine.registry.nodes() == OWNED
    assert engine.registry.claims.refused == {STRANGER: {0, 1, 2, 3, 4, 5}}
    assert "claims clients 0, 1, 2, 3, 4, 5, which other nodes hold or claim" in engine.registry.said[STRANGER]


@pytest.mark.parametrize("first", [True, False])
def test_a_client_that_two_nodes_claim_before_the_first_task_is_given_to_neither(first: bool, tmp_path: Path) -> None:
    """The faster answer is no proof: the run does not start, and says which nodes to look at."""
    store = folder_of(tmp_path)
    grid = grid_for(quick(3), tmp_path, store.run)
    honest, grid.nodes = grid.nodes, {}
    for nodes in ("stranger", "honest") if first else ("honest", "stranger"):
        if nodes == "honest":
            grid.nodes |= honest
        else:
            intrude(grid, tmp_path, "3,4,5")
    with pytest.raises(UserError, match=r"clients 3, 4, 5 are claimed by nodes 42, 666, 1152921504606846977.*--nodes"):
        serve_on(grid, store)
    assert given_to(grid) == set()
    assert {client: holder.node for client, holder in Claims.open(store.folder, store.run).holders.items()} == {
        0: 7001, 1: 7001, 2: 7001,
    }  # fmt: skip
    assert "node 666 claimed clients 3, 4, 5, which other nodes hold or claim; refused" in read_run(store.folder).said
    claims = Claims.open(store.folder, store.run)
    claims.name(OWNED)
    serve_on(grid, store)
    assert given_to(grid) == set(NODES)


def test_a_run_starts_when_every_node_that_is_there_has_answered(tmp_path: Path) -> None:
    """The stranger holds all clients by its own word, and answers before the others."""
    late: list[threading.Timer] = []

    def slow(task: Message, reply: Message) -> Message | None:
        if task.metadata.dst_node_id == STRANGER:
            return reply
        number = f"message-{len(grid.sent) - 1}"
        late.append(threading.Timer(0.4, lambda: grid.replies.update({number: over_the_wire(reply)})))
        late[-1].start()
        return None

    grid = grid_for(quick(), tmp_path, "ab", slow)
    intrude(grid, tmp_path)
    engine = Flower(grid, quick(), problem_for(quick()), Timeouts(5.0, 60.0, 0.0, 0.02))
    with pytest.raises(UserError, match="clients 0, 1, 2, 3, 4, 5 are claimed by nodes"):  # at once
        engine.available()


def test_of_a_claim_the_clients_that_nobody_holds_are_taken(tmp_path: Path) -> None:
    grid = grid_for(quick(), tmp_path, "ab")
    grid.nodes.pop(42)
    engine = engine_on(grid)
    assert engine.available() == [0, 1, 2, 3]
    intrude(grid, tmp_path, "3,4")
    assert engine.available() == [0, 1, 2, 3, 4]
    assert engine.registry.nodes() == {0: 7001, 1: 7001, 2: 7001, 3: 2**60 + 1, 4: STRANGER}
    assert engine.registry.claims.refused == {STRANGER: {3}}


def test_a_client_whose_node_is_gone_is_not_given_to_another(tmp_path: Path) -> None:
    grid = grid_for(quick(), tmp_path, "ab")
    engine = engine_on(grid)
    engine.available()
    gone = grid.nodes.pop(7001)
    intrude(grid, tmp_path, "0,1,2")
    assert engine.available() == [3, 4, 5]
    grid.nodes[7001] = gone
    assert engine.available() == [0, 1, 2, 3, 4, 5]
    assert engine.registry.nodes() == OWNED


def test_a_restarted_node_with_a_new_id_shows_the_key_of_its_folder(tmp_path: Path) -> None:
    """Without registered keys Flower gives a node a new id at each start."""
    grid = grid_for(quick(), tmp_path, "ab")
    engine = engine_on(grid)
    engine.available()
    grid.nodes[7002] = dict(grid.nodes.pop(7001))
    assert engine.available() == [0, 1, 2, 3, 4, 5]
    assert engine.registry.nodes() == OWNED | {0: 7002, 1: 7002, 2: 7002}
    assert engine.registry.claims.refused == {}
    key = Path(str(grid.nodes[7002]["private"])) / "node.key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    for message in grid.sent + grid.pulled:
        assert key.read_text().strip() not in str({n: dict(r) for n, r in message.content.config_records.items()})


@pytest.mark.parametrize("change", ["signature", "old", "none", "key", "odd"])
def test_a_key_that_is_not_proven_opens_nothing(change: str, tmp_path: Path) -> None:
    """The stranger knows the public key and an answer to an earlier challenge; it has no other."""
    heard: list[dict[str, Any]] = []

    def forge(task: Message, reply: Message) -> Message:
        if task.metadata.message_type != "query.clients":
            return reply
        about = json.loads(str(reply.content.config_records["clients"]["about"]))
        if task.metadata.dst_node_id == 7001:
            heard.append(about)
        if task.metadata.dst_node_id == STRANGER:
            victim = heard[0]
            about |= {
                "signature": {"key": victim["key"]},
                "old": {"key": victim["key"], "signature": victim["signature"]},
                "none": {"key": victim["key"], "signature": None},
                "key": {"key": "", "signature": ""},
                "odd": {"key": [victim["key"]], "signature": {"a": 1}},
            }[change]
            reply.content["clients"] = ConfigRecord({"about": json.dumps(about)})
        return reply

    grid = grid_for(quick(), tmp_path, "ab", forge)
    engine = engine_on(grid)
    engine.available()
    grid.nodes.pop(7001)
    intrude(grid, tmp_path, "0,1,2")
    assert engine.available() == [3, 4, 5]
    assert engine.registry.claims.refused == {STRANGER: {0, 1, 2}}


def test_a_proof_is_of_one_node_and_one_challenge(tmp_path: Path) -> None:
    """A node that passes its own challenge on to another one gets a proof that is of no use to it."""
    asked, other = new_challenge(), new_challenge()
    shown = proof(tmp_path, 7001, asked)
    assert proven_key(shown, 7001, asked) == shown["key"] != ""
    assert proven_key(shown, STRANGER, asked) == ""
    assert proven_key(shown, 7001, other) == ""


def folder_of(tmp_path: Path, rounds: int = 3) -> Store:
    plan = quick(rounds)
    return Store.create(tmp_path / "run", plan, about_run(plan, problem_for(plan), None))


def serve_on(grid: Loopback, store: Store, **config: Any) -> None:
    given: Mapping[str, Any] = {
        "folder": str(store.folder), "task": "", "noise": "plan", "deadline": 0.5, "gather": 5.0, "comeback": 0.0,
    }  # fmt: skip
    serve(grid, Context(1, 0, {}, RecordDict(), {**grid.run_config, **given, **config}))


def test_the_run_is_the_same_with_a_stranger_and_says_that_it_was_refused(tmp_path: Path) -> None:
    store = folder_of(tmp_path)
    grid = grid_for(quick(3), tmp_path, store.run)

    def enters(task: Message, reply: Message) -> Message:
        if task.metadata.message_type == "train":
            intrude(grid, tmp_path)
        return reply

    grid.spoil = enters
    serve_on(grid, store)
    list(run_plan(quick(3), tmp_path / "here", engine="inprocess"))
    assert torch.equal(store.state().w, Store.open(tmp_path / "here").state().w)
    assert STRANGER not in given_to(grid)
    written = json.loads((store.folder / "nodes.json").read_text())
    assert fits(written["sealed"], SHAPE)
    assert written["sealed"]["refused"] == [{"node": "666", "clients": [0, 1, 2, 3, 4, 5]}]
    run, note = (
        read_run(store.folder),
        "node 666 claimed clients 0, 1, 2, 3, 4, 5, which other nodes hold or claim; refused",
    )
    assert run.said == (note,)
    assert whole_run(run, "a", privacy_spent(run))["said"] == [note]


def test_lindt_show_says_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store, _ = play(quick(1), tmp_path)
    claims = Claims.open(store.folder, store.run)
    assert {client: holder.node for client, holder in claims.holders.items()} == OWNED
    claims.claim(STRANGER, "", frozenset({3}))
    show(store.folder)
    assert "note: node 666 claimed client 3, which another node holds or claims; refused" in capsys.readouterr().out


def test_a_resumed_run_knows_its_nodes_by_id_or_by_key(tmp_path: Path) -> None:
    """A new SuperLink gives all nodes new ids; the stranger is there before them."""
    store, grid = play(quick(2), tmp_path)
    kept = (store.folder / "nodes.json").read_bytes()
    again = grid_for(quick(2), tmp_path, store.run)
    honest = {id + 10_000: dict(config) for id, config in grid.nodes.items()}
    again.nodes = {}
    intrude(again, tmp_path)
    again.nodes |= honest
    engine = engine_on(again, Claims.open(store.folder, store.run))
    assert engine.available() == [0, 1, 2, 3, 4, 5]
    assert engine.registry.nodes() == {client: id + 10_000 for client, id in OWNED.items()}
    assert (store.folder / "nodes.json").read_bytes() != kept
    assert Claims.open(store.folder, store.run).holders == engine.registry.claims.holders


def test_the_operators_list_names_the_nodes_whoever_comes_first(tmp_path: Path) -> None:
    store = folder_of(tmp_path)
    path = tmp_path / "nodes.toml"
    path.write_text(f"7001 = [0, 1, 2]\n{2**60 + 1} = [3]\n42 = [4, 5]\n")
    claims = Claims.open(store.folder, store.run)
    claims.claim(STRANGER, "", frozenset({0, 1}))  # in an earlier session
    claims.settle()
    claims.name(operator_list(path, 6))
    grid = grid_for(quick(), tmp_path, store.run)
    honest, grid.nodes = grid.nodes, {}
    intrude(grid, tmp_path)
    engine = engine_on(grid, Claims.open(store.folder, store.run))
    with pytest.raises(
        UserError, match=r"no client came .* claims clients 0, 1, 2, 3, 4, 5, which other nodes hold or claim"
    ):
        engine.available()
    grid.nodes |= honest
    assert engine.available() == [0, 1, 2, 3, 4, 5]
    assert engine.registry.nodes() == OWNED


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("7001 = [0, 1]\n42 = [1]\n", "client 1 is listed twice"),
        ("7001 = [6]\n", "client 6 does not exist; give numbers from 0 to 5"),
        ("7001 = [true]\n", "give client numbers"),
        ("7001 = 3\n", "give client numbers"),
        ('host-a = [0]\n', "'host-a' is not the id of a SuperNode"),
        ("7001 = [0\n", "it is not valid TOML"),
        ("", "names no client"),
    ],
)  # fmt: skip
def test_a_list_that_cannot_be_is_refused_in_one_sentence(text: str, complaint: str, tmp_path: Path) -> None:
    (tmp_path / "nodes.toml").write_text(text)
    with pytest.raises(UserError, match=rf"--nodes .*nodes\.toml: .*{complaint}"):
        operator_list(tmp_path / "nodes.toml", 6)


def test_a_list_goes_with_a_superlink(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--nodes goes with --superlink"):
        FlowerOptions(nodes=tmp_path / "nodes.toml")
    with pytest.raises(UserError, match=r"--nodes .*there is no such file"):
        operator_list(tmp_path / "none.toml", 6)


@pytest.mark.parametrize("spoil", ["cut", "flip", "other run", "shape"])
def test_a_damaged_file_of_claims_is_named_and_nothing_is_believed(spoil: str, tmp_path: Path) -> None:
    claims = Claims.open(tmp_path, "ab")
    claims.claim(7001, "", frozenset({0, 1}))
    claims.settle()
    path = tmp_path / "nodes.json"
    content = path.read_bytes()
    damaged = {
        "cut": content[:-4],
        "flip": content.replace(b"7001", b"7002"),
        "other run": content,
        "shape": b"[]",
    }[spoil]
    path.write_bytes(damaged)
    with pytest.raises(UserError, match=r"nodes\.json .*delete it, and name the nodes with --nodes"):
        Claims.open(tmp_path, "cd" if spoil == "other run" else "ab")
    assert path.read_bytes() == damaged


def test_a_simulation_keeps_no_claims(tmp_path: Path) -> None:
    """Its nodes have new ids whenever it starts, and all of them are this machine."""
    store = folder_of(tmp_path, 1)
    serve_on(grid_for(quick(1), tmp_path, store.run), store, **{"simulated-private": str(store.private)})
    assert not (store.folder / "nodes.json").exists()


def test_many_strangers_do_not_fill_the_disk(tmp_path: Path) -> None:
    claims = Claims.open(tmp_path, "ab")
    claims.claim(1, "", frozenset({0}))
    claims.settle()
    for node in range(2, 500):
        claims.claim(node, "", frozenset({0}))
    assert len(claims.refused) == 100
    assert claims.holders == {0: Holder(1, "")}


def test_no_two_messages_have_the_same_content(tmp_path: Path) -> None:
    """Flower takes the hash of a message for its id; a node that could guess another's could answer in its place."""
    plan = quick()
    grid = grid_for(plan, tmp_path, "ab")
    engine = engine_on(grid)
    engine.available()
    state = begin(plan, problem_for(plan))
    for _ in range(2):
        list(engine.dispatch([Task("train", "ab", 0, 1, state.w, state.buffers, recovering=False)]))
    first, second = [m for m in grid.sent if m.metadata.message_type == "train"]
    assert first.content.config_records["task"]["nonce"] != second.content.config_records["task"]["nonce"]
