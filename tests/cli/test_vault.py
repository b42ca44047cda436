"""`lindt vault`: what clients of Flower apps keep is listed and deleted, and nothing else is."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("flwr")

from flwr.app import RecordDict

from lindt.cli.main import app
from lindt.errors import UserError
from lindt.flower.client_store import ClientStore
from lindt.flower.messages import Instruction
from lindt.flower.vault import Vault, client_home, lock_client


@pytest.fixture
def vault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LINDT_PRIVATE", str(tmp_path / "vault"))
    for experiment, client, size in (("one", "a", 1000), ("one", "b/c", 500), ("two", "a", 2000)):
        home = client_home(tmp_path / "vault", experiment, client)
        (home / "adapted").mkdir(parents=True)
        (home / "adapted" / "round-000001.model").write_bytes(b"x" * size)
    (tmp_path / "vault" / "notes").mkdir()
    return tmp_path / "vault"


def call(*words: str) -> str:
    done = CliRunner().invoke(app, ["vault", *words])
    if done.exception is not None:
        raise done.exception
    return done.output


def test_experiments_are_listed_with_clients_and_bytes(vault: Path) -> None:
    rows = {row["experiment"]: row for row in map(json.loads, call("list", "--json").splitlines())}
    assert {name: (row["clients"], row["bytes"]) for name, row in rows.items()} == {"one": (2, 1500), "two": (1, 2000)}
    assert "2.0 kB" in call("list")
    assert "no client keeps a model here" in call("list", "--folder", str(vault / "notes"))


def test_one_experiment_is_deleted_and_the_rest_stays(vault: Path) -> None:
    assert call("clear", "one") == "one: deleted\n"
    assert sorted(path.name for path in vault.iterdir()) == ["notes", "two"]
    call("clear", "--all")
    assert [path.name for path in vault.iterdir()] == ["notes"]


def test_what_was_left_alone_for_days_is_deleted(vault: Path) -> None:
    for path in [*(vault / "one").rglob("*"), vault / "one"]:
        os.utime(path, (time.time() - 10 * 86400,) * 2)
    assert "nothing was deleted" in call("clear", "--older-than", "11")
    assert call("clear", "--older-than", "9") == "one: deleted\n"
    assert sorted(path.name for path in vault.iterdir()) == ["notes", "two"]


MISTAKES = {
    "--all --older-than 3": "or give --all, or --older-than DAYS",
    "--older-than -1": "give a number of days",
    "--older-than nan": "give a number of days",
    "notes": "no such experiment",
    "..": "no such experiment",
    "": "or give --all",
    "one --all": "or give --all",
}


@pytest.mark.parametrize(("words", "said"), MISTAKES.items())
def test_nothing_is_deleted_by_a_mistake(vault: Path, words: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        call("clear", *words.split())
    assert sorted(path.name for path in vault.iterdir()) == ["notes", "one", "two"]


def test_a_client_that_trains_keeps_all_of_them(vault: Path) -> None:
    with lock_client(client_home(vault, "two", "a")), pytest.raises(UserError, match="a process trains this client"):
        call("clear", "--all")
    assert sorted(path.name for path in vault.iterdir()) == ["notes", "one", "two"]


def test_links_lead_nowhere(vault: Path, tmp_path: Path) -> None:
    (tmp_path / "outside" / "client-x").mkdir(parents=True)
    (vault / "link").symlink_to(tmp_path / "outside")
    call("clear", "--all")
    assert (tmp_path / "outside" / "client-x").is_dir()
    assert (vault / "link").is_symlink()


def test_folders_of_other_programs_are_no_experiments(vault: Path) -> None:
    """A web project has a folder client-app, too, and a run keeps its v_i in client-00000."""
    for place in ("project/client-app/index.ts", "run/client-00000/round-000001.safetensors", "one/notes.txt"):
        (vault / place).parent.mkdir(parents=True, exist_ok=True)
        (vault / place).write_text("the user's")
    assert [json.loads(line)["experiment"] for line in call("list", "--json").splitlines()] == ["two"]
    call("clear", "--all")
    assert sorted(path.name for path in vault.iterdir()) == ["notes", "one", "project", "run"]
    with pytest.raises(UserError, match="no such experiment"):
        call("clear", "project")


def test_all_that_a_client_writes_may_be_deleted(vault: Path) -> None:
    """Of both kinds of clients, with a file that a killed client wrote aside."""
    client = Vault(vault, "two", "a")
    client.keep_choice("v_i")
    client.keep_evaluation("evaluate", RecordDict())
    client.begin_session(Instruction("two", "s", 0, 1, 0, recovering=True))
    client.set_aside_moved({"a": "1"}, ("train", "s"))
    client.set_aside_moved({"a": "2"}, ("train", "t"))  # adapted goes into aside
    (client.home / ".choice.123").write_bytes(b"half")
    dual = ClientStore(vault, "one", "a")
    with dual.locked():
        dual.begin_session(Instruction("one", "s", 0, 1, 0, recovering=True))
        for name in ("v", "alone.safetensors", "alone.damaged", "alone.session"):
            (dual.home / name).touch()
    call("clear", "--all")
    assert [path.name for path in vault.iterdir()] == ["notes"]
