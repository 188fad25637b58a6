"""A Flower federation in one process: real ClientApps, mods and messages, without a simulation."""

import copy
import dataclasses
import random
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg
from torch import nn

from spear.federated import fedavg, fedsgd

NODES = (11, 2**63 + 5, 13)  # node ids are 64-bit numbers
BATCH, PIXELS, CLASSES = 5, 192, 5


def net(seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Flatten(), nn.Linear(PIXELS, 120), nn.ReLU(), nn.Linear(120, 40), nn.ReLU(),
            nn.Linear(40, CLASSES),
        )  # fmt: skip


def private(node):
    """What a client holds: inputs (5, 3, 8, 8) in [0, 1], and labels."""
    generator = torch.Generator().manual_seed(node % 1000)
    inputs = torch.rand(BATCH, 3, 8, 8, generator=generator)
    return inputs, torch.randint(CLASSES, (BATCH,), generator=generator)


WIDTH, INPUTS = 24, 120  # of a layer that is too narrow for any one round


def narrow(seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(INPUTS, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(),
            nn.Linear(WIDTH, CLASSES),
        )  # fmt: skip


def many(node, count=WIDTH):
    """What a client of the narrow model holds: as many inputs as the layer has neurons, and labels."""
    generator = torch.Generator().manual_seed(node % 1000)
    inputs = torch.randn(count, INPUTS, generator=generator)
    return inputs, torch.randint(CLASSES, (count,), generator=generator)


def truth(server_round, reply):
    return private(reply.metadata.src_node_id)


def weights(model, inputs, labels, lr):
    return ArrayRecord(fedavg(model, inputs, labels, lr=lr))


def client_app(
    reply: Callable[..., ArrayRecord] = weights, *, model=net, mods=(), metrics=None, held=private
) -> ClientApp:
    """Clients that train for one step; `reply(model, inputs, labels, lr)` is what they send."""
    app = ClientApp()

    @app.train(mods=list(mods))
    def train(msg: Message, context: Context) -> Message:
        local = model()
        record = msg.content.array_records["arrays"]
        arrays = zip(local.state_dict(), record.to_numpy_ndarrays(), strict=True)
        local.load_state_dict({name: torch.from_numpy(value) for name, value in arrays})
        if not mods:  # frugal clients take the record apart; Flower's own mods need it afterwards
            record.clear()
        inputs, labels = held(context.node_id)
        lr = msg.content.config_records["config"].get("lr", 0.05)
        told = {"num-examples": len(inputs), "train_loss": 1.0, **(metrics or {})}
        content = {"arrays": reply(local, inputs, labels, lr), "metrics": MetricRecord(told)}
        return Message(RecordDict(content), reply_to=msg)

    @app.evaluate()
    def evaluate(msg: Message, context: Context) -> Message:
        told = MetricRecord({"num-examples": BATCH, "eval_loss": 1.0})
        return Message(RecordDict({"metrics": told}), reply_to=msg)

    return app


def gradients(model, inputs, labels, lr):
    return ArrayRecord(fedsgd(model, inputs, labels))


def differences(model, inputs, labels, lr):
    after = fedavg(model, inputs, labels, lr=lr)
    return ArrayRecord({name: after[name] - value for name, value in model.state_dict().items()})


class InProcess(Grid):
    """Hands each message to the client app, as a copy, and collects the replies."""

    def __init__(
        self,
        app: ClientApp,
        spoil: Callable[[Message], Message] | None = None,
        nodes: Sequence[int] = NODES,
    ) -> None:
        _be_a_server()
        self.app, self.spoil, self.sent = app, spoil, 0
        self.contexts = {node: Context(1, node, {}, RecordDict(), {}) for node in nodes}

    def send_and_receive(self, messages, *, timeout=None):
        return [self._answer(message) for message in messages]

    def _answer(self, message):
        self.sent += 1
        received = copy.deepcopy(message)
        try:
            reply = self.app(received, self.contexts[message.metadata.dst_node_id])
        except RuntimeError as error:
            reply = Message(Error(0, str(error)), reply_to=received)
        train = message.metadata.message_type == "train"
        return self.spoil(reply) if train and self.spoil else reply

    def get_node_ids(self):
        return list(self.contexts)

    def set_run(self, run):
        raise NotImplementedError

    run = property(set_run)
    create_message = push_messages = pull_messages = set_run


def lone():
    """Federated averaging that is content with a single client."""
    return FedAvg(min_train_nodes=1, min_evaluate_nodes=1, min_available_nodes=1)


def run(
    strategy,
    app=None,
    *,
    rounds=1,
    lr=0.05,
    model=net,
    spoil=None,
    arrays=None,
    nodes=NODES,
    **config,
):
    """Start a strategy on some clients; the result, and the grid."""
    grid = InProcess(app or client_app(), spoil, nodes)
    told = ConfigRecord({**({} if lr is None else {"lr": lr}), **config})
    random.seed(0)  # Flower draws the clients' order from it, and sums in that order
    start = arrays or ArrayRecord(model().state_dict())
    result = strategy.start(grid=grid, initial_arrays=start, num_rounds=rounds, train_config=told)
    return result, grid


def _be_a_server():
    """Later versions of Flower want to know in whose name a message is made."""
    with suppress(ImportError):
        from flwr.supercore.task_identity import TaskIdentity

        TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1


def replaced(array, **fields):
    """A Flower array with other fields than it had."""
    own = {f.name: getattr(array, f.name) for f in dataclasses.fields(array)}
    return type(array)(**{**own, **fields})
