"""A real deployment on loopback: TLS, registered keys, processes that are really killed. Slow, but in CI."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from worlds import tiny_runtime

from lindt.engines.flower.superlink import environment, free_port
from lindt.plan.file import to_dict
from lindt.plan.plan import METHODS, Alone, Plan, Scoring
from lindt.runs.play import run_plan
from lindt.runs.store import Store

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples/flower-deployment"
BIN = Path(sys.executable).parent

pytestmark = pytest.mark.slow


def write_plan(plan: Plan, path: Path) -> Path:
    path.write_text(tomli_w.dumps(to_dict(plan)))
    return path


def wait_until(happened: Any, seconds: float, what: str) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, f"{what} did not happen within {seconds} s"
        time.sleep(0.2)


@pytest.fixture
def deployment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An empty one: certificates and a SuperLink. Modules of this folder can be imported on every host."""
    monkeypatch.syspath_prepend(EXAMPLE)
    monkeypatch.syspath_prepend(Path(__file__).parent)
    from hosts import Deployment

    (tmp_path / "deployment").mkdir()
    found = Deployment(tmp_path / "deployment")
    try:
        found.start_superlink()
        yield found
    finally:
        found.stop()


started: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def _none_left() -> Iterator[None]:
    yield
    for process in started:
        with process:  # closes its pipes and waits
            if process.poll() is None:
                process.kill()
    started.clear()


