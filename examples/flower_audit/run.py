"""Runs the app in Flower's simulation on this machine, and leaves report.html where it is called.

    python examples/flower_audit/run.py

Or, as any Flower app: flwr run examples/flower_audit --stream
"""

import os

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")  # nothing about an audit leaves the machine
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

from flwr.simulation import run_simulation
from pictures.client_app import app as client_app
from pictures.server_app import app as server_app
from pictures.task import CLIENTS

from spear.integrations.ray_session import loopback_cluster

if __name__ == "__main__":
    with loopback_cluster():  # else Ray talks to the network, and leaves its logs for all to read
        run_simulation(
            server_app,
            client_app,
            num_supernodes=CLIENTS,
            backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
        )
