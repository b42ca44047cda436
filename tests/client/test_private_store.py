"""What a client and the server keep between rounds: found again, pruned in time, safe against damage."""

from __future__ import annotations

import os
import random
import re
import shutil
import sqlite3
import struct
from collections.abc import Callable
from pathlib import Path
from threading import Event, Timer
from typing import Any, final

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lindt.client.private_store import (
    SHARDS,
    BackgroundWriter,
    FolderStore,
    Kept,
    MemoryStore,
    PrivateStore,
    ShardStore,
    forget_after,
    meet_session,
    newest,
    private_store,
    prune,
)
from lindt.errors import UserError
from lindt.protocols import MANY, Buffers, RecoveryState
from lindt.runs.files import seal, write_whole
from lindt.runs.store import load_checkpoint, save_checkpoint
from lindt.server.state import RunState
from lindt.weights import read_buffers, read_w


@pytest.fixture(params=["memory", "folder", "behind", "shards", "shards behind"])
def versions(request: pytest.FixtureRequest, tmp_path: Path) -> PrivateStore:
    folder = FolderStore(tmp_path, "run-1")
    kinds: dict[str, PrivateStore] = {"memory": MemoryStore(), "folder": folder, "behind": BackgroundWriter(folder)}
    shards = ShardStore(tmp_path, "run-1")
    kinds |= {"shards": shards, "shards behind": BackgroundWriter(shards)}
    return kinds[request.param]


def v(value: float) -> Kept:
    return {"weight": torch.tensor([value])}, {"alpha": value}


def found(versions: PrivateStore, client: int, up_to: int) -> float | None:
    kept = newest(versions, client, up_to=up_to)
    if kept is None:
        return None
    assert kept[1]["alpha"] == kept[0]["weight"].item()
    return kept[0]["weight"].item()


def test_the_newest_version_up_to_a_round(versions: PrivateStore) -> None:
    for round in (30, 2, 10):  # in whatever order they were written
        versions.write(4, round, v(float(round)))
    assert [found(versions, 4, up_to) for up_to in (1, 2, 9, 10, 29, 30, 99)] == [None, 2, 2, 10, 10, 30, 30]
    assert sorted(versions.rounds(4)) == [2, 10, 30]


def test_clients_are_kept_apart(versions: PrivateStore) -> None:
    versions.write(1, 3, v(1.0))
    versions.write(11, 3, v(11.0))
    assert (found(versions, 1, 9), found(versions, 11, 9), found(versions, 2, 9)) == (1.0, 11.0, None)


def test_a_round_played_again_writes_over_its_own_version(versions: PrivateStore) -> None:
    versions.write(0, 3, v(1.0))
    versions.write(0, 3, v(2.0))
    assert (found(versions, 0, 3), versions.rounds(0)) == (2.0, [3])


def test_a_modules_state_comes_back_bit_for_bit_with_its_notes(versions: PrivateStore) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    versions.write(0, 1, (model.state_dict(), {"score/fc1": 0.1 + 0.2, "alpha": 1e-300}))
    with torch.no_grad():  # the live module goes on training
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.add_(1)
    tensors, notes = versions.read(0, 1)
    assert tensors.keys() == before.keys()
    assert all(torch.equal(tensors[name], before[name]) for name in before)
    assert all(tensors[name].dtype == before[name].dtype for name in before)
    assert notes == {"score/fc1": 0.1 + 0.2, "alpha": 1e-300}
    model.load_state_dict(tensors)


def test_training_on_what_was_read_does_not_change_what_is_kept(versions: PrivateStore) -> None:
    versions.write(0, 1, ({"weight": torch.zeros(1, 1)}, {}))
    model = nn.Linear(1, 1, bias=False)
    model.load_state_dict(versions.read(0, 1)[0])
    nn.init.ones_(model.weight)
    assert versions.read(0, 1)[0]["weight"].item() == 0.0


