"""A run's folder that a stranger wrote: it is resumed within itself, or refused in one sentence."""

from __future__ import annotations

import json
import os
import shutil
from itertools import islice
from pathlib import Path

import pytest
from worlds import tiny

from lindt.cli import run as cli_run
from lindt.errors import UserError
from lindt.runs.export import export_client
from lindt.runs.files import locked, write_whole
from lindt.runs.play import run_plan
from lindt.runs.store import Store


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that stopped after two of four rounds, with a v_i for each client that trained."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    events = run_plan(tiny("apfl"), folder)
    for _ in islice(events, 1 + 5 + 2):
        pass
    events.close()
    return folder


@pytest.fixture
def folder(stopped: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stopped, tmp_path / "run"))


def outside(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "id", ["../../victim/private/other", "/victim", "..", "", "A" * 32, "0" * 31, 7, "0" * 32 + "\n"]
)
def test_the_id_of_a_run_is_no_path(folder: Path, tmp_path: Path, id: object) -> None:
    kept = tmp_path / "victim" / "private" / "other" / "client-00000" / "round-000009.safetensors"
    kept.parent.mkdir(parents=True)
    kept.write_bytes(b"another run's v_i")
    shutil.rmtree(folder / "checkpoint")  # back to round 0: every later v_i under the run's id is dropped
    (folder / "rounds.jsonl").unlink()
    about = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(about | {"run": id}))
    with pytest.raises(UserError, match=r"run\.json: run = .* is not an id of a run"):
        list(run_plan(None, folder, resume=True))
    assert kept.read_bytes() == b"another run's v_i"


def _link(place: Path, target: Path) -> None:
    """`place`, or what is there, becomes a link to `target`."""
    if place.exists():
        place.rename(place.with_name(f"{place.name}-before"))
    place.symlink_to(target)


NAMES = ("lock", "rounds.jsonl", "timing.jsonl", "summary.json", "plan.toml", "run.json", "checkpoint", "private")


@pytest.mark.parametrize(
    "name", [*NAMES, "flower.log", "failure.txt", "nodes.json", "export", "checkpoint/round-000002.safetensors"]
)
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_links_and_pipes_are_refused(folder: Path, tmp_path: Path, name: str, kind: str) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "kept").write_bytes(b"not the run's")
    place = folder / name
    target = victim if name in ("checkpoint", "private", "export") else victim / "kept"
    if kind == "link":
        _link(place, target)
    else:
        if place.exists():
            place.rename(tmp_path / "before")
        os.mkfifo(place)
    with pytest.raises(UserError, match="is a link" if kind == "link" else "is not a plain file") as told:
        list(run_plan(None, folder, resume=True))
    assert str(place) in str(told.value)
    assert outside(victim) == {"kept": b"not the run's"}
    with pytest.raises(UserError, match=r"is a link|is not a plain file"):
        cli_run._name_in(folder)  # read before the store is: a pipe would be waited for
    with pytest.raises(UserError, match=r"is a link|is not a plain file"):
        export_client(folder, 0, tmp_path / "out")


def test_a_link_deep_inside_is_refused(folder: Path, tmp_path: Path) -> None:
    store = Store.open(folder)
    home = next(iter((store.private / store.run).iterdir()))
    victim = tmp_path / "victim"
    home.rename(victim)
    home.symlink_to(victim)
    before = outside(victim)
    with pytest.raises(UserError, match=f"{home.name} is a link"):
        list(run_plan(None, folder, resume=True))
    assert outside(victim) == before


@pytest.mark.parametrize("name", ["lock", "rounds.jsonl", "checkpoint", "private"])
def test_a_new_run_follows_no_link_either(tmp_path: Path, name: str) -> None:
    victim, new = tmp_path / "victim", tmp_path / "new"
    for one in (victim, new):
        one.mkdir()
    (victim / "kept").write_bytes(b"not the run's")
    (new / name).symlink_to(victim if name in ("checkpoint", "private") else victim / "kept")
    with pytest.raises(UserError, match=f"{name} is a link"):
        list(run_plan(tiny("apfl"), new))
    assert outside(victim) == {"kept": b"not the run's"}
    assert [path.name for path in new.iterdir()] == [name]  # nothing was begun