def start(deployment: Any, out: Path, *words: str) -> subprocess.Popen[str]:
    command = [
        *(BIN / "lindt", "run", "--engine", "flower", "--out", out, "--json", "--noise", "plan"),
        *("--superlink", deployment.address, "--root-certificates", deployment.keys / "ca.crt", *words),
    ]
    env = environment() | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), str(ROOT)])}
    process = subprocess.Popen(
        [str(word) for word in command], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    started.append(process)
    return process


def finished(process: subprocess.Popen[str], deployment: Any, seconds: float = 300) -> tuple[int, str]:
    out, err = process.communicate(timeout=seconds)
    if process.returncode:
        for log in deployment.folder.glob("*.log"):
            sys.stdout.write(f"--- {log.name}\n{log.read_text()[-3000:]}\n")
    return process.returncode, out + err


def test_the_example_detects_recovers_and_has_the_bytes_of_in_process(tmp_path: Path) -> None:
    """LINDT, five rounds; the script starts four processes, and none is left when it ends."""
    plan = tiny_runtime(patience=1, rounds=5, scoring=Scoring(every=5, last=1))
    path = write_plan(plan, tmp_path / "plan.toml")
    command = [sys.executable, EXAMPLE / "deploy.py", "--folder", tmp_path / "deployed", "--plan", path, "--noise=plan"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "round 2: NFL suspected" in " ".join(done.stdout.split()), done.stdout
    assert re.search(r"host-a keeps [12] v_i", done.stdout)
    list(run_plan(plan, tmp_path / "here", engine="inprocess"))
    there = tmp_path / "deployed/run"
    assert (there / "rounds.jsonl").read_bytes() == (tmp_path / "here/rounds.jsonl").read_bytes()
    assert torch.equal(Store.open(there).state().w, Store.open(tmp_path / "here").state().w)
    assert not Store.open(there).private.exists()
    assert (
        str(tmp_path / "deployed") not in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    )


@pytest.mark.torture  # three minutes; the Grid of fake_grid.py shows the same in the quick suite
def test_fedavg_and_lindt_tm_have_the_bytes_of_in_process(deployment: Any, tmp_path: Path) -> None:
    for name, clients in (("host-a", "0,1,2"), ("host-b", "3,4,5")):
        deployment.register(name)
        deployment.start_node(name, clients)
    for method in ("fedavg", "lindt-tm"):
        plan = replace(tiny_runtime(rounds=5), method=METHODS[method], alone=Alone(private=False))
        out = tmp_path / method
        code, said = finished(start(deployment, out, str(write_plan(plan, tmp_path / f"{method}.toml"))), deployment)
        assert code == 0, said
        list(run_plan(plan, tmp_path / f"{method}-here", engine="inprocess"))
        assert (out / "rounds.jsonl").read_bytes() == (tmp_path / f"{method}-here/rounds.jsonl").read_bytes()
        assert torch.equal(Store.open(out).state().w, Store.open(tmp_path / f"{method}-here").state().w)


def lines(out: Path) -> list[dict[str, Any]]:
    path = out / "rounds.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_faults_cost_answers_and_never_the_run(deployment: Any, tmp_path: Path) -> None:
    """Host-b is killed in the round that host-c hangs in, and comes back; later the SuperLink is killed, too."""
    deployment.register("host-a"), deployment.register("host-b"), deployment.register("host-c")
    deployment.start_node("host-a", "0,1")
    first = deployment.start_node("host-b", "2,3")
    bad = deployment.start_node("host-c", "4", 'task="spoilt_task:problem"')

    out = tmp_path / "run"
    words = ["--task", "node_task:problem", "--deadline", "45", "--rounds", "9"]
    sets = ["environment.participation.rate=1.0", "detection=delta", "method=runtime",
            "method.recovery.epsilon=1e-6", "method.recovery.patience=0",
            "scoring.every=100", "scoring.last=1", "alone.private=false"]  # fmt: skip
    words += [word for assignment in sets for word in ("--set", assignment)]
    run = start(deployment, out, *words)
    v_2 = deployment.folder / "host-b/private"
    wait_until(lambda: len(lines(out)) >= 2, 200, "round 2")
    kept = {path: path.read_bytes() for path in v_2.glob("*/client-00002/round-000002.safetensors")}
    assert len(kept) == 1  # recovering since round 2
    wait_until(lambda: any(v_2.glob("*/*/round-000003.safetensors")) or len(lines(out)) >= 3, 60, "host-b's round 3")
    deployment.kill(first)
    check_strangers(deployment)  # while the round waits for host-c until its deadline
    deployment.restart_node("host-b", "2,3")
    wait_until(lambda: len(lines(out)) >= 3, 100, "the end of round 3")
    deployment.kill(bad)  # it would hang for ever

    wait_until(lambda: {2, 3} <= set(lines(out)[-1]["answered"]) and len(lines(out)) > 3, 150, "host-b's return")
    deployment.kill(deployment.superlink)
    code, said = finished(run, deployment)
    assert code == 2, said
    state = Store.open(out).state()
    assert 4 <= state.round < 9
    assert (state.recovery.count, state.recovery.on) == (state.round, True)
    deployment.start_superlink()
    deployment.restart_node("host-c", "4")  # mended
    code, said = finished(start(deployment, out, "--resume", "--task", "node_task:problem"), deployment)
    assert code == 0, said

    found = lines(out)
    assert [line["round"] for line in found] == list(range(1, 10))
    assert [line["count"] for line in found] == list(range(1, 10))  # not one lost, not one twice
    assert [line["flag"] for line in found] == [True] * 9
    refused = {line["round"]: {r["client"]: r["reason"] for r in line["refused"]} for line in found}
    assert refused[1][4] == "NaN or infinity among the weights"
    assert re.fullmatch(r"81 weights where the model has 82", refused[2][4])
    assert found[0]["answered"] == found[1]["answered"] == [0, 1, 2, 3]
    assert 4 not in found[2]["answered"]
    assert {0, 1} <= set(found[2]["answered"])
    assert found[-1]["answered"] == [0, 1, 2, 3, 4]  # everybody is back, host-b with what it had
    versions = sorted(int(p.stem.removeprefix("round-")) for p in v_2.glob("*/client-00002/round-*.safetensors"))
    assert versions[-1] == 9
    for path, content in kept.items():
        assert not path.exists() or path.read_bytes() == content


def check_strangers(deployment: Any) -> None:
    """An unregistered key, no key, and plain text to TLS: all refused."""
    from certificates import make_node_key

    make_node_key(deployment.keys, "stranger")
    address, ca = deployment.address, deployment.keys / "ca.crt"
    nodes = [
        ["--root-certificates", ca, "--auth-supernode-private-key", deployment.keys / "stranger"],
        ["--root-certificates", ca],
        ["--insecure"],
    ]
    strangers = []
    for words in nodes:
        command = [BIN / "flower-supernode", "--superlink", address, *words, "--isolation", "process"]
        tls = () if "--insecure" in words else (
            *("--ssl-ca-certfile", ca, "--ssl-certfile", deployment.keys / "server.crt"),
            *("--ssl-keyfile", deployment.keys / "server.key"),
        )  # fmt: skip
        extra = ["--max-retries", "1", "--host", "127.0.0.1", "--port", str(free_port()), *tls]
        env = environment(deployment.folder / "stranger")
        strangers.append(
            subprocess.Popen(
                [str(word) for word in (*command, *extra)], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
        )
    try:
        for process in strangers:
            said, _ = process.communicate(timeout=90)
            assert process.returncode != 0, said.decode()
    finally:
        for process in strangers:
            if process.poll() is None:
                process.kill()
                process.wait()
    listed = json.loads(deployment.flwr("supernode", "list", "here", "--format", "json"))
    assert len(listed["nodes"]) == 3