def test_notes_changed_after_writing_stay_as_written(versions: PrivateStore) -> None:
    notes = {"alpha": 0.5}
    versions.write(0, 1, ({"weight": torch.zeros(1)}, notes))
    notes["alpha"] = 9.0
    assert versions.read(0, 1)[1] == {"alpha": 0.5}


def test_a_model_with_tied_weights_is_kept(versions: PrivateStore) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    versions.write(0, 1, (model.state_dict(), {}))
    tensors, _ = versions.read(0, 1)
    assert torch.equal(tensors["0.weight"], model[0].weight)
    assert torch.equal(tensors["1.weight"], model[0].weight)


def test_tensors_that_are_views_are_kept(versions: PrivateStore) -> None:
    whole = torch.arange(6.0).reshape(2, 3)
    versions.write(0, 1, ({"turned": whole.T, "row": whole[1], "number": whole[0, 1]}, {}))
    tensors, _ = versions.read(0, 1)
    assert tensors["turned"].tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    assert (tensors["row"].tolist(), tensors["number"].item()) == ([3.0, 4.0, 5.0], 1.0)


def test_pruning_by_hand(versions: PrivateStore) -> None:
    for round in (1, 4, 6, 9):
        versions.write(0, round, v(float(round)))
    prune(versions, 0, keep=0)
    prune(versions, 0, keep=3)
    assert sorted(versions.rounds(0)) == [1, 4, 6, 9]  # nothing newer than 1 at or before 3
    prune(versions, 0, keep=7)
    assert sorted(versions.rounds(0)) == [6, 9]  # a checkpoint at 7 asks for 6
    prune(versions, 0, keep=7)
    prune(versions, 1, keep=7)  # of somebody who has none
    assert sorted(versions.rounds(0)) == [6, 9]


@given(written=st.sets(st.integers(1, 30)), keep=st.integers(0, 31))
@settings(max_examples=100, deadline=None)
def test_pruning_keeps_what_a_checkpoint_from_keep_on_can_ask_for(written: set[int], keep: int) -> None:
    versions = MemoryStore()
    for round in written:
        versions.write(0, round, v(float(round)))
    before = [found(versions, 0, up_to) for up_to in range(keep, 33)]
    prune(versions, 0, keep)
    assert [found(versions, 0, up_to) for up_to in range(keep, 33)] == before
    assert sum(round <= keep for round in versions.rounds(0)) <= 1


def test_a_resumed_run_forgets_what_came_after_its_checkpoint(versions: PrivateStore) -> None:
    for round in (2, 5, 7, 8):
        versions.write(0, round, v(float(round)))
    forget_after(versions, 0, 5)
    forget_after(versions, 1, 5)
    assert sorted(versions.rounds(0)) == [2, 5]


def test_dropping_what_is_not_there_is_an_error(versions: PrivateStore) -> None:
    versions.write(0, 1, v(1.0))
    with pytest.raises((KeyError, FileNotFoundError)):
        versions.drop(0, 2)


def test_runs_are_kept_apart_and_a_new_process_finds_its_own(tmp_path: Path) -> None:
    FolderStore(tmp_path, "a").write(0, 1, v(1.0))
    assert found(FolderStore(tmp_path, "a"), 0, 9) == 1.0
    assert found(FolderStore(tmp_path, "b"), 0, 9) is None


@final
class Slow:
    """A folder whose disk is held up until it is let go, and full if it is told so."""

    def __init__(self, folder: Path) -> None:
        self.let_go, self.full = Event(), False
        self._folder = FolderStore(folder, "run")
        self.rounds, self.read, self.drop = self._folder.rounds, self._folder.read, self._folder.drop
        self.newest_rounds, self.drop_after = self._folder.newest_rounds, self._folder.drop_after

    def write(self, client: int, round: int, kept: Kept) -> None:
        assert self.let_go.wait(60)
        if self.full:
            raise OSError("no space left")
        self._folder.write(client, round, kept)

    def flush(self) -> None: ...


