"""The clients: an ordinary ClientApp. Nothing here knows of the audit."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from pictures.task import Net, load_data
from pictures.task import test as test_fn
from pictures.task import train as train_fn

app = ClientApp()


@app.train()
def train(msg: Message, context: Context) -> Message:
    """Train the received model on this client's pictures, and send its weights back."""
    net = Net()
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    partition = context.node_config["partition-id"]
    images, labels, _ = load_data(partition)
    loss = train_fn(net, images, labels, msg.content["config"]["lr"])
    metrics = {"train_loss": loss, "num-examples": len(images), "partition-id": partition}
    content = {"arrays": ArrayRecord(net.state_dict()), "metrics": MetricRecord(metrics)}
    return Message(RecordDict(content), reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    """Evaluate the received model on this client's pictures."""
    net = Net()
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    images, labels, _ = load_data(context.node_config["partition-id"])
    loss, accuracy = test_fn(net, images, labels)
    metrics = {"eval_loss": loss, "eval_acc": accuracy, "num-examples": len(images)}
    return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=msg)
