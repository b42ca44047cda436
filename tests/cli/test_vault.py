"""`lindt vault`: what clients of Flower apps keep is listed and deleted, and nothing else is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("flwr")

from lindt.cli.main import app
from lindt.errors import UserError
from lindt.flower.vault import client_home, lock_client


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


MISTAKES = {
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