def test_others_are_read_while_one_is_written_and_its_own_client_waits(tmp_path: Path) -> None:
    slow = Slow(tmp_path)
    behind = BackgroundWriter(slow)
    behind.write(0, 1, v(1.0))
    assert (behind.rounds(1), slow.rounds(0)) == ([], [])
    Timer(0.05, slow.let_go.set).start()
    assert behind.rounds(0) == [1]  # not before it is there


def test_settled_is_written(tmp_path: Path) -> None:
    slow = Slow(tmp_path)
    behind = BackgroundWriter(slow)
    behind.write(0, 1, v(1.0))
    Timer(0.05, slow.let_go.set).start()
    behind.flush()
    assert slow.rounds(0) == [1]


@pytest.mark.parametrize(
    "then", [BackgroundWriter.flush, lambda behind: behind.write(1, 1, v(1.0)), lambda b: b.rounds(0)]
)
def test_a_full_disk_is_told_by_whatever_comes_next_and_once(
    tmp_path: Path, then: Callable[[BackgroundWriter], object]
) -> None:
    slow = Slow(tmp_path)
    slow.let_go.set()
    slow.full = True
    behind = BackgroundWriter(slow)
    behind.write(0, 1, v(1.0))
    with pytest.raises(OSError, match="no space left"):
        then(behind)
    behind.flush()
    slow.full = False
    behind.write(0, 1, v(2.0))
    assert found(behind, 0, 1) == 2.0


def test_who_is_interrupted_while_waiting_leaves_the_wait_to_the_next(tmp_path: Path) -> None:
    slow = Slow(tmp_path)
    behind = BackgroundWriter(slow)
    behind.write(0, 1, v(1.0))
    _, end = behind._writing or (0, None)
    assert end is not None
    wait, asked = end.result, []

    def interrupted() -> None:
        asked.append(1)
        if len(asked) == 1:
            raise KeyboardInterrupt
        wait()

    end.result = interrupted  # type: ignore[method-assign,assignment]
    with pytest.raises(KeyboardInterrupt):
        behind.flush()
    Timer(0.05, slow.let_go.set).start()
    behind.flush()
    assert slow.rounds(0) == [1]


def only_file(folder: Path) -> Path:
    (path,) = [path for path in folder.rglob("*") if path.is_file()]
    return path


def cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


DAMAGES: list[Any] = [cut, lambda _: b"", lambda _: b"not safetensors at all", lambda c: b"\xff" * 8 + c[8:]]


@pytest.mark.parametrize("damage", DAMAGES, ids=["cut", "empty", "text", "header"])
def test_a_damaged_version_is_told_by_name(tmp_path: Path, damage: Any) -> None:
    versions = FolderStore(tmp_path, "run")
    versions.write(3, 12, v(1.0))
    path = only_file(tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError, match=r"round-000012\.safetensors is damaged"):
        versions.read(3, 12)


def test_a_file_written_aside_is_no_version(tmp_path: Path) -> None:
    versions = FolderStore(tmp_path, "run")
    versions.write(0, 1, v(1.0))
    path = only_file(tmp_path)
    path.with_name(f".{path.name}.4711").write_bytes(b"half")  # a crash in the middle of round 2's write
    assert versions.rounds(0) == [1]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_whole(path, b"old")

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_replaces_the_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for content in (b"something long", b"short", b""):
        write_whole(path, content)
        assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]


def state_after(round: int, run: str = "run-1") -> RunState:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    buffers = Buffers(read_buffers(model).floats_F + round, torch.tensor([round]))
    recovery = RecoveryState(True, count=251, quiet=3, treated=frozenset({9, 2, 40}), detections=1)
    return RunState(run, round, read_w(model) + round, buffers, recovery)


def same(a: RunState, b: RunState) -> bool:
    mine, theirs = ((s.w, s.buffers.floats_F, s.buffers.counts_I) for s in (a, b))
    tensors = all(torch.equal(x, y) and x.dtype == y.dtype for x, y in zip(mine, theirs, strict=True))
    return tensors and (a.run, a.round, a.recovery) == (b.run, b.round, b.recovery)


