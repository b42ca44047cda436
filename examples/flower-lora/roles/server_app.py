"""The app on the server: average the adapters that the clients send back."""

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from lindt.flower import NFLDetector
from roles.task import adapters, base

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    arrays = ArrayRecord(adapters(base()))
    strategy = NFLDetector(FedAvg())
    strategy.start(grid, arrays, num_rounds=config["num-server-rounds"])
