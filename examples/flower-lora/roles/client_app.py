"""The app on a client: train the shared adapters on its role's text, and test them there."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

import lindt.flower
from roles.task import adapters, own_text, test, train, with_adapters

app = ClientApp()


@app.train()
def train_here(msg: Message, context: Context) -> Message:
    model, windows = with_adapters(msg.content["arrays"].to_torch_state_dict()), own_text(context, "train")
    loss = train(model, windows, context.run_config["local-steps"], rate=0.006)
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(windows)})
    return Message(RecordDict({"arrays": ArrayRecord(adapters(model)), "metrics": metrics}), reply_to=msg)


@app.evaluate()
def evaluate_here(msg: Message, context: Context) -> Message:
    model, windows = with_adapters(msg.content["arrays"].to_torch_state_dict()), own_text(context, "test")
    loss, accuracy, characters = test(model, windows)
    metrics = MetricRecord({"eval_loss": loss, "eval_acc": accuracy, "num-examples": characters})
    return Message(RecordDict({"metrics": metrics}), reply_to=msg)


app = lindt.flower.wrap(app)