def test_a_checkpoint_is_read_as_it_was_written(tmp_path: Path) -> None:
    state = state_after(7)
    save_checkpoint(tmp_path / "new" / "folder", state)
    loaded = load_checkpoint(tmp_path / "new" / "folder", "run-1")
    assert loaded is not None
    assert same(loaded.state, state)
    assert isinstance(loaded.state.recovery.treated, frozenset)


def test_a_model_without_buffers_is_kept_too(tmp_path: Path) -> None:
    none = Buffers(torch.empty(0), torch.empty(0, dtype=torch.int64))
    state = RunState("run-1", 1, torch.tensor([1.0, -0.0]), none, RecoveryState())
    save_checkpoint(tmp_path, state)
    loaded = load_checkpoint(tmp_path, "run-1")
    assert loaded is not None
    assert same(loaded.state, state)


def test_before_the_first_round_there_is_none(tmp_path: Path) -> None:
    assert load_checkpoint(tmp_path, "run-1") is None
    assert load_checkpoint(tmp_path / "nowhere", "run-1") is None


def test_the_last_two_are_kept_and_the_newest_is_read(tmp_path: Path) -> None:
    for round in (8, 9, 10, 11):
        save_checkpoint(tmp_path, state_after(round))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["round-000010.safetensors", "round-000011.safetensors"]
    loaded = load_checkpoint(tmp_path, "run-1")
    assert loaded is not None
    assert (loaded.state.round, loaded.damaged) == (11, {})


@pytest.mark.parametrize("damage", DAMAGES, ids=["cut", "empty", "text", "header"])
def test_a_damaged_checkpoint_is_told_and_the_one_before_serves(tmp_path: Path, damage: Any) -> None:
    first = state_after(1)
    for state in (first, state_after(2)):
        save_checkpoint(tmp_path, state)
    path = tmp_path / "round-000002.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    loaded = load_checkpoint(tmp_path, "run-1")
    assert loaded is not None
    assert same(loaded.state, first)
    assert list(loaded.damaged) == [path]
    assert re.fullmatch(r".*round-000002\.safetensors is damaged \(.+\)", loaded.damaged[path])
    other = tmp_path / "round-000001.safetensors"
    other.write_bytes(damage(other.read_bytes()))
    with pytest.raises(
        UserError, match=r"round-000002\.safetensors is damaged .* every older checkpoint is damaged too"
    ):
        load_checkpoint(tmp_path, "run-1")


def test_a_version_is_no_checkpoint(tmp_path: Path) -> None:
    FolderStore(tmp_path, "run").write(0, 1, v(1.0))
    with pytest.raises(UserError, match="is damaged"):
        load_checkpoint(tmp_path / "run" / "client-00000", "run-1")


def test_another_runs_checkpoint_is_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, state_after(1, run="other"))
    with pytest.raises(UserError, match="belongs to another run"):
        load_checkpoint(tmp_path, "run-1")


def test_a_renamed_checkpoint_is_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, state_after(1))
    (tmp_path / "round-000001.safetensors").rename(tmp_path / "round-000009.safetensors")
    with pytest.raises(UserError, match="another run or round"):
        load_checkpoint(tmp_path, "run-1")


@pytest.mark.parametrize(
    "about",
    [
        "[" * 100_000,
        '{"format": 2, "run": "run-1", "round": 1, "recovery": 3, "private": []}',
        '{"format": 2, "run": "run-1", "round": 1, "recovery": {"on": 1, "count": 0, "quiet": 0, "treated": [], '
        '"detections": 0}, "private": []}',
        '{"format": 2, "run": "run-1", "round": 1, "recovery": {"on": true, "count": 0, "quiet": 0, "treated": [], '
        '"detections": 0}, "private": [[Infinity, 1]]}',
        '{"format": 2, "run": "run-1", "round": 1, "recovery": {"on": true, "count": -1, "quiet": 0, "treated": [], '
        '"detections": 0}, "private": []}',
    ],
    ids=["deep", "no table", "no flag", "infinite", "negative"],
)
def test_a_sealed_file_that_is_no_state_is_damaged(about: str, tmp_path: Path) -> None:
    """Whoever can write the folder can seal what they like: it is read as data all the same."""
    tensors = {"w": torch.zeros(2), "floats": torch.empty(0), "counts": torch.empty(0, dtype=torch.int64)}
    write_whole(tmp_path / "round-000001.safetensors", seal(tensors, {"about": about}))
    with pytest.raises(UserError, match="is damaged"):
        load_checkpoint(tmp_path, "run-1")


