"""examples/flower-lora: adapters on the wire, one frozen base in a process, two lines; detection and recovery.

Slow: transformers and PEFT.
"""

from __future__ import annotations

import gc
import importlib
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("flwr")
pytest.importorskip("transformers")
pytest.importorskip("peft")

import numpy as np
import torch
from fake_grid import FakeGrid
from flwr.app import Context, RecordDict
from test_wrap_apps import bytes_of, seed
from transformers import GPT2LMHeadModel

from lindt.data.shakespeare import encode, window_pools
from lindt.data.sources import Text
from lindt.errors import UserError

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2] / "examples" / "flower-lora"
SPEECH = "to be or not to be that is the question ", "all the world is a stage and all men players "
CONFIG = {"num-server-rounds": 3, "local-steps": 2, "two-vocabularies": True}


@pytest.fixture
def roles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The app's modules, by their names; the data folder is empty."""
    monkeypatch.setenv("LINDT_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("LINDT_PRIVATE", str(tmp_path / "private"))
    yield lambda folder=ROOT: imported(folder, monkeypatch)
    forget()


def forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in ("roles", "one_process")]:
        del sys.modules[name]
    gc.collect()


def imported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, ModuleType, ModuleType]:
    forget()
    with monkeypatch.context() as patch:
        patch.syspath_prepend(folder)
        task, client, server = (
            importlib.import_module(f"roles.{name}") for name in ("task", "client_app", "server_app")
        )
    return task, client, server


def give_text(task: Any) -> None:
    """Seven roles of one speech over and over: three for the base, four clients."""
    texts = [encode(SPEECH[i % 2] * (30 if i < 4 else 12)) for i in range(7)]
    ends = np.cumsum([len(text) for text in texts])
    pools = window_pools(np.concatenate(texts), ends, [str(i) for i in range(7)], Text(32, 5), 0.2, 0)
    task.windows = lambda: (pools, [0, 1, 2, 3])


def give_made_up_text(task: Any, clients: int) -> None:
    """Random words of one made-up language, for each client and for three roles of the base."""
    letters = random.Random(0)
    pairs = [consonant + vowel for consonant in "bcdfghlmnprstvw" for vowel in "aeiou"]
    words = ["".join(letters.choices(pairs, k=letters.randint(1, 3))) for _ in range(60)]
    weights = [1 / (k + 1) for k in range(60)]
    texts = [encode(" ".join(random.Random(i).choices(words, weights, k=1200))) for i in range(clients + 3)]
    ends = np.cumsum([len(text) for text in texts])
    names = [str(i) for i in range(len(texts))]
    pools = window_pools(np.concatenate(texts), ends, names, Text(32, 5, split="blocked"), 0.2, 0)
    task.windows = lambda: (pools, list(range(clients)))


def play(modules: Any) -> FakeGrid:
    task, client, server = modules
    give_text(task)
    if not task.BASE.exists():
        task.train_base(steps=10)
    seed()  # Python's generator too: FedAvg draws the order of the clients
    grid = FakeGrid(client.app, 4, CONFIG)
    server.main(grid, Context(1, 1, {}, RecordDict(), CONFIG))
    return grid


