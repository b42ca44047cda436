"""MLflow: to the server or the store that MLFLOW_TRACKING_URI names, or to MLflow's own default."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

TAG = "lindt.run"
MOST_VALUES = 500  # MLflow takes up to 1,000 metrics and 100 parameters in one call
MOST_PARAMETERS = 100


def open_run(folder: Path, run: str, name: str, plan: Mapping[str, object], done: int) -> Mlflow:
    from mlflow import MlflowClient

    client = MlflowClient()
    wanted = os.environ.get("MLFLOW_EXPERIMENT_NAME", "lindt")
    found = client.get_experiment_by_name(wanted)
    experiment = found.experiment_id if found else client.create_experiment(wanted)
    # A resumed run is found by its id, so that both parts are one run.
    known = client.search_runs([experiment], f"tags.`{TAG}` = '{run}'", max_results=1) if done else []
    tracked = known[0] if known else client.create_run(experiment, run_name=folder.name, tags={TAG: run, "plan": name})
    return Mlflow(client, tracked.info.run_id, {} if known else plan, done)


@final
class Mlflow:
    def __init__(self, client: Any, run_id: str, plan: Mapping[str, object], done: int) -> None:
        self.client, self.run_id, self.last = client, run_id, done
        self.status = "KILLED"  # until the run has ended
        from mlflow.entities import Param

        parameters = [Param(field, str(value)[:500]) for field, value in plan.items()]
        for start in range(0, len(parameters), MOST_PARAMETERS):
            client.log_batch(run_id, params=parameters[start : start + MOST_PARAMETERS])
        client.update_run(run_id, status="RUNNING")

    def round(self, round: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        self.last, now = round, int(time.time() * 1000)
        metrics = [Metric(name, value, now, round) for name, value in values.items()]
        for start in range(0, len(metrics), MOST_VALUES):
            self.client.log_batch(self.run_id, metrics=metrics[start : start + MOST_VALUES])

    def end(self, values: Mapping[str, float]) -> None:
        self.round(self.last, values)
        self.status = "FINISHED"

    def close(self) -> None:
        self.client.set_terminated(self.run_id, self.status)