def test_names_that_are_no_rounds_are_not_looked_at(tmp_path: Path) -> None:
    kept = FolderStore(tmp_path, "run")
    kept.write(0, 3, v(1.0))
    (tmp_path / "run/client-00000/round-x.safetensors").write_bytes(b"")
    assert kept.rounds(0) == [3]


def test_a_new_session_drops_the_later_rounds_once(versions: PrivateStore, tmp_path: Path) -> None:
    """A server that resumes from round 2 plays round 3 again; the v_i of its own round 3 then stays."""
    mark, kept = tmp_path / "mark", ({"v": torch.zeros(1)}, dict[str, float]())
    for round in (1, 2, 3):
        versions.write(0, round, kept)
    meet_session(versions, 0, mark, "second", since=2)
    assert sorted(versions.rounds(0)) == [1, 2]
    versions.write(0, 3, kept)
    meet_session(versions, 0, mark, "second", since=2)
    assert sorted(versions.rounds(0)) == [1, 2, 3]
    meet_session(versions, 0, mark, "third", since=1)
    assert versions.rounds(0) == [1]


def test_all_stores_agree_whatever_is_written_dropped_and_read(tmp_path: Path) -> None:
    """Random changes: memory, folders and shards hold the same, and a new process finds what was flushed."""
    draw, memory, folders = random.Random(3), MemoryStore(), FolderStore(tmp_path, "a")
    shards = ShardStore(tmp_path, "b")
    stores: list[PrivateStore] = [memory, folders, shards]
    for step in range(150):
        client, round = draw.randrange(20), draw.randrange(1, 6)
        dropped = draw.random() < 0.3 and round in memory.rounds(client)
        for store in stores:
            if dropped:
                store.drop(client, round)
            else:
                store.write(client, round, v(float(step)))
            if step == 100:
                store.drop_after(3)
            if step % 40 == 0:
                store.flush()
        assert len({tuple(sorted(store.rounds(client))) for store in stores}) == 1
        assert len({found(store, client, 4) for store in stores}) == 1
        assert memory.newest_rounds(4) == folders.newest_rounds(4) == shards.newest_rounds(4)
    shards.flush()
    anew = ShardStore(tmp_path, "b")
    assert anew.newest_rounds(99) == memory.newest_rounds(99)
    assert all(found(anew, client, 99) == found(memory, client, 99) for client in range(20))
    assert len([path for path in (tmp_path / "b").iterdir() if path.is_file()]) == SHARDS


def test_a_transaction_that_a_crash_cuts_leaves_the_versions_before(tmp_path: Path) -> None:
    """The files as they are in the middle of a transaction that has begun to write: what a killed process leaves."""
    shards = ShardStore(tmp_path, "run")
    shards.write(0, 1, v(1.0))
    shards.write(8, 1, v(2.0))
    shards.flush()
    big = {"weight": torch.zeros(2**20)}, {"alpha": 0.0}
    with shards._shard(0, write=True) as shard:
        assert shard is not None
        shard.execute("PRAGMA cache_size = 1")  # so that pages are written before the end
        shard.execute("UPDATE v SET sealed = ?", (b"half",))
        shard.execute("INSERT INTO v VALUES (16, 2, ?)", (seal(big[0], {"notes": "{}"}),))
        shutil.copytree(tmp_path / "run", tmp_path / "after")
    assert (tmp_path / "after" / "shard-0.sqlite").stat().st_size > 2**20
    assert (tmp_path / "after" / "shard-0.sqlite-journal").exists()
    found_again = ShardStore(tmp_path, "after")
    assert found_again.newest_rounds(9) == {0: 1, 8: 1}
    assert (found(found_again, 0, 9), found(found_again, 8, 9)) == (1.0, 2.0)


