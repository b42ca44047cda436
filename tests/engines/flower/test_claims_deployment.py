"""A registered node that claims the clients of others, at a real deployment with TLS and registered keys. Slow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_deployment_flower import deployment, finished, lines, start, wait_until

from lindt.engines.flower.claims import Claims
from lindt.report.reading import read_run
from lindt.runs.play import run_plan
from lindt.runs.store import Store

pytestmark = pytest.mark.slow
__all__ = ["deployment"]


def test_a_registered_node_that_claims_every_client_gets_no_training_message(deployment: Any, tmp_path: Path) -> None:
    """It joins once the run has begun, as a host with all client numbers in its --node-config."""
    for name in ("host-a", "host-b", "stranger"):
        deployment.register(name)
    deployment.start_node("host-a", "0,1,2")
    deployment.start_node("host-b", "3,4")
    out, sets = tmp_path / "run", ["method=fedavg", "environment.participation.rate=1.0", "detection=delta",
                                   "scoring.every=100", "scoring.last=1", "alone.private=false"]  # fmt: skip
    words = [word for assignment in sets for word in ("--set", assignment)]
    run = start(deployment, out, "--task", "node_task:problem", "--rounds", "4", *words)
    wait_until(lambda: (out / "nodes.json").exists(), 100, "the nodes' claims")
    deployment.start_node("stranger", "0,1,2,3,4")
    code, said = finished(run, deployment)
    assert code == 0, said

    store = Store.open(out)
    claims = Claims.open(out, store.run)
    owners = {client: holder.node for client, holder in claims.holders.items()}
    assert owners[0] == owners[1] == owners[2] != owners[3] == owners[4]
    ids = {
        int(one["node-id"])
        for one in json.loads(deployment.flwr("supernode", "list", "here", "--format", "json"))["nodes"]
    }
    (stranger,) = ids - set(owners.values())  # as the operator sees them, for a list of --nodes
    assert claims.refused == {stranger: {0, 1, 2, 3, 4}}
    note = f"node {stranger} claimed clients 0, 1, 2, 3, 4, which other nodes hold or claim; refused"
    assert note in read_run(out).said
    assert all(line["answered"] == [0, 1, 2, 3, 4] for line in lines(out))
    assert not list((deployment.folder / "stranger/private").glob("*/client-*"))  # no task has reached it
    list(run_plan(store.plan(), tmp_path / "here", task="node_task:problem", engine="inprocess"))
    assert torch.equal(store.state().w, Store.open(tmp_path / "here").state().w)
