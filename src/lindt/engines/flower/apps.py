"""The ServerApp and the ClientApp that Flower loads: `federate` inside the one, a node's clients inside the other.

`lindt run --engine flower` (engines/flower/launch.py) makes the app folder that names these two. Everything a run needs
is in its run config: the plan, the run's id, the server's folder. The server's folder has the format of any run folder.
"""

from __future__ import annotations

import traceback
from pathlib import Path

from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from lindt.engines.flower.claims import Claims
from lindt.engines.flower.engine import Flower, Timeouts
from lindt.engines.flower.node import answer, identify
from lindt.errors import UserError
from lindt.plan.plan import Plan
from lindt.plan.problem import Problem
from lindt.runs.files import write_whole
from lindt.runs.play import run_plan

FAILURE = "failure.txt"  # in the run's folder: why the ServerApp failed, for the process that follows the run
server_app = ServerApp()
client_app = ClientApp()


@server_app.main()
def serve(grid: Grid, context: Context) -> None:
    """Play the run in the server's folder to its end, from its last checkpoint if there is one."""
    config = context.run_config
    folder = Path(str(config["folder"]))
    patience = Timeouts(*(float(str(config[name])) for name in ("deadline", "gather", "comeback")))

    deployment = "simulated-private" not in config

    def make_engine(plan: Plan, problem: Problem) -> Flower:
        # The nodes of a simulation are processes of this machine, and get other ids at each start.
        claims = Claims.open(folder, str(config["run"])) if deployment else None
        return Flower(grid, plan, problem, patience, claims)

    secret, task = config["noise"] == "system", str(config["task"]) or None
    try:
        for _ in run_plan(
            None,
            folder,
            task=task,
            resume=True,
            engine="flower",
            make_engine=make_engine,
            secret=secret,
            deployment=deployment,
        ):
            pass
    except BaseException as error:
        reason = str(error) if isinstance(error, UserError) else traceback.format_exc()
        write_whole(folder / FAILURE, reason.encode())
        raise


client_app.train()(answer)
client_app.train("alone")(answer)
client_app.evaluate()(answer)
client_app.query("clients")(identify)
