"""The trackers themselves, each with its own local store: what they keep of a run that was stopped and resumed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
TESTS = Path(__file__).parents[1]

PLAY = """
import sys
from pathlib import Path
from worlds import tiny_runtime
from lindt.runs.play import RoundPlayed, run_plan
from lindt.trackers.base import track_events

def complain(text): sys.exit(text)

name, folder = sys.argv[1], Path(sys.argv[2])
events, played = track_events(run_plan(tiny_runtime(), folder), [name], complain), 0
while played < 2:
    played += isinstance(next(events), RoundPlayed)
events.close()
list(track_events(run_plan(None, folder, resume=True), [name], complain))
"""

READ = {
    "tensorboard": """
import json
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
found = EventAccumulator("run/tensorboard")
found.Reload()
delta = [[one.step, one.value] for one in found.Scalars("detection/delta")]
text = found.Tensors("plan/text_summary")[0].tensor_proto.string_val[0].decode()
print(json.dumps({"delta": delta, "end": found.Scalars("end/beta")[-1].value, "epsilon": "epsilon = 1e-06" in text}))
""",
    "mlflow": """
import json
from mlflow import MlflowClient
client = MlflowClient()
runs = client.search_runs([client.get_experiment_by_name("lindt").experiment_id])
assert len(runs) == 1 and runs[0].info.status == "FINISHED"
delta = [[one.step, one.value] for one in client.get_metric_history(runs[0].info.run_id, "detection/delta")]
data = runs[0].data
epsilon = data.params["method.recovery.epsilon"] == "1e-06"
print(json.dumps({"delta": delta, "end": data.metrics["end/beta"], "epsilon": epsilon}))
""",
    # W&B has no reader for its offline files; they are a log of records in blocks of 32 KiB, as LevelDB's.
    "wandb": """
import json, struct
from pathlib import Path
from wandb.proto import wandb_internal_pb2 as proto

def records(raw):
    at, parts = 7, b""
    while at < len(raw):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", raw, at)
        parts, at = parts + raw[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4):
            yield proto.Record.FromString(parts)
            parts = b""

delta, end, epsilon, ids = [], None, False, set()
for path in sorted(Path("run/wandb").glob("offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime):
    for record in records(path.read_bytes()):
        for item in record.history.item:
            if "/".join(item.nested_key) == "detection/delta" or item.key == "detection/delta":
                delta.append([record.history.step.num, json.loads(item.value_json)])
        for item in record.summary.update:
            if "end/beta" in (item.key, "/".join(item.nested_key)):
                end = json.loads(item.value_json)
        for item in record.run.config.update:
            if "method.recovery.epsilon" in (item.key, "/".join(item.nested_key)):
                epsilon = json.loads(item.value_json) == 1e-06
        if record.run.run_id:
            ids.add(record.run.run_id)
assert len(ids) == 1, ids
print(json.dumps({"delta": delta, "end": end, "epsilon": epsilon}))
""",
}


@pytest.mark.parametrize("name", READ)
def test_a_run_that_was_stopped_and_resumed_is_one_run(tmp_path: Path, name: str) -> None:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed: pip install 'lindt[{name}]'")
    settings = os.environ | {
        "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1", "MLFLOW_TRACKING_URI": "sqlite:///mlflow.db",
        "DO_NOT_TRACK": "true", "WANDB_ERROR_REPORTING": "false",
    }  # fmt: skip
    settings.pop("WANDB_MODE", None)  # offline by itself

    def python(*arguments: str) -> str:
        command = [sys.executable, *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=settings, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    python("-c", PLAY, name, "run")
    found = json.loads(python("-c", READ[name]).splitlines()[-1])
    lines = [json.loads(text) for text in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    assert [step for step, _ in found["delta"]] == [1, 2, 3, 4]
    assert [value for _, value in found["delta"]] == pytest.approx([line["delta"] for line in lines], rel=1e-6)
    assert found["end"] == pytest.approx(json.loads((tmp_path / "run" / "summary.json").read_text())["beta"], rel=1e-6)
    assert found["epsilon"] is True
