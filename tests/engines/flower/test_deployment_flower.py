"""A real deployment on loopback: TLS, registered keys, one SuperLink and its SuperNodes for all tests of this file.

Slow, but in CI. The tests run in this order: the last one starts a SuperNode more. Kills: test_kills_flower.py.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from deployments import BIN, ROOT, importable, lines, show_logs, started, status_at_end, wait_until, write_plan
from worlds import tiny_runtime

from lindt.engines.flower.claims import Claims
from lindt.engines.flower.superlink import SuperLink, end, environment, free_port
from lindt.environment import Environment
from lindt.environment.participation import Sampled
from lindt.environment.privacy import Gaussian
from lindt.plan.plan import Plan, Scoring
from lindt.report.reading import read_run
from lindt.runs.files import unseal_table
from lindt.runs.play import run_plan
from lindt.runs.store import Store

pytestmark = pytest.mark.slow
TASK = "node_task:problem"  # five clients
HOSTS = {
    "host-a": ["0,1,2", "partition-id=0", "num-partitions=10"],
    "host-b": ["3,4", "partition-id=1", "num-partitions=10"],
}


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """As examples/flower-deployment/deploy.py starts it, with two hosts, which take part in wrapped apps, too."""
    folder = tmp_path_factory.mktemp("flower") / "deployment"
    folder.mkdir()
    with importable(), pytest.MonkeyPatch.context() as patch:
        from deploy import deployed

        patch.setenv("LINDT_PRIVATE", str(folder.parent / "private"))  # where wrapped apps keep v_i
        with deployed(folder, HOSTS) as found:
            yield found
    processes = subprocess.run(["ps", "-A", "-ww", "-o", "args="], capture_output=True, text=True, check=True).stdout
    assert str(folder) not in processes  # all that was started has been stopped


def plan_of(rounds: int) -> Plan:
    everybody = Environment(Sampled(rate=1.0), privacy=Gaussian(S=15.0, sigma=0.001))
    return tiny_runtime(patience=1, rounds=rounds, environment=everybody, scoring=Scoring(every=rounds, last=1))


def test_a_node_without_a_registered_key_is_refused(deployment: Any) -> None:
    """An unregistered key, no key, and plain text to TLS."""
    from certificates import make_node_key

    make_node_key(deployment.keys, "unknown")
    address, ca = deployment.address, deployment.keys / "ca.crt"
    nodes = {
        "unknown key": ["--root-certificates", ca, "--auth-supernode-private-key", deployment.keys / "unknown"],
        "no key": ["--root-certificates", ca],
        "plain text": ["--insecure"],
    }
    refused = []
    try:
        for words in nodes.values():
            command = [BIN / "flower-supernode", "--superlink", address, *words, "--isolation", "process"]
            tls = () if "--insecure" in words else (
                *("--ssl-ca-certfile", ca, "--ssl-certfile", deployment.keys / "server.crt"),
                *("--ssl-keyfile", deployment.keys / "server.key"),
            )  # fmt: skip
            extra = ["--max-retries", "1", "--host", "127.0.0.1", "--port", str(free_port()), *tls]
            refused.append(
                subprocess.Popen(
                    [str(word) for word in (*command, *extra)],
                    env=environment(deployment.folder / "unknown"),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                )
            )
        for name, process in zip(nodes, refused, strict=True):
            said, _ = process.communicate(timeout=400)
            assert process.returncode != 0, f"{name}: {said.decode()}"
    finally:
        for process in refused:
            with process:
                process.kill()
    assert len(connected_nodes(deployment)) == len(HOSTS)


def holds_clients(claims: Path) -> bool:
    """Whether the claims are settled: before the first task the file names no holder."""
    return claims.exists() and bool(unseal_table(claims.read_bytes())["holders"])


def connected_nodes(deployment: Any) -> set[int]:
    """As the operator sees them, for a list of --nodes."""
    listed = json.loads(deployment.flwr("supernode", "list", "here", "--format", "json"))["nodes"]
    return {int(one["node-id"]) for one in listed}


def test_a_run_that_fails_on_flower_is_an_exit_code_with_the_reason(deployment: Any, tmp_path: Path) -> None:
    """Nobody is given the time to come: the ServerApp gives up, and the command says why."""
    path = write_plan(plan_of(2), tmp_path / "plan.toml")
    with started(deployment, tmp_path / "run", path, "--task", TASK, "--gather", "0") as run:
        out, err = run.communicate(timeout=600)
    assert run.returncode == 2, out + err
    assert "no client came within 0 s" in err


def test_a_wrapped_app_recovers_behind_tls(deployment: Any, tmp_path: Path) -> None:
    """The quickstart's app on two hosts, by the paper's rule: two rounds decide nothing else."""
    app, run, private = tmp_path / "app", tmp_path / "run", deployment.folder.parent / "private"
    shutil.copytree(ROOT / "examples/flower-quickstart/with-lindt", app, ignore=shutil.ignore_patterns("__pycache__"))
    changes = {
        "pyproject.toml": ("rounds = 30\nfraction-train = 0.5", "rounds = 2\nfraction-train = 1.0"),
        "quickstart/server_app.py": (
            '["fraction-train"]))', f'["fraction-train"]), epsilon=1e-6, patience=0, folder={str(run)!r})'
        ),
    }  # fmt: skip
    for file, (before, after) in changes.items():
        text = (app / file).read_text()
        assert before in text
        (app / file).write_text(text.replace(before, after))
    superlink = SuperLink("here", environment(deployment.folder / "operator"))
    id = superlink.submit(app)
    if (status := status_at_end(superlink, id, run, 900)) != "finished:completed":
        show_logs(deployment)
    assert status == "finished:completed"
    found = lines(run)
    assert [line["round"] for line in found] == [1, 2]
    assert [len(line["answered"]) for line in found] == [2] * 2
    assert [line["flag"] for line in found] == [True] * 2
    assert found[-1]["recovering"]
    assert found[-1]["scores"]["local"] >= found[-1]["scores"]["central"]  # the better of w and v_i
    kept = sorted(path.name for path in private.glob("*/client-*") if any((path / "adapted").iterdir()))
    assert kept == ["client-0", "client-1"]
    assert not [*deployment.folder.rglob("*adapted*"), *run.rglob("*adapted*")]  # nothing of v_i on the server's side


def test_lindt_recovers_with_the_bytes_of_in_process_and_a_stranger_gets_no_task(
    deployment: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Detected in round 2. A registered node that claims every client joins once the run has begun."""
    from deploy import play

    plan = plan_of(rounds=4)
    out, path = deployment.folder / "run", write_plan(plan, tmp_path / "plan.toml")
    deployment.register("stranger")
    with ThreadPoolExecutor(1) as aside:
        patient = ["--gather", "600", "--deadline", "600"]  # far above any run on a busy machine
        played = aside.submit(play, deployment, path, ["--task", TASK, "--noise", "plan", *patient])
        wait_until(lambda: played.done() or holds_clients(out / "nodes.json"), 400, "the nodes' claims")
        deployment.start_node("stranger", "0,1,2,3,4")
        code = played.result(1200)
    nodes = connected_nodes(deployment)
    end(deployment.nodes["stranger"])
    said = capfd.readouterr().out
    if code:
        show_logs(deployment)
    assert code == 0, said
    assert "round 2: NFL suspected" in " ".join(said.split()), said
    assert "host-a keeps 3 v_i" in said
    assert "host-b keeps 2 v_i" in said
    assert "stranger keeps 0 v_i" in said

    list(run_plan(plan, tmp_path / "here", task=TASK, engine="inprocess"))
    store = Store.open(out)
    assert (out / "rounds.jsonl").read_bytes() == (tmp_path / "here/rounds.jsonl").read_bytes()
    assert torch.equal(store.state().w, Store.open(tmp_path / "here").state().w)
    assert [line["flag"] for line in lines(out)] == [False, True, True, True]
    assert all(line["answered"] == [0, 1, 2, 3, 4] for line in lines(out))
    assert not store.private.exists()  # v_i lie on the nodes

    claims = Claims.open(out, store.run)
    owners = {client: holder.node for client, holder in claims.holders.items()}
    assert owners[0] == owners[1] == owners[2] != owners[3] == owners[4]
    (stranger,) = nodes - set(owners.values())
    assert claims.refused == {stranger: {0, 1, 2, 3, 4}}
    note = f"node {stranger} claimed clients 0, 1, 2, 3, 4, which other nodes hold or claim; refused"
    assert note in read_run(out).said
    assert not list((deployment.folder / "stranger/private").glob("*/client-*"))  # no task has reached it
