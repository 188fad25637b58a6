"""The server: an ordinary ServerApp, and two lines for the audit."""

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from pictures.task import MEAN, PIXELS, STD, Net, load_data
from spear.integrations.flower import Audited  # the first line
from spear.report import ImageFormat

app = ServerApp()

# Both are optional. How inputs look as pictures, and what clients really held: an audit of one's own
# simulation may know that, a server does not. Without it the verdict is the same.
PICTURES = ImageFormat((3, PIXELS, PIXELS), mean=(MEAN,), std=(STD,))


def originals(server_round: int, reply: Message):
    """A client's pictures, labels and their names; the reply's metrics say which client it was."""
    return load_data(int(reply.content["metrics"]["partition-id"]))


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Federated averaging, audited."""
    torch.manual_seed(0)
    net = Net()
    strategy = FedAvg(fraction_train=1.0)
    strategy = Audited(  # the second line; without it this is the plain app
        strategy,
        model=Net(),
        image_format=PICTURES,
        truth=originals,
        report="report.html",
        json="report.json",
    )
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(net.state_dict()),
        train_config=ConfigRecord({"lr": context.run_config.get("learning-rate", 0.01)}),
        num_rounds=context.run_config.get("num-server-rounds", 2),
    )
    print(strategy.report.headline)
