"""v_i on a client's own disk: whole or not at all, one process at a time, keyed by experiment and client."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path

import pytest

pytest.importorskip("flwr")

import torch
from safetensors.torch import save
from small_apps import heard
from torch import Tensor, nn

from lindt.errors import PlanError, UserError
from lindt.flower.client_store import AloneScores, ClientStore
from lindt.flower.protocol import Instruction
from lindt.flower.vault import default_folder
from lindt.runs.files import seal


def instruction(round: int, *, session: str = "s", since: int = 0, keep: int = 0) -> Instruction:
    return Instruction("exp", session, since, round, keep, True)


def store(folder: Path, experiment: str = "exp", client: str = "0") -> ClientStore:
    found = ClientStore(folder, experiment, client)
    found.open()
    return found


def model(value: float, width: int = 2) -> nn.Module:
    made = nn.Linear(width, 1)
    nn.init.constant_(made.weight, value)
    return made


def value_in(kept: ClientStore, up_to: int) -> float | None:
    found = model(0.0)
    return float(found.weight.detach()[0, 0]) if kept.read(found, up_to=up_to) else None


def test_it_survives_a_restart_and_is_keyed_by_experiment_and_client(tmp_path: Path) -> None:
    store(tmp_path).write(model(7.0), instruction(3))
    assert value_in(store(tmp_path), 3) == 7.0  # another object, as another process has
    assert value_in(store(tmp_path), 2) is None  # training in round 3 again finds what it found before
    assert value_in(store(tmp_path, client="1"), 3) is None
    assert value_in(store(tmp_path, experiment="other"), 3) is None


def test_a_crash_while_writing_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = store(tmp_path)
    kept.write(model(1.0), instruction(1))

    def crash(*arguments: object) -> None:
        raise OSError("power cut")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", crash)
        with pytest.raises(OSError, match="power cut"):
            kept.write(model(2.0), instruction(2))
    assert value_in(kept, 2) == 1.0
    assert len(list(tmp_path.rglob("*.safetensors"))) == 1
    assert not [path for path in tmp_path.rglob(".*") if path.is_file()]


def test_nothing_is_renamed_before_it_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    sync, rename = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (done.append("sync"), sync(fd))[1])
    monkeypatch.setattr(os, "replace", lambda a, b: (done.append("rename"), rename(a, b))[1])
    store(tmp_path).write(model(1.0), instruction(1))
    assert done == ["sync", "rename", "sync"]  # the file, the name, the folder


def test_a_v_i_gone_to_nan_is_not_kept(tmp_path: Path) -> None:
    kept = store(tmp_path)
    assert kept.write(model(1.0), instruction(1))
    assert not kept.write(model(float("nan")), instruction(2))
    assert value_in(kept, 2) == 1.0


def test_one_that_does_not_fit_the_model_is_refused(tmp_path: Path) -> None:
    kept = store(tmp_path)
    kept.write(model(1.0, width=5), instruction(1))
    with pytest.raises(UserError, match=r"v_i does not fit the model \(first at weight"):
        kept.read(model(0.0), up_to=1)
    with pytest.raises(UserError, match="does not fit"):
        kept.read(nn.Sequential(nn.Linear(5, 1)), up_to=1)
    (path,) = tmp_path.rglob("*.safetensors")
    path.write_bytes(b"\x00" * 100)
    with pytest.raises(UserError, match="damaged"):
        kept.read(model(0.0, width=5), up_to=1)


def test_a_new_session_forgets_what_never_happened(tmp_path: Path) -> None:
    kept = store(tmp_path)
    kept.begin_session(instruction(1))
    for round in (1, 2, 3):
        kept.write(model(float(round)), instruction(round))
    kept.begin_session(instruction(4))  # the same session
    assert value_in(kept, 9) == 3.0
    kept.begin_session(instruction(3, session="again", since=2))  # the server went on from round 2
    assert value_in(kept, 9) == 2.0


def test_old_versions_go(tmp_path: Path) -> None:
    kept = store(tmp_path)
    for round in (1, 2, 5, 7):
        kept.write(model(float(round)), instruction(round, keep=max(0, round - 2)))
    assert sorted(kept.rounds()) == [5, 7]


def test_one_holder_a_client(tmp_path: Path) -> None:
    """A lock belongs to the file that was opened, not to the process: two vaults here are as two processes are."""
    holder = store(tmp_path).locked()
    holder.__enter__()
    with (
        pytest.raises(UserError, match="another process has trained this client"),
        store(tmp_path).locked(wait=0.2),
    ):
        pass
    with store(tmp_path, client="1").locked(wait=0.2):  # another client is free
        pass
    release = threading.Timer(0.3, holder.__exit__, (None, None, None))
    release.start()
    with store(tmp_path).locked(wait=20):  # it is waited for
        release.join()


@pytest.mark.parametrize("name", ["..", "../../x", "a/b", "", "x" * 300, "Würzburg 3"])
def test_no_name_leads_out_of_the_folder(name: str, tmp_path: Path) -> None:
    if not 0 < len(name) < 200:
        with pytest.raises(PlanError, match="client_id"):
            store(tmp_path, client=name)
        return
    home = store(tmp_path / "private", client=name).home
    assert home.resolve().is_relative_to((tmp_path / "private" / "exp").resolve())
    assert home.is_dir()


def test_where_it_lies_by_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LINDT_PRIVATE", str(tmp_path))
    assert default_folder() == tmp_path
    monkeypatch.delenv("LINDT_PRIVATE")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert default_folder() == tmp_path / "data" / "lindt" / "private"


def test_the_private_score_is_kept_for_the_same_key(tmp_path: Path) -> None:
    kept, scores = store(tmp_path), torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)
    assert kept.read_alone("a", 3) is None
    kept.write_alone("a", AloneScores(scores), model(1.0))
    found = kept.read_alone("a", 3)
    assert found is not None
    assert found.test_n.tolist() == [1.0, 0.0, 1.0]
    assert kept.read_alone("b", 3) is None
    assert kept.read_alone("a", 4) is None


SCORES = torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)


def set_aside(kept: ClientStore, content: bytes, reason: str) -> None:
    """`content` in the place of the private model: not believed, moved away, and said."""
    (kept.home / "alone.safetensors").write_bytes(content)
    with heard() as said:
        assert kept.read_alone("a", 3) is None
    assert (kept.home / "alone.damaged").read_bytes() == content
    assert not (kept.home / "alone.safetensors").exists()
    assert len(said) == 1
    assert re.search(rf"alone.safetensors does not fit \(.*{reason}.*\); it is set aside as .damaged, .* anew", said[0])


def test_every_flipped_byte_of_the_private_model_is_noticed(tmp_path: Path) -> None:
    """A flipped sign of a score is a score: only the checksum can tell. In the header, spaces are no content."""
    kept = store(tmp_path)
    kept.write_alone("a", AloneScores(SCORES), model(1.0))
    whole = (kept.home / "alone.safetensors").read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    for place in range(header, len(whole)):
        set_aside(kept, whole[:place] + bytes([whole[place] ^ 0x80]) + whole[place + 1 :], "checksum is wrong")
    for place in range(header):
        (kept.home / "alone.safetensors").write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        found = kept.read_alone("a", 3)
        assert found is None or torch.equal(found.test_n, SCORES)
    for length in range(0, len(whole), 7):
        set_aside(kept, whole[:length], "")


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"scores": torch.tensor([1.0, float("nan"), 0.0])}, "NaN or infinity"),
        ({"scores": torch.tensor([1.0, float("inf"), 0.0])}, "NaN or infinity"),
        ({"scores": torch.tensor([1, 0, 1])}, "scores is missing, or has a wrong shape or type"),
        ({}, "scores is missing"),
        ({"scores": SCORES, "validation": torch.zeros(2, 5)}, "only one of validation and rows is present"),
        ({"scores": SCORES, "validation": torch.zeros(2, 5), "rows": torch.arange(4)}, "validation or rows"),
        ({"scores": SCORES, "validation": torch.full((2, 5), torch.nan), "rows": torch.arange(5)}, "NaN or infinity"),
    ],
)
def test_a_sealed_file_that_can_be_no_private_model_is_set_aside(
    tmp_path: Path, tensors: dict[str, Tensor], reason: str
) -> None:
    set_aside(store(tmp_path), seal(tensors, {"key": "a"}), reason)


def test_the_unsealed_file_of_an_earlier_version_is_set_aside(tmp_path: Path) -> None:
    """Whether its numbers are as they were written cannot be told."""
    set_aside(store(tmp_path), save({"scores": SCORES}, {"key": "a"}), "it has no checksum")


def test_a_pipe_in_its_place_is_not_waited_for(tmp_path: Path) -> None:
    kept = store(tmp_path)
    os.mkfifo(kept.home / "alone.safetensors")
    assert kept.read_alone("a", 3) is None
    assert (kept.home / "alone.damaged").is_fifo()


def test_scores_of_a_model_that_diverged_are_not_kept(tmp_path: Path) -> None:
    """Neither is the file of other settings before: unkeyed reads of the session would take it for this one's."""
    kept = store(tmp_path)
    assert kept.write_alone("a", AloneScores(SCORES), model(1.0))
    assert not kept.write_alone("b", AloneScores(SCORES * torch.nan), model(1.0))
    assert kept.read_alone(None) is None