def shown() -> list[str]:
    found = re.search(r"```diff\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert found
    return found.group(1).splitlines()


def plain(folder: Path) -> Path:
    """The app before the lines that the README shows."""
    for name in ("task", "client_app", "server_app"):
        path = folder / "roles" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        text = (ROOT / "roles" / f"{name}.py").read_text()
        lines, file = shown(), ""
        for before, line in zip(["", *lines], lines, strict=False):
            file = line.removeprefix("+++ ") if line.startswith("+++") else file
            if line.startswith("+") and not line.startswith("+++") and file == f"roles/{name}.py":
                assert text.count(line[1:] + "\n") == 1
                text = text.replace(line[1:], before[1:] if re.match(r"-(?!--)", before) else "")
        path.write_text(text)
    return folder


def test_the_base_is_held_once_and_the_apps_records_are_those_of_the_plain_app(roles: Any, tmp_path: Path) -> None:
    modules = roles()
    wrapped = play(modules)
    task, frozen = modules[0], modules[0].base().get_base_model().transformer.wte.weight
    assert not frozen.requires_grad
    # w, v_i and P_i of all clients went through one model, whose frozen weights are the file's. Its class is compared
    # by identity: isinstance asks lazy objects of torch's for their class, which warns.
    assert len([one for one in gc.get_objects() if type(one) is GPT2LMHeadModel]) == 1
    kept = task.load_file(task.BASE)["transformer.wte.weight"]
    assert torch.equal(frozen, kept)
    sent = wrapped.sent[0].content["arrays"]
    assert all(re.search(r"\.lora_[AB]\.weight$", name) for name in sent)
    size = sum(array.numpy().size for array in sent.values())
    assert size < sum(p.numel() for p in task.untrained().parameters()) / 10
    del frozen, kept, task, modules
    unwrapped = play(roles(plain(tmp_path / "plain")))
    assert all("lindt" not in reply.content for reply in unwrapped.received)
    for theirs, ours in zip(unwrapped.received, wrapped.received, strict=True):
        assert bytes_of(theirs) == bytes_of(ours)


def test_two_vocabularies_are_detected_and_private_adapters_recover(
    roles: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, _, _ = roles()
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.setattr(sys, "path", [*sys.path])  # one_process adds to it
    one_process: Any = importlib.import_module("one_process")
    clients, rounds = 8, 14
    give_made_up_text(task, clients)
    task.TESTS = 30
    task.train_base(steps=300)
    config = {"num-server-rounds": rounds, "local-steps": 10, "two-vocabularies": True}
    result, grid = one_process.play(config, clients, seed=0)
    trained, scored = result.train_metrics_clientapp, result.evaluate_metrics_clientapp
    assert trained[rounds]["lindt-verdict"] == -1  # federation hurts, at level 0.05
    flags = [trained[r]["lindt-recovering"] for r in range(1, rounds + 1)]
    warned = flags.index(1) + 1
    assert 8 <= warned <= 12  # the early warning looks in round 8 first
    assert flags[warned - 1 :] == [1] * (rounds + 1 - warned)
    # v_i, which is not chosen by its score, is better than w: a one-sided test at level 0.025.
    assert trained[rounds]["lindt-recovery-gain"] > 2 * trained[rounds]["lindt-gain-error"]
    before, after = scored[warned - 1], scored[rounds]
    assert before["lindt-local"] == before["lindt-central"]  # clients predict with w
    assert after["lindt-local"] > before["lindt-local"] + 0.05
    # The choice was made on the evaluation's text. On other text of the same roles it holds. One client is scored on
    # 450 characters, so its own difference may be chance (0.03 is about one standard error); the mean of eight is not.
    unread = one_process.scores_on_unread_text(grid).values()
    assert len(unread) == clients
    assert sum(predicts > w for w, predicts, _, _ in unread) >= clients - 2
    means = [mean(scores[i] for scores in unread) for i in (0, 1, 3)]
    assert means[1] > means[0] + 0.05
    assert means[1] > means[2] - 0.02
    assert all(predicts > private - 0.09 for _, predicts, _, private in unread)


def test_without_the_data_or_the_base_it_says_the_command(roles: Any) -> None:
    task, _, _ = roles()
    with pytest.raises(UserError, match="lindt data fetch shakespeare"):
        task.windows()
    with pytest.raises(SystemExit, match=r"python -m roles\.task"):
        task.base()


def test_two_lines_and_their_imports_are_added() -> None:
    added = [line for line in shown() if re.match(r"\+(?!\+\+)", line)]
    assert len(added) == 4
    assert all("lindt" in line or "NFLDetector" in line for line in added)
