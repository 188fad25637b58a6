"""A plain Flower app over twenty rounds, with the two lines of the audit added.

    SPEAR_DATA=... OMP_NUM_THREADS=1 python benchmarks/flower_rounds.py [--help]

An app like Flower's quickstart, in Flower's own simulation: clients with pictures of CIFAR-10, a
network of three linear layers, SGD, FedAvg. It leaves flower-rounds.html where it is called, and prints
the verdict and the report's first table. Clients shuffle by the clock: runs differ in the last digits.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import nn

from spear.data import cifar10
from spear.integrations.flower import Audited
from spear.integrations.ray_session import loopback_cluster


def network(neurons: int) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        *(nn.Linear(3 * 32 * 32, neurons), nn.ReLU()),
        *(nn.Linear(neurons, 84), nn.ReLU(), nn.Linear(84, 10)),
    )


def clients(told: argparse.Namespace) -> ClientApp:
    app = ClientApp()
    root = Path(os.environ["SPEAR_DATA"])

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        net = network(told.neurons)
        net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
        first = int(context.node_config["partition-id"]) * told.samples
        images, labels = cifar10(root).batch(list(range(first, first + told.samples)))
        optimizer = torch.optim.SGD(net.parameters(), lr=msg.content["config"]["lr"])
        for _ in range(told.epochs):
            for chosen in torch.randperm(told.samples).split(told.local_batch or told.samples):
                optimizer.zero_grad()
                nn.functional.cross_entropy(net(images[chosen]), labels[chosen]).backward()
                optimizer.step()
        metrics = MetricRecord({"num-examples": told.samples})
        content = {"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}
        return Message(RecordDict(content), reply_to=msg)

    return app


def server(told: argparse.Namespace) -> ServerApp:
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        torch.manual_seed(told.seed)
        net = network(told.neurons)
        strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.0)
        options = {"epochs": told.epochs, "batch_size": told.local_batch} if told.epochs > 1 else {}
        audited = Audited(
            strategy,
            model=network(told.neurons),
            report="flower-rounds.html",
            aggregate=told.aggregate,
            history=told.history,
            max_seconds=told.max_seconds,
            **options,  # type: ignore[arg-type]
        )
        start = ArrayRecord(net.state_dict())
        config = ConfigRecord({"lr": told.lr})
        audited.start(grid, start, num_rounds=told.rounds, train_config=config)
        print(audited.report.headline)
        table = audited.report.tables[0]
        print(*(" | ".join(map(str, row)) for row in (table.columns, *table.rows)), sep="\n")

    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--samples", type=int, default=60, help="of each client")
    parser.add_argument("--neurons", type=int, default=60, help="of the first layer")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=1, help="told to the audit if more than 1")
    parser.add_argument("--local-batch", type=int, help="samples in a local step; all unless given")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--aggregate", action="store_true", help="see sums of all clients only")
    parser.add_argument("--history", type=int, default=20)
    parser.add_argument("--max-seconds", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    told = parser.parse_args()
    with loopback_cluster():
        run_simulation(
            server(told),
            clients(told),
            num_supernodes=told.clients,
            backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
        )


if __name__ == "__main__":
    main()
