"""Real deployments and simulations whose processes are killed or answer nonsense. Minutes each: `make torture`."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from deployments import EXAMPLE, ROOT, empty_deployment, finished, lines, started, status_at_end, wait_until, write_plan
from worlds import tiny_runtime

from lindt.engines.flower.superlink import family, kill, simulating
from lindt.plan.plan import Alone, Scoring
from lindt.runs.play import run_plan
from lindt.runs.store import Store

pytestmark = [pytest.mark.slow, pytest.mark.torture]
KILLS = 3


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Any]:
    with empty_deployment(tmp_path / "deployment") as found:
        yield found


def test_killed_superlinks_and_supernodes_change_no_byte(deployment: Any, tmp_path: Path) -> None:
    """At random moments."""
    draw, rounds = random.Random(7), 12
    plan = replace(tiny_runtime(rounds=rounds), alone=Alone(private=False), scoring=Scoring(every=100, last=1))
    list(run_plan(plan, tmp_path / "here", engine="inprocess"))
    hosts = {"host-a": "0,1,2", "host-b": "3,4,5"}
    for name, clients in hosts.items():
        deployment.register(name)
        deployment.start_node(name, clients)
    out, path = tmp_path / "run", write_plan(plan, tmp_path / "plan.toml")
    patient = ("--comeback", "200", "--deadline", "300", "--gather", "200")
    with ExitStack() as runs:
        run = runs.enter_context(started(deployment, out, path, *patient))
        for n in range(KILLS):
            played = len(lines(out))
            wait_until(lambda played=played: len(lines(out)) > played, 200, f"a round before node kill {n + 1}")
            name = draw.choice(list(hosts))
            time.sleep(draw.uniform(0.0, 5.0))  # a moment somewhere in a round
            deployment.kill(deployment.nodes[name])
            deployment.restart_node(name, hosts[name])
        for n in range(KILLS):
            played = len(lines(out))
            wait_until(lambda played=played: len(lines(out)) > played, 300, f"a round before SuperLink kill {n + 1}")
            time.sleep(draw.uniform(0.0, 5.0))  # a moment somewhere in a round
            deployment.kill(deployment.superlink)
            code, said = finished(run, deployment)
            assert code == 2, said
            deployment.start_superlink()
            run = runs.enter_context(started(deployment, out, "--resume", *patient))
        code, said = finished(run, deployment, 400)
    assert code == 0, said
    assert (out / "rounds.jsonl").read_bytes() == (tmp_path / "here/rounds.jsonl").read_bytes()
    assert torch.equal(Store.open(out).state().w, Store.open(tmp_path / "here").state().w)
    sys.__stdout__.write(f"FIGURE kills_of_supernodes={KILLS} kills_of_superlink={KILLS} same_bytes=1\n")  # type: ignore[union-attr]


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
    with started(deployment, out, *words) as run:
        v_2 = deployment.folder / "host-b/private"
        wait_until(lambda: len(lines(out)) >= 2, 600, "round 2")
        kept = {path: path.read_bytes() for path in v_2.glob("*/client-00002/round-000002.safetensors")}
        assert len(kept) == 1  # recovering since round 2
        wait_until(
            lambda: any(v_2.glob("*/*/round-000003.safetensors")) or len(lines(out)) >= 3, 60, "host-b's round 3"
        )
        deployment.kill(first)
        deployment.restart_node("host-b", "2,3")
        wait_until(lambda: len(lines(out)) >= 3, 300, "the end of round 3")
        deployment.kill(bad)  # it would hang for ever

        wait_until(lambda: {2, 3} <= set(lines(out)[-1]["answered"]) and len(lines(out)) > 3, 300, "host-b's return")
        deployment.kill(deployment.superlink)
        code, said = finished(run, deployment)
        assert code == 2, said
        state = Store.open(out).state()
        assert 4 <= state.round < 9
        assert (state.recovery.count, state.recovery.on) == (state.round, True)
    deployment.start_superlink()
    deployment.restart_node("host-c", "4")  # mended
    with started(deployment, out, "--resume", "--task", "node_task:problem") as run:
        code, said = finished(run, deployment)
    assert code == 0, said

    found = lines(out)
    assert [line["round"] for line in found] == list(range(1, 10))
    assert [line["count"] for line in found] == list(range(1, 10))  # not one lost, not one twice
    assert [line["flag"] for line in found] == [True] * 9
    refused = {line["round"]: {r["client"]: r["reason"] for r in line["refused"]} for line in found}
    assert refused[1][4] == "its weights hold NaN or infinity"
    assert refused[2][4] == "it has 81 weights, the model 82"
    assert found[0]["answered"] == found[1]["answered"] == [0, 1, 2, 3]
    assert 4 not in found[2]["answered"]
    assert {0, 1} <= set(found[2]["answered"])
    assert found[-1]["answered"] == [0, 1, 2, 3, 4]  # everybody is back, host-b with what it had
    versions = sorted(int(p.stem.removeprefix("round-")) for p in v_2.glob("*/client-00002/round-*.safetensors"))
    assert versions[-1] == 9
    for path, content in kept.items():
        assert not path.exists() or path.read_bytes() == content


def test_the_example_detects_recovers_and_has_the_bytes_of_in_process(tmp_path: Path) -> None:
    """LINDT, five rounds; the script starts four processes, and none is left when it ends."""
    plan = tiny_runtime(patience=1, rounds=5, scoring=Scoring(every=5, last=1))
    path = write_plan(plan, tmp_path / "plan.toml")
    command = [sys.executable, EXAMPLE / "deploy.py", "--folder", tmp_path / "deployed", "--plan", path, "--noise=plan"]
    with subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True) as script:
        try:
            said, _ = script.communicate(timeout=900)
        finally:
            if script.poll() is None:
                kill(family(script.pid))
    assert script.returncode == 0, said
    assert "round 2: NFL suspected" in " ".join(said.split()), said
    assert re.search(r"host-a keeps [12] v_i", said)
    list(run_plan(plan, tmp_path / "here", engine="inprocess"))
    there = tmp_path / "deployed/run"
    assert (there / "rounds.jsonl").read_bytes() == (tmp_path / "here/rounds.jsonl").read_bytes()
    assert torch.equal(Store.open(there).state().w, Store.open(tmp_path / "here").state().w)
    assert not Store.open(there).private.exists()
    assert (
        str(tmp_path / "deployed") not in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    )


def pid_at(address: tuple[str, int] | None) -> int:
    assert address
    listed = subprocess.run(["ps", "-A", "-ww", "-o", "pid=,args="], capture_output=True, text=True, check=True).stdout
    found = [line for line in listed.splitlines() if "flower-superlink" in line and f"--port {address[1]}" in line]
    return int(found[0].split()[0])


def test_the_quickstarts_app_goes_on_after_a_kill_of_the_simulation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`flwr run` as a user calls it, with Ray; the SuperLink is killed on the way, the app started again goes on."""
    pytest.importorskip("ray")
    monkeypatch.setenv("LINDT_PRIVATE", str(tmp_path / "private"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    app = tmp_path / "app"
    shutil.copytree(ROOT / "examples/flower-quickstart/with-lindt", app, ignore=shutil.ignore_patterns("__pycache__"))
    text = (app / "pyproject.toml").read_text()
    (app / "pyproject.toml").write_text(text.replace("num-server-rounds = 30", "num-server-rounds = 8"))
    server = app / "quickstart" / "server_app.py"
    run = tmp_path / "run"
    plain, ours = '["fraction-train"]))', f'["fraction-train"]), epsilon=0.4, patience=5, folder={str(run)!r})'
    assert plain in server.read_text()
    server.write_text(server.read_text().replace(plain, ours))  # by the paper's rule: 8 rounds decide nothing else

    with simulating(tmp_path / "home", tmp_path / "log", 10) as superlink:
        superlink.submit(app)
        wait_until(lambda: len(lines(run)) >= 4, 400, "round 4")
        kill(family(pid_at(superlink.address)))  # kill -9: the ServerApp, Ray and its actors go with it
    before = lines(run)
    assert 4 <= len(before) < 8
    with simulating(tmp_path / "home", tmp_path / "log", 10) as superlink:
        id = superlink.submit(app)
        assert status_at_end(superlink, id, run, 400) == "finished:completed"
    assert lines(run)[: len(before) - 1] == before[:-1]  # the last one may have been played again
    assert [line["round"] for line in lines(run)] == list(range(1, 9))
    assert [line["flag"] for line in lines(run)] == [False] * 5 + [True] * 3
    assert lines(run)[-1]["scores"]["local"] > lines(run)[-1]["scores"]["central"]
    assert json.loads((run / "summary.json").read_text())["detected_at"] == [6]
    assert len(list((tmp_path / "private").glob("*/client-*/adapted"))) >= 5