@pytest.mark.parametrize("name", ["lock", "rounds.jsonl", "timing.jsonl", "flower.log"])
@pytest.mark.parametrize("new", [False, True], ids=["resumed", "new"])
def test_a_second_name_of_a_file_outside_is_not_written_through(
    folder: Path, tmp_path: Path, name: str, new: bool
) -> None:
    """A hard link is a plain file: appending to it changes the file outside, and locking it stops the run outside."""
    victim = tmp_path / "victim"
    shutil.copytree(folder, victim)
    (victim / "flower.log").write_bytes(b"not the run's\n")
    before = outside(victim)
    attacked = tmp_path / "new" if new else folder
    attacked.mkdir(exist_ok=True)
    (attacked / name).unlink(missing_ok=True)
    (attacked / name).hardlink_to(victim / name)
    try:
        with pytest.raises(UserError, match=rf"{name} has 2 names .*; copy the folder"):
            list(run_plan(tiny("apfl") if new else None, attacked, resume=not new))
    finally:
        assert outside(victim) == before
    assert not new or [path.name for path in attacked.iterdir()] == [name]  # nothing was begun
    copied = Path(shutil.copytree(attacked, tmp_path / "copied"))  # what the sentence says to do
    if new:
        (copied / name).unlink()
    list(run_plan(tiny("apfl") if new else None, copied, resume=not new))
    assert Store.open(copied).ended
    assert outside(victim) == before


@pytest.mark.parametrize("left", ["rounds.jsonl", "timing.jsonl", "summary.json", "checkpoint"])
def test_a_new_run_takes_over_no_rounds_of_another(folder: Path, tmp_path: Path, left: str) -> None:
    """Its lines would stand before the new run's, and the summary would count them."""
    (folder / "summary.json").write_text("{}")
    new = tmp_path / "new"
    new.mkdir()
    (folder / left).rename(new / left)
    with pytest.raises(UserError, match=rf"holds {left} of a run whose plan.toml is gone"):
        list(run_plan(tiny("apfl"), new))
    assert [path.name for path in new.iterdir()] == [left]


def test_hard_links_to_files_that_are_replaced_whole_are_harmless(folder: Path, tmp_path: Path) -> None:
    """As `cp -al` makes them of checkpoints and v_i: a replaced file is a new one, the other name keeps its bytes."""
    kept = tmp_path / "kept"
    shutil.copytree(folder, kept, copy_function=os.link)
    before = outside(kept)
    for name in ("lock", "rounds.jsonl", "timing.jsonl"):
        shutil.copy2(kept / name, tmp_path / "aside")
        os.replace(tmp_path / "aside", folder / name)
    list(run_plan(None, folder, resume=True))
    assert Store.open(folder).ended
    assert outside(kept) == before


def test_a_link_to_the_whole_folder_is_the_users_own(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to(folder)
    list(run_plan(None, tmp_path / "latest", resume=True))
    assert Store.open(folder).ended


def test_a_lock_is_neither_followed_nor_cut(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_bytes(b"not a lock")
    (tmp_path / "link").symlink_to(kept)
    with pytest.raises(UserError, match="link: cannot be locked"), locked(tmp_path / "link", wait=0, busy=""):
        pass
    with locked(kept, wait=0, busy=""):
        pass
    assert kept.read_bytes() == b"not a lock"
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="pipe: cannot be locked"), locked(tmp_path / "pipe", wait=0, busy=""):
        pass


def test_the_file_written_aside_is_always_a_new_one(tmp_path: Path) -> None:
    """Its name can be foreseen: it has the process's number in it."""
    victim, aside = tmp_path / "victim", tmp_path / f".a.{os.getpid()}"
    victim.write_bytes(b"not the run's")
    aside.symlink_to(victim)
    write_whole(tmp_path / "a", b"new")
    assert (victim.read_bytes(), (tmp_path / "a").read_bytes()) == (b"not the run's", b"new")
    assert not aside.is_symlink()
