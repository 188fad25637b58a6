"""A client: an ordinary script of NVFlare's client API. Nothing here knows of the audit."""

import argparse

import nvflare.client as flare
from task import Net, load_data, train


def main() -> None:
    """Train each received model on this client's pictures, and send its weights back."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.01)
    lr = parser.parse_args().lr
    flare.init()
    images, labels = load_data(flare.get_site_name())
    while flare.is_running():
        received = flare.receive()
        net = Net()
        net.load_state_dict(received.params)
        train(net, images, labels, lr)
        flare.send(flare.FLModel(params=net.state_dict()))


if __name__ == "__main__":
    main()
