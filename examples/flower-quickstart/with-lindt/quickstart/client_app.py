"""The app on a client: train the shared model on its own data, and test it there."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

import lindt.flower
from quickstart.task import Net, load_data, sgd, test, train


def own(context: Context, split: str):
    return load_data(context.node_config["partition-id"], context.node_config["num-partitions"], split)


app = ClientApp()


@app.train()
def train_here(msg: Message, context: Context) -> Message:
    net, loader = Net(), own(context, "train")
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    loss = train(net, loader, sgd(net.parameters()), context.run_config["local-epochs"])
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(loader.dataset)})
    return Message(RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=msg)


@app.evaluate()
def evaluate_here(msg: Message, context: Context) -> Message:
    net, loader = Net(), own(context, "test")
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    loss, accuracy = test(net, loader)
    metrics = MetricRecord({"eval_loss": loss, "eval_acc": accuracy, "num-examples": len(loader.dataset)})
    return Message(RecordDict({"metrics": metrics}), reply_to=msg)


app = lindt.flower.wrap(app)