def test_what_is_not_flushed_is_lost_as_a_whole(tmp_path: Path) -> None:
    shards = ShardStore(tmp_path, "run")
    shards.write(3, 1, v(1.0))
    assert found(shards, 3, 1) == 1.0
    assert found(ShardStore(tmp_path, "run"), 3, 1) is None


@pytest.mark.parametrize("damage", ["cut", "bit", "other table", "trigger"])
def test_a_damaged_shard_is_told_by_name(tmp_path: Path, damage: str) -> None:
    shards = ShardStore(tmp_path, "run")
    shards.write(3, 1, v(1.0))
    shards.flush()
    path = tmp_path / "run" / "shard-3.sqlite"
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:5000])
    else:
        with sqlite3.connect(path) as connection:
            if damage == "bit":
                ((sealed,),) = connection.execute("SELECT sealed FROM v").fetchall()
                changed = sealed[:-1] + bytes([sealed[-1] ^ 1])
                connection.execute("UPDATE v SET sealed = ?", (changed,))
            elif damage == "other table":
                connection.execute("CREATE TABLE other (x)")
            else:
                connection.execute("CREATE TRIGGER t AFTER INSERT ON v BEGIN DELETE FROM v; END")
        connection.close()
    with pytest.raises(UserError, match=r"shard-3.sqlite.*(cannot be used|is damaged|is not a file of v_i)"):
        newest(ShardStore(tmp_path, "run"), 3, up_to=9)


def _hot_journal(database: bytes, names: Path) -> bytes:
    """A rollback journal without pages, as SQLite's file format describes it, that names a super-journal."""
    magic, sector = bytes.fromhex("d9d505f920a163d7"), 512
    page = int.from_bytes(database[16:18], "big")
    name = str(names).encode()
    head = magic + struct.pack(">5I", 0, 0, len(database) // page, sector, page)
    locked_page = struct.pack(">I", 2**30 // page + 1)
    return head.ljust(sector, b"\0") + locked_page + name + struct.pack(">2I", len(name), sum(name)) + magic


def test_a_journal_deletes_no_file_that_it_names(tmp_path: Path) -> None:
    """SQLite deletes the super-journal that a journal names, when it rolls the transaction back."""
    shards = ShardStore(tmp_path, "run")
    shards.write(3, 1, v(1.0))
    shards.flush()
    path, outside = tmp_path / "run" / "shard-3.sqlite", tmp_path / "outside"
    outside.write_bytes(b"a file of the user's\0")
    path.with_name("shard-3.sqlite-journal").write_bytes(_hot_journal(path.read_bytes(), outside))
    with pytest.raises(UserError, match=r"shard-3.sqlite-journal names a file outside of the store; delete it"):
        newest(ShardStore(tmp_path, "run"), 3, up_to=9)
    assert outside.read_bytes() == b"a file of the user's\0"


def test_a_round_that_is_a_text_is_damage(tmp_path: Path) -> None:
    shards = ShardStore(tmp_path, "run")
    shards.write(3, 1, v(1.0))
    shards.flush()
    with sqlite3.connect(tmp_path / "run" / "shard-3.sqlite") as connection:
        connection.execute("INSERT INTO v VALUES (3, 'two', x'00')")
    connection.close()
    with pytest.raises(UserError, match=r"shard-3.sqlite is damaged"):
        ShardStore(tmp_path, "run").rounds(3)


def test_many_clients_have_shards_and_a_folder_that_was_begun_before_is_still_read(tmp_path: Path) -> None:
    assert isinstance(private_store(tmp_path, "new", MANY + 1), ShardStore)
    assert isinstance(private_store(tmp_path, "new", MANY), FolderStore)
    FolderStore(tmp_path, "old").write(7, 2, v(5.0))
    old = private_store(tmp_path, "old", MANY + 1)
    assert found(old, 7, 9) == 5.0
    assert old.newest_rounds(9) == {7: 2}
